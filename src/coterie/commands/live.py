"""Progress on stderr: a live display on a terminal, else a plain line every few seconds.

On a terminal one line is redrawn several times a second, within a round too. In a pipe or a log,
rounds that are faster than EVERY share a line, and a thread prints a line if nothing was printed
for SILENCE seconds, so that a long round is no silence.
"""

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ..errors import ConfigError, few, printable
from ..runs.config.schema import Config
from ..runs.listeners import Progress, Watch
from ..views.words import size

# ---- ``--tensorboard``, ``--wandb``, ``--mlflow``: also log the scores and bytes of every round --

Log = Callable[[dict[str, float], int], None]  # the values of a round, and its number
End = Callable[[bool], None]  # whether all rounds were done
Begin = Callable[[str, str, int], tuple[Log, End]]  # place, method, seed


@contextlib.contextmanager
def also_logged(tracker: str, place: str | None, watch: Watch) -> Iterator[Watch]:
    """A watcher that also logs into one run of a tracker per method and seed.

    The values are ``score`` (mean over clients) and ``bytes`` (of the round's training). Without a
    place (a folder, project or experiment), the watcher as it is.
    """
    if not place:
        yield watch
        return
    begin, open_runs = _imported(tracker), dict[tuple[str, int], tuple[Log, End]]()

    def both(step: Progress) -> None:
        watch(step)
        if step.more > 1 or step.reused or step.waits:  # rounds of another call, which logged them
            return
        run = step.method, step.seed
        if run not in open_runs:
            try:
                open_runs[run] = begin(place, *run)
            except Exception as error:  # whatever a tracker raises
                raise ConfigError(
                    f"--{tracker} {place}: {tracker} could not begin a run: {error}; correct the "
                    f"name or {tracker}'s settings, or leave the option out"
                ) from error
        log, end = open_runs[run]
        score = {} if step.score is None else {"score": step.score}
        log({"bytes": float(step.sent), **score}, step.done)
        if step.done == step.rounds:
            end(True)
            del open_runs[run]

    try:
        yield both
    finally:
        for _, end in open_runs.values():
            end(False)


def _tensorboard(folder: str, method: str, seed: int) -> tuple[Log, End]:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(log_dir=str(Path(folder) / method / f"seed-{seed}"))

    def log(values: dict[str, float], at: int) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, at)

    return log, lambda done: writer.close()


def _wandb(project: str, method: str, seed: int) -> tuple[Log, End]:
    import wandb

    name = f"{method}-{seed}"
    run = wandb.init(project=project, name=name, group=method, reinit="create_new")
    return lambda values, at: run.log(values, step=at), lambda done: run.finish(int(not done))


def _mlflow(experiment: str, method: str, seed: int) -> tuple[Log, End]:
    from mlflow import MlflowClient

    client = MlflowClient()
    found = client.get_experiment_by_name(experiment)
    home = client.create_experiment(experiment) if found is None else found.experiment_id
    run = client.create_run(home, run_name=f"{method}-{seed}").info.run_id

    def log(values: dict[str, float], at: int) -> None:
        for name, value in values.items():
            client.log_metric(run, name, value, step=at)

    return log, lambda done: client.set_terminated(run, "FINISHED" if done else "KILLED")


TRACKERS: dict[str, tuple[str, Begin]] = {
    "tensorboard": ("torch.utils.tensorboard", _tensorboard),
    "wandb": ("wandb", _wandb),
    "mlflow": ("mlflow", _mlflow),
}


def _imported(tracker: str) -> Begin:
    """What begins a run of a tracker; refused before training where it is not installed."""
    module, begin = TRACKERS[tracker]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"--{tracker}: {tracker} is not installed; install it with "
            f"'pip install coterie[{tracker}]', or leave the option out"
        ) from error
    return begin


EVERY = 4.0  # seconds between two lines about rounds
SILENCE = 9.0  # seconds without a line after which one is printed
MANY = 12  # at most so many sites are named in a line


@contextlib.contextmanager
def watching(config: Config, runs: int, **trackers: str | None) -> Iterator[Watch]:
    """Show the progress of the runs of a config, and log it with the trackers that are asked for.

    ``trackers`` are names of TRACKERS with a folder, project or experiment each, or None.
    """
    federated = config.run.federation is not None
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(progress_on_stderr(runs, config.run.rounds, sites=federated))
        for tracker, place in trackers.items():
            watch = stack.enter_context(also_logged(tracker, place, watch))
        yield watch


@contextlib.contextmanager
def progress_on_stderr(runs: int, rounds: int, *, sites: bool = False) -> Iterator[Watch]:
    """Show the progress of all runs; ``sites`` also shows which sites answered in a round."""
    console, done = Console(stderr=True), Tally(runs * rounds, sites=sites)
    if console.is_terminal:
        with _display(console, done) as watch:
            yield watch
        return
    lines, over = Lines(done), threading.Event()
    thread = threading.Thread(target=_beat, args=(lines, over), daemon=True)
    thread.start()
    try:
        yield lines.tell
    finally:
        over.set()
        thread.join()


