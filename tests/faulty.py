"""Clients that send what they should not: any method, with one client's upload spoilt."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.algorithms.fedavg import FedAvg, Update
from coterie.core.algorithm import Mixture, Round, Wrapper
from coterie.core.client import Client
from coterie.core.problem import Problem
from coterie.core.tree import Tree, map_leaves

BAD = 2  # the client that misbehaves

Spoil = Callable[[Tree, Tensor], Tree]  # (upload, whether this is the client) -> upload


def with_value(value: float) -> Spoil:
    """One number of every floating array replaced."""

    def spoil(upload: Tree, bad: Tensor) -> Tree:
        def one(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            first = torch.arange(leaf.numel(), device=leaf.device).view(leaf.shape) == 0
            return torch.where(bad & first, value, leaf)

        return map_leaves(one, upload)

    return spoil


def scaled(factor: float) -> Spoil:
    """Every number multiplied."""
    return lambda upload, bad: map_leaves(
        lambda leaf: torch.where(bad, factor * leaf, leaf) if leaf.is_floating_point() else leaf,
        upload,
    )


def claiming(samples: float, everybody: bool = False) -> Spoil:
    """Another sample count."""

    def spoil(upload: Tree, bad: Tensor) -> Tree:
        claim = torch.full_like(upload.size, samples)
        return upload._replace(size=torch.where(bad | everybody, claim, upload.size))

    return spoil


class More(NamedTuple):
    """An update with a field too many."""

    w: Tensor
    size: Tensor
    note: Tensor


class Less(NamedTuple):
    """An update with a field too few."""

    w: Tensor


# For engines in which clients are apart: (spoilt upload, the reason to reject it).
MISSHAPEN: dict[str, tuple[Callable[[Update], Any], str]] = {
    "one number, which broadcasts": (lambda u: u._replace(w=u.w[:1]), "shape"),
    "a number too few": (lambda u: u._replace(w=u.w[:-1]), "shape"),
    "a dimension too many": (lambda u: u._replace(w=u.w[None]), "shape"),
    "another precision": (lambda u: u._replace(w=u.w.half()), "dtype"),
    "a count as a fraction": (lambda u: u._replace(size=u.size.double()), "dtype"),
    "a field too many": (lambda u: More(*u, u.w[0]), "fields"),
    "a field too few": (lambda u: Less(u.w), "fields"),
    "no names": (lambda u: (u.w, u.size), "fields"),
    "nothing": (lambda u: (), "fields"),
}


@dataclass(frozen=True)
class Spoilt(Wrapper[Any, Any, Any, Any]):
    """Any method in which one client's uploads are spoilt; ``apart``: outside of vmap."""

    spoil: Spoil
    apart: bool = False

    def init(self, problem: Problem) -> tuple[Tree, Tree]:
        return self.algorithm.init(problem)

    def download(self, server: Tree, round: Round) -> Tree:
        return self.algorithm.download(server, round)

    def local(self, client: Client, received: Tree, state: Tree) -> tuple[Tree, Tree]:
        upload, after = self.algorithm.local(client, received, state)
        bad = client.id == BAD
        if self.apart and not bool(bad):
            return upload, after
        return self.spoil(upload, bad), after

    def aggregate(self, server: Tree, uploads: Tree, round: Round) -> Tree:
        return self.algorithm.aggregate(server, uploads, round)

    def serve(self, server: Tree, round: Round) -> Tree:
        return self.algorithm.serve(server, round)

    def predictor(self, client: Client, served: Tree, state: Tree) -> Mixture:
        return self.algorithm.predictor(client, served, state)

    def shown(self, state: Tree) -> Tree:
        return self.algorithm.shown(state)

    def collaboration(self, server: Tree, shown: Tree, round: Round) -> Tensor | None:
        return self.algorithm.collaboration(server, shown, round)


@dataclass(frozen=True)
class Poisonous(FedAvg):
    """FedAvg with a client that sends NaN, for configs: ``faulty:Poisonous``."""

    def local(self, client: Client, received: Tensor, state: tuple[()]) -> Any:
        upload, after = super().local(client, received, state)
        return with_value(float("nan"))(upload, client.id == BAD), after


assert fields(Poisonous) == fields(FedAvg)
