"""Adaptation: what a client does to the finished predictor before it uses it.

Nothing that is adapted is ever uploaded: adapting changes what predicts, never the run.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from .algorithm import Algorithm, AnyAlgorithm, Mixture, Round
from .client import Client
from .task import Task
from .tree import Tree


class Adaptation(ABC):
    """One client's model, made its own."""

    @abstractmethod
    def adapt(self, client: Client, w: Tensor) -> Tensor:
        """The adapted model."""


@dataclass(frozen=True)
class FineTune(Adaptation):
    """Fine-tuning (ft): train a copy of the model on the client's own data.

    Fields:
        epochs: passes over the client's data; None takes the training recipe's.
        lr: learning rate; None takes the rate of the round.
    """

    epochs: int | None = None
    lr: float | None = None

    def adapt(self, client: Client, w: Tensor) -> Tensor:
        """Train on."""
        return client.tuned(epochs=self.epochs, lr=self.lr).train(w)


ADAPTATIONS: dict[str, type[Adaptation]] = {"ft": FineTune}


@dataclass(frozen=True)
class Adapted(Algorithm[Any, Any, Any, Any]):
    """Any method, followed by an adaptation of every model that predicts."""

    algorithm: AnyAlgorithm
    adaptation: Adaptation

    paper: ClassVar[str] = ""

    @property
    def uses_validation(self) -> bool:
        """As the method."""
        return self.algorithm.uses_validation

    @property
    def everybody(self) -> bool:
        """As the method."""
        return self.algorithm.everybody

    def init(self, task: Task) -> tuple[Tree, Tree]:
        """As the method."""
        return self.algorithm.init(task)

    def download(self, server: Tree, round: Round) -> Tree:
        """As the method."""
        return self.algorithm.download(server, round)

    def local(self, client: Client, received: Tree, state: Tree) -> tuple[Tree, Tree]:
        """As the method."""
        return self.algorithm.local(client, received, state)

    def aggregate(self, server: Tree, uploads: Tree, round: Round) -> Tree:
        """As the method."""
        return self.algorithm.aggregate(server, uploads, round)

    def serve(self, server: Tree, round: Round) -> Tree:
        """As the method."""
        return self.algorithm.serve(server, round)

    def predictor(self, client: Client, served: Tree, state: Tree) -> Mixture:
        """The method's predictor, each of its models adapted."""
        weights, models = self.algorithm.predictor(client, served, state)
        return Mixture(weights, client.map(lambda w: self.adaptation.adapt(client, w), models))

    def collaboration(self, server: Tree, states: Tree, round: Round) -> Tensor | None:
        """As the method."""
        return self.algorithm.collaboration(server, states, round)
