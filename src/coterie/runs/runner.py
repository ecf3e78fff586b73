"""Executes one run, new or resumed: trains it, writes its folder, and writes checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..core.algorithm import AnyAlgorithm, check_run
from ..core.locations import check_square, located
from ..core.metrics import mean_known
from ..core.policies import governed
from ..core.problem import Problem
from ..engines import Engine, process
from ..engines.process import full_memory_told
from ..storage import faults
from ..training.guard import Guard
from ..training.rounds import Begin, Record, train
from . import resume, run_folder
from .checkpoint import Keeper
from .config.loading import canonical, config_hash
from .config.schema import Config
from .environment import environment
from .interrupt import Stop
from .resume import UnfinishedRun
from .run import History, Log
from .run_folder import Predictors
from .setting import Cell, Setting, with_training_loss


class Progress(NamedTuple):
    """What a watcher is told after each round."""

    method: str
    seed: int
    done: int  # rounds done so far
    rounds: int  # rounds of the whole run
    score: float | None  # mean over clients, if the round was evaluated
    reused: bool = False  # the whole run was found finished on disk
    more: int = 1  # rounds since the last call
    rejected: tuple[tuple[str, str], ...] = ()  # (client, reason) pairs that were not told before
    slow: tuple[str, ...] = ()  # calls that took much of the run and why they were not faster
    sent: int = 0  # bytes to and from all clients for training in this round
    answered: tuple[str, ...] = ()  # clients whose answer entered this round
    silent: tuple[str, ...] = ()  # clients that were asked and whose answer did not
    waits: bool = (
        False  # another process has taken this run, and nothing is left but to wait for it
    )


Watch = Callable[[Progress], None]
SLOW = 0.2  # share of a run's time: calls that take more and could be faster are reported


def execute(
    setting: Setting,
    cell: Cell,
    *,
    stop: Stop,
    references: Mapping[str, History] | None = None,
    progress: Watch | None = None,
    left: UnfinishedRun | None = None,
    render: run_folder.Render | None = None,
) -> run_folder.RunData:
    """Execute one run, and return its data.

    If the cell has a folder, the run is written there round by round. An unfinished run ``left`` is
    continued. ``render`` makes the page that is written into the folder at the end.
    """
    asked, algorithm = setting.config.single(cell.method, cell.seed), cell.method.build()
    if left is not None:
        left.refuse_other(config_hash(asked))
        run_folder.refuse_other_data(left.path, setting.identity(cell.seed))
    on = setting.prepare(algorithm, asked)
    algorithm = governed(algorithm, on.problem)
    if asked.run.training_loss:
        on = with_training_loss(on)
    with located(algorithm):
        check_run(algorithm, on.problem, asked.run.rounds)
    with ExitStack() as scope:
        scope.enter_context(full_memory_told())
        scope.enter_context(process.settings(tf32=asked.train.precision == "tf32"))
        engine = setting.engine(cell, on, left)
        scope.callback(engine.close)
        scope.enter_context(process.settings(**process.of_engine(engine.choice, on.problem.device)))
        swaps, merged = algorithm.traits.models_change_hands, asked.train.merge_val
        log = Log(cell.method.label, cell.seed, asked.run.metric, on.roster, swaps, merged)
        run = _Run(asked, algorithm, setting, on.problem, engine, log, cell, stop)
        return run.finished(left, references, progress, render)


@dataclass(frozen=True, eq=False)
class _Run:
    """One run, with everything it needs: config, algorithm, data, engine, log and folder."""

    asked: Config
    algorithm: AnyAlgorithm
    setting: Setting
    problem: Problem
    engine: Engine
    log: Log
    cell: Cell
    stop: Stop

    def finished(
        self,
        left: UnfinishedRun | None,
        references: Mapping[str, History] | None,
        progress: Watch | None,
        render: run_folder.Render | None,
    ) -> run_folder.RunData:
        """Create or reopen the folder, train all rounds, and finish the folder."""
        config, where = written(self.asked, self.engine.choice), environment(self.problem.device)
        folder, begin, newest, out = None, None, None, self.cell.out
        if out is not None and left is not None:
            start = self.setting.start(self.algorithm, self.problem)
            folder, begin, newest = resume.reopen(left, self.log, start, where, self.engine.choice)
        elif out is not None:
            seed = self.cell.seed
            said = self.setting.manifest(seed), self.setting.preprocessing(seed)
            folder = run_folder.RunFolder.create(out, self.log, config, where, *said)
        faults.at("run.created")
        watch = _Watcher(progress, self.log, self.asked.run.rounds)
        watch.begun(begin)
        predictors = self._rounds(folder, begin, newest, watch)
        if folder is None:
            where |= {run_folder.RAN: run_folder.ran(self.engine.forms)}
            return run_folder.collect(self.log, predictors, config, where, references)
        return folder.finish(predictors, references, render)

    def _rounds(
        self,
        folder: run_folder.RunFolder | None,
        begin: Begin | None,
        newest: Path | None,
        watch: "_Watcher",
    ) -> Predictors:
        """Train all rounds, write each one and due checkpoints; returns the last predictors."""
        run = self.asked.run
        keeper = None
        if self.cell.out is not None:
            keeper = Keeper(self.cell.out, run.checkpoint_every, before=newest)
        for record in self._trained(begin):
            faults.at("round.done")
            if folder is not None:
                folder.note_ran(self.engine.forms)
            (self.log if folder is None else folder).append(record)
            faults.at("log.done")
            watch.done(record, self.engine)
            if record.mixture is not None:
                return Predictors.of(record.mixture, record.digests)
            if folder is not None and keeper is not None:
                if keeper.due(record) or self.stop.asked is not None:
                    keeper.write(record, folder)
                self.stop.here()
        raise AssertionError("the last round of a run is always evaluated")

    def _trained(self, begin: Begin | None) -> Iterator[Record]:
        """The rounds of the run; an error in a user's method or network names its line."""
        run = self.asked.run
        with located(self.algorithm, self.problem.model.module):
            for record in train(
                self.algorithm,
                self.problem,
                self.engine,
                run.rounds,
                participation=run.participation,
                evaluate_every=run.evaluate_every,
                metric=run.metric,
                guard=Guard(**self.asked.guard.model_dump()),
                begin=begin,
            ):
                if record.collaboration is not None:
                    shape = record.collaboration.shape
                    check_square(self.algorithm, shape, self.problem.population)
                yield record


