"""What clients send that they should not, beyond what ``coterie.testing`` has them send."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.algorithms.fedavg import FedAvg, Update
from coterie.core.client import Client
from coterie.core.tree import Tree
from coterie.testing.whole_runs import BAD, WithValue


@dataclass(frozen=True)
class Claiming:
    """Another sample count."""

    samples: float
    everybody: bool = False

    def __call__(self, upload: Tree, bad: Tensor) -> Tree:
        claim = torch.full_like(upload.size, self.samples)
        return upload._replace(size=torch.where(bad | self.everybody, claim, upload.size))


@dataclass(frozen=True)
class Misshapen:
    """An update of another layout, by its name in MISSHAPEN."""

    name: str

    def __call__(self, upload: Tree, bad: Tensor) -> Tree:
        return MISSHAPEN[self.name][0](upload)


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
class Poisonous(FedAvg):
    """FedAvg with a client that sends NaN, for configs: ``faulty:Poisonous``."""

    def local(self, client: Client, received: Tensor, state: tuple[()]) -> Any:
        upload, after = super().local(client, received, state)
        return WithValue(float("nan"))(upload, client.id == BAD), after


assert fields(Poisonous) == fields(FedAvg)
