"""What to do from Python: :func:`run` one method, :func:`compare` several, :func:`resume` either.

    import coterie
    result = coterie.compare(methods=["fedavg", "fedfomo"], rounds=10)
    print(result)            # the table
    print(result.verdict)    # whether joining is worth it

Both take a config (a path, tables or a Config; nothing means the built-in default) and the options
of the command line by the same names; ``set={"train.momentum": 0.9}`` reaches every other field.
Without ``out`` nothing is written to disk. What is written survives a kill at any instant.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import __version__
from .core.imports import Code, Given
from .errors import ConfigError, StoreError, did_you_mean
from .experiment import comparison_folder, interrupt, run_folder
from .experiment.assemble import Assembly, assemble, check_methods
from .experiment.comparison_folder import COMPARE
from .experiment.config.loading import canonical, config_hash, load
from .experiment.config.methods import Method
from .experiment.config.schema import FLAGS, Config
from .experiment.resume import UnfinishedRun, unfinished_run
from .experiment.runner import Progress, Watch, drive
from .report.outcomes import Comparison, RunResult
from .report.run_page import run_page
from .results.history import History
from .storage import faults, files, lock

Source = Config | Mapping[str, Any] | str | Path | None
FIRST = ("local", "fedavg")  # what other methods are compared with has to be there before them


def configure(source: Source = None, **flags: Any) -> Config:
    """The config of a source with the options of the command line applied to it."""
    changes, code = dict(flags.pop("set", None) or {}), flags.pop("code", None)
    for name, value in flags.items():
        if name not in FLAGS:
            known = did_you_mean(name, [*FLAGS, "set", "code"])
            raise ConfigError(f"there is no option '{name}'; {known}")
        if value is not None:
            changes[FLAGS[name]] = value
    if isinstance(source, Config):
        allowed = source.code if code is None else code
        return load(canonical(source), changes, allowed) if changes or code else source
    return load(source, changes, code)


def run(source: Source = None, *, progress: Watch | None = None, **flags: Any) -> RunResult:
    """Run one method with one seed."""
    config = configure(source, **flags)
    method = config.method()
    config = config.single(method, config.run.seed)
    out, assembly = _folder(config), assemble(config)
    if out is not None:
        comparison_folder.refuse_used(out)
        run_folder.refuse_used(out)
    with _held(out) as stop:
        return _driven(assembly, method, config.run.seed, out, stop=stop, progress=progress)


def compare(source: Source = None, *, progress: Watch | None = None, **flags: Any) -> Comparison:
    """Run several methods, Local always among them, with every seed on the same clients.

    A run that is already finished in the folder, with the same config and version, is read instead;
    one that was interrupted is continued.
    """
    config = configure(source, **flags)
    methods, out = config.methods(), _folder(config)
    assembly = assemble(config)
    if out is not None:
        comparison_folder.refuse_run(out)
    for method in methods:
        for seed in config.seeds:
            _found(assembly, method, seed, out)  # what is refused is refused before any training
    check_methods(assembly, methods)
    with _held(out) as stop:
        if out is not None:
            comparison_folder.unseal(out)
            comparison_folder.write_asked(out, canonical(config))
        done: dict[tuple[str, int], RunResult] = {}
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
            faults.at("compare.manifest")
            comparison_folder.seal(out, [run.path for run in runs if run.path is not None])
    return comparison


def resume(
    path: str | Path, *, progress: Watch | None = None, code: Given = None
) -> RunResult | Comparison:
    """Continue an interrupted run or comparison; a finished one is read.

    The folder may be somebody else's, so code that its config names is imported only from the
    folders ``code``, or from installed packages where ``code`` is ``"installed"``.
    """
    path, allowed = files.folder_of(path, "RUN"), Code.of(code, installed=False)
    if (path / COMPARE).is_file():
        return compare(_asked(path, allowed), progress=progress)
    if run_folder.finished(path):
        if run_folder.untidy(path):
            with lock.held(path):
                run_folder.tidy(path)
        return RunResult.read(path)
    if unfinished_run(path) is None:
        raise StoreError(
            f"{path}: holds no run to continue; expected a folder of 'coterie run' or 'coterie "
            "compare'; a run that was stopped before it began has nothing to lose: start it again"
        )
    with _held(path) as stop:
        unfinished = unfinished_run(path)
        if unfinished is None:  # another process has finished it in this moment
            return RunResult.read(path)
        config = load(unfinished.tables, {"run.out": str(path)}, allowed)
        return _driven(
            assemble(config),
            config.method(),
            config.run.seed,
            path,
            stop=stop,
            references=_beside(path),
            progress=progress,
            unfinished=unfinished,
        )


def expected(path: str | Path, code: Given = None) -> tuple[int, int]:
    """How many runs, of how many rounds, :func:`resume` has to see finished."""
    path, allowed = files.folder_of(path, "RUN"), Code.of(code, installed=False)
    if (path / COMPARE).is_file():
        config = _asked(path, allowed)
        return len(config.methods()) * len(config.seeds), config.run.rounds
    found = unfinished_run(path)
    return 1, 1 if found is None else load(found.tables, code=allowed).run.rounds


def _asked(path: Path, code: Code) -> Config:
    """The config of a comparison, from its folder."""
    return load(comparison_folder.read_asked(path), {"run.out": str(path)}, code)


def verify(path: str | Path) -> dict[str, list[str]]:
    """What is wrong in each finished run of a folder; an empty list where all is as written.

    No config is loaded for it, and hence no code that one names.
    """
    path = files.folder_of(path, "RUN")
    if run_folder.finished(path):
        return {str(path): run_folder.verify(path)}
    report = comparison_folder.verify(path)
    if not report:
        raise StoreError(
            f"{path}: holds no finished run; expected a folder of 'coterie run' or 'coterie "
            "compare'; finish an interrupted one with 'coterie resume'"
        )
    return report


def _driven(
    assembly: Assembly,
    method: Method,
    seed: int,
    out: Path | None,
    *,
    stop: interrupt.Stop,
    references: Mapping[str, History] | None = None,
    progress: Watch | None = None,
    unfinished: UnfinishedRun | None = None,
) -> RunResult:
    """One run to its end, with its page where it has a folder."""
    data = drive(
        *(assembly, method, seed, out),
        stop=stop,
        references=references,
        progress=progress,
        left=unfinished,
        render=run_page,
    )
    return RunResult(data)


@contextlib.contextmanager
def _held(out: Path | None) -> Iterator[interrupt.Stop]:
    """Hold the lock of a folder, and signals until a round is over."""
    locked = contextlib.nullcontext() if out is None else lock.held(out)
    with locked, interrupt.held(out) as stop:
        yield stop


def _beside(path: Path) -> dict[str, History]:
    """Finished runs of Local and FedAvg next to a run of a comparison."""
    home = path.resolve().parent.parent
    places = {name: home / name / path.resolve().name for name in FIRST}
    if not (home / COMPARE).is_file():
        return {}
    return {name: RunResult.read(p).history for name, p in places.items() if run_folder.finished(p)}


def _turn(method: Method) -> int:
    return FIRST.index(method.label) if method.label in FIRST else len(FIRST)


def _folder(config: Config) -> Path | None:
    return None if config.run.out is None else files.folder_of(config.run.out, "run.out")


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
    place = None if out is None else comparison_folder.place(out, method.label, seed)
    with contextlib.nullcontext() if place is None else lock.held(place):
        found = _found(assembly, method, seed, out)  # nobody else writes into it now
        if isinstance(found, RunResult):
            return found
        return _driven(
            *(assembly, method, seed, place),
            stop=stop,
            references=known,
            progress=progress,
            unfinished=found,
        )


def _found(
    assembly: Assembly, method: Method, seed: int, out: Path | None
) -> RunResult | UnfinishedRun | None:
    """A run of the very same config, finished or not; any other run in its place is refused."""
    if out is None:
        return None
    place = comparison_folder.place(out, method.label, seed)
    asked = config_hash(assembly.config.single(method, seed))
    if run_folder.finished(place):
        found = RunResult.read(place)
        same = found.data.config.get("hash") == asked
        if same and found.data.environment.get("coterie") == __version__:
            run_folder.refuse_other_data(place, assembly.federations[seed])
            return found
    unfinished = unfinished_run(place)
    if unfinished is not None:
        unfinished.refuse_other(asked)
        run_folder.refuse_other_data(place, assembly.federations[seed])
        return unfinished
    run_folder.refuse_used(place)
    return None
