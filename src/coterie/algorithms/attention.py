"""What FedAMP and HeurFedAMP share: the server keeps every client's last model and mixes them.

    u_i = Σ_j ξ_ij w_j                                                     on the server
    w_i = argmin F_i(w) + (λ/2α_k)‖w − u_i‖²                               on the client

A subclass defines the weights ξ.
"""

from abc import abstractmethod
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


class Uploads(NamedTuple):
    """The server: the last upload of every client."""

    models: Rows  # [K, P]
    seen: Tensor  # [K] whether the client has uploaded
    start: Tensor  # [P] the common start
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


@dataclass(frozen=True, kw_only=True)
class Attentive(Algorithm[Uploads, Cloud, Upload, Own]):
    """Base of methods that mix the models of similar clients; a subclass defines the similarity.

    Fields:
        prox: the proximal coefficient λ/α_k itself.
        start: local training starts from the ``cloud`` model u_i or from the client's own
            (``self``).
        predict_with: the client's ``own`` model w_i, or the newest ``cloud`` model u_i.
    """

    prox: NotNegative = 1e-4
    start: Literal["cloud", "self"] = "cloud"
    predict_with: Literal["own", "cloud"] = "own"

    private = Declaration(leaves="nothing else")

    @abstractmethod
    def attention(self, models: Tensor, round: Round) -> Tensor:
        """The weights ξ ``[m, m]`` between clients, from the parameters of their last uploads."""

    def _prox(self, round: Round) -> float:
        """The proximal coefficient λ/α_k."""
        return self.prox

    def _among(self, server: Uploads, clients: Tensor) -> Tensor:
        """Those of some clients that have uploaded, in the order of their numbers."""
        return clients[server.seen[clients]].sort().values

    def _rows(self, server: Uploads, clients: Tensor, members: Tensor, round: Round) -> Tensor:
        """ξ of some clients ``[n, m]`` over members that include them."""
        A = members.new_ones(1, 1, dtype=torch.float64)
        if len(members) > 1:
            A = self.attention(round.trainable(server.models[members]), round)
        return A[torch.searchsorted(members, clients)]

    def _mixed(self, server: Uploads, among: Tensor, round: Round) -> Tensor:
        """``u_i = Σ_j ξ_ij w_j`` over those of ``among`` that have uploaded.

        A client of the round that has not uploaded yet gets the common start.
        """
        u, known = server.start.repeat(len(round.clients), 1), server.seen[round.clients]
        if known.any():
            members = self._among(server, among)
            A = self._rows(server, round.clients[known], members, round)
            u[known] = mix(A, server.models[members])
        return u

    def init(self, problem: Problem) -> tuple[Uploads, Own]:
        K, start = problem.population, problem.start
        nobody = torch.zeros(K, dtype=torch.bool, device=problem.device)
        return Uploads(rows(start, K), nobody, start, nobody_yet(start, K)), Own(rows(start, K))

    def download(self, server: Uploads, round: Round) -> Cloud:
        u = self._mixed(server, round.clients, round)
        return Cloud(u, u.new_full((len(u),), self._prox(round)))

    def serve(self, server: Uploads, round: Round) -> Tree:
        """The newest u_i, over all clients that have uploaded, where u_i is used to predict."""
        if self.predict_with == "own":
            return ()
        return self._mixed(server, torch.arange(round.population, device=server.seen.device), round)

    def collaboration(self, server: Uploads, shown: Tree, round: Round) -> Tensor:
        return last_applied(server.applied)

    def local(self, client: Client, received: Cloud, state: Own) -> tuple[Upload, Own]:
        """Train near u_i: ``argmin F_i(w) + (λ/2α_k)‖w − u_i‖²``."""
        begin = received.u if self.start == "cloud" else state.w
        w = client.train(begin, penalty=lambda w: proximal(w, received.u, received.prox))
        return Upload(w), Own(w)

    def aggregate(self, server: Uploads, uploads: Upload, round: Round) -> Uploads:
        """Store the uploads, and the weights that the round applied."""
        at, known = round.clients, server.seen[round.clients]
        applied = server.start.new_zeros(len(at), round.population)
        applied[torch.arange(len(at), device=at.device), at] = 1  # in its first round alone
        if known.any():
            members = self._among(server, round.asked)
            A = self._rows(server, at[known], members, round).to(applied.dtype)
            applied[known] = torch.zeros_like(applied[known]).index_copy(1, members, A)
        return server._replace(
            models=updated(server.models, at, uploads.w),
            seen=server.seen.index_fill(0, at, True),
            applied=updated(server.applied, at, applied),
        )

    def predictor(self, client: Client, served: Any, state: Own) -> Mixture:
        return single(state.w if self.predict_with == "own" else served)
