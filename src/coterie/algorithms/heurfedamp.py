"""HeurFedAMP: FedAMP with attention from the angles between models.

    ξ_ii fixed;   ξ_ij = (1 − ξ_ii) exp(σ cos(w_i, w_j)) / Σ_{h≠i} exp(σ cos(w_i, w_h))    (Eq. 8)

The rest is as in FedAMP; α_k enters only through the proximal coefficient.

Travels: as FedAMP.

Notes:
    P5's σ is in an appendix that we could not read (reading P5-4), and models that share a start
    have cosines so close to one that any published σ gives equal weights on label skew.
    ``sigma = "median"`` takes σ in every exchange anew, as 1 / ``sigma_factor`` over the median of
    1 − cos(w_i, w_j) over the pairs: it does not depend on how close to one the cosines are.
    ``self_weight = "auto"`` is 1/N for the N clients of the round's exchange.
    Prediction with w_i or u_i, starts and first exchange are as in FedAMP. FedAMP's α_k = λ/√T of T
    rounds is ``prox`` = √T here.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.algorithm import Round, check_pull
from ..core.mixing import cosines
from ..core.problem import Problem
from ..core.ranges import Auto, NotNegative, Positive, Share
from .attention import Attentive, median_of
from .fedamp import FedAMP


def heuristic_attention(cosine: Tensor, sigma: Tensor | float, self_weight: float) -> Tensor:
    """Eq. 8: rows sum to one, ``self_weight`` on the diagonal, float64.

    >>> W = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> heuristic_attention(cosines(W), sigma=1.0, self_weight=1 / 3)[0]
    tensor([0.3333, 0.2202, 0.4465], dtype=torch.float64)
    """
    alike = (sigma * cosine).fill_diagonal_(-torch.inf)
    A = (1 - self_weight) * alike.softmax(1)  # Eq. 8
    return A.fill_diagonal_(self_weight)


@dataclass(frozen=True)
class HeurFedAMP(Attentive):
    """Heuristic federated attentive message passing.

    Fields:
        sigma: sharpness σ of the attention; ``median`` follows the median of 1 − cos.
        sigma_factor: ``median``: 1/σ in units of the median of 1 − cos.
        self_weight: ξ_ii, the weight on a client's own model; ``auto`` is 1/N.
    """

    sigma: NotNegative | Literal["median"] = "median"
    sigma_factor: Positive = 0.1
    self_weight: Share | Auto = "auto"

    bibtex: ClassVar[str] = FedAMP.bibtex

    def attention(self, models: Tensor, round: Round) -> Tensor:
        own = 1 / len(models) if self.self_weight == "auto" else self.self_weight
        cosine, sigma = cosines(models), self.sigma
        sharp = 1 / (self.sigma_factor * median_of(1 - cosine)) if sigma == "median" else sigma
        return heuristic_attention(cosine, sharp, own)

    def check(self, problem: Problem, rounds: int) -> None:
        check_pull(problem, rounds, "heurfedamp.prox", self.prox)
