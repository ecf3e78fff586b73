"""Executes a plan: every cell is read from its folder, continued or started, and yields a run.

``execute`` is the only loop over methods and seeds: comparisons, sweeps, searches, paper cards and
probes make plans and read runs. The data of a config is read once for all of its cells.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..core.algorithm import AnyAlgorithm, check_run
from ..core.locations import check_square, located
from ..core.metrics import facts, mean_known
from ..core.policies import governed
from ..engines import Engine, process
from ..engines.process import full_memory_told
from ..errors import InUseError
from ..storage import faults, lock
from ..training.guard import Guard
from ..training.rounds import Begin, Record, train
from . import comparison_folder, interrupt, resume, run_folder
from .accounting import accounted
from .config.loading import canonical, config_hash
from .config.schema import Config
from .environment import environment
from .listeners import InFolder, InMemory, Live, Progress, Reporter, Watch
from .plan import FIRST, Cell, Plan, columns
from .resume import UnfinishedRun, unfinished_run
from .run import Log, Run
from .setting import Prepared, Setting
from .summary import Predictors

POLL = 1.0  # seconds between two looks at the runs of other processes

Where = Callable[[Config], AbstractContextManager[Setting]]
Done = Callable[[Cell], bool]


def execute(
    plan: Plan, where: Where, listeners: Sequence[Watch] = (), done: Done = lambda _: False
) -> Iterator[tuple[Cell, Run]]:
    """Execute a plan; ``where`` opens the clients of a config.

    A run that is finished in its folder is read, an interrupted one is continued. Where several
    processes share a plan, each takes the cells that no other one is running; ``done`` tells
    whether a cell was finished by another process before this one could take it. The caller has to
    store what it needs of a run before it asks for the next one.
    """
    waiting, told = list(plan.cells), list[Cell]()
    while waiting:
        taken: list[Cell] = []  # by other processes
        for cells in columns(waiting):
            yield from _column(plan, cells, where, listeners, done, taken)
        if not plan.wait:
            return
        if len(taken) == len(waiting):
            if taken != told:
                told = taken
                _tell(listeners, taken[0], 0, waits=True, more=0)
            time.sleep(POLL)
        waiting = taken


def _tell(listeners: Sequence[Watch], cell: Cell, done: int, **facts: Any) -> None:
    rounds = cell.config.run.rounds
    for watch in listeners:
        watch(Progress(cell.method.label, cell.seed, done, rounds, None, **facts))


def _column(
    plan: Plan,
    cells: list[Cell],
    where: Where,
    listeners: Sequence[Watch],
    done: Done,
    taken: list[Cell],
) -> Iterator[tuple[Cell, Run]]:
    """The run of every cell of one config, whose clients are opened for the first of them.

    Cells that another process is running are put into ``taken``.
    """
    known: dict[tuple[int, str], Run] = {}
    setting: Setting | None = None
    with ExitStack() as scope:
        if cells[0].config.run.spread is not None:
            from .spread import spread

            setting = scope.enter_context(where(cells[0].config))
            check(setting, cells)
            yield from spread(setting, cells, listeners)
            return
        for cell in cells:
            interrupt.here()
            try:
                with _claimed(plan, cell):
                    if done(cell):
                        continue
                    if setting is None:
                        setting = scope.enter_context(where(cell.config))
                        check(setting, cells)
                    beside = {
                        label: run for (seed, label), run in known.items() if seed == cell.seed
                    }
                    run = run_cell(setting, cell, listeners, beside)
                    faults.at("compare.cell")
                    if cell.method.label in FIRST:
                        known[cell.seed, cell.method.label] = run
                    yield cell, run
                    if run.path is not None and not cell.kept:
                        shutil.rmtree(run.path)
            except InUseError:
                if not plan.shared:
                    raise
                taken.append(cell)


def _claimed(plan: Plan, cell: Cell) -> AbstractContextManager[None]:
    """The right to run a cell until its run is stored; InUseError if another process has it."""
    if cell.out is None or not plan.shared:
        return contextlib.nullcontext()
    return lock.held(cell.out.with_name(f"{cell.out.name}-taken"))


# ---- one cell ------------------------------------------------------------------------------------


def check(setting: Setting, cells: Sequence[Cell]) -> None:
    """Before training, refuse a cell that could not be finished, and a folder it cannot use."""
    for cell in cells:
        _found(setting, cell)
    setting.check({cell.method.label: cell.method for cell in cells}.values())


def run_cell(
    setting: Setting,
    cell: Cell,
    listeners: Sequence[Watch] = (),
    references: Mapping[str, Run] | None = None,
) -> Run:
    """The run of a cell: read, continued or started; ``references`` are Local's and FedAvg's."""
    found = _found(setting, cell)
    if isinstance(found, Run):
        rounds = cell.config.run.rounds
        _tell(listeners, cell, rounds, reused=True, more=rounds)
        return found
    with contextlib.nullcontext() if cell.out is None else lock.held(cell.out):
        found = _found(setting, cell)  # again: now no other process writes into it
        if isinstance(found, Run):
            return found
        return train_cell(setting, cell, listeners, references, found)


def _found(setting: Setting, cell: Cell) -> Run | UnfinishedRun | None:
    """The run of the same config in a cell's folder, finished or not; any other is refused."""
    place = cell.out
    if place is None:
        return None
    asked = config_hash(setting.asked(cell))
    if run_folder.is_finished(place):
        found = run_folder.read(place)
        same = found.config.get("hash") == asked
        if same and found.environment.get("coterie") == __version__:
            run_folder.refuse_other_data(place, setting.identity(cell.seed))
            return found
    unfinished = unfinished_run(place)
    if unfinished is not None:
        unfinished.refuse_other(asked)
        run_folder.refuse_other_data(place, setting.identity(cell.seed))
        return unfinished
    run_folder.refuse_used(place)
    return None


