"""The shortest time that a round could take on this machine, by arithmetic and memory traffic.

A round cannot be shorter than its floating-point operations at the rate of a large matrix product,
nor than its bytes at the rate of a large copy. Operations are counted by torch in one client's
epoch and evaluation; clipping and mixing are left out. Bytes are counted as if nothing stayed in a
cache from one step to the next:

    a step         weights read, gradients written, weights written
    an evaluation  weights read
    a sample seen  its numbers read, every layer's output written and read once

Small models do stay in caches, so a share may exceed 1 where traffic is the limit.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ...core.problem import Problem
from ...data.simulation import Simulation
from .clients import Clients
from .workloads import Workload

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
        """The shortest time a round can take.

        >>> Bill(flops=6e9, bytes=1e9).seconds(Machine(gemm=2e9, copy=1e9))
        3.0
        """
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
    spent = []
    for _ in range(1 + TRIES):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent.append(time.perf_counter() - began)
    return min(spent[1:])


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
    return int(counter.get_total_flops())


def numbers_moved(work: Workload, on: Simulation) -> int:
    """How many numbers one client reads and writes in a round."""
    size = on.problem.model.size
    a_sample = on.shards.x[0].numel() + 2 * outputs_of(on.problem)
    training = work.steps * 3 * size + work.samples * a_sample
    judging = size + work.judged * a_sample
    return work.trains * training + work.judges * judging


def outputs_of(problem: Problem) -> int:
    """How many numbers all layers of the network output for one sample."""
    total = 0

    def count(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        nonlocal total
        total += output.numel()

    module = problem.model.module
    layers = [
        m for m in module.modules() if not isinstance(m, nn.Flatten) and not any(m.children())
    ]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        with torch.no_grad():
            module(problem.blank(1))
    finally:
        for hook in hooks:
            hook.remove()
    return total
