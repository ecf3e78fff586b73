"""Clustered FL: start as one federation and split it where clients pull in opposite directions.

Clients train their cluster's model and send the change Δ_i. For every cluster Q:

    if ‖Σ_Q p_i Δ_i‖ < ε_1  and  max_Q ‖Δ_i‖ > ε_2  and  |Q| > 2:
        the average has stopped moving but the members have not: split Q in two by cos(Δ_i, Δ_j)
    model_Q ← model_Q + Σ_Q p_i Δ_i                       for every (new) cluster

The two parts are found by single linkage on the similarities, merging until two groups remain.
Of all cuts this one minimises the largest similarity across the cut (the paper's optimal
bipartition).

Travels: the cluster's model down, Δ_i and the sample count up.

Notes:
    The paper's thresholds are norms, right for one model and one learning rate (reading B-4).
    ``relative``, our default, measures them in units of the largest ‖Δ_i‖ of the first round.
    ``cfl_mean`` is our version of the method.
    No split before round ``t_min``; ``auto`` is a fifth of the run. Public code waits 20 rounds.
    Parts are kept as sets of client ids; public code loses them at the second split, and finds
    them by complete linkage.
    With partial participation the last Δ_i of each member is used, and a cluster may split only
    when all its members have sent one since the cluster was formed. Members without data go with
    the larger part.
    ``predict_with = "validation"``, by loss, is the original's choice among all ancestors' models.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, Traits, single
from ..core.client import Client
from ..core.mixing import cosines, last_applied, mix, nobody_yet, noted, shares, shares_within
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import Auto, CountOrZero, NotNegative
from ..core.rows import Rows, updated
from ..core.tree import Bank, Tree
from .fedavg import Update, Weighting

Linkage = Literal["single", "complete"]


class Clusters(NamedTuple):
    """The server. A cluster that was split keeps the model it had at the split."""

    models: Tensor  # [C, P]
    parent: Tensor  # [C] the cluster from which it was split off, -1 for the first
    member: Tensor  # [K] each client's cluster
    updates: Rows  # [K, P] each client's last Δ
    sizes: Tensor  # [K] training samples
    heard: Tensor  # [K] whether the member has sent a Δ since the cluster was formed
    scale: Tensor  # [] the largest ‖Δ‖ of the first round
    applied: Rows  # [K, K] the weights of the average that each client last took part in


class Merges(NamedTuple):
    """The result of merging the most similar groups of clients."""

    group: Tensor  # [n] a representative of each client's group
    levels: list[float]  # the similarity at which each merge happened


def merged(similarity: Tensor, groups: int, linkage: Linkage) -> Merges:
    """Agglomerative clustering: merge the most similar pair until ``groups`` groups remain.

    The similarity of two groups is that of their most similar members (``single``) or of their
    least similar ones (``complete``).
    """
    S = similarity.cpu().clone().fill_diagonal_(-torch.inf)
    group, levels = torch.arange(len(S)), []
    for _ in range(len(S) - groups):
        a, b = divmod(int(S.argmax()), len(S))
        levels.append(float(S[a, b]))
        joined = torch.maximum(S[a], S[b]) if linkage == "single" else torch.minimum(S[a], S[b])
        S[a], S[:, a] = joined, joined
        S[b], S[:, b] = -torch.inf, -torch.inf
        S[a, a] = -torch.inf
        group[group == b] = a
    return Merges(group.to(similarity.device), levels)


def bipartition(similarity: Tensor) -> Tensor:
    """Two parts ``[n]`` (bool): the clients merged until two groups remain.

    >>> S = torch.tensor([[1.0, 0.2, 0.9], [0.2, 1.0, -0.5], [0.9, -0.5, 1.0]])
    >>> bipartition(S)
    tensor([False,  True, False])
    """
    group = merged(similarity, 2, "single").group
    return group != group[0]


@dataclass(frozen=True)
class Dividing(Algorithm[Clusters, Tensor, Update, tuple[()]]):
    """Base of federations that divide again and again; a subclass says where.

    Fields:
        eps2: ε_2, the least length that some member's change must have for a split.
        t_min: the first round in which a cluster may split; ``auto`` is a fifth of the run.
        predict_with: the ``cluster``'s model, or the best on ``validation`` data among it and its
            ancestors.
    """

    eps2: NotNegative = 0.4
    t_min: CountOrZero | Auto = "auto"
    predict_with: Literal["cluster", "validation"] = "cluster"
    weighting: Weighting = "samples"

    private = Declaration()

    @abstractmethod
    def _divides(self, average: Tensor, similarity: Tensor, part: Tensor, scale: Tensor) -> bool:
        """Whether a cluster whose mean change has this length splits into these parts."""

    def _unit(self, scale: Tensor) -> Tensor | float:
        """What lengths are measured in; ``scale`` is the largest ‖Δ_i‖ of the first round."""
        return scale

    @property
    def traits(self) -> Traits:
        """Clients may choose among the models of their ancestor clusters by validation data."""
        return Traits(uses_validation=self.predict_with == "validation")

    def init(self, problem: Problem) -> tuple[Clusters, tuple[()]]:
        K, device = problem.population, problem.device
        nothing = torch.zeros(K, device=device, dtype=torch.int64)
        updates = problem.start.new_zeros(1).expand(K, len(problem.start))  # no memory yet
        scale = torch.zeros((), dtype=torch.float64, device=device)
        first = (problem.start[None], nothing[:1] - 1, nothing)
        applied = nobody_yet(problem.start, K)
        return Clusters(*first, updates, problem.sizes, nothing > 0, scale, applied), ()

    def download(self, server: Clusters, round: Round) -> Tensor:
        return server.models[server.member[round.clients]]

    def local(self, client: Client, received: Tensor, state: tuple[()]) -> tuple[Update, tuple[()]]:
        return Update(client.train(received) - received, client.size), ()

    def aggregate(self, server: Clusters, uploads: Update, round: Round) -> Clusters:
        """Split the clusters whose members disagree, then update every cluster's model."""
        server = self._remember(server, uploads, round)
        for cluster in server.member.unique().tolist():
            server = self._divide(server, cluster, round)
        models = server.models.clone()
        at = server.member[round.clients]
        for cluster in at.unique().tolist():
            p = shares(uploads.size[at == cluster], self.weighting)
            models[cluster] += mix(p, uploads.w[at == cluster])
        weights = shares_within(at, uploads.size, self.weighting)
        return server._replace(models=models, applied=noted(server.applied, round.clients, weights))

    def _remember(self, server: Clusters, uploads: Update, round: Round) -> Clusters:
        norms = round.trainable(uploads.w).to(torch.float64).norm(dim=1)
        return server._replace(
            updates=updated(server.updates, round.clients, uploads.w),
            heard=server.heard.index_fill(0, round.clients, True),
            scale=server.scale if server.scale > 0 else norms.max(),
        )

    def _divide(self, server: Clusters, cluster: int, round: Round) -> Clusters:
        """The server after one cluster was tested and, if the conditions hold, split."""
        everyone = (server.member == cluster).nonzero().flatten()
        ids = everyone[server.sizes[everyone] > 0]
        first = max(1, round.horizon // 5) if self.t_min == "auto" else self.t_min
        if round.index < first or len(ids) < 3 or not server.heard[ids].all():
            return server
        part = self._cut(round.trainable(server.updates[ids]), server.sizes[ids], server.scale)
        if part is None:
            return server
        new = len(server.models)
        larger = new + int(2 * part.sum() > len(part))
        member = server.member.index_fill(0, everyone, larger).index_copy(0, ids, new + part.long())
        return server._replace(
            models=torch.cat([server.models, server.models[cluster].expand(2, -1)]),
            parent=torch.cat([server.parent, server.parent.new_full((2,), cluster)]),
            member=member,
            heard=server.heard.index_fill(0, everyone, False),
        )

    def _cut(self, updates: Tensor, sizes: Tensor, scale: Tensor) -> Tensor | None:
        """The two parts ``[n]``, or None where the members agree or have converged."""
        wide = updates.to(torch.float64)
        if wide.norm(dim=1).max() <= self.eps2 * self._unit(scale):
            return None
        average, similarity = mix(shares(sizes, self.weighting), wide).norm(), cosines(updates)
        part = bipartition(similarity)
        return part if self._divides(average, similarity, part, scale) else None

    def serve(self, server: Clusters, round: Round) -> Bank:
        """The cluster's model and, where clients choose, those of its ancestors."""
        node = server.member[round.clients]
        path = [node]
        while self.predict_with == "validation" and (node >= 0).any():
            node = torch.where(node >= 0, server.parent[node.clamp(min=0)], -1)
            path.append(node)
        slot = torch.stack(path, 1)
        return Bank(server.models, slot, torch.full_like(slot, -1))  # averages are nobody's own

    def predictor(self, client: Client, served: Bank, state: tuple[()]) -> Mixture:
        models, there = served.rows()
        if self.predict_with == "cluster":
            return single(models[0])
        losses = client.map(lambda w: client.loss(w, "val"), models)
        return single(models[torch.where(there, losses, torch.inf).argmin()])

    def collaboration(self, server: Clusters, shown: Tree, round: Round) -> Tensor:
        return last_applied(server.applied)


@dataclass(frozen=True)
class CFL(Dividing):
    """Clustered federated learning by recursive bipartition.

    Fields:
        eps2: ε_2, the length that some member's change must exceed (public code: 1.6).
        eps_mode: ε_1 and ε_2 are in units of the first round's largest ‖Δ_i‖ (``relative``), or
            ``absolute`` norms.
        eps1: ε_1, the length below which a cluster's mean change must be (public code: 0.4).
    """

    eps_mode: Literal["relative", "absolute"] = "relative"
    eps1: NotNegative = 0.4

    bibtex: ClassVar[str] = """@article{sattler2021cfl,
  title={Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under
         Privacy Constraints},
  author={Sattler, Felix and M{\\"u}ller, Klaus-Robert and Samek, Wojciech},
  journal={IEEE Transactions on Neural Networks and Learning Systems}, year={2021}}"""

    def _divides(self, average: Tensor, similarity: Tensor, part: Tensor, scale: Tensor) -> bool:
        """Whether the average has stopped moving."""
        return bool(average < self.eps1 * self._unit(scale))

    def _unit(self, scale: Tensor) -> Tensor | float:
        """What lengths are measured in."""
        return 1.0 if self.eps_mode == "absolute" else scale