def references_beside(path: Path) -> dict[str, Run]:
    """The finished runs of Local and FedAvg next to a run of a comparison."""
    home = path.resolve().parent.parent
    if not (home / comparison_folder.COMPARE).is_file():
        return {}
    places = {name: home / name / path.resolve().name for name in FIRST}
    return {n: run_folder.read(at) for n, at in places.items() if run_folder.is_finished(at)}


def train_cell(
    setting: Setting,
    cell: Cell,
    listeners: Iterable[Watch] = (),
    references: Mapping[str, Run] | None = None,
    left: UnfinishedRun | None = None,
) -> Run:
    """Train a run from its first round, or from where the unfinished run ``left`` stopped."""
    with opened(setting, cell, left) as made:
        asked, algorithm, on, engine = made
        swaps, merged = algorithm.traits.models_change_hands, asked.train.merge_val
        log = Log(cell.method.label, cell.seed, asked.run.metric, on.roster, swaps, merged)
        config, where = written(asked, engine.choice), environment(on.problem.device)
        spends = accounted(on.problem, algorithm)
        config |= {} if spends is None else {"accounted": spends}
        live = Live(log, engine, asked.run.rounds, config, where)
        begin, recorder = _begun(setting, cell, live, made, left)
        faults.at("run.created")
        done = 0 if begin is None else begin.rounds
        reporters = [Reporter(watch, live, done) for watch in listeners]
        for record in _rounds(made, live, begin):
            recorder.round(live, record)
            for reporter in reporters:
                reporter.round(live, record)
            if record.mixture is not None:
                predictors = Predictors.of(record.mixture, record.digests)
                return recorder.finished(live, predictors, references)
            interrupt.here()
    raise AssertionError("the last round of a run is always evaluated")


class Opened(NamedTuple):
    """What a cell is trained with."""

    asked: Config  # of this run alone
    algorithm: AnyAlgorithm
    on: Prepared
    engine: Engine


@contextlib.contextmanager
def opened(setting: Setting, cell: Cell, left: UnfinishedRun | None = None) -> Iterator[Opened]:
    """Prepare the clients of a cell and start its engine, as the cell's own config asks."""
    asked, algorithm = setting.asked(cell), cell.method.build()
    if left is not None:
        left.refuse_other(config_hash(asked))
        run_folder.refuse_other_data(left.path, setting.identity(cell.seed))
    on = setting.prepare(algorithm, asked)
    algorithm = governed(algorithm, on.problem)
    with located(algorithm):
        check_run(algorithm, on.problem, asked.run.rounds)
    with ExitStack() as scope:
        scope.enter_context(full_memory_told())
        scope.enter_context(process.settings(tf32=asked.train.precision == "tf32"))
        engine = setting.engine(cell, on, left)
        scope.callback(engine.close)
        scope.enter_context(process.settings(threads=process.threads_of(engine.choice)))
        yield Opened(asked, algorithm, on, engine)


def _begun(
    setting: Setting, cell: Cell, live: Live, made: Opened, left: UnfinishedRun | None
) -> tuple[Begin | None, InMemory]:
    """Create or reopen the folder of a run; the state to begin from, and what records rounds."""
    if cell.out is None:
        return None, InMemory()
    every = setting.config.run.checkpoint_every
    if left is not None:
        start = setting.start(made.algorithm, made.on.problem)
        folder, begin, newest = resume.reopen(
            left, live.log, start, live.environment, live.engine.choice
        )
        live.log = folder.log
        return begin, InFolder(folder, every, newest, page=cell.kept)
    said = setting.manifest(cell.seed), setting.preprocessing(cell.seed)
    folder = run_folder.RunFolder.create(cell.out, live.log, live.config, live.environment, *said)
    return None, InFolder(folder, every, None, page=cell.kept)


def _rounds(made: Opened, live: Live, begin: Begin | None) -> Iterator[Record]:
    """The rounds of a run; an error in a user's method or network names its line."""
    asked, algorithm, problem = made.asked, made.algorithm, made.on.problem
    with located(algorithm, problem.model.module):
        for record in train(
            algorithm,
            problem,
            made.engine,
            asked.run.rounds,
            participation=asked.run.participation,
            evaluate_every=asked.run.evaluate_every,
            metric=asked.run.metric,
            guard=Guard(**asked.guard.model_dump()),
            patience=asked.run.patience,
            validated=[float(mean_known(scores["val"])) for _, scores in live.log.evaluated],
            begin=begin,
        ):
            if record.collaboration is not None:
                check_square(algorithm, record.collaboration.shape, problem.population)
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
    if ":" in config.run.metric:
        tables["metric"] = facts(config.run.metric)
    return {**tables, "resolved": dict(choice), "asked": asked, "hash": config_hash(config)}
