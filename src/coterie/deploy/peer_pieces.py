"""The arrays that peers send each other, and the checks of those that arrive."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithms.federico import Reply
from ..core.messages import difference, layout
from ..core.tree import Tree
from ..training.guard import Guard


class Change(NamedTuple):
    """What a user of a model returns to its owner."""

    vector: Tensor  # [P]
    weight: Tensor  # []


def change_of(reply: Reply, slot: int) -> Tree:
    """What is sent to the owner of a slot: its weight and, unless it is zero, the vector."""
    vector, travels = reply.change.vectors[slot], bool(reply.change.sent[slot])
    return (reply.weight[slot], *([vector] if travels else []))


def checked_change(body: Tree, like: Tensor) -> tuple[Change | None, str | None]:
    """A change that arrived, or the reason to refuse it; both None if its sender has none.

    ``like`` is a model ``[P]``.
    """
    if isinstance(body, tuple) and not body:
        return None, None
    weight, whole = torch.zeros((), dtype=torch.float64), isinstance(body, tuple) and len(body) > 1
    reason = _unlike(body, (weight, like) if whole else (weight,))
    if reason is not None:
        return None, reason
    return Change(body[1] if whole else torch.zeros_like(like), body[0]), None


def checked_model(body: Tree, own: Tensor, guard: Guard) -> tuple[Tensor, str | None]:
    """A model that arrived, and the reason to leave it out; ``own`` is the site's own model."""
    reason = _unlike(body, own)
    if reason is not None or not guard.on:
        return body, reason
    length, usual = (float(torch.linalg.vector_norm(w.double())) for w in (body, own))
    if not math.isfinite(length):
        return body, "not_finite"
    outsized = guard.bound is not None and length > guard.bound * max(usual, 1.0)
    return body, "outsized" if outsized else None


def _unlike(body: Tree, expected: Tree) -> str | None:
    """The reason to refuse a message that has not the expected layout."""
    try:
        return difference(layout(body), layout(expected))
    except TypeError:
        return "fields"
