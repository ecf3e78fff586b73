"""What an engine is chosen by: what a config fixes, and how long the run is."""

from dataclasses import dataclass

from .base import Work


@dataclass(frozen=True)
class Asked:
    """What a config fixes; None leaves it to the measurement."""

    chunk: int | None = None
    memory_mib: int | None = None
    threads: int | None = None
    play: bool | None = None
    compiled: bool | None = None


@dataclass(frozen=True)
class Length:
    """How long the run is for which an engine is chosen."""

    rounds: int = 1
    participation: float = 1.0
    runs: int = 1  # runs of one comparison, which share what is measured

    def steps(self, on: Work) -> float:
        """Local steps of all clients together in one run."""
        return self.rounds * self.participation * steps(on)

    def bucket(self, on: Work) -> tuple[int, int]:
        """The length to a factor of two: runs of one bucket share a choice."""
        return int(self.steps(on)).bit_length(), self.runs.bit_length()


def steps(on: Work) -> int:
    """Local steps of all clients together, in a round with everybody."""
    problem, sizes = on.problem, on.shards.splits["train"].sizes
    return sum(problem.recipe.count(size, problem.least) for size in sizes)


NOTHING_ASKED, ONE_ROUND = Asked(), Length()
