"""FedAMP: each client's model is pulled towards the models of similar clients.

Objective: Σ_i F_i(w_i) + λ Σ_{i<j} A(‖w_i − w_j‖²) with A increasing and concave.

    ξ_ij = α_k A'(‖w_i − w_j‖²)  (j ≠ i),   ξ_ii = 1 − Σ_{j≠i} ξ_ij            (Eq. 5, 7)
    u_i  = Σ_j ξ_ij w_j                                                    on the server
    w_i  = argmin F_i(w) + (λ/2α_k)‖w − u_i‖²                              on the client

Travels: w_i and one number up, u_i and one number down; u_i once more for prediction.

Notes:
    ``sigma = "auto"`` is ours (reading P5-4). With the constants found in public code the attention
    is uniform on real models, and with any width that only follows the models' distances
    (``median``) a client without similar clients still gives most of its weight to others. ``auto``
    measures squared distances in units of each client's own sampling noise (module ``attention``):
    A' is 1 up to the value that noise explains, and 0 from twice that value on. So A' and ξ are not
    symmetric where the noise of clients differs.
    ``mass = "auto"`` is ours: a client's own model counts as a model at distance 0, so that N alike
    clients get equal weights (ξ = 1/N). A number is the most weight that a client gives to others;
    with a width other than ``auto`` all of it is given, however unlike the others are (P5-5).
    ``attention_mass = "rows"``, our default, chooses α_k for each client. With the paper's one α_k
    for all (``symmetric``) a large group limits how much the clients of a small group collaborate.
    The proximal coefficient λ/α_k is given directly as ``prox``; with ``lam`` and a numeric
    ``alpha`` it is ``lam / alpha``, as printed. ``alpha = "theory"`` is α_k = λ/√T of the
    convergence theorem, T the number of rounds.
    ``predict_with`` chooses among w_i and u_i, both results of P5; our default takes the better of
    the two on each client's validation data (P5-1). Local training starts at u_i (P5-2). Clients
    start at a common point, and the first exchange follows the first local training (P5-3). In a
    round, u_i is formed over those participants that have uploaded before; a client in its first
    round gets its own start. The u_i of a prediction is formed over all that have uploaded (P5-15).
    ``objective`` logs the objective above in every round; it costs a pass over each client's
    training data, and one more number up.
    Eq. 5 drops a factor 2 of the exact gradient; we follow Eq. 5 (P5-6).
    ``penalty`` offers the other functions A that the paper names, with the same width σ and their
    customary constants: A'(s) = 1/σ · min(1, (3.7 − s/σ)_+ / 2.7) for scad and
    1/σ · (1 − s/3σ)_+ for mcp.
    ``safe_attention`` scales a row down where its off-diagonal weights exceed one (P5-7).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.algorithm import Round, check_pull
from ..core.mixing import off_diagonal, squared_distances
from ..core.problem import Problem
from ..core.ranges import Auto, Count, NotNegative, Positive, Share, ShareAboveZero
from ..errors import ConfigError
from .attention import (
    TINY,
    Attentive,
    Cloud,
    Initial,
    PredictWith,
    Seen,
    Upload,
    Uploads,
    Weigh,
    alike,
    compared,
    mixed,
    refuse_unrelated,
    remembered,
    safe,
    shared,
    stored,
    weights,
)

Penalty = Literal["exponential", "scad", "mcp"]

SCAD, MCP = 3.7, 3.0  # where the slopes of these penalties reach zero, in units of σ


def slope(distances: Tensor, sigma: Tensor | float, penalty: Penalty = "exponential") -> Tensor:
    """``A'(s)`` of squared distances, zero on the diagonal; 1/σ at s = 0 for every penalty."""
    s = distances / sigma
    if penalty == "exponential":
        fall = torch.exp(-s)
    elif penalty == "scad":
        fall = ((SCAD - s) / (SCAD - 1)).clamp(0, 1)
    else:
        fall = (1 - s / MCP).clamp(min=0)
    return (fall / sigma).fill_diagonal_(0)


