"""What a law is, and what laws share: the method on its federation and the runs made so far."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from ..core.algorithm import AnyAlgorithm, Mixture
from ..core.tree import Tree, row
from .differences import copied
from .harness import Network, Outcome, Step, Trial


class NotApplicableError(Exception):
    """A law says nothing about this method; the message says why."""


class Begun(NamedTuple):
    """Where a round begins, and the round."""

    server: Tree
    states: Tree
    step: Step


class Case:
    """A method under test. Runs that several laws look at are made once."""

    def __init__(self, algorithm: AnyAlgorithm, network: Network) -> None:
        self.trial = Trial(algorithm, network)

    @property
    def algorithm(self) -> AnyAlgorithm:
        """The method."""
        return self.trial.algorithm

    def again(self) -> AnyAlgorithm:
        """The same method as another object, without what the first may have kept."""
        return replace(self.algorithm)  # type: ignore[type-var]

    @cached_property
    def walk(self) -> list[Begun]:
        """Two rounds of all clients, taken function by function; arguments are copies."""
        server, states = self.trial.init()
        begun = []
        for index in range(2):
            step = self.trial.step(copied(server), copied(states), self.trial.round(index))
            begun.append(Begun(server, states, copied_step(step)))
            server, states = begun[-1].step.server, begun[-1].step.states
        return begun

    @cached_property
    def halves(self) -> list[Outcome] | Exception:
        """A run on the loop engine in which half of the clients take part, or why there is none."""
        try:
            return self.trial.run()
        except Exception as error:
            return error

    @cached_property
    def reference(self) -> list[Outcome]:
        """The run that others are compared with; of all clients if half of them cannot run."""
        if isinstance(self.halves, Exception):
            return self.full
        return self.halves

    @cached_property
    def full(self) -> list[Outcome]:
        """A run on the loop engine in which all clients take part."""
        return self.trial.run(participation=1.0)

    @property
    def participation(self) -> float:
        """The share of clients in :attr:`reference`."""
        return 1.0 if isinstance(self.halves, Exception) else 0.5

    @cached_property
    def batched(self) -> Outcome | Exception:
        """The last round of the same run on the vmap engine, or why there is none."""
        try:
            return self.trial.run("vmap", participation=self.participation)[-1]
        except Exception as error:
            return error

    def predictors(self, server: Tree, states: Tree, index: int) -> list[Mixture]:
        """Every client's predictor after some rounds."""
        round = self.trial.round(index)
        served = self.algorithm.serve(server, round)
        return [
            self.algorithm.predictor(self.trial.client(i, index), row(served, i), row(states, i))
            for i in range(self.trial.population)
        ]


def copied_step(step: Step) -> Step:
    """A step whose trees share no memory with anything."""
    trees = copied((step.received, step.uploads, step.server, step.states))
    return step._replace(received=trees[0], uploads=trees[1], server=trees[2], states=trees[3])


class Law(NamedTuple):
    """A promise that every method makes, and the function that finds where it is broken."""

    promise: str  # in words, of the method
    findings: Callable[[Case], Iterator[str]]
    needs: tuple[str, ...] = ()  # laws without which this one cannot be judged