def written(config: Config, choice: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of ``config.json``: the config with the resolved engine, and what was asked for.

    ``hash`` is the hash of what was asked for: the choice that "auto" makes does not make it
    another experiment.
    """
    tables = canonical(config)
    asked = {"engine": dict(tables["engine"])}
    found = {key: choice[key] for key in ("chunk", "threads", "trace", "compiled") if key in choice}
    tables["engine"] |= {"name": choice["engine"], **found}
    return {**tables, "resolved": dict(choice), "asked": asked, "hash": config_hash(config)}


class _Watcher:
    """Reports progress to a watcher; each pair of a rejected client and a reason only once."""

    def __init__(self, tell: Watch | None, log: Log, rounds: int) -> None:
        self.tell, self.method, self.seed, self.rounds = tell, log.method, log.seed, rounds
        self.clients = dict(enumerate(log.roster.clients))
        self.told: set[tuple[str, str]] = set()
        self.seconds = 0.0

    def begun(self, begin: Begin | None) -> None:
        """Report the rounds that a resumed run has already done."""
        if self.tell is not None and begin is not None and begin.rounds:
            done = begin.rounds
            self.tell(Progress(self.method, self.seed, done, self.rounds, None, more=done))

    def done(self, record: Record, engine: Engine) -> None:
        """Report one more round."""
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
        out = {self.clients.get(r.client, f"#{r.client}") for r in record.rejected}
        asked = [self.clients[client] for client in record.clients]
        self.tell(
            Progress(
                *(self.method, self.seed, done, self.rounds, score),
                rejected=new,
                slow=slow,
                sent=record.traffic.down + record.traffic.up,
                answered=tuple(name for name in asked if name not in out),
                silent=tuple(name for name in asked if name in out),
            )
        )


def slowly(engine: Engine, seconds: float) -> tuple[str, ...]:
    """Calls that took over a fifth of these seconds and could not be executed as asked."""
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
