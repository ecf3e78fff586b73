"""Clients that send what they should not, and the law that they harm nobody else."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from ..core.algorithm import AnyAlgorithm
from ..core.client import Client
from ..core.locations import place_of
from ..core.policies import Wrapper
from ..core.tree import Tree, leaves, map_leaves, take
from .differences import difference
from .harness import Outcome
from .laws import Case, NotApplicableError

BAD = 2  # the client that misbehaves

Spoil = Callable[[Tree, Tensor], Tree]  # (upload, whether this is the client) -> upload


# Classes, not closures: they may be sent to a process of the wire engine.


@dataclass(frozen=True)
class WithValue:
    """One number of every floating array replaced."""

    value: float

    def __call__(self, upload: Tree, bad: Tensor) -> Tree:
        """The upload, spoilt where ``bad``."""

        def one(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            first = torch.arange(leaf.numel(), device=leaf.device).view(leaf.shape) == 0
            return torch.where(bad & first, self.value, leaf)

        return map_leaves(one, upload)


@dataclass(frozen=True)
class Scaled:
    """Every number multiplied."""

    factor: float

    def __call__(self, upload: Tree, bad: Tensor) -> Tree:
        """The upload, spoilt where ``bad``."""

        def one(leaf: Tensor) -> Tensor:
            return torch.where(bad, self.factor * leaf, leaf) if leaf.is_floating_point() else leaf

        return map_leaves(one, upload)


def longer(upload: Tree, bad: Tensor) -> Tree:
    """Every array with a dimension too many; only where clients are apart."""
    return map_leaves(lambda leaf: leaf[None] if bool(bad) else leaf, upload)


@dataclass(frozen=True)
class Spoilt(Wrapper[Any, Any, Any, Any]):
    """Any method in which uploads are spoilt.

    ``apart``: only outside of vmap; ``by_all``: by all clients, not one; ``only``: in these
    rounds, not in all.
    """

    spoil: Spoil
    apart: bool = False
    by_all: bool = False
    only: tuple[int, ...] | None = None

    def local(self, client: Client, received: Tree, state: Tree) -> tuple[Tree, Tree]:
        """As the method; then the upload is spoilt."""
        upload, after = self.algorithm.local(client, received, state)
        if self.only is not None and client.round not in self.only:
            return upload, after
        bad = (client.id == BAD) | self.by_all
        if self.apart and not bool(bad):
            return upload, after
        return self.spoil(upload, bad), after


ATTACKS: tuple[tuple[str, Spoil, str], ...] = (
    ("a NaN", WithValue(nan), "not_finite"),
    ("an infinite number", WithValue(inf), "not_finite"),
    ("numbers 1e30 times too large", Scaled(1e30), "outsized"),
    ("arrays with a dimension too many", longer, "shape"),
)


def hostile_uploads_harm_nobody_else(case: Case) -> Iterator[str]:
    """Honest replies pass the guard; a hostile one is rejected, and its sender keeps its state."""
    for outcome in case.reference:
        if outcome.rejected:
            client, reason = outcome.rejected[0]
            yield (
                f"the guard rejected an honest reply, of client {client} in round {outcome.index}, "
                f"as '{reason}': upload finite numbers; a field 'size' must be a sample count from "
                "1 to client.own"
            )
            return
    if not any(leaf.is_floating_point() for leaf in leaves(case.walk[0].step.uploads)):
        raise NotApplicableError("its uploads hold no numbers that could be spoilt")
    spoilt: AnyAlgorithm = case.algorithm
    for index, (_, spoil, _) in enumerate(ATTACKS):
        spoilt = Spoilt(spoilt, spoil, apart=spoil is longer, only=(index,))
    outcomes = case.trial.of(spoilt).run(rounds=len(ATTACKS), participation=1.0)
    for (told, _, reason), outcome in zip(ATTACKS, outcomes, strict=True):
        if outcome.rejected != ((BAD, reason),):
            yield (
                f"client {BAD} uploaded {told}, and the guard rejected "
                f"{outcome.rejected or 'nobody'}; expected {((BAD, reason),)}: upload numbers as "
                "they are, in floating types, and let the guard judge them"
            )
            return
    yield from _harm(case, outcomes[-1])


def _harm(case: Case, last: Outcome) -> Iterator[str]:
    """What hostile uploads that were rejected changed all the same."""
    mine, (_, start) = torch.tensor([BAD]), case.trial.init()
    if words := difference(take(last.states, mine), take(start, mine), "state"):
        yield f"client {BAD}, all of whose uploads were rejected, lost its state: {words}"
    if not all(bool(leaf.isfinite().all()) for leaf in leaves(last.mixture)):
        yield (
            f"{place_of(case.algorithm, 'aggregate')}: hostile uploads were rejected, and yet a "
            "predictor is not finite; divide by sums over those who replied"
        )
