"""The base class of wrappers, which add something to any method (``adapt``, ``core.policies``)."""

from collections.abc import Hashable
from dataclasses import dataclass

from .algorithm import Algorithm, AnyAlgorithm, Down, Server, State, Traits, Up
from .problem import Problem


@dataclass(frozen=True)
class Wrapper(Algorithm[Server, Down, Up, State]):
    """Base class of wrappers around a method: checks and traits are the wrapped method's."""

    algorithm: AnyAlgorithm

    def __post_init__(self) -> None:
        """Check nothing: the wrapped method was checked when it was made."""

    def check(self, problem: Problem, rounds: int) -> None:
        """As the method."""
        self.algorithm.check(problem, rounds)

    @property
    def traits(self) -> Traits:
        """As the method."""
        return self.algorithm.traits

    def optimizers(self, problem: Problem) -> int:
        """As the method."""
        return self.algorithm.optimizers(problem)

    def trace_key(self, index: int, horizon: int) -> Hashable | None:
        """As the method."""
        return self.algorithm.trace_key(index, horizon)
