"""FedFomo, model-average variant: clients are weighted by leave-one-out averages of all models.

The server sends the plain average Ā of all N uploads and the N averages that leave one out. On
validation data (Eq. 14):

    w_n  = L_i(Ā_{−n}) − L_i(Ā)                    positive where the average is worse without n
    w*_n = max(w_n, 0) / Σ_m max(w_m, 0)
    θ_i  = Ā + Σ_n w*_n (θ_n − Ā);   Ā where no w_n is positive
    θ_i ← LocalTrain(θ_i);   upload θ_i

Travels: N + 1 models down (the common start in the first round), one model and N shares up.

Notes:
    **This hides no client's model.** θ_n = N Ā − (N − 1) Ā_{−n} exactly, and the client here
    computes the models that it mixes in this way: the averages reveal every client's model. The
    paper offers the variant for privacy; we do not.
    As printed w_n is not divided by a distance; ``distance`` divides it by ‖Ā_{−n} − Ā‖, as public
    code does.
    Before the first upload a client trains from the common start. With a single upload there is
    nothing to leave out and θ_i = Ā.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, Traits, rows, single
from ..core.client import Client
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.tree import Bank, Tree
from .fedfomo import FedFomo, fomo_weights, norm


class Pool(NamedTuple):
    """The server: the last upload of every client."""

    models: Tensor  # [K, P]
    uploaded: Tensor  # [K] whether the client has uploaded
    shares: Tensor  # [K, K] each client's last shares
    start: Tensor  # [P] the common start


class Upload(NamedTuple):
    theta: Tensor  # [P]
    shares: Tensor  # [K]


def leave_one_out(models: Tensor) -> tuple[Tensor, Tensor]:
    """``Ā [P]`` and every ``Ā_{−n} [N, P]``; with a single model, Ā_{−n} is Ā."""
    average, count = models.mean(0), len(models)
    return average, average + (average - models) / max(1, count - 1)


def average_weights(base_loss: Tensor, losses: Tensor, distances: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 14, clipped and normalised: FedFomo's weights with the sign of the gain reversed."""
    return fomo_weights(-base_loss, -losses, distances)  # Eq. 14


@dataclass(frozen=True)
class FedFomoMA(Algorithm[Pool, Bank, Upload, tuple[()]]):
    """First-order model optimisation over averages.

    Fields:
        distance: divide w_n by the distance between Ā_{−n} and Ā: ``none`` (as printed), ``l2``,
            ``l1`` (public code) or ``sq_l2``.
    """

    distance: Literal["none", "l2", "l1", "sq_l2"] = "none"

    title: ClassVar[str] = "FedFomo-MA"
    private = Declaration(leaves="what validation losses decide: its shares of the others")
    bibtex: ClassVar[str] = FedFomo.bibtex

    @property
    def traits(self) -> Traits:
        """Models are weighed on validation data, and once more before a prediction."""
        return Traits(uses_validation=True, weighs_again=True)

    def init(self, problem: Problem) -> tuple[Pool, tuple[()]]:
        K = problem.population
        alone = torch.eye(K, dtype=problem.dtype, device=problem.device)
        nobody = torch.zeros(K, dtype=torch.bool, device=problem.device)
        return Pool(rows(problem.start, K), nobody, alone, problem.start), ()

    def download(self, server: Pool, round: Round) -> Bank:
        """The average in slot 0, and the average without client n in slot 1 + n."""
        there = server.uploaded.nonzero().flatten()
        count, everybody = len(round.clients), torch.arange(round.population, device=there.device)
        slot = torch.full((round.population + 1,), -1, device=there.device)
        slot[0] = 0
        table = server.start[None]
        if len(there):
            average, without = leave_one_out(server.models[there])
            table = torch.cat([average[None], without])
            slot[1 + there] = 1 + torch.arange(len(there), device=there.device)
        owner = torch.cat([slot.new_full((1,), -1), everybody])
        return Bank(table, rows(slot, count), rows(owner, count))

    def local(self, client: Client, received: Bank, state: tuple[()]) -> tuple[Upload, tuple[()]]:
        theta, shares = self.weigh(client, received)
        alone = torch.arange(client.population, device=client.id.device) == client.id
        shares = torch.where(shares.sum() > 0, shares, alone.to(shares.dtype))
        return Upload(client.train(theta), shares), ()

    def weigh(self, client: Client, received: Bank) -> tuple[Tensor, Tensor]:
        """The client's mixture of all uploads, and their shares; zero before the first upload."""
        models, present = received.rows()
        average, without, there = models[0], models[1:], present[1:]
        base = client.loss(average, "val")
        losses = client.map(lambda w: client.loss(w, "val"), without)
        losses = torch.where(there, losses, base)
        _, shares = average_weights(base, losses, self._distances(client, without - average))
        count = there.sum().to(shares.dtype)
        shares = torch.where(shares.sum() > 0, shares, there / count.clamp(min=1))
        # θ_n − Ā = (N − 1)(Ā − Ā_{−n}); with equal shares the sum is zero
        apart = torch.where(there[:, None], (count - 1) * (average - without), 0.0)
        return average + shares @ apart, shares

    def _distances(self, client: Client, apart: Tensor) -> Tensor:
        if self.distance == "none":
            return torch.ones_like(apart[:, 0])
        return norm(client.trainable(apart), self.distance)

    def aggregate(self, server: Pool, uploads: Upload, round: Round) -> Pool:
        at = round.clients
        return server._replace(
            models=server.models.index_copy(0, at, uploads.theta),
            uploaded=server.uploaded.index_fill(0, at, True),
            shares=server.shares.index_copy(0, at, uploads.shares),
        )

    def predictor(self, client: Client, served: Bank, state: tuple[()]) -> Mixture:
        return single(self.weigh(client, served)[0])

    def collaboration(self, server: Pool, shown: Tree, round: Round) -> Tensor:
        return server.shares
