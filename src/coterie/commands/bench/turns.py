"""Rounds of several contestants, timed in turns in one process."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...engines.process import settings
from ...errors import CoterieError
from .peak_memory import watched

BUDGET = 120.0  # seconds that the timed turns of a workload should take
FEWEST = 3  # turns, whatever they take
WARM = 2  # turns that do not count
FAILURES = (CoterieError, RuntimeError, MemoryError)  # RuntimeError: out of memory on a GPU, too


class Contestant(NamedTuple):
    """Whose rounds are timed."""

    once: Callable[[], object]
    threads: int
    resolved: str


class Lap(NamedTuple):
    """How a contestant fared."""

    seconds: float | None = None  # the median
    peak_mib: float | None = None
    repeats: int = 0
    failed: str = ""  # why, where it did
    resolved: str = ""


def race(
    field: dict[str, Contestant],
    device: torch.device,
    repeats: int,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Lap]:
    """Median seconds and peak memory of each; who fails is out and says why.

    Two turns warm up: on a GPU a round is recorded when it comes again. Memory is watched in them.
    Then as many turns count as are asked for, or as fit the budget, but three at least.
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
    """What has been measured so far."""

    def __init__(self, field: dict[str, Contestant], device: torch.device) -> None:
        self.field, self.device = field, device
        self.times: dict[str, list[float]] = {name: [] for name in field}
        self.peaks: dict[str, list[float]] = {name: [] for name in field}
        self.failed: dict[str, str] = {}

    def turn(self, *, watch: bool) -> float:
        """A round of everybody who is still in it, and its seconds."""
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
        """How one of them fared."""
        if name in self.failed:
            return Lap(failed=self.failed[name])
        times, peaks, resolved = (
            self.times[name][WARM:],
            self.peaks[name],
            self.field[name].resolved,
        )
        # the first round loads libraries into a CPU's memory; on a GPU either may be the recording
        seen = peaks if self.device.type == "cuda" else peaks[1:]
        return Lap(statistics.median(times), max(seen, default=None), len(times), "", resolved)


def turns_within(repeats: int, seconds: float, budget: float = BUDGET) -> int:
    """How many turns of so many seconds are timed.

    >>> turns_within(10, 1.0), turns_within(10, 20.0), turns_within(10, 100.0), turns_within(2, 100)
    (10, 6, 3, 2)
    """
    return min(repeats, max(FEWEST, int(budget / max(seconds, 1e-9))))


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    first, *_ = f"{error}".strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def _timed(once: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    once()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
