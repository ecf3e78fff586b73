"""FedAMP: clients whose models are alike attract each other.

Objective: Σ_i F_i(w_i) + λ Σ_{i<j} A(‖w_i − w_j‖²) with A increasing and concave.

    ξ_ij = α_k A'(‖w_i − w_j‖²)  (j ≠ i),   ξ_ii = 1 − Σ_{j≠i} ξ_ij            (Eq. 5, 7)
    u_i  = Σ_j ξ_ij w_j                                                    on the server
    w_i  = argmin F_i(w) + (λ/2α_k)‖w − u_i‖²                              on the client

Travels: w_i up, u_i down.

Notes:
    ``sigma = "auto"`` and ``alpha = "auto"`` are ours (spec 9.3): with the constants found in
    public code the attention is uniform on real models. sigma is a quarter of the median squared
    distance, taken at every exchange; alpha is the largest step that leaves every client
    ``1 − mass`` of its own model. The proximal coefficient λ/α_k is then given directly as
    ``prox``; with ``lam`` set it is ``lam / alpha``, as printed.
    The paper does not say where local training starts; ``start = "cloud"`` (u_i) is our default.
    Clients start at a common point, and the first exchange follows the first local training: P5's
    independent starts would average unrelated deep networks. In a round, u_i is formed over those
    of its participants that have uploaded before; a first-timer gets the common start.
    Eq. 5 drops a factor 2 of the exact gradient; we follow Eq. 5.
    ``penalty`` offers the other functions A the paper names, with widths in the same σ and their
    customary constants: A'(s) = 1/σ · min(1, (3.7 − s/σ)_+ / 2.7) for scad and
    1/σ · (1 − s/3σ)_+ for mcp.
    ``safe_attention`` scales a row down where its off-diagonal weights exceed one; the paper asks
    for a convex combination and leaves the step size to the user.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..algorithm import OwnModel, Round, check_pull, rows
from ..client import Client
from ..errors import ConfigError
from ..mixing import mix, off_diagonal, squared_distances
from ..ranges import Count, NotNegative, Positive, Share, ShareAboveZero
from ..table import Rows, updated
from ..task import Task
from .fedprox import proximal

Auto = Literal["auto"]
Penalty = Literal["exponential", "scad", "mcp"]

SCAD, MCP = 3.7, 3.0  # where the slopes of these penalties reach zero, in units of σ
TINY = 1e-300  # below it a reciprocal may overflow


class Uploads(NamedTuple):
    """The server: everybody's last upload."""

    models: Rows  # [K, P]
    seen: Tensor  # [K] who has uploaded
    start: Tensor  # [P] the common start
    sigma: Tensor  # [] the width of the first exchange, for ``sigma_freeze``


class Cloud(NamedTuple):
    """What a client receives."""

    u: Tensor  # [P]
    prox: Tensor  # [] the proximal coefficient λ/α_k


class Own(NamedTuple):
    """What a client keeps."""

    w: Tensor  # [P]


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


def attention(
    W: Tensor, alpha: Tensor | float, sigma: Tensor | float, penalty: Penalty = "exponential"
) -> Tensor:
    """Eq. 5 and 7, by default with the negative exponential: rows sum to one, float64.

    >>> attention(torch.tensor([[0.0], [1.0], [3.0]]), alpha=0.5, sigma=2.0)[0]
    tensor([0.8456, 0.1516, 0.0028], dtype=torch.float64)
    """
    return weights(slope(squared_distances(W), sigma, penalty), alpha)


def weights(slopes: Tensor, alpha: Tensor | float) -> Tensor:
    """ξ of the slopes A' ``[m, m]``."""
    A = alpha * slopes  # Eq. 5
    return A + torch.diag(1 - A.sum(1))  # Eq. 7


def step_size(
    W: Tensor, sigma: Tensor | float, mass: float, penalty: Penalty = "exponential"
) -> Tensor:
    """The largest α_k that leaves every client ``1 − mass`` of itself; 0 where all A' vanish."""
    return largest_step(slope(squared_distances(W), sigma, penalty), mass)


def largest_step(slopes: Tensor, mass: float) -> Tensor:
    """The same of the slopes A' ``[m, m]``."""
    largest = slopes.sum(1).max()
    return torch.where(largest > TINY, mass / largest, 0.0)


