"""Groups clients that take similarly many local steps, so that little of a chunk is padding.

A chunk takes as many steps as its longest client, and the others are padded. A step of a chunk of
``n`` clients costs about as much as ``n + overhead`` clients: the overhead is what any step costs,
however few clients it has.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..core.problem import Problem

# In clients, as measured (docs/results/speed.md, "Clients of different sizes"). On a CPU it is that
# of a small perceptron, and larger models have less. On a GPU any step takes as long as this many
# floating-point operations of a client; a bound keeps clients of small models together.
_CPU, _GPU_OPERATIONS, _GPU_MOST = 2, 20e9, 64
_PASSES = 3  # a step computes about three times the forward pass
Run = tuple[int, int]  # the first client, and the one after the last


def overhead_of(problem: Problem) -> int:
    """What a step of a chunk costs beside its clients' own work, as a number of clients."""
    if problem.device.type == "cpu":
        return _CPU
    return gpu_overhead(_PASSES * forward_operations(problem))


def gpu_overhead(operations: int) -> int:
    """The overhead on a GPU, where a client's step has so many floating-point operations."""
    return max(1, min(_GPU_MOST, round(_GPU_OPERATIONS / max(1, operations))))


def forward_operations(problem: Problem) -> int:
    """The floating-point operations of a model's forward pass over one batch."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        problem.model.module(problem.blank_batch())
    return int(counter.get_total_flops())


def similar(order: list[int], steps: Sequence[int], most: int, overhead: int) -> list[list[int]]:
    """Clients in the order of their steps, in chunks of :func:`runs_of_similar`, longest first.

    Threads that begin with the most work share the rest.
    """
    runs = runs_of_similar(tuple(steps), most, overhead)
    return [order[start:stop] for start, stop in reversed(runs)]


@lru_cache(maxsize=64)  # the same in every round
def runs_of_similar(steps: tuple[int, ...], most: int, overhead: int) -> tuple[Run, ...]:
    """Cut sorted numbers of steps into runs of at most ``most`` clients, at the lowest cost.

    Returns ``(start, stop)`` of each run. Clients of equally many steps are cut only where a run
    would be longer than ``most``; all pieces of such a run are about equally long.

    >>> runs_of_similar((10, 10, 10, 80), most=20, overhead=2)
    ((0, 3), (3, 4))
    >>> runs_of_similar((10, 10, 10, 80), most=20, overhead=64)
    ((0, 4),)
    """
    ends = [at for at in range(1, len(steps)) if steps[at - 1] != steps[at]] + [len(steps)]
    starts = [0, *ends[:-1]]
    best = [(0, 0)]  # cost of all clients before an end; where its run began
    for last, stop in enumerate(ends):
        tried = []
        for first in range(last + 1):
            clients = stop - starts[first]
            pieces = -(-clients // most)
            tried.append((best[first][0] + steps[stop - 1] * (overhead * pieces + clients), first))
        best.append(min(tried))
    found: list[Run] = []
    last = len(ends)
    while last:
        first = best[last][1]
        found = _pieces(starts[first], ends[last - 1], most) + found
        last = first
    return tuple(found)


def _pieces(start: int, stop: int, most: int) -> list[Run]:
    count = -(-(stop - start) // most)
    each = -(-(stop - start) // count)
    return [(at, min(at + each, stop)) for at in range(start, stop, each)]
