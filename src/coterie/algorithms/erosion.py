"""Weight Erosion: one agent's model uses all agents' updates, with weights that fade by distance.

A model is trained for a requesting agent i* (P4 calls it Alice). In round r = 1 … R every agent
trains it; G_i is the sum of its gradients, −Δy_i/η:

    d_i  = ‖G_i − G_{i*}‖ / ‖G_{i*}‖
    α_i ← max(0, α_i − (1 + p_s ⌊(r−1) b / n_i⌋) p_d d_i),   α_i = 1 at first
    x   ← x − η Σ α_i G_i / Σ α_i

Alice's own distance is 0, so she keeps weight 1 and trains alone in the end.

Travels: x down; Δy_i, whether Δy_i is valid, and the sample count up, once for every requester.

Notes:
    The formula is Grimberg et al.'s; P4 gives values of p_d without the scale they refer to, and no
    p_s (reading P4-6). ``p_d = "auto"`` is 1 / (0.8 R · mean of d_i over the others in the first
    round).
    Several requesters, or ``all``, are independent copies: the paper's method has one.
    An agent that is missing or rejected keeps its weight and is left out of the average. Where the
    requester itself is missing, its model and weights do not change.
    One upload carries an agent's updates for all requesters. Where one of them became NaN or
    infinite, the agent sends zeros and ``valid = False`` for that requester, and counts as missing
    for that requester only.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, Traits, rows
from ..core.client import Client
from ..core.mixing import mix
from ..core.privacy import Declaration, Query
from ..core.problem import Problem
from ..core.ranges import CountOrZero, MinLen, NotNegative
from ..core.tree import Bank, Tree
from ..errors import ConfigError

Requesters = Annotated[tuple[CountOrZero, ...], MinLen(1)] | Literal["all"]


class Copies(NamedTuple):
    """The server: a model and the agents' weights for every requester."""

    x: Tensor  # [R, P]
    alpha: Tensor  # [R, K]
    p_d: Tensor  # [R] the distance penalty, 0 before ``auto`` has computed it
    shares: Tensor  # [R, K] the weights of the last average, 0 for agents that were missing


class Update(NamedTuple):
    dy: Tensor  # [R, P]
    valid: Tensor  # [R] bool; a row of dy that is not finite is sent as zeros
    size: Tensor  # []


def erode(
    weights: Tensor,
    distances: Tensor,
    p_d: Tensor | float,
    p_s: float,
    r: int,
    batch: Tensor | int,
    sizes: Tensor,
) -> Tensor:
    """The agents' weights after round r, none below zero.

    >>> erode(torch.ones(2), torch.tensor([0.0, 2.0]), 0.1, 2.0, 11, 5, torch.tensor([50, 50]))
    tensor([1.0000, 0.4000])
    """
    passes = torch.div((r - 1) * batch, sizes, rounding_mode="floor").to(distances.dtype)
    return (weights - (1 + p_s * passes) * p_d * distances).clamp(min=0)


def lengths(updates: Tensor) -> Tensor:
    """``‖G_i‖`` of all rows, float64."""
    found: Tensor = torch.linalg.vector_norm(updates, dim=-1, dtype=torch.float64)
    return found


def distances_to(at: int, updates: Tensor) -> Tensor:
    """``‖G_i − G_at‖`` for all rows, float64."""
    return lengths(updates - updates[at])


def requesting(requesters: Requesters, population: int) -> list[int]:
    """The ids of the clients that ask for a model; ids that do not exist are refused."""
    ids = list(range(population)) if requesters == "all" else list(requesters)
    if len(set(ids)) < len(ids) or not set(ids) <= set(range(population)):
        raise ConfigError(
            f"requesters: found {requesters!r}; expected 'all' or different numbers from 0 to "
            f"{population - 1}"
        )
    return ids


def place_of(requester: int, clients: Tensor) -> int | None:
    """The requester's index among the clients that replied; None where it did not reply."""
    found = (clients == requester).nonzero().flatten().tolist()
    return found[0] if found else None


def is_finite(*vectors: Tensor) -> Tensor:
    """Whether the norms of some vectors ``[P]`` are finite: no entry is NaN, infinite or huge."""
    norms = [torch.linalg.vector_norm(vector) for vector in vectors]
    return torch.stack(norms).isfinite().all()


def offer(models: Tensor, requesters: list[int], clients: Tensor) -> Bank:
    """A Bank that sends every requester its model, and the other clients nothing."""
    asked = torch.tensor(requesters, device=clients.device)
    match = clients[:, None] == asked
    slot = torch.where(match.any(1), match.to(torch.int64).argmax(1), -1)[:, None]
    return Bank(models, slot, torch.where(slot >= 0, clients[:, None], -1))


def accept(served: Bank) -> Mixture:
    """The received model as predictor; a client that did not request one has no predictor."""
    models, present = served.rows()
    return Mixture(present.to(models.dtype), models)


