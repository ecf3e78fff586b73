"""The inputs of the choice of an engine: the settings that a config fixes, and the run's length."""

from dataclasses import dataclass

from .base import Work


@dataclass(frozen=True)
class Asked:
    """Engine settings that a config fixes; None leaves a setting to the measurement."""

    chunk: int | None = None
    memory_mib: int | None = None
    threads: int | None = None
    trace: bool | None = None
    compiled: bool | None = None


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


def steps(on: Work) -> int:
    """The local steps of a round with full participation, summed over all clients."""
    problem, sizes = on.problem, on.shards.splits["train"].sizes
    return sum(problem.recipe.count(size, problem.least) for size in sizes)


NOTHING_ASKED, ONE_ROUND = Asked(), Length()
