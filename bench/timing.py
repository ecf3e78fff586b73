"""What is measured of a round: its seconds, its peak memory, and the least that it could take.

Contestants (engines, the plain loop) take turns in one process: absolute times depend on the
machine and its load, a ratio depends on them much less if both sides take turns.
"""

import ctypes
import gc
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from coterie.core.problem import Problem
from coterie.data.simulation import Simulation
from coterie.engines.process import settings
from coterie.errors import CoterieError
from coterie.training.rounds import Record
from plain import Clients
from workloads import Workload

BUDGET = 120.0  # seconds that the timed turns of a workload should take
FEWEST = 3  # turns that are timed at least, however long they take
WARM = 2  # turns to warm up, which do not count
FAILURES = (CoterieError, RuntimeError, MemoryError)  # RuntimeError: out of memory on a GPU, too


def tell(line: str) -> None:
    """Print a line of progress to stderr."""
    print(f"bench: {line}", file=sys.stderr, flush=True)


def busy() -> str:
    """Why this machine should not be measured now; empty if it is idle.

    A second job slows a loop with two threads much more than it slows the engines.
    """
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= 0.6 * cores:
        return ""
    return (
        f"the machine is busy: load {load:.1f} on {cores} cores; expected an idle one; wait until "
        "other jobs end, or measure anyway with --force"
    )


# ---- turns ---------------------------------------------------------------------------------------


class Contestant(NamedTuple):
    """One contestant: a function that executes a round, its threads, and what it chose."""

    once: Callable[[], object]
    threads: int
    resolved: str


@dataclass
class Lap:
    """The measurements of one contestant so far."""

    resolved: str = ""
    failed: str = ""  # why it failed; empty if it did not
    times: list[float] = field(default_factory=list)  # of all turns, also those to warm up
    peaks: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """The median of the timed turns."""
        return None if self.failed else statistics.median(self.times[WARM:])

    @property
    def peak_mib(self) -> float | None:
        """The peak memory of a round beyond what was held before it."""
        return None if self.failed else max(self.peaks, default=None)

    @property
    def repeats(self) -> int:
        """How many turns the median is over."""
        return 0 if self.failed else len(self.times) - WARM


def race(
    contestants: dict[str, Contestant],
    device: torch.device,
    repeats: int,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Lap]:
    """Time rounds of every contestant in turns; one that fails drops out, with a reason.

    Two turns warm up, because on a GPU a round is traced when it comes again. Then ``repeats``
    turns are timed, or as many as fit the budget, but at least three. Memory is measured while
    warming up: on a GPU in both turns, because either may be the tracing; on a CPU in the second
    one, because the first loads libraries into memory.
    """
    laps = {name: Lap(one.resolved) for name, one in contestants.items()}

    def turn(told: str, *, watch: bool) -> float:
        for name, lap in laps.items():
            if not lap.failed:
                _round(contestants[name], lap, device, watch=watch)
        last = {name: lap.times[-1] for name, lap in laps.items() if not lap.failed}
        tell(f"{told}: {', '.join(f'{name} {spent:.3g} s' for name, spent in last.items())}")
        return sum(last.values())

    for number in range(WARM):
        seconds = turn("warm-up", watch=device.type == "cuda" or number > 0)
    turns = turns_within(repeats, seconds)
    for number in range(turns):
        turn(f"turn {number + 1} of {turns}", watch=False)
    return laps


def _round(one: Contestant, lap: Lap, device: torch.device, *, watch: bool) -> None:
    """Execute a round of a contestant, and note its seconds, its peak memory or its failure."""
    try:
        with settings(threads=one.threads):
            if not watch:
                lap.times.append(timed(one.once, device))
                return
            with watched(device) as peak:
                lap.times.append(timed(one.once, device))
            lap.peaks += [] if peak.mib is None else [peak.mib]
    except FAILURES as error:
        lap.resolved, lap.failed = "", reason(error)


def turns_within(repeats: int, seconds: float, budget: float = BUDGET) -> int:
    """How many turns of this many seconds are timed."""
    return min(repeats, max(FEWEST, int(budget / max(seconds, 1e-9))))


