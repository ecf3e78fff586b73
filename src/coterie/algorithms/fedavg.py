"""FedAvg: one global model, the average of the clients' locally trained models.

    θ_i = LocalTrain(θ)                     on every participant
    θ⁺  = θ + η_g Σ_i p_i (θ_i − θ)         on the server

Travels: θ down, θ_i and the sample count up.

Notes:
    A sum of differences, where P3's Eq. 2 prints a sum of models (reading P3-1).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeVar

from torch import Tensor

from ..core.algorithm import GlobalModel, Round, rows
from ..core.client import Client
from ..core.mixing import mean_move, shares
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import Meaning, Positive

Up = TypeVar("Up")
Weighting = Annotated[
    Literal["samples", "uniform"],
    Meaning("``samples`` weighs clients by their training samples, ``uniform`` equally"),
]
ServerLr = Annotated[
    Positive, Meaning("the server's step η_g towards the average; 1 is the average itself")
]


class Update(NamedTuple):
    w: Tensor  # [P]
    size: Tensor  # []


def average(w: Tensor, uploads: Update, weighting: Weighting, server_lr: float) -> Tensor:
    """``w + η_g Σ p_i (w_i − w)`` over the clients that replied."""
    return w + server_lr * mean_move(shares(uploads.size, weighting), uploads.w, w)


class OneModel(GlobalModel[Tensor, Tensor, Up, tuple[()]]):
    """Base class of methods whose server is the model that everybody gets; clients keep nothing."""

    def init(self, problem: Problem) -> tuple[Tensor, tuple[()]]:
        return problem.start, ()

    def download(self, server: Tensor, round: Round) -> Tensor:
        return rows(server, len(round.clients))

    def model(self, server: Tensor) -> Tensor:
        return server


@dataclass(frozen=True)
class FedAvg(OneModel[Update]):
    """Federated averaging."""

    weighting: Weighting = "samples"
    server_lr: ServerLr = 1.0

    bibtex: ClassVar[str] = """@inproceedings{mcmahan2017fedavg,
  title={Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author={McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and
          Ag{\\"u}era y Arcas, Blaise},
  booktitle={AISTATS}, year={2017}}"""
    private = Declaration()

    def local(self, client: Client, received: Tensor, state: tuple[()]) -> tuple[Update, tuple[()]]:
        return Update(client.train(received), client.size), ()

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        return average(server, uploads, self.weighting, self.server_lr)
