"""TERM: FedAvg with weights tilted towards (or, for t < 0, away from) large losses.

Objective: (1/t) log Σ_i p_i exp(t F_i), with F_i the training loss of the received model θ.

    ω_i = p_i exp(t F_i) / Σ_j p_j exp(t F_j)
    θ⁺  = θ + η_g Σ_i ω_i (θ_i − θ)

Travels: θ down, θ_i, the sample count and F_i up.

Notes:
    Losses are shifted by the largest (t > 0) or smallest (t < 0) before the exponential; weights do
    not change. |t| < 1e-12 is FedAvg.
    The authors' code keeps a running normaliser and divides by the number of clients twice, so that
    its step is N times too small (reading P3-10).
    The default t = 0.1 is one of P3's values. Where groups of clients conflict and t is about 1 or
    more, one round changes a group's loss by much more than 1/t: the weight jumps to the group that
    the last round neglected, and the model alternates between groups with period two.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.algorithm import Round
from ..core.mixing import mix, shares
from ..core.ranges import Number
from .fedavg import ServerLr, Weighting
from .qfedavg import ByLoss, Measured


def tilted_shares(losses: Tensor, shares: Tensor, t: float) -> Tensor:
    """The weights ω from the losses and the plain shares p, float64, summing to one.

    >>> tilted_shares(torch.tensor([0.5, 1.2, 2.0]), torch.tensor([0.2, 0.3, 0.5]), 1.0)
    tensor([0.0657, 0.1984, 0.7359], dtype=torch.float64)
    """
    p = shares.to(torch.float64)
    if abs(t) < 1e-12:
        return p
    F = losses.to(torch.float64)
    extreme = F.max() if t > 0 else F.min()
    tilted = p * torch.exp(t * (F - extreme))
    return tilted / tilted.sum()


@dataclass(frozen=True)
class TERM(ByLoss):
    """Tilted empirical risk minimisation.

    Fields:
        t: the tilt; positive favours clients with large losses, negative those with small ones;
            0 is FedAvg.
    """

    t: Number = 0.1
    weighting: Weighting = "samples"
    server_lr: ServerLr = 1.0

    bibtex: ClassVar[str] = """@inproceedings{li2021term,
  title={Tilted Empirical Risk Minimization},
  author={Li, Tian and Beirami, Ahmad and Sanjabi, Maziar and Smith, Virginia},
  booktitle={ICLR}, year={2021}}"""

    def aggregate(self, server: Tensor, uploads: Measured, round: Round) -> Tensor:
        omega = tilted_shares(uploads.loss, shares(uploads.size, self.weighting), self.t)
        return server + self.server_lr * mix(omega, uploads.w - server)
