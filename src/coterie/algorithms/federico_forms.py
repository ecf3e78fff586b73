"""The messages of FedeRiCo, and what its two forms do differently.

Among peers a client's own model stays with it and only clients of the round can be reached. With a
server (the paper's section 3.2) all models lie on the server and everybody weighs all of them.
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Round
from ..core.tree import Bank, Parcels, Tree

Scale = Literal["auto", "sum", "mean"]


class Circle(NamedTuple):
    """What the clients hold between rounds, a row a client; no server in the decentralised form."""

    models: Tensor  # [K, P] φ
    optimizer: Tree  # the owners' optimiser states, for ``gradient``
    sizes: Tensor  # [K] training samples
    ranks: Tensor  # [K, K] how many clients each client prefers to this one
    wanted: Tensor  # [K, K] whose models each client predicts with


class Held(NamedTuple):
    """What an owner holds."""

    model: Tensor  # [P]
    optimizer: Tree


class Inbox(NamedTuple):
    """What the users of a model returned to its owner."""

    total: Tensor  # [P] the sum
    mass: Tensor  # [] the users' weights together
    divisor: Tensor  # [] of the gradients


class Sight(NamedTuple):
    """The models a client looks at."""

    own: Parcels  # [1, P]
    peers: Bank  # [M]

    def models(self, me: Tensor) -> tuple[Tensor, Tensor]:
        """Of client ``me``: its own model and its peers' ``[1 + M, P]``, and whose they are."""
        peers, present = self.peers.rows()
        peers = torch.where(present[:, None], peers, self.own.vectors)  # no row is garbage
        models = torch.cat([self.own.vectors, peers])
        return models, torch.cat([me[None], self.peers.owner])


class Reply(NamedTuple):
    """What a client returns to the owners of the models it looked at, itself first."""

    change: Parcels  # [1 + M, P] weighed differences or gradients, then weighed buffers
    weight: Tensor  # [1 + M] w_ib
    owner: Tensor  # [1 + M]
    ranks: Tensor  # [K]
    wanted: Tensor  # [K]


class Exchange(ABC):
    """What depends on where the models are."""

    @property
    @abstractmethod
    def own_travels(self) -> bool:
        """Whether a client's own model, and what it returns for it, cross the wire."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether everybody weighs all models in every round, so that losses can be added up."""

    def own(self, server: Circle, round: Round) -> Parcels:
        """Each client's own model: it is there already, unless a server holds it."""
        models = server.models[round.clients, None]
        sent = torch.full(models.shape[:2], self.own_travels, device=models.device)
        return Parcels(models, sent)

    @abstractmethod
    def reachable(self, round: Round) -> Tensor:
        """Whose models can be looked at in this round ``[K]``."""

    @abstractmethod
    def slots(self, downloads: int, population: int) -> int:
        """How many models of others a client looks at, if there are so many."""

    @abstractmethod
    def divisors(self, sizes: Tensor, round: Round, scale: Scale) -> Tensor:
        """What every owner divides gradients by ``[K]``."""


class AmongPeers(Exchange):
    """Clients hold their own models and look at those of some peers."""

    own_travels = False
    exact = False

    def reachable(self, round: Round) -> Tensor:
        """The clients of the round."""
        return torch.isin(
            torch.arange(round.population, device=round.clients.device), round.clients
        )

    def slots(self, downloads: int, population: int) -> int:
        """As many as the method is told."""
        return downloads

    def divisors(self, sizes: Tensor, round: Round, scale: Scale) -> Tensor:
        """1 as printed (Eq. 9), or the owner's samples."""
        return sizes if scale == "mean" else torch.ones_like(sizes)  # Eq. 9


class OnServer(Exchange):
    """A server holds all models; everybody looks at all of them."""

    own_travels = True
    exact = True

    def reachable(self, round: Round) -> Tensor:
        """Everybody."""
        return torch.ones(round.population, dtype=torch.bool, device=round.clients.device)

    def slots(self, downloads: int, population: int) -> int:
        """All."""
        return population

    def divisors(self, sizes: Tensor, round: Round, scale: Scale) -> Tensor:
        """The samples of the round's clients, as printed (Eq. 6), or 1."""
        if scale == "sum":
            return torch.ones_like(sizes)
        return sizes[round.clients].sum().expand(len(sizes))  # Eq. 6


EXCHANGES: dict[str, Exchange] = {"decentralised": AmongPeers(), "centralised": OnServer()}