def penalty_of(distances: Tensor, sigma: Tensor | float, penalty: Penalty) -> Tensor:
    """``A(s)`` of squared distances: the integral of :func:`slope` from 0 to s.

    >>> penalty_of(torch.tensor([0.0, 2.0, 8.0]), 2.0, "mcp")
    tensor([0.0000, 0.8333, 1.5000])
    """
    s = distances / sigma
    if penalty == "exponential":
        return -torch.expm1(-s)
    if penalty == "scad":
        beyond = (s.clamp(max=SCAD) - 1).clamp(min=0)  # the slope falls from 1 to 0 there
        return s.clamp(max=1) + beyond - beyond**2 / (2 * (SCAD - 1))
    return s.clamp(max=MCP) - s.clamp(max=MCP) ** 2 / (2 * MCP)


def attention(
    W: Tensor, alpha: Tensor | float, sigma: Tensor | float, penalty: Penalty = "exponential"
) -> Tensor:
    """Eq. 5 and 7, by default with the negative exponential: rows sum to one, float64.

    >>> attention(torch.tensor([[0.0], [1.0], [3.0]]), alpha=0.5, sigma=2.0)[0]
    tensor([0.8456, 0.1516, 0.0028], dtype=torch.float64)
    """
    return weights(slope(squared_distances(W), sigma, penalty), alpha)


def step_size(
    W: Tensor, sigma: Tensor | float, mass: float, penalty: Penalty = "exponential"
) -> Tensor:
    """The largest α_k with ``ξ_ii ≥ 1 − mass`` for every client; 0 where all A' vanish."""
    return largest_step(slope(squared_distances(W), sigma, penalty), mass)


def largest_step(slopes: Tensor, mass: float) -> Tensor:
    """As :func:`step_size`, from the slopes A' ``[m, m]``."""
    largest = slopes.sum(1).max()
    return torch.where(largest > TINY, mass / largest, 0.0)


def median_width(W: Tensor, factor: float) -> Tensor:
    """σ as a multiple of the median squared distance, 1 where all models are the same."""
    return width_of(squared_distances(W), factor)


def width_of(distances: Tensor, factor: float) -> Tensor:
    """As :func:`median_width`, from the squared distances ``[m, m]``."""
    width = factor * off_diagonal(distances).median()
    return torch.where(width > TINY, width, 1.0)


def spread(A: Tensor, mass: float) -> Tensor:
    """Scale every row's off-diagonal weights to sum to ``mass``; rows without any stay as is."""
    others = A.clone().fill_diagonal_(0)
    total = others.sum(1, keepdim=True)
    others = torch.where(total > 0, mass * others / total, 0.0)
    return others + torch.diag(1 - others.sum(1))