def reason(error: BaseException) -> str:
    """The error in one line."""
    first, *_ = f"{error}".strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def timed(once: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the GPU's work included."""
    began = time.perf_counter()
    once()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def rounds_timed(records: Iterator[Record], rounds: int, device: torch.device) -> list[float]:
    """Seconds of the first rounds of the round loop, the GPU's work included."""
    return [timed(lambda: next(records), device) for _ in range(rounds)]


# ---- peak memory ---------------------------------------------------------------------------------

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 2**20


class Peak:
    """The peak memory of a block; set when the block ends."""

    mib: float | None = None


@contextmanager
def watched(device: torch.device) -> Iterator[Peak]:
    """Measure the peak memory of the block, beyond what was held before it.

    On a GPU torch's allocator reports it. On a CPU it is the rise of the process's resident memory,
    by the kernel's high-water mark; None if the kernel keeps no such mark.
    """
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.mib = (torch.cuda.max_memory_allocated(device) - before) / MIB
        return
    resident = _fresh_mark()
    yield peak
    if resident is not None:
        peak.mib = max(0, _kib("VmHWM") - resident) / 1024


def _fresh_mark() -> int | None:
    """Reset the high-water mark to the current resident memory, and return that in KiB.

    Freed memory is returned to the system first; otherwise a round would seem to need only what the
    last one did not leave behind.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
        RESET.write_text("5")
    except (OSError, AttributeError):  # not Linux, or not glibc
        return None
    return _kib("VmRSS")


def _kib(name: str) -> int:
    (found,) = re.findall(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return int(found)


# ---- the ceiling ---------------------------------------------------------------------------------
#
# A round cannot be shorter than its floating-point operations at the rate of a large matrix
# product, nor than its bytes at the rate of a large copy. Operations are counted by torch in one
# client's epoch and evaluation; clipping and mixing are left out. Bytes are counted as if nothing
# stayed in a cache from one step to the next:
#
#     a step         weights read, gradients written, weights written
#     an evaluation  weights read
#     a sample seen  its numbers read, every layer's output written and read once
#
# Small models do stay in caches, so a share may exceed 1 where traffic is the limit.

SIDE = {"cpu": 2048, "cuda": 8192}  # rows and columns of the matrices that are multiplied
COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes that are copied
TRIES = 5


class Machine(NamedTuple):
    """Measured rates of a device."""

    gemm: float  # floating-point operations per second
    copy: float  # bytes per second, read and written
    device: str = "cpu"
    precision: str = "float32"


class Bill(NamedTuple):
    """The operations and bytes of one round of all clients."""

    flops: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """The shortest time a round can take."""
        return max(self.flops / machine.gemm, self.bytes / machine.copy)


def machine(device: torch.device, precision: str) -> Machine:
    """Measure the rates of this machine, with torch's current threads and precision."""
    side, size = SIDE[device.type], COPIED[device.type]
    a, b = torch.randn(2, side, side, device=device)
    product = torch.empty_like(a)
    gemm = _best(lambda: torch.mm(a, b, out=product), device)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _best(lambda: target.copy_(source), device)
    return Machine(2 * side**3 / gemm, 2 * size / copy, str(device), precision)


def _best(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few calls, after one to warm up."""
    return min([timed(call, device) for _ in range(1 + TRIES)][1:])


def bill(work: Workload, clients: Clients) -> Bill:
    """The operations and bytes of all clients of a workload in one round."""
    training = _flops(lambda: clients.train(0, clients.minibatches(0)))
    judging = _flops(lambda: clients.loss(0, clients.w[0], work.judged_on)) if work.judges else 0
    flops = work.trains * training + work.judges * judging
    moved = numbers_moved(work, clients.on) * clients.w.element_size()
    return Bill(float(work.clients * flops), float(work.clients * moved))


def _flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def numbers_moved(work: Workload, on: Simulation) -> int:
    """How many numbers one client reads and writes in a round."""
    size = on.problem.model.size
    a_sample = on.shards.x[0].numel() + 2 * outputs_of(on.problem)
    training = work.steps * 3 * size + work.samples * a_sample
    judging = size + work.judged * a_sample
    return work.trains * training + work.judges * judging


def outputs_of(problem: Problem) -> int:
    """How many numbers all layers of the network output for one sample."""
    outputs = list[int]()

    def note(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        outputs.append(output.numel())

    module = problem.model.module
    layers = [
        m for m in module.modules() if not isinstance(m, nn.Flatten) and not any(m.children())
    ]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        with torch.no_grad():
            module(problem.blank(1))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(outputs)