def median_width(W: Tensor, factor: float) -> Tensor:
    """σ as a multiple of the median squared distance, 1 where all models are the same."""
    return width_of(squared_distances(W), factor)


def width_of(distances: Tensor, factor: float) -> Tensor:
    """The same of the squared distances ``[m, m]``."""
    width = factor * off_diagonal(distances).median()
    return torch.where(width > TINY, width, 1.0)


def spread(A: Tensor, mass: float) -> Tensor:
    """Scale every row's off-diagonal weights to sum to ``mass`` (a row without any stays)."""
    others = A.clone().fill_diagonal_(0)
    total = others.sum(1, keepdim=True)
    others = torch.where(total > 0, mass * others / total, 0.0)
    return others + torch.diag(1 - others.sum(1))


def safe(A: Tensor) -> Tensor:
    """Scale down the rows whose off-diagonal weights exceed one."""
    others = A.clone().fill_diagonal_(0)
    others = others / others.sum(1, keepdim=True).clamp(min=1)
    return others + torch.diag(1 - others.sum(1))


def exchange(server: Uploads, round: Round, weigh: Callable[[Tensor], Tensor]) -> Tensor:
    """u for every client of the round: ``weigh(W) @ W`` over those who have uploaded before.

    ``weigh`` sees the trainable part of the models.
    """
    known = server.seen[round.clients]
    u = server.start.repeat(len(round.clients), 1)
    W = server.models[round.clients[known]]
    if len(W):
        u[known] = mix(weigh(round.trainable(W)), W) if len(W) > 1 else W
    return u


def among_seen(server: Uploads, round: Round, weigh: Callable[[Tensor], Tensor]) -> Tensor:
    """The weights of an exchange between all who have uploaded; strangers stand alone."""
    A = torch.eye(len(server.seen), dtype=torch.float64, device=server.seen.device)
    at = server.seen.nonzero().flatten()
    if len(at) > 1:
        A[at[:, None], at] = weigh(round.trainable(server.models[at]))
    return A


