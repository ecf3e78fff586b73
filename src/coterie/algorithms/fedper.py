"""FedPer: a shared base, and a personal head on every client.

    w_i = (global base, own head);   w_i ← LocalTrain(w_i)          base and head together
    base ← base + Σ_i p_i (base_i − base)                           on the server

Travels: the base, both ways. The head never leaves the client.

Notes:
    The mirror of LG-FedAvg: layers near the *output* are personal here. ``head = 1`` is the last
    layer; the paper tries one to four. A network of a single layer has no base: local training.
    Batch-norm statistics belong to their layer, a weight that two layers share to the later one.
    Predictions use the newest base (reading G-6). A client that never took part predicts with the
    head of the common start; ``adapt = "fb"`` gives it one of its own.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, rows, single
from ..core.client import Client
from ..core.privacy import Declaration
from ..core.problem import Problem
from .fedavg import Update, Weighting, average
from .lgfedavg import Layers, Parts, parts


class Head(NamedTuple):
    """What a client keeps."""

    w: Tensor  # [P - s]


@dataclass(frozen=True)
class PersonalHead(Algorithm[Tensor, Tensor, Update, Head]):
    """Base class of FedPer and FedRep, which differ in how a client trains.

    Fields:
        head: the layers that stay on the client: the number of last layers, or names.
    """

    head: Layers = 1
    weighting: Weighting = "samples"

    @abstractmethod
    def trained(self, client: Client, w: Tensor, at: Parts) -> Tensor:
        """The client's whole model after its round."""

    def init(self, problem: Problem) -> tuple[Tensor, Head]:
        head, base, _ = parts(problem.model, self.head)
        return problem.start[base], Head(rows(problem.start[head], problem.population))

    def download(self, server: Tensor, round: Round) -> Tensor:
        return rows(server, len(round.clients))

    def local(self, client: Client, received: Tensor, state: Head) -> tuple[Update, Head]:
        at = parts(client.model, self.head)
        w = self.trained(client, at.join(state.w, received), at)
        return Update(w[at.lower], client.size), Head(w[at.upper])

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        return average(server, uploads, self.weighting, 1.0)

    def predictor(self, client: Client, served: Tensor, state: Head) -> Mixture:
        return single(parts(client.model, self.head).join(state.w, served))

    def check(self, problem: Problem, rounds: int) -> None:
        parts(problem.model, self.head)


@dataclass(frozen=True)
class FedPer(PersonalHead):
    """Personalisation layers."""

    bibtex: ClassVar[str] = """@article{arivazhagan2019fedper,
  title={Federated Learning with Personalization Layers},
  author={Arivazhagan, Manoj Ghuhan and Aggarwal, Vinay and Singh, Aaditya Kumar and
          Choudhary, Sunav},
  journal={arXiv:1912.00818}, year={2019}}"""
    private = Declaration()

    def trained(self, client: Client, w: Tensor, at: Parts) -> Tensor:
        return client.train(w)
