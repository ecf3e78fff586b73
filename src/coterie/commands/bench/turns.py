"""Times rounds of several contestants (engines, the plain loop), in turns in one process."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...engines.process import settings
from ...errors import CoterieError
from .peak_memory import watched

BUDGET = 120.0  # seconds that the timed turns of a workload should take
FEWEST = 3  # turns that are timed at least, however long they take
WARM = 2  # turns to warm up, which do not count
FAILURES = (CoterieError, RuntimeError, MemoryError)  # RuntimeError: out of memory on a GPU, too


class Contestant(NamedTuple):
    """One contestant: a function that executes a round, its threads, and what it chose."""

    once: Callable[[], object]
    threads: int
    resolved: str


class Lap(NamedTuple):
    """The measurements of one contestant."""

    seconds: float | None = None  # the median
    peak_mib: float | None = None
    repeats: int = 0
    failed: str = ""  # why it failed; empty if it did not
    resolved: str = ""


def race(
    field: dict[str, Contestant],
    device: torch.device,
    repeats: int,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Lap]:
    """Median seconds and peak memory of each contestant; one that fails drops out, with a reason.

    Two turns warm up, because on a GPU a round is traced when it comes again; memory is measured in
    these turns. Then ``repeats`` turns are timed, or as many as fit the budget, but at least three.
    """
    running = _Race(field, device)
    for _ in range(WARM):
        a_turn = running.turn(watch=True)
        tell(f"warm-up: {running.latest}")
    turns = turns_within(repeats, a_turn)
    for turn in range(turns):
        running.turn(watch=False)
        tell(f"turn {turn + 1} of {turns}: {running.latest}")
    return {name: running.lap(name) for name in field}


class _Race:
    """The measurements of all contestants so far."""

    def __init__(self, field: dict[str, Contestant], device: torch.device) -> None:
        self.field, self.device = field, device
        self.times: dict[str, list[float]] = {name: [] for name in field}
        self.peaks: dict[str, list[float]] = {name: [] for name in field}
        self.failed: dict[str, str] = {}

    def turn(self, *, watch: bool) -> float:
        """Execute one round of each contestant that has not failed; returns the total seconds."""
        for name, contestant in self.field.items():
            if name in self.failed:
                continue
            try:
                with settings(threads=contestant.threads):
                    self._round(name, watch)
            except FAILURES as error:
                self.failed[name] = reason(error)
        return sum(self._last().values())

    @property
    def latest(self) -> str:
        """The seconds of the last turn."""
        return ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self._last().items())

    def _last(self) -> dict[str, float]:
        return {n: times[-1] for n, times in self.times.items() if n not in self.failed}

    def _round(self, name: str, watch: bool) -> None:
        once = self.field[name].once
        if not watch:
            self.times[name].append(_timed(once, self.device))
            return
        with watched(self.device) as peak:
            seconds = _timed(once, self.device)
        self.times[name].append(seconds)
        self.peaks[name] += [] if peak.mib is None else [peak.mib]

    def lap(self, name: str) -> Lap:
        """The measurements of one contestant."""
        if name in self.failed:
            return Lap(failed=self.failed[name])
        times, peaks, resolved = (
            self.times[name][WARM:],
            self.peaks[name],
            self.field[name].resolved,
        )
        # on a CPU the first round loads libraries into memory; on a GPU either may be the tracing
        seen = peaks if self.device.type == "cuda" else peaks[1:]
        return Lap(statistics.median(times), max(seen, default=None), len(times), "", resolved)


def turns_within(repeats: int, seconds: float, budget: float = BUDGET) -> int:
    """How many turns of this many seconds are timed.

    >>> turns_within(10, 1.0), turns_within(10, 20.0), turns_within(10, 100.0), turns_within(2, 100)
    (10, 6, 3, 2)
    """
    return min(repeats, max(FEWEST, int(budget / max(seconds, 1e-9))))


def reason(error: BaseException) -> str:
    """The error in one line."""
    first, *_ = f"{error}".strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def _timed(once: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    once()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
