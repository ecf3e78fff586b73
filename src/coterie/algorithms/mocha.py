"""MOCHA: federated multi-task learning: one model per client, tied by the task relation Ω.

Objective: Σ_i F_i(w_i) + λ_1 tr(W Ω Wᵀ) + λ_2 ‖W‖²,  W = [w_1 … w_K]. Client i moves column i only:

    gradient  ∇F_i(w_i) + 2λ_1 (Ω_ii w_i + c_i) + 2λ_2 w_i,    c_i = Σ_{j≠i} Ω_ij w_j

    mean      Ω = I − 11ᵀ/K                    then Ω_ii w_i + c_i = w_i − w̄ with w_i live in w̄
    learned   Ω = Σ⁻¹,  Σ = (WᵀW)^½ / tr((WᵀW)^½),  every ``omega_every`` rounds;  Σ = I/K at first

Travels: w_i up, c_i and Ω_ii down. No client sees another's model, no d × K matrix is sent.

Notes:
    The original solves convex problems in the dual. This is the primal form for deep networks
    (reading B-3), by local training on the penalised loss.
    The columns are all K clients. A client that has not taken part yet has the common start as its
    column, and a learned Ω leaves it out: untrained models are equal without being related.
    The code that P1 used has a constant matrix for Ω, which pulls the *sum* of the models to zero.
    Explicit steps are stable while η (2λ_1 Ω_ii + 2λ_2) < 2; other settings are refused. A learned
    Ω would break that wherever models nearly coincide (the original's eigenvalue floor is 1e-7), so
    the eigenvalues of Σ are also kept at or above 2ηλ_1.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import OwnModel, Round, rows
from ..core.client import Client
from ..core.mixing import gram, mix
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import Count, NotNegative, Positive
from ..errors import ConfigError


class Columns(NamedTuple):
    """The server."""

    W: Tensor  # [K, P] the last upload of each client
    omega: Tensor  # [K, K]
    seen: Tensor  # [K] whether the client has uploaded


class Ties(NamedTuple):
    """What a client receives."""

    others: Tensor  # [P] c_i
    own: Tensor  # [] Ω_ii


class Own(NamedTuple):
    w: Tensor  # [P]


def mean_omega(count: int) -> Tensor:
    """``I − 11ᵀ/K``: tr(W Ω Wᵀ) = Σ_i ‖w_i − w̄‖²."""
    return torch.eye(count, dtype=torch.float64) - 1 / count


def learned_omega(products: Tensor, floor: float) -> Tensor:
    """``Ω = Σ⁻¹`` from the dot products WᵀW ``[K, K]``, eigenvalues of Σ at least ``floor``."""
    values, vectors = torch.linalg.eigh(products)
    root = values.clamp(min=0).sqrt()
    total = root.sum()
    sigma = torch.where(total > 0, root / total.clamp(min=1e-300), 1 / len(root))
    omega: Tensor = (vectors / sigma.clamp(min=floor)) @ vectors.T
    return omega


def tied(w: Tensor, ties: Ties, lam1: Tensor | float, lam2: Tensor | float) -> Tensor:
    """The penalty of column i: ``λ_1 (Ω_ii ‖w‖² + 2 w·c_i) + λ_2 ‖w‖²``."""
    square = (w * w).sum()
    return lam1 * (ties.own * square + 2 * (w * ties.others).sum()) + lam2 * square


@dataclass(frozen=True)
class Mocha(OwnModel[Columns, Ties, Tensor, Own]):
    """Federated multi-task learning.

    Fields:
        lam1: strength λ_1 of the ties; P1 searches 0.001, 0.01, 0.1.
        lam2: weight decay λ_2 of all models.
        omega: how tasks are related: ``mean`` or ``learned``.
        omega_every: rounds between two updates of a learned Ω.
        floor: smallest eigenvalue of Σ; explicit steps may need a larger one, see Notes.
    """

    lam1: NotNegative = 0.01
    lam2: NotNegative = 0.0
    omega: Literal["mean", "learned"] = "mean"
    omega_every: Count = 1
    floor: Positive = 1e-7

    title: ClassVar[str] = "MOCHA"
    bibtex: ClassVar[str] = """@inproceedings{smith2017mocha,
  title={Federated Multi-Task Learning},
  author={Smith, Virginia and Chiang, Chao-Kai and Sanjabi, Maziar and Talwalkar, Ameet},
  booktitle={NeurIPS}, year={2017}}"""
    private = Declaration()

    def init(self, problem: Problem) -> tuple[Columns, Own]:
        K = problem.population
        W = rows(problem.start, K)
        omega = mean_omega(K)
        if self.omega == "learned":  # Σ = I/K
            sigma = max(1 / K, self._floor(problem.recipe.rate(0)))
            omega = torch.eye(K, dtype=torch.float64) / sigma
        nobody = torch.zeros(K, dtype=torch.bool, device=problem.device)
        return Columns(W, omega.to(problem.device), nobody), Own(W)

    def _floor(self, lr: float) -> float:
        return max(self.floor, 2 * lr * self.lam1)

    def download(self, server: Columns, round: Round) -> Ties:
        mine = server.omega[round.clients].clone()
        own = mine.gather(1, round.clients[:, None]).squeeze(1)
        self._refuse(float(own.max()), round.index, round.lr)
        others = mix(mine.scatter(1, round.clients[:, None], 0.0), server.W)
        return Ties(others, own.to(others.dtype))

    def _refuse(self, largest: float, index: int, lr: float) -> None:
        """Refuse a learning rate whose step overshoots when the largest Ω_ii is ``largest``."""
        rate = lr * 2 * (self.lam1 * largest + self.lam2)
        if rate >= 2:
            raise ConfigError(
                f"mocha: lr * (2 lam1 Ω_ii + 2 lam2) is {rate:g} in round {index} and must "
                "stay below 2; lower lr, lam1 or lam2"
            )

    def local(self, client: Client, received: Ties, state: Own) -> tuple[Tensor, Own]:
        ties = received._replace(others=client.trainable(received.others))

        def penalty(w: Tensor) -> Tensor:
            return tied(client.trainable(w), ties, self.lam1, self.lam2)

        w = client.train(state.w, penalty=penalty)
        return w, Own(w)

    def aggregate(self, server: Columns, uploads: Tensor, round: Round) -> Columns:
        W = server.W.index_copy(0, round.clients, uploads)
        seen = server.seen.index_fill(0, round.clients, True)
        omega = server.omega
        if self.omega == "learned" and (round.index + 1) % self.omega_every == 0:
            at = seen.nonzero().flatten()
            learned = learned_omega(gram(round.trainable(W[at])), self._floor(round.lr))
            omega = omega.index_put((at[:, None], at), learned)
        return Columns(W, omega, seen)

    def model(self, state: Own) -> Tensor:
        return state.w

    def check(self, problem: Problem, rounds: int) -> None:
        """Refuse a step that overshoots in any round; a learned Ω is known only in the first."""
        largest = float(self.init(problem)[0].omega.diagonal().max())
        for index in range(rounds):
            known = largest if index == 0 or self.omega != "learned" else 0.0
            self._refuse(known, index, problem.recipe.rate(index))
