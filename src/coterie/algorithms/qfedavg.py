"""q-FedAvg: FedAvg that gives more weight to clients with larger losses.

Objective: Σ_i p_i F_i^{q+1} / (q+1), with F_i the training loss of the received model θ.

    Δ_i = F_i^q g_i,   g_i = L(θ − θ_i),   L = 1/η
    h_i = q F_i^{q−1} ‖g_i‖² + L F_i^q
    θ⁺  = θ − η_g (Σ_i p_i Δ_i) / (Σ_i p_i h_i)

``step = "normalised"`` is P3's account of it, an average weighted by losses:

    ω_i = p_i F_i^q / Σ_j p_j F_j^q;   θ⁺ = θ + η_g Σ_i ω_i (θ_i − θ)

Travels: θ down, θ_i, the sample count and F_i up.

Notes:
    h_i is an estimate of the objective's Lipschitz constant: the larger q, the smaller the step. P3
    uses the same η for every q (reading P3-9): weights that sum to one. Both are FedAvg at q = 0.
    Clients are sampled uniformly and weighed by samples, as in P3.
    Both sums are homogeneous in F^q, which over- and underflows: F_i^q is computed as
    (F_i / F_max)^q, and L cancels out of the weights. 1e-10 is added to every loss.
    η in L is the clients' rate of the round. With momentum or several epochs g_i is not a gradient
    and h_i is a heuristic. Where every loss is zero the model does not change.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Round
from ..core.client import Client
from ..core.mixing import mean_move, mix, shares
from ..core.privacy import Declaration
from ..core.ranges import NotNegative, Positive
from .fedavg import OneModel, Weighting

Step = Literal["lipschitz", "normalised"]


class Measured(NamedTuple):
    """What a client sends."""

    w: Tensor  # [P]
    size: Tensor  # []
    loss: Tensor  # [] F_i of the received model


def q_weights(squares: Tensor, losses: Tensor, shares: Tensor, q: float, lr: float) -> Tensor:
    """The weight of every θ_i − θ in the step, float64; ``squares`` are ‖θ_i − θ‖².

    >>> q_weights(torch.ones(2), torch.tensor([1.0, 1.0]), torch.tensor([0.25, 0.75]), 1.0, 1.0)
    tensor([0.1250, 0.3750], dtype=torch.float64)
    """
    F = losses.to(torch.float64) + 1e-10
    r = (F / F.max()) ** q
    p = shares.to(torch.float64)
    h = r * (q * squares.to(torch.float64) / (lr * F) + 1)  # h_i / L, as ‖g_i‖² / L = ‖·‖² / η
    return torch.where((losses > 0).any(), p * r / (p * h).sum(), 0.0)


def normalised_weights(losses: Tensor, shares: Tensor, q: float) -> Tensor:
    """``p_i F_i^q / Σ_j p_j F_j^q``, float64; all zero where every loss is zero and q > 0.

    >>> normalised_weights(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.5]), 1.0)
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    F, least = losses.to(torch.float64), torch.finfo(torch.float64).tiny
    weights = shares.to(torch.float64) * (F / F.max().clamp(min=least)) ** q
    return weights / weights.sum().clamp(min=least)


def q_step(
    w: Tensor,
    models: Tensor,
    losses: Tensor,
    shares: Tensor,
    q: float,
    lr: float,
    parameters: int | None = None,
) -> Tensor:
    """The model after a step of η_g = 1; norms are over the first ``parameters`` entries."""
    change = models - w
    squares = (change[:, :parameters].to(torch.float64) ** 2).sum(1)
    return w + mix(q_weights(squares, losses, shares, q, lr), change)


class ByLoss(OneModel[Measured]):
    """Base class of methods that weigh clients by their loss of the received model."""

    private = Declaration(leaves="the number of samples and the training loss")

    def local(
        self, client: Client, received: Tensor, state: tuple[()]
    ) -> tuple[Measured, tuple[()]]:
        """Train, and measure the received model on all training data."""
        return Measured(client.train(received), client.size, client.loss(received, "train")), ()


@dataclass(frozen=True)
class QFedAvg(ByLoss):
    """Fair averaging by powers of the loss.

    Fields:
        q: exponent q of the losses, which favours large ones; 0 is FedAvg.
        server_lr: factor η_g on the server's step.
        step: ``lipschitz`` is the step of the paper, which shrinks as q grows; ``normalised``
            weights sum to one, as P3 describes it.
    """

    q: NotNegative = 1.0
    weighting: Weighting = "samples"
    server_lr: Positive = 1.0
    step: Step = "lipschitz"

    title: ClassVar[str] = "q-FedAvg"
    bibtex: ClassVar[str] = """@inproceedings{li2020qfedavg,
  title={Fair Resource Allocation in Federated Learning},
  author={Li, Tian and Sanjabi, Maziar and Beirami, Ahmad and Smith, Virginia},
  booktitle={ICLR}, year={2020}}"""

    def aggregate(self, server: Tensor, uploads: Measured, round: Round) -> Tensor:
        p = shares(uploads.size, self.weighting)
        if self.step == "normalised":
            omega = normalised_weights(uploads.loss, p, self.q)
            return server + self.server_lr * mean_move(omega, uploads.w, server)
        w = q_step(server, uploads.w, uploads.loss, p, self.q, round.lr, round.parameters)
        return server + self.server_lr * (w - server)
