"""What to do from Python: :func:`run` one method, :func:`compare` several, :func:`resume` either.

    import coterie
    result = coterie.compare(methods=["fedavg", "fedfomo"], rounds=10)
    print(result)            # the table
    print(result.verdict)    # whether joining is worth it

Both take a config (a path, tables or a Config; nothing means the built-in default) and the options
of the command line by the same names; ``set={"train.momentum": 0.9}`` reaches every other field.
Without ``out`` nothing is written to disk. What is written survives a kill at any instant.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import __version__, faults, files, interrupt, store
from .assemble import Assembly, assemble, check_methods
from .config import canonical, config_hash, load
from .drive import Progress, Watch, drive
from .errors import ConfigError, StoreError, did_you_mean
from .history import History
from .leftover import COMPARE, Left, left
from .methods import Method
from .results import COMPARISON, Comparison, RunResult
from .schema import FLAGS, Config

Source = Config | Mapping[str, Any] | str | Path | None
FIRST = ("local", "fedavg")  # what other methods are compared with has to be there before them


def configure(source: Source = None, **flags: Any) -> Config:
    """The config of a source with the options of the command line applied to it."""
    changes = dict(flags.pop("set", None) or {})
    for name, value in flags.items():
        if name not in FLAGS:
            raise ConfigError(f"there is no option '{name}'; {did_you_mean(name, [*FLAGS, 'set'])}")
        if value is not None:
            changes[FLAGS[name]] = value
    if isinstance(source, Config):
        return source if not changes else load(canonical(source), changes)
    return load(source, changes)


def run(source: Source = None, *, progress: Watch | None = None, **flags: Any) -> RunResult:
    """Run one method with one seed."""
    config = configure(source, **flags)
    method = config.method()
    config = config.single(method, config.run.seed)
    out, assembly = _folder(config), assemble(config)
    if out is not None:
        store.refuse_used(out)
    with interrupt.held(out) as stop:
        return drive(assembly, method, config.run.seed, out, stop=stop, progress=progress)


def compare(source: Source = None, *, progress: Watch | None = None, **flags: Any) -> Comparison:
    """Run several methods, Local always among them, with every seed on the same clients.

    A run that is already finished in the folder, with the same config and version, is read instead;
    one that was interrupted is continued.
    """
    config = configure(source, **flags)
    methods, out = config.methods(), _folder(config)
    assembly = assemble(config)
    for method in methods:
        for seed in config.seeds:
            _found(assembly, method, seed, out)  # what is refused is refused before any training
    check_methods(assembly, methods)
    if out is not None:
        with files.writing(out):
            out.mkdir(parents=True, exist_ok=True)
        files.write_json(out / COMPARE, canonical(config))
    done: dict[tuple[str, int], RunResult] = {}
    with interrupt.held(out) as stop:
        for seed in config.seeds:
            known: dict[str, History] = {}
            for method in sorted(methods, key=_turn):
                stop.here()
                result = _cell(assembly, method, seed, out, stop, known, progress)
                faults.at("compare.cell")
                done[method.label, seed] = result
                if method.label in FIRST:
                    known[method.label] = result.history
    runs = [done[method.label, seed] for method in methods for seed in config.seeds]
    comparison = Comparison.of(runs, out)
    faults.at("compare.report")
    if out is not None:
        comparison.write(out)
    return comparison


def resume(path: str | Path, *, progress: Watch | None = None) -> RunResult | Comparison:
    """Continue an interrupted run or comparison; a finished one is read."""
    path = Path(path)
    if (path / COMPARE).is_file():
        tables = files.read_json(path / COMPARE)
        return compare(load(tables, {"run.out": str(path)}), progress=progress)
    if store.finished(path):
        store.tidy(path)
        return RunResult.read(path)
    found = left(path)
    if found is None:
        raise StoreError(
            f"{path}: holds no run to continue; expected a folder of 'coterie run' or 'coterie "
            "compare'; a run that was stopped before it began has nothing to lose: start it again"
        )
    config = load(found.tables, {"run.out": str(path)})
    assembly, method = assemble(config), config.method()
    with interrupt.held(path) as stop:
        return drive(
            assembly,
            method,
            config.run.seed,
            path,
            stop=stop,
            references=_beside(path),
            progress=progress,
            left=found,
        )


def expected(path: str | Path) -> tuple[int, int]:
    """How many runs, of how many rounds, :func:`resume` has to see finished."""
    path = Path(path)
    if (path / COMPARE).is_file():
        config = load(files.read_json(path / COMPARE))
        return len(config.methods()) * len(config.seeds), config.run.rounds
    found = left(path)
    return 1, 1 if found is None else int(found.tables["run"]["rounds"])


def verify(path: str | Path) -> dict[str, list[str]]:
    """What is wrong in each finished run of a folder; an empty list where all is as written."""
    path = Path(path)
    if store.finished(path):
        return {str(path): store.verify(path)}
    places = [found for found in sorted(path.glob("*/seed-*")) if found.is_dir()]
    if not places:
        raise StoreError(
            f"{path}: holds no finished run; expected a folder of 'coterie run' or 'coterie "
            "compare'; finish an interrupted one with 'coterie resume'"
        )
    report = {
        str(place): store.verify(place) if store.finished(place) else ["is not finished"]
        for place in places
    }
    if (path / COMPARISON).is_file():
        report[str(path / COMPARISON)] = _listed(path)
    return report


def _listed(path: Path) -> list[str]:
    """Whether a comparison lists its runs with their digests."""
    wrong = []
    for run in files.read_json(path / COMPARISON)["runs"]:
        place = path / run["path"]
        if not store.finished(place) or store.read(place).summary["digest"] != run["digest"]:
            wrong.append(f"{run['path']} does not have the digest {run['digest'][:16]}")
    return wrong


def _beside(path: Path) -> dict[str, History]:
    """Finished runs of Local and FedAvg next to a run of a comparison."""
    home = path.resolve().parent.parent
    places = {name: home / name / path.resolve().name for name in FIRST}
    if not (home / COMPARE).is_file():
        return {}
    return {name: RunResult.read(p).history for name, p in places.items() if store.finished(p)}


def _turn(method: Method) -> int:
    return FIRST.index(method.label) if method.label in FIRST else len(FIRST)


def _folder(config: Config) -> Path | None:
    return None if config.run.out is None else Path(config.run.out)


def _cell(
    assembly: Assembly,
    method: Method,
    seed: int,
    out: Path | None,
    stop: interrupt.Stop,
    known: Mapping[str, History],
    progress: Watch | None,
) -> RunResult:
    """One run of a comparison: read, continued, or run from its first round."""
    found = _found(assembly, method, seed, out)
    if isinstance(found, RunResult):
        if progress is not None:
            turns = assembly.config.run.rounds
            step = Progress(method.label, seed, turns, turns, None, reused=True, more=turns)
            progress(step)
        return found
    place = None if out is None else out / method.label / f"seed-{seed}"
    return drive(
        *(assembly, method, seed, place),
        stop=stop,
        references=known,
        progress=progress,
        left=found,
    )


def _found(
    assembly: Assembly, method: Method, seed: int, out: Path | None
) -> RunResult | Left | None:
    """A run of the very same config, finished or not; any other run in its place is refused."""
    if out is None:
        return None
    place = out / method.label / f"seed-{seed}"
    asked = config_hash(assembly.config.single(method, seed))
    if store.finished(place):
        found = RunResult.read(place)
        same = found.data.config.get("hash") == asked
        if same and found.data.environment.get("coterie") == __version__:
            store.refuse_other_data(place, assembly.federations[seed])
            return found
    unfinished = left(place)
    if unfinished is not None:
        unfinished.refuse_other(asked)
        store.refuse_other_data(place, assembly.federations[seed])
        return unfinished
    store.refuse_used(place)
    return None
