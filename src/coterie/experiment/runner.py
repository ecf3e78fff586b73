"""One run, from its first round or from where it was left: trained, written down, kept safe."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from ..core.algorithm import check_run
from ..core.buffers import governed
from ..core.metrics import mean_known
from ..data.manifest import manifest
from ..engines import Engine, process
from ..report.outcomes import RunResult
from ..results.history import History, Log, Roster
from ..storage import faults
from ..training.guard import Guard
from ..training.rounds import Begin, Record
from ..training.rounds import run as run_rounds
from . import resume, run_folder
from .assemble import Assembly, engine_of, task_of
from .checkpoint import Keeper
from .config.loading import canonical, config_hash
from .config.methods import Method
from .config.schema import Config
from .interrupt import Stop
from .resume import Left


class Progress(NamedTuple):
    """One more round is done."""

    method: str
    seed: int
    done: int  # rounds
    rounds: int
    score: float | None  # mean over clients where the round was evaluated
    reused: bool = False  # the whole run was found finished on disk
    more: int = 1  # rounds since the last step
    rejected: tuple[tuple[str, str], ...] = ()  # (client, reason) not told before
    slow: tuple[str, ...] = ()  # what took much of the run and could be faster, and why it is not


Watch = Callable[[Progress], None]
SLOW = 0.2  # share of a run: what takes more and could be faster is told


def drive(
    assembly: Assembly,
    method: Method,
    seed: int,
    out: Path | None,
    *,
    stop: Stop,
    references: Mapping[str, History] | None = None,
    progress: Watch | None = None,
    left: Left | None = None,
) -> RunResult:
    """One run; with a folder it is written down round by round, and ``left`` is continued."""
    with ExitStack() as scope:
        tf32 = assembly.config.train.precision == "tf32"
        scope.enter_context(process.settings(tf32=tf32))
        return _drive(scope, assembly, method, seed, out, stop, references, progress, left)


def _drive(
    scope: ExitStack,
    assembly: Assembly,
    method: Method,
    seed: int,
    out: Path | None,
    stop: Stop,
    references: Mapping[str, History] | None,
    progress: Watch | None,
    left: Left | None,
) -> RunResult:
    """The same, with the settings of the process entered into ``scope``."""
    asked, algorithm = assembly.config.single(method, seed), method.build()
    if left is not None:
        left.refuse_other(config_hash(asked))
        run_folder.refuse_other_data(left.path, assembly.federations[seed])
    task = task_of(assembly, algorithm, seed)
    algorithm = governed(algorithm, task)
    check_run(algorithm, task, asked.run.rounds)
    if left is None:
        engine = engine_of(asked, task, runs=_runs(assembly.config, asked))
    else:
        engine = engine_of(left.with_engine(asked), task, left.ways)
    scope.enter_context(process.settings(**process.of_engine(engine.choice, task.device)))
    roster, swaps = Roster.of(task.federation), algorithm.models_change_hands
    log = Log(method.label, seed, asked.run.metric, roster, swaps, asked.train.merge_val)
    config, where = written(asked, engine.choice), run_folder.environment(task.device)
    folder, begin, keeper = None, None, None
    if out is not None and left is not None:
        folder, begin, newest = resume.reopen(left, log, algorithm.init(task), where, engine.choice)
        keeper = Keeper(out, asked.run.checkpoint_every, before=newest)
    elif out is not None:
        folder = run_folder.RunFolder.create(out, log, config, where, manifest(task.federation))
        keeper = Keeper(out, asked.run.checkpoint_every)
    faults.at("run.created")
    watch = _Watcher(progress, method.label, seed, asked.run.rounds, task.federation.clients)
    watch.begun(begin)
    mixture = None
    for record in run_rounds(
        algorithm,
        task,
        engine,
        asked.run.rounds,
        participation=asked.run.participation,
        evaluate_every=asked.run.evaluate_every,
        metric=asked.run.metric,
        guard=Guard(**asked.guard.model_dump()),
        begin=begin,
        scratch=out,
    ):
        faults.at("round.done")
        if folder is not None:
            folder.note_ran(engine.forms)
        (log if folder is None else folder).append(record)
        faults.at("log.done")
        mixture = record.mixture
        watch.done(record, engine)
        if folder is not None and keeper is not None and mixture is None:
            if keeper.due(record) or stop.asked is not None:
                keeper.write(record, folder)
            stop.here()
    if mixture is None:
        raise AssertionError("the last round of a run is always evaluated")
    if folder is None:
        where |= {run_folder.RAN: run_folder.ran(engine.forms)}
        return RunResult(run_folder.collect(log, mixture, config, where, references))
    return RunResult(folder.finish(mixture, references))


def _runs(config: Config, one: Config) -> int:
    """How many runs a config asks for, of which this is one."""
    return 1 if config == one else len(config.methods()) * len(config.seeds)


def written(config: Config, choice: Mapping[str, Any]) -> dict[str, Any]:
    """What ``config.json`` holds: the config with the engine that came of it, and what was asked.

    ``hash`` is of what was asked: where "auto" led does not make it another experiment.
    """
    tables = canonical(config)
    asked = {"engine": dict(tables["engine"])}
    found = {key: choice[key] for key in ("chunk", "threads", "play", "compiled") if key in choice}
    tables["engine"] |= {"name": choice["engine"], **found}
    return {**tables, "resolved": dict(choice), "asked": asked, "hash": config_hash(config)}


class _Watcher:
    """Tells whoever watches; a client that keeps being rejected for the same reason, once."""

    def __init__(
        self, tell: Watch | None, method: str, seed: int, rounds: int, clients: tuple[str, ...]
    ) -> None:
        self.tell, self.method, self.seed, self.rounds = tell, method, seed, rounds
        self.clients = dict(enumerate(clients))
        self.told: set[tuple[str, str]] = set()
        self.seconds = 0.0

    def begun(self, begin: Begin | None) -> None:
        """Rounds that are there already."""
        if self.tell is not None and begin is not None and begin.rounds:
            done = begin.rounds
            self.tell(Progress(self.method, self.seed, done, self.rounds, None, more=done))

    def done(self, record: Record, engine: Engine) -> None:
        """One more round."""
        self.seconds += record.seconds
        if self.tell is None:
            return
        all_of = [(self.clients.get(r.client, f"#{r.client}"), r.reason) for r in record.rejected]
        new = tuple(pair for pair in all_of if pair not in self.told)
        self.told |= set(new)
        found = record.evaluation
        score = None if found is None else float(mean_known(found.test))
        done = record.index + 1
        slow = slowly(engine, self.seconds) if done == self.rounds else ()
        step = Progress(self.method, self.seed, done, self.rounds, score, rejected=new, slow=slow)
        self.tell(step)


def slowly(engine: Engine, seconds: float) -> tuple[str, ...]:
    """Calls that took more than a fifth of these seconds and could not be done as was asked."""
    took: dict[tuple[str, str, str], float] = {}
    for form in engine.forms:
        if form.why:
            key = form.stage, form.way, form.why
            took[key] = took.get(key, 0.0) + form.seconds / engine.choice["threads"]
    return tuple(
        f"{stage} took {min(time / seconds, 1):.0%} of the time: it is {way}, not faster: {why}"
        for (stage, way, why), time in took.items()
        if time > SLOW * seconds
    )
