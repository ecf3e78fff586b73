"""How fast a round is: every engine against a plain PyTorch loop, as ratios in one run.

Absolute times depend on the machine and on what else it does; a ratio measured in one process,
engines and loop taking turns, depends on them much less.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..algorithm import round_of
from ..algorithms.fedavg import FedAvg
from ..engines import Engine, make_engine
from ..errors import ConfigError, EngineError, did_you_mean
from ..task import Task
from .plain import plain_round
from .workloads import WORKLOADS, Workload

ENGINES = ("auto", "vmap", "loop")
PRECISIONS = ("float32", "tf32")
Timed = tuple[Callable[[], None], int]  # one round, and the threads it takes


class Result(NamedTuple):
    """One engine on one workload."""

    workload: str
    engine: str  # "plain" is the loop written in torch alone
    resolved: str  # what the engine chose
    seconds_per_round: float
    speedup_over_loop: float  # over the plain loop
    precision: str
    device: str


def report(
    names: list[str], device: str, precision: str, repeats: int, *, force: bool, as_json: bool
) -> None:
    """Measure and print."""
    results = measure(names or list(WORKLOADS), device, precision, repeats, force=force)
    if as_json:
        print(json.dumps([result._asdict() for result in results], indent=1))
        return
    print(f"{'':4} {'engine':7} {'s a round':>10} {'over plain':>11}   resolved to")
    for r in results:
        time_, ratio = f"{r.seconds_per_round:10.4f}", f"{r.speedup_over_loop:9.2f} x"
        print(f"{r.workload:4} {r.engine:7} {time_} {ratio}   {r.resolved}", flush=True)


def measure(
    names: list[str], device: str, precision: str, repeats: int, *, force: bool = False
) -> Iterator[Result]:
    """Results of some workloads, as each is done. A loaded machine is refused unless forced."""
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"workload '{name}' is unknown; {did_you_mean(name, WORKLOADS)}")
    if precision not in PRECISIONS:
        raise ConfigError(f"precision '{precision}' is unknown; expected float32 or tf32")
    if not force:
        _refuse_load()
    return _results(names, device, precision, repeats)


def _results(names: list[str], device: str, precision: str, repeats: int) -> Iterator[Result]:
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    for name in names:
        for engine, resolved, seconds, ratio in _measured(WORKLOADS[name], device, repeats):
            yield Result(name, engine, resolved, seconds, ratio, precision, device)


def _refuse_load() -> None:
    """A second job on two cores slows a two-thread loop many times over, and us less."""
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > 0.6 * cores:
        raise EngineError(
            f"the machine is busy: load {busy:.1f} on {cores} cores; expected an idle one; wait "
            "until other jobs end, or measure anyway with --force"
        )


def _measured(work: Workload, device: str, repeats: int) -> Iterator[tuple[str, str, float, float]]:
    task, cores = work.task(torch.device(device)), torch.get_num_threads()
    runs: dict[str, Timed] = {"plain": (plain_round(task), cores)}
    resolved = {"plain": f"{cores} threads"}
    for name in ENGINES:
        torch.set_num_threads(cores)
        engine = make_engine(name, task)
        runs[name] = _round_of(task, engine), engine.choice["threads"]
        resolved[name] = ", ".join(f"{key} {value}" for key, value in engine.choice.items())
    seconds = _timed(runs, task.device, repeats)
    torch.set_num_threads(cores)
    for name, spent in seconds.items():
        yield name, resolved[name], spent, seconds["plain"] / spent


def _round_of(task: Task, engine: Engine) -> Callable[[], None]:
    """One round of FedAvg without evaluation: training is what is timed."""
    method = FedAvg()
    server, states = method.init(task)
    round = round_of(task, 0, 1, torch.arange(task.population, device=task.device))

    def once() -> None:
        uploads, _ = engine.local(method, method.download(server, round), states, round)
        method.aggregate(server, uploads, round)

    return once


def _timed(runs: dict[str, Timed], device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each, all of them taking turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 2):  # two turns warm up: a round is recorded when it comes again
        for name, (once, threads) in runs.items():
            torch.set_num_threads(threads)
            began = time.perf_counter()
            once()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(spent[2:]) for name, spent in times.items()}
