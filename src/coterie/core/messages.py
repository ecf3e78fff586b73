"""A client's reply, and the reasons for which a reply is rejected.

:func:`admit` checks replies that arrive one by one: the client was asked, the round is the current
one, no reply comes twice, and each reply has the expected layout.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .algorithm import Round
from .tree import Tree, flatten

REASONS = {
    "lost": "no answer: the client could not be reached, or its process ended",
    "unreadable": "a message that is not made of the method's own types, or is cut short",
    "stale_state": "the client holds another state than the one that was accepted last",
    "refused": "the site does not do what it was asked: its own rules forbid it, or it failed",
    "withdrawn": "the site has left the federation",
    "not_agreed": "the site does not know the experiment: it has not agreed to it",
    "not_approved": "the site's owner has not approved the request, or no longer",
    "policy": "the request asks for more than the site's policy allows",
    "ended": "the experiment has ended at the site",
    "unsigned": "a message that the federation's operator has not signed for this site",
    "range": "a score that the metric cannot have",
    "wrong_client": "from a client that was not asked in this round",
    "wrong_round": "of another round: late, or sent again",
    "duplicate": "a second answer of a client in the same round",
    "fields": "other fields than expected: one missing, one too many, or in another order",
    "shape": "an array of another shape than expected",
    "dtype": "an array of another number type than expected",
    "not_finite": "a number that is NaN or infinite",
    "copies": "one of several copies is NaN or infinite: that copy is left out, the others count",
    "samples": "a sample count that is not above 0 and at most what the client declared",
    "norm": "a step longer than guard.norm times the median step of the round",
    "idle": "no step: the client sent back what it was sent (with guard.norm)",
    "outsized": "a vector more than guard.bound times as long as the median one of the round and "
    "as any that the client was sent or had sent before",
    "values": "numbers that the method cannot aggregate, such as a choice that does not exist",
    "overflow": "finite, but the aggregate with it would not be",
}

Layout = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]  # path, shape and dtype of each array


class Rejection(NamedTuple):
    """A reply that was left out of the aggregate, with the reason."""

    client: int
    reason: str  # one of REASONS


class Reply(NamedTuple):
    """What one client sent back."""

    client: int
    round: int
    upload: Tree
    state: Tree = ()  # the client's new state, where the engine stores it for the client


def layout(message: Tree) -> Layout:
    """The path, shape and dtype of each array in a message, in order."""
    found = list(flatten(message))
    for _, leaf in found:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"a message is made of tensors and tuples; found {type(leaf).__name__}")
    return tuple((path, tuple(leaf.shape), leaf.dtype) for path, leaf in found)


def difference(found: Layout, expected: Layout) -> str | None:
    """The reason to reject a message whose layout is not the expected one; None if it is."""
    if [array[0] for array in found] != [array[0] for array in expected]:
        return "fields"
    if [array[1] for array in found] != [array[1] for array in expected]:
        return "shape"
    return None if found == expected else "dtype"


def usual(layouts: Sequence[Layout]) -> Layout | None:
    """The layout of more than half of the messages; None where no layout has a majority."""
    ranked = Counter(layouts).most_common(1)
    return ranked[0][0] if ranked and 2 * ranked[0][1] > len(layouts) else None


def admit(
    replies: Sequence[Reply], round: Round, like: tuple[Tree, Tree] | None = None
) -> tuple[tuple[Reply, ...], tuple[Rejection, ...]]:
    """The replies that are accepted, in the round's order, and a rejection for every other reply.

    ``like`` is an (upload, state) of the expected layout. Without it, the layout of more than half
    of the replies is expected; where no layout has a majority, all replies are rejected.
    """
    asked = round.clients.tolist()
    seen: dict[int, Reply] = {}
    rejected = []
    for reply in replies:
        reason = _misplaced(reply, round.index, asked, seen)
        if reason is None:
            seen[reply.client] = reply
        else:
            rejected.append(Rejection(reply.client, reason))
    found = {client: _layout_or_none((reply.upload, reply.state)) for client, reply in seen.items()}
    known = [one for one in found.values() if one is not None]
    expected = usual(known) if like is None else layout(like)
    for client, one in found.items():
        fault = "fields" if one is None or expected is None else difference(one, expected)
        if fault is not None:
            rejected.append(Rejection(client, fault))
            del seen[client]
    return tuple(seen[client] for client in asked if client in seen), tuple(rejected)


def _misplaced(reply: Reply, index: int, asked: list[int], seen: dict[int, Reply]) -> str | None:
    if reply.client not in asked:
        return "wrong_client"
    if reply.round != index:
        return "wrong_round"
    return "duplicate" if reply.client in seen else None


def _layout_or_none(message: Any) -> Layout | None:
    try:
        return layout(message)
    except TypeError:
        return None
