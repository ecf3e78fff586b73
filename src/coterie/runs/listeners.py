"""What is told of a run while it is executed: its folder, its checkpoints, and whoever watches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..core.metrics import mean_known
from ..engines import Engine
from ..storage import faults
from ..training.rounds import Record
from . import interrupt
from .checkpoint import Keeper
from .run import RAN, Log, Run, ran
from .run_folder import RunFolder
from .summary import Predictors, finished

SLOW = 0.2  # share of a run's time: calls that take more and could be faster are reported


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
    waits: bool = False  # another process has taken this run; nothing is left but to wait for it


Watch = Callable[[Progress], None]


@dataclass
class Live:
    """A run that is being executed; its log grows with every round."""

    log: Log
    engine: Engine
    rounds: int  # of the whole run
    config: Mapping[str, Any]  # as in config.json
    environment: Mapping[str, Any]


class InMemory:
    """Logs the rounds of a run that is kept in memory."""

    def round(self, live: Live, record: Record) -> None:
        live.log.append(record)

    def finished(
        self, live: Live, predictors: Predictors, references: Mapping[str, Run] | None
    ) -> Run:
        where = {**live.environment, RAN: ran(live.engine.forms)}
        return finished(live.log, predictors, live.config, where, references)


class InFolder(InMemory):
    """Writes the rounds of a run into its folder, and a checkpoint when one is due."""

    def __init__(
        self, folder: RunFolder, every: int | None, before: Path | None, *, page: bool
    ) -> None:
        self.folder, self.page = folder, page
        self.keeper = Keeper(folder.path, every, before=before)

    def round(self, live: Live, record: Record) -> None:
        """Write the round; unless it is the last one, also a due checkpoint."""
        faults.at("round.done")
        self.folder.note_ran(live.engine.forms)
        self.folder.append(record)
        faults.at("log.done")
        due = record.mixture is None and (self.keeper.due(record) or interrupt.asked())
        if due:
            self.keeper.write(record, self.folder)

    def finished(
        self, live: Live, predictors: Predictors, references: Mapping[str, Run] | None
    ) -> Run:
        return self.folder.finish(predictors, references, page=self.page)


class Reporter:
    """Tells a watcher of every round; each pair of a rejected client and a reason only once."""

    def __init__(self, watch: Watch, live: Live, done: int) -> None:
        self.watch = watch
        self.told: set[tuple[str, str]] = set()
        self.seconds = 0.0
        if done:  # the run goes on after so many rounds
            log = live.log
            watch(Progress(log.method, log.seed, done, live.rounds, None, more=done))

    def round(self, live: Live, record: Record) -> None:
        self.seconds += record.seconds
        clients, found, done = live.log.roster.clients, record.evaluation, record.index + 1
        named = dict(enumerate(clients))
        rejected = [(named.get(r.client, f"#{r.client}"), r.reason) for r in record.rejected]
        new = tuple(pair for pair in rejected if pair not in self.told)
        self.told |= set(new)
        out, asked = {name for name, _ in rejected}, [clients[i] for i in record.clients]
        self.watch(
            Progress(
                live.log.method,
                live.log.seed,
                done,
                done if record.mixture is not None else live.rounds,  # patience may end it
                None if found is None else float(mean_known(found.test)),
                rejected=new,
                slow=() if record.mixture is None else slowly(live.engine, self.seconds),
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
