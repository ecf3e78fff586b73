"""Times a round of every engine against a plain PyTorch loop, as ratios within one process.

Absolute times depend on the machine and its load. A ratio depends on them much less if engines and
loop take turns in one process.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ...data.simulation import Simulation
from ...engines import make_backend
from ...engines.base import DEVICE, Backend, Work
from ...engines.process import settings
from ...engines.settings import Length
from ...errors import ConfigError, EngineError, did_you_mean
from .ceiling import Bill, Machine, bill, machine
from .plain import fastest
from .steady import Steady, steady
from .turns import FAILURES, Contestant, Lap, race, reason
from .workloads import WORKLOADS, Workload

ENGINES = ("auto", "vmap", "loop")
PRECISIONS = ("float32", "tf32")
LONG = 1000  # rounds that engines are told the run has, so that measuring and tracing pay off


class Result(NamedTuple):
    """The timing of one engine on one workload; a value that could not be measured is None."""

    workload: str
    engine: str  # "plain" is the plain PyTorch loop
    seconds_per_round: float | None
    speedup_over_loop: float | None  # over the plain loop
    peak_mib: float | None  # memory of a round beyond what was held before it
    share_of_ceiling: float | None  # the shortest possible time divided by the time it took
    precision: str
    device: str
    resolved: str  # what the engine chose
    failed: str  # why the engine failed; empty if it did not
    repeats: int  # rounds that the median is over
    ms_per_step: float | None  # one step of all clients
    gflop: float  # of a round
    gbytes: float  # moved in a round at least
    gemm_gflops: float  # of the machine, per second
    copy_gbs: float  # of the machine, per second


def measure(
    names: list[str], device: str, precision: str, repeats: int, *, force: bool = False
) -> Iterator[Result]:
    """Yield the results of some workloads, each when it is done; a busy machine is refused."""
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"workload '{name}' is unknown; {did_you_mean(name, WORKLOADS)}")
    check(device, precision, force=force)
    chosen = [WORKLOADS[name] for name in names or WORKLOADS]
    return _results(chosen, torch.device(device), precision, repeats)


def check(device: str, precision: str, *, force: bool) -> None:
    """Refuse a device or precision that does not exist here, and a busy machine unless forced."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision '{precision}' is unknown; expected float32 or tf32")
    if precision == "tf32" and device == "cpu":
        raise ConfigError("precision 'tf32' is a GPU's; found device 'cpu'; use float32")
    if not re.fullmatch(DEVICE, device):
        raise ConfigError(f"device '{device}' is unknown; expected cpu, cuda or cuda:N")
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device '{device}': torch sees no CUDA device here; use cpu")
    if not force:
        _refuse_load()


def _refuse_load() -> None:
    """Refuse a busy machine: a second job slows a loop with two threads much more than engines."""
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > 0.6 * cores:
        raise EngineError(
            f"the machine is busy: load {busy:.1f} on {cores} cores; expected an idle one; wait "
            "until other jobs end, or measure anyway with --force"
        )


def tell(line: str) -> None:
    """Print a line of progress to stderr."""
    print(f"bench: {line}", file=sys.stderr, flush=True)


def _results(
    works: list[Workload], device: torch.device, precision: str, repeats: int
) -> Iterator[Result]:
    with settings(tf32=precision == "tf32"):
        tell("the machine's rates")
        here = machine(device, precision)
        for work in works:
            cost, laps = measured(work, device, repeats)
            loop = laps["plain"].seconds
            for name, lap in laps.items():
                yield _result(work, name, lap, loop, cost, here)


def _result(
    work: Workload, name: str, lap: Lap, loop: float | None, cost: Bill, here: Machine
) -> Result:
    spent = lap.seconds
    return Result(
        workload=work.name,
        engine=name,
        seconds_per_round=spent,
        speedup_over_loop=loop / spent if loop and spent else None,
        peak_mib=lap.peak_mib,
        share_of_ceiling=cost.seconds(here) / spent if spent else None,
        precision=here.precision,
        device=here.device,
        resolved=lap.resolved,
        failed=lap.failed,
        repeats=lap.repeats,
        ms_per_step=1e3 * spent / work.steps if spent else None,
        gflop=cost.flops / 1e9,
        gbytes=cost.bytes / 1e9,
        gemm_gflops=here.gemm / 1e9,
        copy_gbs=here.copy / 1e9,
    )


def measured(work: Workload, device: torch.device, repeats: int) -> tuple[Bill, dict[str, Lap]]:
    """The cost of a round of a workload, and the timings of the plain loop and every engine."""
    tell(f"{work.name}, {work.about}, {work.clients} x {work.samples}: setting up")
    start, cores = steady(work.method, work.simulation(device)), torch.get_num_threads()
    plain, chosen = fastest(start, cores)
    field = {"plain": Contestant(plain, chosen["threads"], _words(chosen))}
    cost = bill(work, plain.clients)
    failed = {}
    for name in ENGINES:
        tell(f"{work.name}: making engine '{name}'")
        try:
            field[name] = _contestant(name, start)
        except FAILURES as error:
            failed[name] = Lap(failed=reason(error))
    with settings(keep_memory=device.type == "cpu"):
        laps = race(field, device, repeats, lambda line: tell(f"{work.name}: {line}"))
    return cost, {**laps, **failed}


def backend_of(name: str, on: Simulation) -> Backend:
    """The backend that a long run would use."""
    return make_backend(name, Work(on.problem, on.shards), Length(LONG))


def _contestant(name: str, start: Steady) -> Contestant:
    made = backend_of(name, start.on)
    return Contestant(_round_of(made, start), made.choice["threads"], _words(made.choice))


def _round_of(backend: Backend, start: Steady) -> Callable[[], None]:
    """A function that executes one round of the method, without evaluation."""
    _, method, server, states, round = start

    def once() -> None:
        uploads, _ = backend.local(method, method.download(server, round), states, round)
        method.aggregate(server, uploads, round)

    return once


def _words(choice: dict[str, object]) -> str:
    told = (f"{key} {value}" for key, value in choice.items() if key not in ("compiler", "kernels"))
    return ", ".join(told)
