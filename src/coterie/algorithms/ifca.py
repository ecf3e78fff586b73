"""IFCA: k models; every client trains the one that fits its data best (also HypCluster).

    j_i = argmin_j F_i(θ_j)                           on its training data
    θ_{j_i} ← LocalTrain(θ_{j_i});  upload it with j_i
    θ_j ← Σ p_i θ_i  over the clients that chose j;  a model that no client chose stays

Travels: k models down, one model, the choice and the sample count up.

Notes:
    The initial models decide success: from equal or unrelated models all clients choose the same
    one (reading B-8). ``pretrain``, our default, spends the first round on training the common
    start; the server merges the clients whose changes are most alike (complete linkage on cosines)
    until k groups are left, and the averages of the groups are the k models. Where not all clients
    take part in the first round, pretraining goes on until each has, for a fifth of the run at
    most. ``k = "auto"`` stops merging before the largest drop in similarity, with at least two
    groups and at most half as many as there are clients; the paper has k given.
    ``redraw`` draws independent models and, as the authors' code, draws again until every model
    attracts a ``min_share`` of the clients. Only clients see data, so each draw costs a round;
    after ``draws`` draws the last is kept.
    Models are averaged; the paper's other form averages gradients.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, single
from ..core.client import Client
from ..core.mixing import cosines, last_applied, nobody_yet, noted, shares_within
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import Auto, Few, Share
from ..core.rows import Rows, updated
from ..core.tree import Bank, Tree
from ..errors import ConfigError
from .cfl import merged
from .fedavg import Update, Weighting, average


class Models(NamedTuple):
    """The server."""

    theta: Tensor  # [k, P]
    choice: Tensor  # [K] each client's last choice, -1 before its first
    spare: Tensor  # [d, k, P] the draws that are left, with ``redraw``
    changes: Rows  # [K, P] the clients' changes of the common start, after pretraining [0, P]
    sizes: Tensor  # [K] training samples
    applied: Rows  # [K, K] the weights of the average that each client last took part in


class Pick(NamedTuple):
    """What a client sends."""

    w: Tensor  # [P]
    size: Tensor  # []
    choice: Tensor  # []


def groups_by_gap(levels: list[float]) -> int:
    """The number of groups, from the similarities of all merges down to one group.

    Merging stops before the largest drop, with 2 to n/2 groups.

    >>> groups_by_gap([0.9, 0.85, 0.8, 0.1, 0.05])
    3
    """
    count = len(levels) + 1
    allowed = range(2, max(2, count // 2) + 1)
    # With g groups left, n − g merges are done, and the next merge would be at levels[n − g].
    drop = {g: (levels[count - g - 1] if g < count else 1.0) - levels[count - g] for g in allowed}
    return max(drop, key=lambda g: (drop[g], -g))


@dataclass(frozen=True)
class IFCA(Algorithm[Models, Bank, Pick, tuple[()]]):
    """The iterative federated clustering algorithm.

    Fields:
        k: number of models; ``auto`` lets ``pretrain`` decide.
        start: ``pretrain`` or ``redraw``.
        min_share: with ``redraw``, the share of clients that every model must attract.
        draws: with ``redraw``, the largest number of draws.
    """

    k: Few | Auto = "auto"
    start: Literal["pretrain", "redraw"] = "pretrain"
    min_share: Share = 0.1
    draws: Few = 5
    weighting: Weighting = "samples"

    paper: ClassVar[str] = (
        "Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning, "
        "NeurIPS 2020; HypCluster: Mansour, Mohri, Ro, Suresh: Three Approaches for "
        "Personalization with Applications to Federated Learning, 2020"
    )
    bibtex: ClassVar[str] = """@inproceedings{ghosh2020ifca,
  title={An Efficient Framework for Clustered Federated Learning},
  author={Ghosh, Avishek and Chung, Jichan and Yin, Dong and Ramchandran, Kannan},
  booktitle={NeurIPS}, year={2020}}"""
    private = Declaration(leaves="the number of samples, and the choice of a model by losses")

    def check_together(self) -> None:
        if self.k == "auto" and self.start != "pretrain":
            raise ConfigError(
                f"ifca: k is {self.k!r} with start = '{self.start}'; give the number of models "
                "(1 or more), or take start = 'pretrain'"
            )

    def init(self, problem: Problem) -> tuple[Models, tuple[()]]:
        start, K = problem.start, problem.population
        nobody = torch.full((K,), -1, device=problem.device)
        none = start.new_zeros(0, 1, len(start))
        applied = nobody_yet(start, K)
        if self.start == "pretrain" or self.k == "auto":
            unheard = start.new_zeros(1).expand(K, len(start))
            return Models(start[None], nobody, none, unheard, problem.sizes, applied), ()
        drawn = torch.stack([problem.starts(self.k, draw) for draw in range(self.draws)])
        return Models(drawn[0], nobody, drawn[1:], none[:, 0], problem.sizes, applied), ()

    def download(self, server: Models, round: Round) -> Bank:
        k = torch.arange(len(server.theta), device=server.theta.device)
        slot = k.expand(len(round.clients), -1)
        return Bank(server.theta, slot, slot)

    def choose(self, client: Client, received: Bank) -> tuple[Tensor, Tensor]:
        """The model that fits best, and its number."""
        models, _ = received.rows()
        best = client.map(lambda w: client.loss(w, "train"), models).argmin()
        return models[best], best

    def local(self, client: Client, received: Bank, state: tuple[()]) -> tuple[Pick, tuple[()]]:
        w, choice = self.choose(client, received)
        return Pick(client.train(w), client.size, choice), ()

    def aggregate(self, server: Models, uploads: Pick, round: Round) -> Models:
        if len(server.changes):
            return self._pretrained(server, uploads, round)
        if len(server.spare) and self._lopsided(uploads.choice, len(server.theta)):
            return server._replace(theta=server.spare[0], spare=server.spare[1:])
        choice = server.choice.index_copy(0, round.clients, uploads.choice)
        theta = self._averaged(server.theta, uploads)
        applied = self._noted(server, round.clients, uploads)
        return server._replace(theta=theta, choice=choice, spare=server.spare[:0], applied=applied)

    def _noted(self, server: Models, clients: Tensor, uploads: Pick) -> Rows:
        """The table of applied weights with those of a new average."""
        weights = shares_within(uploads.choice, uploads.size, self.weighting)
        return noted(server.applied, clients, weights)

    def _averaged(self, theta: Tensor, uploads: Pick) -> Tensor:
        new = theta.clone()
        for j in uploads.choice.unique().tolist():
            at = uploads.choice == j
            update = Update(uploads.w[at], uploads.size[at])
            new[j] = average(theta[j], update, self.weighting, 1.0)
        return new

    def _lopsided(self, choice: Tensor, k: int) -> bool:
        """Whether a model attracts too few of the round's clients."""
        return int(choice.bincount(minlength=k).min()) < math.ceil(self.min_share * len(choice))

    def _pretrained(self, server: Models, uploads: Pick, round: Round) -> Models:
        """Collect the clients' changes; once all are known, average the groups of similar ones."""
        start = server.theta[0]
        changes = updated(server.changes, round.clients, uploads.w - start)
        choice = server.choice.index_fill(0, round.clients, 0)
        waited = round.index + 1 >= max(1, round.horizon // 5)
        if not (waited or self.k == 1 or (choice[server.sizes > 0] == 0).all()):
            return server._replace(changes=changes, choice=choice)
        heard = (choice == 0).nonzero().flatten()
        k, group = self._grouped(cosines(round.trainable(changes[heard])))
        picks = Pick(start + changes[heard], server.sizes[heard], group)
        return server._replace(
            theta=self._averaged(start.repeat(k, 1), picks),
            choice=choice.index_copy(0, heard, group),
            changes=changes[:0],
            applied=self._noted(server, heard, picks),
        )

    def _grouped(self, similarity: Tensor) -> tuple[int, Tensor]:
        """The number of groups, and each client's group ``[n]``."""
        n, k = len(similarity), self.k
        if k == "auto":
            k = groups_by_gap(merged(similarity, 1, "complete").levels) if n > 1 else 1
        group = merged(similarity, min(k, n), "complete").group
        return k, group.unique(return_inverse=True)[1]

    def predictor(self, client: Client, served: Bank, state: tuple[()]) -> Mixture:
        return single(self.choose(client, served)[0])

    def collaboration(self, server: Models, shown: Tree, round: Round) -> Tensor:
        return last_applied(server.applied)