def full_rows(weights: Tensor, requesters: list[int]) -> Tensor:
    """The requesters' rows ``[R, K]`` as a matrix ``[K, K]``; rows of other clients are zero."""
    A = weights.new_zeros(weights.shape[1], weights.shape[1])
    return A.index_copy(0, torch.tensor(requesters, device=A.device), weights)


@dataclass(frozen=True)
class Erosion(Algorithm[Copies, Tensor, Update, tuple[()]]):
    """Weight Erosion.

    Fields:
        requesters: the clients (numbers from 0) that get a model of their own, or ``all``.
        p_d: what a weight loses per round at a relative distance of 1; with ``auto`` the weight of
            an agent at the average distance reaches zero after 0.8 of the run.
        p_s: how much faster a weight fades with every pass over the agent's samples.
        samples_per_round: b, the samples that one round counts as: a ``batch`` or the local
            ``epoch`` itself.
    """

    requesters: Requesters = "all"
    p_d: NotNegative | Literal["auto"] = "auto"
    p_s: NotNegative = 2.0
    samples_per_round: Literal["batch", "epoch"] = "batch"

    title: ClassVar[str] = "Weight Erosion"
    bibtex: ClassVar[str] = """@inproceedings{grimberg2020erosion,
  title={Weight Erosion: An Update Aggregation Scheme for Personalized Collaborative Machine
         Learning},
  author={Grimberg, Felix and Hartley, Mary-Anne and Jaggi, Martin and
          Karimireddy, Sai Praneeth},
  booktitle={DART, MICCAI Workshop}, year={2020}}"""
    private = Declaration(
        lambda self, when: (Query(times=len(requesting(self.requesters, when.population))),)
    )

    @property
    def traits(self) -> Traits:
        return Traits(everybody=True, several_models=True)

    def optimizers(self, problem: Problem) -> int:
        return len(requesting(self.requesters, problem.population))  # of every requester's model

    def init(self, problem: Problem) -> tuple[Copies, tuple[()]]:
        asked = len(requesting(self.requesters, problem.population))
        alpha = torch.ones(asked, problem.population, dtype=torch.float64, device=problem.device)
        none = torch.zeros_like(alpha)
        return Copies(rows(problem.start, asked), alpha, alpha.new_zeros(asked), none), ()

    def download(self, server: Copies, round: Round) -> Tensor:
        return rows(server.x, len(round.clients))

    def local(self, client: Client, received: Tensor, state: tuple[()]) -> tuple[Update, tuple[()]]:
        def one(x: Tensor) -> tuple[Tensor, Tensor]:
            dy = client.train(x) - x
            fine = is_finite(dy)
            return torch.where(fine, dy, 0.0), fine

        dy, valid = client.map(one, received)
        return Update(dy, valid, client.size), ()

    def aggregate(self, server: Copies, uploads: Update, round: Round) -> Copies:
        x, alpha, p_d, applied = (part.clone() for part in server)
        for k, requester in enumerate(requesting(self.requesters, round.population)):
            valid = uploads.valid[:, k]
            here = round.clients[valid]
            at = place_of(requester, here)
            if at is None:
                continue
            dy, size = uploads.dy[valid, k], uploads.size[valid]
            weights, p_d[k] = self._eroded(alpha[k, here], p_d[k], dy, at, size, round)
            alpha[k, here] = weights
            share = weights / weights.sum()
            x[k] = x[k] + mix(share, dy)
            applied[k] = torch.zeros_like(applied[k]).index_copy(0, here, share)
        return Copies(x, alpha, p_d, applied)

    def _eroded(
        self, weights: Tensor, p_d: Tensor, dy: Tensor, at: int, size: Tensor, round: Round
    ) -> tuple[Tensor, Tensor]:
        """New weights of the agents that replied, and p_d; both unchanged where G_{i*} is zero."""
        update = round.trainable(dy)
        own = lengths(update[at])
        if own == 0:
            return weights, p_d
        d = distances_to(at, update) / own
        if self.p_d != "auto":
            p_d = torch.full_like(p_d, self.p_d)
        elif p_d == 0 and d.sum() > 0:
            p_d = (len(d) - 1) / (0.8 * round.horizon * d.sum())
        epoch = size * round.recipe.epochs
        batch = round.recipe.batch if self.samples_per_round == "batch" else epoch
        return erode(weights, d, p_d, self.p_s, round.index + 1, batch, size), p_d

    def serve(self, server: Copies, round: Round) -> Bank:
        return offer(server.x, requesting(self.requesters, round.population), round.clients)

    def predictor(self, client: Client, served: Bank, state: tuple[()]) -> Mixture:
        return accept(served)

    def collaboration(self, server: Copies, shown: Tree, round: Round) -> Tensor:
        return full_rows(server.shares, requesting(self.requesters, round.population))

    def check(self, problem: Problem, rounds: int) -> None:
        requesting(self.requesters, problem.population)