@dataclass(frozen=True)
class FedAMP(OwnModel[Uploads, Cloud, Tensor, Own]):
    """Federated attentive message passing.

    Fields:
        penalty: the function A: ``exponential`` (1 − e^{−s/σ}), ``scad`` (smoothly clipped absolute
            deviation) or ``mcp`` (minimax concave penalty); the last two leave clients beyond
            3.7σ and 3σ alone entirely.
        sigma: width σ of the attention; ``auto`` follows the median squared distance.
        alpha: step size α_k; ``auto`` is as large as ``mass`` allows.
        alpha_gamma: factor on a numeric alpha every ``alpha_every`` rounds.
        alpha_every: rounds between two reductions of alpha.
        mass: with ``alpha = "auto"``, the most weight a client gives to others.
        attention_mass: ``symmetric`` gives only the best connected client that much;
            ``rows`` gives it to every client.
        sigma_factor: ``auto`` sigma in units of the median squared distance.
        sigma_freeze: keep the ``auto`` sigma of the first exchange.
        lam: λ of the paper; the proximal coefficient is then lam/alpha. None uses ``prox``.
        prox: the proximal coefficient λ/α_k itself.
        start: local training starts from the ``cloud`` model u_i or from the client's own
            (``self``).
        safe_attention: scale rows whose weights on others exceed one.
    """

    penalty: Penalty = "exponential"
    sigma: Positive | Auto = "auto"
    alpha: NotNegative | Auto = "auto"
    alpha_gamma: ShareAboveZero = 1.0
    alpha_every: Count = 30
    mass: Share = 0.8
    attention_mass: Literal["symmetric", "rows"] = "symmetric"
    sigma_factor: Positive = 0.25
    sigma_freeze: bool = False
    lam: NotNegative | None = None
    prox: NotNegative = 1e-4
    start: Literal["cloud", "self"] = "cloud"
    safe_attention: bool = True

    paper: ClassVar[str] = (
        "Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on "
        "Non-IID Data, AAAI 2021"
    )
    bibtex: ClassVar[str] = """@inproceedings{huang2021fedamp,
  title={Personalized Cross-Silo Federated Learning on Non-{IID} Data},
  author={Huang, Yutao and Chu, Lingyang and Zhou, Zirui and Wang, Lanjun and Liu, Jiangchuan and
          Pei, Jian and Zhang, Yong},
  booktitle={AAAI}, year={2021}}"""

    def init(self, task: Task) -> tuple[Uploads, Own]:
        """The common start."""
        return start_together(task)

    def _alpha(self, index: int, lr: float) -> float | None:
        """α_k = α_0 γ^⌊k/every⌋, refused where the proximal step would overshoot (spec 9.3)."""
        if self.alpha == "auto":
            return None
        alpha = self.alpha * self.alpha_gamma ** (index // self.alpha_every)
        if self.lam and (alpha <= 0 or lr * self.lam / alpha >= 1):
            raise ConfigError(
                f"fedamp: lr * lam / alpha is {lr * self.lam / alpha if alpha else float('inf'):g} "
                f"in round {index} and must stay below 1; raise alpha, or lower lam or alpha_gamma"
            )
        return alpha

    def _weigh(self, server: Uploads, alpha: float | None) -> Callable[[Tensor], Tensor]:
        """ξ of some models; distances, which cost most, are taken once."""

        def weigh(W: Tensor) -> Tensor:
            distances = squared_distances(W)
            slopes = slope(distances, self._sigma(server, distances), self.penalty)
            A = weights(slopes, largest_step(slopes, self.mass) if alpha is None else alpha)
            if alpha is None and self.attention_mass == "rows":
                A = spread(A, self.mass)
            return safe(A) if self.safe_attention else A

        return weigh

    def _sigma(self, server: Uploads, distances: Tensor) -> Tensor | float:
        if self.sigma != "auto":
            return self.sigma
        if self.sigma_freeze and server.sigma > 0:
            return server.sigma
        return width_of(distances, self.sigma_factor)

    def download(self, server: Uploads, round: Round) -> Cloud:
        """u_i, and how strongly to stay near it."""
        alpha = self._alpha(round.index, round.lr)
        u = exchange(server, round, self._weigh(server, alpha))
        prox = self.prox if self.lam is None or alpha is None else self._ratio(alpha)
        return Cloud(u, u.new_full((len(u),), prox))

    def _ratio(self, alpha: float) -> float:
        return self.lam / alpha if self.lam else 0.0

    def local(self, client: Client, received: Cloud, state: Own) -> tuple[Tensor, Own]:
        """Train near u_i."""
        w = train_near(client, received, state, self.start)
        return w, Own(w)

    def aggregate(self, server: Uploads, uploads: Tensor, round: Round) -> Uploads:
        """Store."""
        new = store(server, uploads, round)
        if server.sigma > 0 or len(uploads) < 2:
            return new
        return new._replace(sigma=median_width(round.trainable(uploads), self.sigma_factor))

    def model(self, state: Own) -> Tensor:
        """The client's own model."""
        return state.w

    def collaboration(self, server: Uploads, states: Own, round: Round) -> Tensor:
        """The attention of an exchange between all who have uploaded."""
        alpha = None if self.alpha == "auto" else self.alpha
        return among_seen(server, round, self._weigh(server, alpha))

    def check(self, task: Task, rounds: int) -> None:
        """Refuse a pull that overshoots, in any round of the schedule."""
        for index in range(rounds):
            self._alpha(index, task.recipe.rate(index))
        if self.lam is None or self.alpha == "auto":
            check_pull(task, rounds, "fedamp.prox", self.prox)


def start_together(task: Task) -> tuple[Uploads, Own]:
    """The server and the clients before round 0, all at the common start."""
    models = rows(task.start, task.population)
    nobody = torch.zeros(task.population, dtype=torch.bool, device=task.device)
    width = torch.zeros((), dtype=torch.float64, device=task.device)
    return Uploads(models, nobody, task.start, width), Own(models)


def train_near(client: Client, received: Cloud, state: Own, start: str) -> Tensor:
    """``argmin F_i(w) + (λ/2α_k)‖w − u_i‖²`` by local training."""
    begin = received.u if start == "cloud" else state.w
    return client.train(begin, penalty=lambda w: proximal(w, received.u, received.prox))


def store(server: Uploads, uploads: Tensor, round: Round) -> Uploads:
    """The server with the round's uploads."""
    models = updated(server.models, round.clients, uploads)
    return server._replace(models=models, seen=server.seen.index_fill(0, round.clients, True))
