"""The messages of FedeRiCo, and the differences between its decentralised and centralised forms.

Among peers a client keeps its own model, and only clients of the round can be reached. With a
server (the paper's section 3.2) the server holds all models and every client weighs all of them.
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Round
from ..core.clipping import clipped
from ..core.tree import Bank, Parcels, Tree

Scale = Literal["auto", "sum", "mean"]


class Circle(NamedTuple):
    """The state between rounds, one row per client; the clients or a server hold it."""

    models: Tensor  # [K, P] φ
    optimizer: Tree  # the owners' optimiser states, for ``gradient``
    sizes: Tensor  # [K] training samples
    ranks: Tensor  # [K, K] how many clients each client prefers to this one
    wanted: Tensor  # [K, K] whose models each client predicts with

    def scores(self, clients: Tensor, allowed: Tensor) -> Tensor:
        """How much the clients prefer each model ``[m, K]``; -inf where it is not ``allowed``."""
        return (-self.ranks[clients].to(torch.float64)).masked_fill(~allowed, -torch.inf)


class Held(NamedTuple):
    """One owner's model and optimiser state."""

    model: Tensor  # [P]
    optimizer: Tree


class Returned(NamedTuple):
    """The vectors that users of models return to the owners, one row per vector."""

    owner: Tensor  # [n]
    vector: Tensor  # [n, P]
    weight: Tensor  # [n]
    travels: Tensor  # [n] False where the owner computed it itself

    def limited(self, longest: float, round: Round) -> Tensor:
        """The vectors, clipped to ``longest`` times their weight; an owner's own is not clipped."""
        limit = longest * self.weight.clamp(0, 1).to(self.vector.dtype)
        limit = torch.where(self.travels, limit, torch.inf)[:, None]
        moves, buffers = round.trainable(self.vector), self.vector[:, round.parameters :]
        return torch.cat([clipped(moves, limit), buffers], -1)


class Inbox(NamedTuple):
    """The sum of what the users of a model returned to its owner."""

    total: Tensor  # [P] the sum of the returned vectors
    mass: Tensor  # [] the sum of the users' weights
    divisor: Tensor  # [] what gradients are divided by


class Sight(NamedTuple):
    """The models that a client receives: its own and its peers'."""

    own: Parcels  # [1, P]
    peers: Bank  # [M]

    def models(self, me: Tensor) -> tuple[Tensor, Tensor]:
        """The models of client ``me`` and its peers ``[1 + M, P]``, and the owner of each."""
        peers, present = self.peers.rows()
        peers = torch.where(present[:, None], peers, self.own.vectors)  # fill the empty slots
        models = torch.cat([self.own.vectors, peers])
        return models, torch.cat([me[None], self.peers.owner])


class Reply(NamedTuple):
    """What a client returns to the owners of the models it evaluated, itself first."""

    change: Parcels  # [1 + M, P] weighted differences or gradients, then weighted buffers
    weight: Tensor  # [1 + M] w_ib
    owner: Tensor  # [1 + M]
    ranks: Tensor  # [K]
    wanted: Tensor  # [K]

    def returned(self, own_travels: bool) -> Returned:
        """All vectors of some clients' replies, client by client."""
        travels = torch.ones_like(self.owner, dtype=torch.bool)
        travels[..., 0] = own_travels
        vectors, weight = self.change.vectors.flatten(0, -2), self.weight.flatten()
        return Returned(self.owner.flatten(), vectors, weight, travels.flatten())


class Exchange(ABC):
    """The parts of FedeRiCo that depend on where the models are stored."""

    @property
    @abstractmethod
    def own_travels(self) -> bool:
        """Whether a client's own model and its change are sent over the network."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether every client weighs all models in every round, so that losses can be summed."""

    def own(self, server: Circle, round: Round) -> Parcels:
        """Each client's own model; it is sent only where a server holds it."""
        models = server.models[round.clients, None]
        sent = torch.full(models.shape[:2], self.own_travels, device=models.device)
        return Parcels(models, sent)

    @abstractmethod
    def reachable(self, round: Round) -> Tensor:
        """Whether each client's model can be downloaded in this round ``[K]``."""

    @abstractmethod
    def slots(self, downloads: int, population: int) -> int:
        """The number of other clients' models that a client downloads, if there are so many."""

    @abstractmethod
    def divisors(self, sizes: Tensor, round: Round, scale: Scale) -> Tensor:
        """The number by which every owner divides gradients ``[K]``."""


class AmongPeers(Exchange):
    """Clients hold their own models and download those of some peers."""

    own_travels = False
    exact = False

    def reachable(self, round: Round) -> Tensor:
        """The clients of the round."""
        return torch.isin(
            torch.arange(round.population, device=round.clients.device), round.clients
        )

    def slots(self, downloads: int, population: int) -> int:
        """The method's field ``downloads``."""
        return downloads

    def divisors(self, sizes: Tensor, round: Round, scale: Scale) -> Tensor:
        """1 as printed (Eq. 9), or the owner's samples."""
        return sizes if scale == "mean" else torch.ones_like(sizes)  # Eq. 9


class OnServer(Exchange):
    """A server holds all models; every client downloads all of them."""

    own_travels = True
    exact = True

    def reachable(self, round: Round) -> Tensor:
        """All clients."""
        return torch.ones(round.population, dtype=torch.bool, device=round.clients.device)

    def slots(self, downloads: int, population: int) -> int:
        """All models."""
        return population

    def divisors(self, sizes: Tensor, round: Round, scale: Scale) -> Tensor:
        """The samples of the round's clients, as printed (Eq. 6), or 1."""
        if scale == "sum":
            return torch.ones_like(sizes)
        return sizes[round.clients].sum().expand(len(sizes))  # Eq. 6


EXCHANGES: dict[str, Exchange] = {"decentralised": AmongPeers(), "centralised": OnServer()}
