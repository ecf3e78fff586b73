"""Our two contestants, the plain loop and ``auto``, made as ``coterie bench`` makes them."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import coterie
from coterie.commands.bench import Contestant, _contestant, _words
from coterie.commands.bench.plain import fastest
from coterie.commands.bench.steady import steady
from coterie.commands.bench.workloads import WORKLOADS

WARM_UP = 2


class Ours(NamedTuple):
    """A contestant in this process."""

    once: Callable[[], float]  # a round, and its seconds
    version: str
    setting: str


def ours(workload: str, cores: int) -> dict[str, Ours]:
    """The plain loop and ``auto`` on a workload, warm."""
    work = WORKLOADS[workload]
    start = steady(work.method, work.simulation(torch.device("cpu")))
    plain, chosen = fastest(start, cores)
    torch.set_num_threads(cores)
    made = {
        "plain": Contestant(plain, chosen["threads"], _words(chosen)),
        "auto": _contestant("auto", start),
    }
    versions = {"plain": f"torch {torch.__version__}", "auto": f"coterie {coterie.__version__}"}
    contestants = {
        name: Ours(_timed(one), versions[name], one.resolved) for name, one in made.items()
    }
    for one in contestants.values():
        for _ in range(WARM_UP):
            one.once()
    return contestants


def job(workload: str, cores: int) -> dict[str, Any]:
    """The workload in the words that a worker understands."""
    work = WORKLOADS[workload]
    task = work.simulation(torch.device("cpu"))
    return {
        "workload": workload,
        "model": work.model,
        "shape": work.shape,
        "clients": work.clients,
        "samples": work.samples,
        "batch": work.batch,
        "lr": task.problem.recipe.lr,
        "steps": work.clients * -(-work.samples // work.batch),
        "parameters": sum(p.numel() for p in task.problem.factory().parameters()),
        "cores": cores,
    }


def _timed(one: Contestant) -> Callable[[], float]:
    def once() -> float:
        torch.set_num_threads(one.threads)
        began = time.perf_counter()
        one.once()
        return time.perf_counter() - began

    return once
