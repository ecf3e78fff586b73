"""FedProx: FedAvg with a proximal term that holds clients near the model they received.

    θ_i minimises F_i(w) + (μ/2)‖w − θ‖²,   θ frozen
    θ⁺ = θ + η_g Σ_i p_i (θ_i − θ)

Travels: as FedAvg.

Notes:
    The paper draws clients in proportion to their samples and averages uniformly; here clients are
    drawn uniformly and weighed by samples, as in FedAvg. It lets each client solve its problem as
    far as it can; here all take the recipe's steps.
    Stable only while ημ < 2 (1 + momentum); other settings are refused.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core.algorithm import Round, check_pull
from ..core.client import Client
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import NotNegative
from .fedavg import OneModel, ServerLr, Update, Weighting, average


def proximal(w: Tensor, anchor: Tensor, strength: float | Tensor) -> Tensor:
    """``(μ/2)‖w − anchor‖²``; its gradient in ``w`` is ``μ(w − anchor)``."""
    return 0.5 * strength * ((w - anchor) ** 2).sum()


@dataclass(frozen=True)
class FedProx(OneModel[Update]):
    """FedAvg with a proximal term.

    Fields:
        mu: strength μ of the pull towards the received model; 0 is FedAvg.
    """

    mu: NotNegative = 0.1
    weighting: Weighting = "samples"
    server_lr: ServerLr = 1.0

    bibtex: ClassVar[str] = """@inproceedings{li2020fedprox,
  title={Federated Optimization in Heterogeneous Networks},
  author={Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and
          Talwalkar, Ameet and Smith, Virginia},
  booktitle={MLSys}, year={2020}}"""
    private = Declaration()

    def local(self, client: Client, received: Tensor, state: tuple[()]) -> tuple[Update, tuple[()]]:
        w = client.train(received, penalty=lambda w: proximal(w, received, self.mu))
        return Update(w, client.size), ()

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        return average(server, uploads, self.weighting, self.server_lr)

    def check(self, problem: Problem, rounds: int) -> None:
        check_pull(problem, rounds, "fedprox.mu", self.mu)
