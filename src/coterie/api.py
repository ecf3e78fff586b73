"""The two things to do from Python: :func:`run` one method, :func:`compare` several.

    import coterie
    result = coterie.compare(methods=["fedavg", "fedfomo"], rounds=10)
    print(result)            # the table
    print(result.verdict)    # whether joining is worth it

Both take a config (a path, tables or a Config; nothing means the built-in default) and the options
of the command line by the same names; ``set={"train.momentum": 0.9}`` reaches every other field.
Without ``out`` nothing is written to disk.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import __version__, files, store
from .assemble import Assembly, assemble, engine_of, task_of
from .config import canonical, config_hash, load
from .errors import ConfigError, did_you_mean
from .history import History, Log, Roster
from .methods import Method
from .metrics import mean_known
from .results import Comparison, RunResult
from .run import run as run_rounds
from .schema import FLAGS, Config

Source = Config | Mapping[str, Any] | str | Path | None
FIRST = ("local", "fedavg")  # what other methods are compared with has to be there before them


class Progress(NamedTuple):
    """One more round is done."""

    method: str
    seed: int
    done: int  # rounds
    rounds: int
    score: float | None  # mean over clients where the round was evaluated
    reused: bool = False  # the whole run was found finished on disk


Watch = Callable[[Progress], None]


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
        _refuse(out, config_hash(assembly.config))
    return _run(assembly, method, config.run.seed, out, {}, progress)


def compare(source: Source = None, *, progress: Watch | None = None, **flags: Any) -> Comparison:
    """Run several methods, Local always among them, with every seed on the same clients.

    A run that is already finished in the folder, with the same config and version, is read instead;
    one that was interrupted is started again.
    """
    config = configure(source, **flags)
    methods, out = config.methods(), _folder(config)
    assembly = assemble(config)
    for method in methods:
        for seed in config.seeds:
            _reusable(assembly, method, seed, out)
    done: dict[tuple[str, int], RunResult] = {}
    for seed in config.seeds:
        known: dict[str, History] = {}
        for method in sorted(methods, key=_turn):
            place = None if out is None else out / method.label / f"seed-{seed}"
            result = _reusable(assembly, method, seed, out)
            if result is None:
                result = _run(assembly, method, seed, place, known, progress)
            elif progress is not None:
                turns = assembly.config.run.rounds
                progress(Progress(method.label, seed, turns, turns, None, reused=True))
            done[method.label, seed] = result
            if method.label in FIRST:
                known[method.label] = result.history
    runs = [done[method.label, seed] for method in methods for seed in config.seeds]
    comparison = Comparison.of(runs, out)
    if out is not None:
        comparison.write(out)
    return comparison


def _turn(method: Method) -> int:
    return FIRST.index(method.label) if method.label in FIRST else len(FIRST)


def _folder(config: Config) -> Path | None:
    return None if config.run.out is None else Path(config.run.out)


def _reusable(assembly: Assembly, method: Method, seed: int, out: Path | None) -> RunResult | None:
    """A finished run of the very same config; any other run in its place is refused."""
    if out is None:
        return None
    place = out / method.label / f"seed-{seed}"
    asked = config_hash(assembly.config.single(method, seed))
    if store.finished(place):
        found = RunResult.read(place)
        same = found.data.config.get("hash") == asked
        if same and found.data.environment.get("coterie") == __version__:
            return found
    _refuse(place, asked)
    return None


def _refuse(place: Path, asked: str) -> None:
    """Refuse a folder that holds a run, unless it was given up and would be the same run again."""
    if not _given_up(place, asked):
        store.refuse_used(place)


def _given_up(place: Path, asked: str) -> bool:
    """Whether an unfinished run of this config lies here that nothing could be resumed from."""
    config = place / store.CONFIG
    if not config.is_file() or store.finished(place) or (place / "checkpoint").exists():
        return False
    return bool(files.read_json(config).get("hash") == asked)


def _run(
    assembly: Assembly,
    method: Method,
    seed: int,
    out: Path | None,
    references: Mapping[str, History],
    progress: Watch | None,
) -> RunResult:
    """One run, written down round by round where there is a folder for it."""
    algorithm, run = method.build(), assembly.config.run
    task = task_of(assembly, algorithm, seed)
    engine = engine_of(assembly.config, task)
    log = Log(method.label, seed, run.metric, Roster.of(task.federation))
    config = _written(assembly.config.single(method, seed), engine.choice)
    where = store.environment(task.device)
    if out is not None and _given_up(out, config["hash"]):
        shutil.rmtree(out)
    folder = None if out is None else store.RunFolder.create(out, log, config, where)
    mixture = None
    for record in run_rounds(
        algorithm,
        task,
        engine,
        run.rounds,
        participation=run.participation,
        evaluate_every=run.evaluate_every,
        metric=run.metric,
    ):
        (log if folder is None else folder).append(record)
        mixture = record.mixture
        if progress is not None:
            found = record.evaluation
            score = None if found is None else float(mean_known(found.test))
            progress(Progress(method.label, seed, record.index + 1, run.rounds, score))
    if mixture is None:
        raise AssertionError("the last round of a run is always evaluated")
    if folder is None:
        return RunResult(store.collect(log, mixture, config, where, references))
    return RunResult(folder.finish(mixture, references))


def _written(config: Config, choice: Mapping[str, Any]) -> dict[str, Any]:
    """What ``config.json`` holds: what was asked for, its hash, and the engine that came of it."""
    tables = canonical(config)
    found = {key: choice[key] for key in ("chunk", "threads") if key in choice}
    tables["engine"] |= {"name": choice["engine"], **found}
    return {**tables, "resolved": dict(choice), "hash": config_hash(config)}
