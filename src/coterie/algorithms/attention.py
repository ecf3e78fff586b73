"""What FedAMP and HeurFedAMP share: the server keeps every client's last model and mixes them.

    u_i = Σ_j ξ_ij w_j                                                     on the server
    w_i = argmin F_i(w) + (λ/2α_k)‖w − u_i‖²                               on the client

A subclass defines the weights ξ.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, rows, single
from ..core.client import Client
from ..core.mixing import last_applied, mix, nobody_yet, off_diagonal
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import NotNegative
from ..core.rows import Rows, updated
from ..core.tree import Tree
from .fedprox import proximal

TINY = 1e-300  # the reciprocal of a smaller number may overflow

Weigh = Callable[[Tensor], Tensor]  # clients [m] that have uploaded -> their weights [m, m]


class Uploads(NamedTuple):
    """The server: the last upload of every client."""

    models: Rows  # [K, P]
    seen: Tensor  # [K] whether the client has uploaded
    start: Tensor  # [P] the common start, or [K, P] every client's own
    applied: Rows  # [K, K] the weights of each client's last round; zeros before its first


class Upload(NamedTuple):
    w: Tensor  # [P]


class Cloud(NamedTuple):
    """What a client receives."""

    u: Tensor  # [P]
    prox: Tensor  # [] the proximal coefficient λ/α_k


class Own(NamedTuple):
    w: Tensor  # [P]


def median_of(apart: Tensor) -> Tensor:
    """The median over all pairs ``[m, m]``, 1 where it is zero: models that are all the same.

    >>> median_of(torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 9.0], [4.0, 9.0, 0.0]]))
    tensor(4.)
    """
    median = off_diagonal(apart).median()
    return torch.where(median > TINY, median, 1.0)


def mixed(server: Uploads, clients: Tensor, among: Tensor, weigh: Weigh) -> Tensor:
    """``u_i = Σ_j ξ_ij w_j`` of some clients, over the clients ``among`` that have uploaded.

    A client that has not uploaded yet gets the model that it starts with.
    """
    own = server.start.dim() == 2
    u = server.start[clients] if own else server.start.repeat(len(clients), 1)
    members = among[server.seen[among]].sort().values
    known = server.seen[clients]
    if len(members) and known.any():
        u[known] = mix(_rows_of(members, clients[known], weigh), server.models[members])
    return u


def _rows_of(members: Tensor, clients: Tensor, weigh: Weigh) -> Tensor:
    """The rows of the members' weights that belong to ``clients``; a single member has weight 1."""
    A = weigh(members) if len(members) > 1 else members.new_ones(1, 1, dtype=torch.float64)
    return A[torch.searchsorted(members, clients)]


def remembered(server: Uploads, round: Round, weigh: Weigh) -> Rows:
    """The table of applied weights with this round's added; ``server`` is that before the round."""
    at = round.clients
    applied = server.start.new_zeros(len(at), round.population)
    applied[torch.arange(len(at), device=at.device), at] = 1  # in its first round a client is alone
    members = round.asked[server.seen[round.asked]].sort().values
    known = server.seen[at]
    if len(members) and known.any():
        weights = _rows_of(members, at[known], weigh).to(applied.dtype)
        applied[known] = torch.zeros_like(applied[known]).index_copy(1, members, weights)
    return updated(server.applied, at, applied)


@dataclass(frozen=True, kw_only=True)
class Attentive(Algorithm[Uploads, Cloud, Upload, Own]):
    """Base of methods that mix the models of similar clients; a subclass defines the similarity.

    Fields:
        prox: the proximal coefficient λ/α_k itself.
        start: local training starts from the ``cloud`` model u_i or from the client's own
            (``self``).
        predict_with: the client's ``own`` model w_i, or the newest ``cloud`` model u_i.
        initial: the clients' models are one ``common`` model before round 0, or ``independent``.
    """

    prox: NotNegative = 1e-4
    start: Literal["cloud", "self"] = "cloud"
    predict_with: Literal["own", "cloud"] = "own"
    initial: Literal["common", "independent"] = "common"

    private = Declaration(leaves="nothing else")

    @abstractmethod
    def _weigh(self, server: Uploads, round: Round) -> Weigh:
        """A function that computes the weights ξ between some clients in this round."""

    def _prox(self, round: Round) -> float:
        """The proximal coefficient λ/α_k."""
        return self.prox

    def init(self, problem: Problem) -> tuple[Uploads, Own]:
        K, start = problem.population, problem.start
        common = self.initial == "common"
        models = rows(start, K) if common else problem.fresh(torch.arange(K))
        server = Uploads(
            models=models,
            seen=torch.zeros(K, dtype=torch.bool, device=problem.device),
            start=start if common else models,
            applied=nobody_yet(start, K),
        )
        return server, Own(models)

    def download(self, server: Uploads, round: Round) -> Cloud:
        u = mixed(server, round.clients, round.clients, self._weigh(server, round))
        return Cloud(u, u.new_full((len(u),), self._prox(round)))

    def serve(self, server: Uploads, round: Round) -> Tree:
        """The newest u_i, over all clients that have uploaded, where u_i is used to predict."""
        if self.predict_with == "own":
            return ()
        everybody = torch.arange(round.population, device=round.clients.device)
        return mixed(server, round.clients, everybody, self._weigh(server, round))

    def collaboration(self, server: Uploads, shown: Tree, round: Round) -> Tensor:
        return last_applied(server.applied)

    def local(self, client: Client, received: Cloud, state: Own) -> tuple[Upload, Own]:
        """Train near u_i: ``argmin F_i(w) + (λ/2α_k)‖w − u_i‖²``."""
        begin = received.u if self.start == "cloud" else state.w
        w = client.train(begin, penalty=lambda w: proximal(w, received.u, received.prox))
        return Upload(w), Own(w)

    def aggregate(self, server: Uploads, uploads: Upload, round: Round) -> Uploads:
        """Store the uploads, and record the weights that the round applied."""
        at = round.clients
        return server._replace(
            applied=remembered(server, round, self._weigh(server, round)),
            models=updated(server.models, at, uploads.w),
            seen=server.seen.index_fill(0, at, True),
        )

    def predictor(self, client: Client, served: Any, state: Own) -> Mixture:
        return single(state.w if self.predict_with == "own" else served)
