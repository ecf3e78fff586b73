"""What is asked of an engine: its settings, and the length of the run that it is chosen for."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ..core.ranges import Count, OneOf
from .base import Work

ENGINES = {
    "auto": "measures the others on the real model and takes the fastest for the run",
    "vmap": "many clients at once, on one CPU or GPU",
    "loop": "one client at a time: the reference",
    "wire": "one client at a time, by messages of bytes, as in a federation",
    "remote": "the sites of a federation (--federation FOLDER), each with its own data",
}
DEVICE = r"^(cpu|cuda(:[0-9]{1,3})?)$"
MOST_THREADS = 1024  # OpenMP aborts the process if it cannot start as many threads as requested


@dataclass(frozen=True)
class EngineSettings:
    """Which engine computes the clients, and on which device; None leaves it to the engine."""

    name: Annotated[str, OneOf(tuple(ENGINES))] = "auto"  # what computes the clients
    device: Annotated[str, Field(pattern=DEVICE)] = "cpu"  # cpu, cuda or cuda:N
    chunk: Count | None = None  # clients computed at a time; None: as many as fit into the memory
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] | None = None  # of the CPU
    trace: bool | None = None  # trace rounds and replay them
    compiled: bool | None = None  # compile traces to C++


@dataclass(frozen=True)
class Length:
    """The length of the run for which an engine is chosen."""

    rounds: int = 1
    participation: float = 1.0
    runs: int = 1  # runs of one comparison, which share one measurement

    def steps(self, on: Work) -> float:
        """The local steps of one run, summed over its clients."""
        return self.rounds * self.participation * steps(on)

    def bucket(self, on: Work) -> tuple[int, int]:
        """The length up to a factor of two; runs in the same bucket share a choice."""
        return int(self.steps(on)).bit_length(), self.runs.bit_length()


ONE_ROUND = Length()


def steps(on: Work) -> int:
    """The local steps of a round with full participation, summed over all clients."""
    problem, sizes = on.problem, on.shards.splits["train"].sizes
    return sum(problem.recipe.count(size, problem.least) for size in sizes)
