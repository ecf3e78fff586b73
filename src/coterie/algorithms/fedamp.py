"""FedAMP: each client's model is pulled towards the models of similar clients.

Objective: Σ_i F_i(w_i) + λ Σ_{i<j} A(‖w_i − w_j‖²) with A increasing and concave.

    ξ_ij = α_k A'(‖w_i − w_j‖²)  (j ≠ i),   ξ_ii = 1 − Σ_{j≠i} ξ_ij            (Eq. 5, 7)
    u_i  = Σ_j ξ_ij w_j                                                    on the server
    w_i  = argmin F_i(w) + (λ/2α_k)‖w − u_i‖²                              on the client

Travels: w_i and one number up, u_i and one number down; u_i once more for prediction.

Notes:
    P5's constants are in an appendix that we could not read (reading P5-4); numbers that do not
    depend on the model's size are ours. ``sigma = "median"`` takes the width σ in every exchange
    anew, as ``sigma_factor`` times the median of ‖w_i − w_j‖² over the pairs. ``alpha = "auto"`` is
    the largest α_k at which no other model gets more weight than a client's own, if its own counts
    as one at distance 0: α_k = 1 / (A'(0) + max_i Σ_{j≠i} A'(‖w_i − w_j‖²)). ``alpha = "theory"``
    is α_k = λ/√T of the convergence theorem, T the number of rounds.
    The proximal coefficient λ/α_k is given directly as ``prox``; with ``lam`` and a numeric
    ``alpha`` it is ``lam / alpha``, as printed.
    P5's Algorithm 1 returns w_i and u_i; ``predict_with`` chooses (P5-1). Local training starts at
    u_i (P5-2). Clients start at a common point, and the first exchange follows the first local
    training (P5-3). In a round, u_i is formed over those participants that have uploaded before; a
    client in its first round gets that start. The u_i of a prediction is formed over all that
    have uploaded (P5-15).
    Eq. 5 drops a factor 2 of the exact gradient; we follow Eq. 5 (P5-6).
    A(s) = 1 − exp(−s/σ); the paper also names scad and mcp, without their constants.
    A row whose weights on others exceed one is scaled down (P5-7).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.algorithm import Round, check_pull
from ..core.mixing import squared_distances
from ..core.problem import Problem
from ..core.ranges import NotNegative, Positive
from ..errors import ConfigError
from .attention import TINY, Attentive, median_of


def slope(distances: Tensor, sigma: Tensor | float) -> Tensor:
    """``A'(s) = exp(−s/σ)/σ`` of squared distances, zero on the diagonal."""
    return (torch.exp(-distances / sigma) / sigma).fill_diagonal_(0)


def weights(slopes: Tensor, alpha: Tensor | float) -> Tensor:
    """The weights ξ from the slopes A' ``[m, m]``: rows sum to one.

    >>> W = torch.tensor([[0.0], [1.0], [3.0]])
    >>> weights(slope(squared_distances(W), sigma=2.0), alpha=0.5)[0]
    tensor([0.8456, 0.1516, 0.0028], dtype=torch.float64)
    """
    A = alpha * slopes  # Eq. 5
    return A + torch.diag(1 - A.sum(1))  # Eq. 7


def step_size(slopes: Tensor, sigma: Tensor | float) -> Tensor:
    """The largest α_k with which nobody gives another model more weight than A'(0) α_k = its own.

    >>> slopes = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.5], [0.0, 0.5, 0.0]])
    >>> weights(slopes, step_size(slopes, sigma=1.0))
    tensor([[0.6000, 0.4000, 0.0000],
            [0.4000, 0.4000, 0.2000],
            [0.0000, 0.2000, 0.8000]])
    """
    return 1 / (1 / sigma + slopes.sum(1).max())


def safe(A: Tensor) -> Tensor:
    """Scale down the rows whose off-diagonal weights sum to more than one."""
    others = A.clone().fill_diagonal_(0)
    total = others.sum(1, keepdim=True)
    others = torch.where(total > 1, others / total.clamp(min=TINY), others)
    return others + torch.diag(1 - others.sum(1))


@dataclass(frozen=True)
class FedAMP(Attentive):
    """Federated attentive message passing.

    Fields:
        sigma: width σ of the attention; ``median`` follows the median squared distance.
        sigma_factor: ``median`` sigma in units of the median squared distance.
        alpha: step size α_k; ``auto`` is the largest at which no other model gets more weight than
            a client's own; ``theory`` is lam/√T.
        lam: λ of the paper; the proximal coefficient is then lam/alpha. None uses ``prox``.
    """

    sigma: Positive | Literal["median"] = "median"
    sigma_factor: Positive = 0.1
    alpha: NotNegative | Literal["auto", "theory"] = "auto"
    lam: NotNegative | None = None

    bibtex: ClassVar[str] = """@inproceedings{huang2021fedamp,
  title={Personalized Cross-Silo Federated Learning on Non-{IID} Data},
  author={Huang, Yutao and Chu, Lingyang and Zhou, Zirui and Wang, Lanjun and Liu, Jiangchuan and
          Pei, Jian and Zhang, Yong},
  booktitle={AAAI}, year={2021}}"""

    def check_together(self) -> None:
        """Refuse ``lam`` where it has no effect, and ``theory`` without it."""
        if self.lam is None and self.alpha == "theory":
            raise ConfigError("fedamp: alpha = 'theory' needs λ, and lam is not given; set lam = 1")
        if self.lam is not None and self.alpha == "auto":
            raise ConfigError(
                f"fedamp: lam = {self.lam!r} has no effect with alpha = 'auto'; it needs a numeric "
                "alpha"
            )

    def _prox(self, round: Round) -> float:
        alpha = self._alpha(round.index, round.horizon, round.lr)
        return self.prox if self.lam is None or alpha is None else self.lam / max(alpha, TINY)

    def _alpha(self, index: int, horizon: int, lr: float) -> float | None:
        """α_k as given, or λ/√T; refused where the proximal step would overshoot."""
        if self.alpha == "auto":
            return None
        alpha = (self.lam or 0.0) / horizon**0.5 if self.alpha == "theory" else self.alpha
        if self.lam and (alpha <= 0 or lr * self.lam / alpha >= 1):
            found = lr * self.lam / alpha if alpha else float("inf")
            raise ConfigError(
                f"fedamp: lr * lam / alpha is {found:g} in round {index} and must stay below 1; "
                "raise alpha, or lower train.lr or lam"
            )
        return alpha

    def attention(self, models: Tensor, round: Round) -> Tensor:
        distances, sigma = squared_distances(models), self.sigma
        width = self.sigma_factor * median_of(distances) if sigma == "median" else sigma
        slopes = slope(distances, width)
        alpha = self._alpha(round.index, round.horizon, round.lr)
        return safe(weights(slopes, step_size(slopes, width) if alpha is None else alpha))

    def check(self, problem: Problem, rounds: int) -> None:
        for index in range(rounds + 1):  # the last models are served after the last round
            self._alpha(index, rounds, problem.recipe.rate(index))
        if self.lam is None or self.alpha == "auto":
            check_pull(problem, rounds, "fedamp.prox", self.prox)