class Tally:
    """Counts the rounds, bytes and time of all runs, and describes them in a few words."""

    def __init__(
        self, rounds: int, *, sites: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rounds, self.sites, self.clock = rounds, sites, clock
        self.at = clock()  # of the last report
        self.done = self.trained = self.sent = 0
        self.spent = 0.0  # seconds of the rounds that count for the time left
        self.step: Progress | None = None
        self.score: float | None = None

    def add(self, step: Progress) -> None:
        """Count one report of a run."""
        new = self.step is None or (self.step.method, self.step.seed) != (step.method, step.seed)
        if step.score is not None or new:
            self.score = step.score
        self.done += step.more
        now = self.clock()
        if step.more == 1 and not step.reused and not new:  # a first round may compile
            self.trained, self.spent = self.trained + 1, self.spent + now - self.at
        self.sent += step.sent
        self.step, self.at = step, now

    @property
    def left(self) -> float | None:
        """The seconds that are left if all rounds take as long as those so far; None at first."""
        if not self.trained:
            return None
        spent = self.spent / self.trained
        return max(0.0, (self.rounds - self.done) * spent - (self.clock() - self.at))

    def words(self) -> list[str]:
        """The last score, the bytes so far, the time left, and the sites that answered."""
        found = [] if self.score is None else [f"mean {self.score:.4g}"]
        if self.sent:
            found.append(f"{size(self.sent)} sent")
        if self.left is not None and self.done < self.rounds:
            found.append(f"about {duration(self.left)} left")
        return found + self._answers()

    def _answers(self) -> list[str]:
        if not self.sites or self.step is None:
            return []
        found = [f"answered: {few(self.step.answered, MANY) or 'none'}"]
        silent = [f"no answer: {few(self.step.silent, MANY)}"]
        return found + silent * bool(self.step.silent)


def duration(seconds: float) -> str:
    """A time in one unit.

    >>> duration(61), duration(600), duration(7200)
    ('61 s', '10 min', '2.0 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Lines:
    """Prints plain lines; reports and heartbeats may come from different threads."""

    def __init__(self, tally: Tally, write: Callable[[str], None] = _to_stderr) -> None:
        self.tally, self.write, self.lock = tally, write, threading.Lock()
        self.last = tally.clock()  # time of the last line

    def tell(self, step: Progress) -> None:
        """Report a round: what happened in it at once, its score only every few seconds."""
        with self.lock:
            self.tally.add(step)
            lines = events(step)
            if not lines and self.tally.clock() - self.last >= EVERY:
                lines = [", ".join([_round(step), *self.tally.words()])]
            self._print(lines)

    def beat(self) -> None:
        """Print a line if there was none for long: a round, or the preparation, takes its time."""
        with self.lock:
            now, step = self.tally.clock(), self.tally.step
            if now - self.last < SILENCE:
                return
            waited = f"for {duration(now - self.tally.at)}"
            if step is None or step.done == step.rounds:
                self._print([f"preparing {waited}"])
            elif step.waits:
                self._print([f"{waits_for(step)} {waited}"])
            else:
                at = f"{step.method}, seed {step.seed}: in round {step.done + 1} of {step.rounds}"
                self._print([", ".join([f"{at} {waited}", *self.tally.words()])])

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            self.write(printable(line))
        if lines:
            self.last = self.tally.clock()


def _beat(lines: Lines, over: threading.Event) -> None:
    while not over.wait(1.0):
        lines.beat()


def _round(step: Progress) -> str:
    return f"{step.method}, seed {step.seed}: round {step.done} of {step.rounds}"


def waits_for(step: Progress) -> str:
    """What is said while another process computes a run that this one needs."""
    return f"{step.method}, seed {step.seed}: another process runs it; waiting"


def events(step: Progress) -> list[str]:
    """Lines to print at once: rejected clients, slow calls, rounds found on disk, a run's end."""
    if step.waits:
        return [waits_for(step)]
    run = f"{step.method}, seed {step.seed}"
    lines = [
        f"{run}: round {step.done} left out client {client!r} ({reason})"
        for client, reason in step.rejected
    ]
    lines += [f"{run}: {what}" for what in step.slow]
    if step.done == step.rounds:
        what = "finished before, read again" if step.reused else f"{step.rounds} rounds"
        score = "" if step.score is None else f", mean {step.score:.4g}"
        lines.append(f"{run}: {what}{score}")
    elif step.more > 1:
        lines.append(f"{run}: continues after {step.done} rounds")
    return lines


@contextlib.contextmanager
def _display(console: Console, tally: Tally) -> Iterator[Watch]:
    """One line that is redrawn: run, bar, rounds, elapsed time, and the tally's words."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total} rounds"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[words]}", markup=False),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("preparing", total=tally.rounds, words="")

        def watch(step: Progress) -> None:
            tally.add(step)
            words = printable(", ".join(tally.words()))
            run = printable(f"{step.method}, seed {step.seed}")
            bar.update(task, advance=step.more, description=run, words=words)
            for line in map(printable, events(step)):
                bar.console.print(line, highlight=False, markup=False)

        yield watch
