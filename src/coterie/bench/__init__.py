"""How fast a round is: every engine against a plain PyTorch loop, as ratios in one run.

Absolute times depend on the machine and on what else it does; a ratio measured in one process,
engines and loop taking turns, does not.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..algorithm import round_of
from ..algorithms.fedavg import FedAvg
from ..engines import Engine, make_engine
from ..errors import EngineError
from ..task import Task
from .plain import plain_round
from .workloads import WORKLOADS, Workload

ENGINES = ("auto", "vmap", "loop")


class Result(NamedTuple):
    """One engine on one workload."""

    workload: str
    engine: str  # "plain" is the loop written in torch alone
    resolved: str  # what the engine chose
    seconds_per_round: float
    speedup_over_loop: float  # over the plain loop
    precision: str
    device: str


def measure(
    names: list[str], *, device: str = "cpu", repeats: int = 5, force: bool = False
) -> Iterator[Result]:
    """Results of some workloads, as each is done. A loaded machine is refused unless forced."""
    if not force:
        _refuse_load()
    for name in names:
        yield from _measured(WORKLOADS[name], torch.device(device), repeats)


def _refuse_load() -> None:
    """A second job on two cores slows a two-thread loop many times over, and us less."""
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > 0.6 * cores:
        raise EngineError(
            f"the machine is busy: load {busy:.1f} on {cores} cores; expected an idle one; wait "
            "until other jobs end, or measure anyway with --force"
        )


def _measured(work: Workload, device: torch.device, repeats: int) -> Iterator[Result]:
    task = work.task(device)
    cores = torch.get_num_threads()
    plain = plain_round(task)
    runs: dict[str, tuple[Callable[[], None], int]] = {"plain": (plain, cores)}
    resolved = {"plain": f"{cores} threads"}
    for name in ENGINES:
        torch.set_num_threads(cores)
        engine = make_engine(name, task)
        runs[name] = (_round_of(task, engine), engine.choice["threads"])
        resolved[name] = ", ".join(f"{key} {value}" for key, value in engine.choice.items())
    seconds = {name: statistics.median(times) for name, times in _timed(runs, device, repeats)}
    torch.set_num_threads(cores)
    for name, spent in seconds.items():
        yield Result(
            work.name, name, resolved[name], spent, seconds["plain"] / spent, "float32", str(device)
        )


def _round_of(task: Task, engine: Engine) -> Callable[[], None]:
    """One round of FedAvg without evaluation: training is what is timed."""
    method = FedAvg()
    server, states = method.init(task)
    round = round_of(task, 0, 1, torch.arange(task.population, device=task.device))

    def once() -> None:
        uploads, _ = engine.local(method, method.download(server, round), states, round)
        method.aggregate(server, uploads, round)

    return once


def _timed(
    runs: dict[str, tuple[Callable[[], None], int]], device: torch.device, repeats: int
) -> Iterator[tuple[str, list[float]]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):  # the first turn warms up
        for name, (once, threads) in runs.items():
            torch.set_num_threads(threads)
            began = time.perf_counter()
            once()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:
                times[name].append(time.perf_counter() - began)
    yield from times.items()