@dataclass(frozen=True)
class FedAMP(Attentive):
    """Federated attentive message passing.

    Fields:
        penalty: the function A: ``exponential`` (1 − e^{−s/σ}), ``scad`` (smoothly clipped absolute
            deviation) or ``mcp`` (minimax concave penalty); the last two give weight zero to
            clients beyond 3.7σ and 3σ. For a width other than ``auto``.
        sigma: width σ of the attention; ``auto`` is the squared distance that the clients' own
            sampling noise explains, with weight zero from twice that value on; ``median`` follows
            the median squared distance.
        alpha: step size α_k; ``auto`` is as large as ``mass`` allows; ``theory`` is lam/√T.
        alpha_gamma: factor on a numeric alpha every ``alpha_every`` rounds.
        alpha_every: rounds between two reductions of alpha.
        mass: with ``alpha = "auto"``, the most weight a client gives to others (with a sigma that
            is not ``auto``, the best connected client gives exactly this); ``auto`` lets a client's
            own model count as one at distance 0.
        attention_mass: ``symmetric`` has one α_k for all, so that only the best connected client
            gives all of ``mass``; ``rows`` has one α_k per client.
        sigma_factor: ``median`` sigma in units of the median squared distance.
        sigma_freeze: keep the ``median`` sigma of the first exchange.
        lam: λ of the paper; the proximal coefficient is then lam/alpha. None uses ``prox``.
        prox: the proximal coefficient λ/α_k itself.
        start: local training starts from the ``cloud`` model u_i or from the client's own
            (``self``).
        safe_attention: scale down rows whose weights on others sum to more than one.
        predict_with: the client's ``own`` model w_i, the newest ``cloud`` model u_i, ``both`` with
            equal weight, or the better of them on ``validation`` data.
        initial: the clients' models are one ``common`` model before round 0, or ``independent``.
        objective: log Σ F_i(w_i) + λ Σ A in every round, over the clients that have uploaded.
    """

    penalty: Penalty = "exponential"
    sigma: Positive | Literal["auto", "median"] = "auto"
    alpha: NotNegative | Literal["auto", "theory"] = "auto"
    alpha_gamma: ShareAboveZero = 1.0
    alpha_every: Count = 30
    mass: Share | Auto = "auto"
    attention_mass: Literal["symmetric", "rows"] = "rows"
    sigma_factor: Positive = 0.25
    sigma_freeze: bool = False
    lam: NotNegative | None = None
    prox: NotNegative = 1e-4
    start: Literal["cloud", "self"] = "cloud"
    safe_attention: bool = True
    predict_with: PredictWith = "validation"
    initial: Initial = "common"
    objective: bool = False

    paper: ClassVar[str] = (
        "Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on "
        "Non-IID Data, AAAI 2021"
    )
    bibtex: ClassVar[str] = """@inproceedings{huang2021fedamp,
  title={Personalized Cross-Silo Federated Learning on Non-{IID} Data},
  author={Huang, Yutao and Chu, Lingyang and Zhou, Zirui and Wang, Lanjun and Liu, Jiangchuan and
          Pei, Jian and Zhang, Yong},
  booktitle={AAAI}, year={2021}}"""

    def check_together(self) -> None:
        """Refuse fields that would have no effect, and a value that lacks what it needs."""
        refuse_unrelated("fedamp", "sigma", self.sigma, self.initial)
        if self.lam is None and (self.alpha == "theory" or self.objective):
            field = "alpha = 'theory'" if self.alpha == "theory" else "objective = true"
            raise ConfigError(f"fedamp: {field} needs λ, and lam is not given; set lam, such as 1")
        idle = {
            "lam": self.lam is not None and self.alpha == "auto",
            "alpha_gamma": self.alpha_gamma != 1 and isinstance(self.alpha, str),
            "objective": self.objective and isinstance(self.sigma, str),
            "mass": self.mass != "auto" and self.alpha != "auto",
            "penalty": self.penalty != "exponential" and self.sigma == "auto",
            "sigma_freeze": self.sigma_freeze and self.sigma != "median",
        }
        needs = {"penalty": "a numeric sigma or sigma = 'median'", "mass": "alpha = 'auto'"}
        needs |= {"sigma_freeze": "sigma = 'median'", "objective": "a numeric sigma"}
        for field in (name for name, without_effect in idle.items() if without_effect):
            raise ConfigError(
                f"fedamp: {field} = {getattr(self, field)!r} has no effect with sigma = "
                f"{self.sigma!r} and alpha = {self.alpha!r}; it needs "
                f"{needs.get(field, 'a numeric alpha')}"
            )

    @property
    def reports(self) -> bool:
        """With ``objective``, F_i(w_i)."""
        return self.objective

    def download(self, server: Uploads, round: Round) -> Cloud:
        """u_i, and how strongly to stay near it."""
        weigh = self._weigh(server, round)
        u = mixed(server, round.clients, round.clients, weigh)
        alpha = self._alpha(round.index, round.horizon, round.lr)
        prox = self.prox if self.lam is None or alpha is None else self.lam / max(alpha, TINY)
        return Cloud(u, u.new_full((len(u),), prox))

    def _alpha(self, index: int, horizon: int, lr: float) -> float | None:
        """α_k = α_0 γ^⌊k/every⌋ or λ/√T, refused where the proximal step would overshoot."""
        if self.alpha == "auto":
            return None
        first = (self.lam or 0.0) / horizon**0.5 if self.alpha == "theory" else self.alpha
        alpha = first * self.alpha_gamma ** (index // self.alpha_every)
        if self.lam and (alpha <= 0 or lr * self.lam / alpha >= 1):
            found = lr * self.lam / alpha if alpha else float("inf")
            raise ConfigError(
                f"fedamp: lr * lam / alpha is {found:g} in round {index} and must stay below 1; "
                "raise alpha, or lower train.lr, lam or alpha_gamma"
            )
        return alpha

    def _weigh(self, server: Uploads, round: Round) -> Weigh:
        """A function that computes ξ between some clients in this round."""

        def weigh(members: Tensor) -> Tensor:
            slopes, most = self._slopes(server, members, round)
            alpha = self._alpha(round.index, round.horizon, round.lr)
            by_row = self.attention_mass == "rows"
            if alpha is not None:
                A = weights(slopes, alpha)
            elif self.mass == "auto":
                A = shared(slopes, most, by_row)
            elif self.sigma == "auto":
                A = safe(shared(slopes, most, by_row), self.mass)
            else:
                A = weights(slopes, largest_step(slopes, self.mass))
                A = spread(A, self.mass) if by_row else A
            return safe(A) if self.safe_attention else A

        return weigh

    def _slopes(
        self, server: Uploads, members: Tensor, round: Round
    ) -> tuple[Tensor, Tensor | float]:
        """A' between some clients ``[m, m]``, zero on the diagonal, and A'(0)."""
        if self.sigma == "auto":
            return alike(server, members), 1.0
        distances = squared_distances(round.trainable(server.models[members]))
        sigma = self._sigma(server, distances)
        return slope(distances, sigma, self.penalty), 1 / sigma

    def _sigma(self, server: Uploads, distances: Tensor) -> Tensor | float:
        if not isinstance(self.sigma, str):
            return self.sigma
        if self.sigma_freeze and server.sigma > 0:
            return server.sigma
        return width_of(distances, self.sigma_factor)

    def seen(self, W: Tensor, start: Tensor, noise: Tensor) -> Seen:
        """Models are compared by their distance."""
        return Seen(W - start[: W.shape[1]], noise.to(torch.float64))

    def aggregate(self, server: Uploads, uploads: Upload, round: Round) -> Uploads:
        """Store and compare the uploads, and record the weights that the round applied."""
        new = server._replace(applied=remembered(server, round, self._weigh(server, round)))
        if self.sigma == "auto":
            seen = self.seen(round.trainable(uploads.w), server.start, uploads.noise)
            new = compared(new, seen, round)
        elif self.sigma_freeze and server.sigma == 0 and len(uploads.w) > 1:
            width = median_width(round.trainable(uploads.w), self.sigma_factor)
            new = new._replace(sigma=width)
        new = stored(new, uploads, round)
        return new._replace(objective=self._objective(new, round)) if self.objective else new

    def observed(self, server: Uploads) -> dict[str, Any]:
        """The objective after the round, if it is asked for."""
        return {"objective": float(server.objective)} if self.objective else {}

    def _objective(self, server: Uploads, round: Round) -> Tensor:
        """``Σ F_i(w_i) + λ Σ_{i<j} A(‖w_i − w_j‖²)`` of the clients that have uploaded."""
        members = server.seen.nonzero().flatten()
        distances = squared_distances(round.trainable(server.models[members]))
        tie = penalty_of(distances, self._sigma(server, distances), self.penalty).triu(1).sum()
        fit: Tensor = server.losses[members].to(torch.float64).sum()
        return fit + (self.lam or 0.0) * tie

    def check(self, problem: Problem, rounds: int) -> None:
        """Refuse a pull that overshoots, in any round of the schedule."""
        for index in range(rounds + 1):  # the last models are served after the last round
            self._alpha(index, rounds, problem.recipe.rate(index))
        if self.lam is None or self.alpha == "auto":
            check_pull(problem, rounds, "fedamp.prox", self.prox)
