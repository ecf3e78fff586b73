"""What may enter an aggregation, and why something may not.

Messages that arrive one by one pass :func:`admit`: the right client, the right round, not twice,
and of the very form that is expected. Then all uploads of a round, whichever engine they come
from, pass :func:`screen`: finite numbers of a possible size, a sample count that can be true and,
where it is asked for, no outsized step. Last, :func:`aggregate` refuses an aggregate that is not
finite. Whoever is left out keeps the state it had, and the others go on.

A clean run is not changed by a bit: nothing is clipped, reordered or rescaled.

By convention a sample count is the field ``size`` of an upload. An upload that carries several
copies of a client's work says in its field ``valid`` which of them are finite; those that are not
are sent as zeros, and the method leaves them out (WAFFLE, Weight Erosion). The upload is let in,
and that it lost a copy is written down as a rejection.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Round
from ..core.ranges import AtLeastOne, Positive
from ..core.tree import Bank, Tree

REASONS = {
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
    "outsized": "a vector more than guard.bound times as long as the median one of the round and "
    "as any that the client had",
    "overflow": "finite, but the aggregate with it would not be",
}
SAMPLES, VALID = "size", "valid"
FEWEST = 3  # uploads that have a median worth the name
SINGLE = 1e6  # a number that is no model's may be so large, and so many times the median one

Form = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]  # path, shape and type of every array


class Rejection(NamedTuple):
    """An upload that was left out."""

    client: int
    reason: str  # one of REASONS


@dataclass(frozen=True)
class Guard:
    """What is checked beyond the form of a message.

    Fields:
        on: reject what is not finite and sample counts that cannot be true.
        norm: reject steps longer than so many times the median step; None rejects none.
        bound: reject vectors so many times longer than the median of the round and than every
            vector the client had: a bound against the catastrophic, which no honest client meets
            (docs/reliability.md has the margin). None rejects none.
    """

    on: bool = True
    norm: Positive | None = None
    bound: AtLeastOne | None = 100.0


class Reply(NamedTuple):
    """What one client sent back."""

    client: int
    round: int
    upload: Tree
    state: Tree = ()


# ---- one message at a time -----------------------------------------------------------------------


def form(message: Tree, path: str = "") -> Form:
    """Which arrays a message has: their place, shape and type, in order."""
    if isinstance(message, Tensor):
        return ((path, tuple(message.shape), message.dtype),)
    if not isinstance(message, tuple):
        raise TypeError(f"a message is made of tensors and tuples; found {type(message).__name__}")
    names = getattr(message, "_fields", range(len(message)))
    pairs = zip(names, message, strict=True)
    return tuple(array for name, part in pairs for array in form(part, f"{path}.{name}"))


def difference(found: Form, expected: Form) -> str | None:
    """The reason to reject a message of one form where another is expected."""
    if [array[0] for array in found] != [array[0] for array in expected]:
        return "fields"
    if [array[1] for array in found] != [array[1] for array in expected]:
        return "shape"
    return None if found == expected else "dtype"


def usual(forms: Sequence[Form]) -> Form | None:
    """The form of more than half of the messages; None where there is none."""
    ranked = Counter(forms).most_common(1)
    return ranked[0][0] if ranked and 2 * ranked[0][1] > len(forms) else None


def admit(
    replies: Sequence[Reply], round: Round, like: tuple[Tree, Tree] | None = None
) -> tuple[tuple[Reply, ...], tuple[Rejection, ...]]:
    """The replies that may be put together, in the round's order, and the others with a reason.

    ``like`` is an (upload, state) of the expected form; without it, the form of more than half of
    the replies is expected, and where there is none nobody is believed.
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
    forms = {client: _form_or_none((reply.upload, reply.state)) for client, reply in seen.items()}
    known = [found for found in forms.values() if found is not None]
    expected = usual(known) if like is None else form(like)
    for client, found in forms.items():
        fault = "fields" if found is None or expected is None else difference(found, expected)
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


def _form_or_none(message: Any) -> Form | None:
    try:
        return form(message)
    except TypeError:
        return None


# ---- all uploads of a round ----------------------------------------------------------------------


def screen(
    uploads: Tree, round: Round, sizes: Tensor, guard: Guard, had: Sequence[Tree] = ()
) -> tuple[Tensor, tuple[Rejection, ...]]:
    """Positions of the uploads that may be aggregated, and the others with their reason.

    ``sizes [population]`` are the sample counts the clients have declared; ``had`` is what they
    had before they worked, a row each: what they were sent and what they kept.
    """
    fine = torch.ones(len(round.clients), dtype=torch.bool, device=round.clients.device)
    if not guard.on:
        return fine.nonzero().flatten(), ()
    rejected: list[Rejection] = []
    checks = [("not_finite", finite(uploads, fine)), ("samples", counted(uploads, round, sizes))]
    for reason, passed in checks:
        rejected += _rejections(round, fine & ~passed, reason)
        fine &= passed
    limits = (("outsized", possible, guard.bound), ("norm", moderate, guard.norm))
    for reason, check, most in limits:
        if most is not None:
            passed = check(uploads, had, fine, most)
            rejected += _rejections(round, fine & ~passed, reason)
            fine &= passed
    rejected += _rejections(round, fine & ~complete(uploads, fine), "copies")
    return fine.nonzero().flatten(), tuple(rejected)


def _rejections(round: Round, whom: Tensor, reason: str) -> list[Rejection]:
    return [Rejection(client, reason) for client in round.clients[whom].tolist()]


def aggregate(
    algorithm: AnyAlgorithm, server: Tree, uploads: Tree, round: Round, guard: Guard
) -> tuple[Tree, Tensor, tuple[Rejection, ...]]:
    """The server after the round, the positions of the uploads in it, and who made it overflow.

    Where the new server is not finite, the longest uploads are left out until it is. They are named
    and the server is as if they had not answered; where nobody is left it is as it was.
    """
    rejected: list[Rejection] = []
    kept = torch.arange(len(round.clients), device=round.clients.device)
    while len(kept):
        part = round._replace(clients=round.clients[kept])
        whole = len(kept) == len(round.clients)
        new = algorithm.aggregate(server, uploads if whole else tree.take(uploads, kept), part)
        if not guard.on or not spoiled(server, new):
            return new, kept, tuple(rejected)
        size = _longest(uploads, round.clients)[kept]
        out = size >= size.max() / 2
        rejected += _rejections(part, out, "overflow")
        kept = kept[~out]
    return server, kept, tuple(rejected)


def spoiled(before: Tree, after: Tree) -> bool:
    """Whether a server that was finite is not any more; an entry may be infinite from the start.

    A table holds uploads as they came, which have been looked at.
    """
    return any(
        bool(~new.sum().isfinite()) and _flaws(new) > _flaws(old)
        for old, new in _arrays(before, after)
        if new.is_floating_point()
    )


def _arrays(before: Tree, after: Tree) -> Iterator[tuple[Tensor, Tensor]]:
    """Every array of a server before and after a round."""
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        yield before, after
    elif isinstance(before, tuple) and isinstance(after, tuple):
        for parts in zip(before, after, strict=True):
            yield from _arrays(*parts)


def _flaws(leaf: Tensor) -> int:
    return int((~leaf.isfinite()).sum())


def _longest(uploads: Tree, like: Tensor) -> Tensor:
    """The length of each client's longest vector of any field ``[m]``."""
    none = torch.zeros(len(like), dtype=torch.float64, device=like.device)
    fields = (leaf for _, leaf in _fields(uploads) if leaf.is_floating_point())
    return torch.stack([none, *(_lengths(leaf).to(like.device) for leaf in fields)]).amax(0)


def complete(uploads: Tree, everybody: Tensor) -> Tensor:
    """Whose copies are all valid ``[m]``; everybody's, of a method that sends no copies."""
    whole = everybody.clone()
    for name, leaf in _fields(uploads):
        if name == VALID:
            whole &= leaf.reshape(len(leaf), -1).all(1).to(whole.device)
    return whole


def finite(uploads: Tree, everybody: Tensor) -> Tensor:
    """Whose numbers are all finite ``[m]``.

    The length of a vector with a NaN or an infinity in it is never finite, and takes no memory;
    only rows whose length is not (it may have overflowed) are looked at number by number.
    """
    fine = everybody.clone()
    for _, leaf in _fields(uploads):
        if leaf.is_floating_point():
            doubtful = ~_lengths(leaf).isfinite()
            if bool(doubtful.any()):
                good = leaf[doubtful].flatten(1).isfinite().all(1) if leaf.dim() > 1 else False
                fine[doubtful.to(fine.device)] &= good
    return fine


def counted(uploads: Tree, round: Round, sizes: Tensor) -> Tensor:
    """Whose sample count is above 0 and at most what the client declared ``[m]``."""
    most = sizes.to(round.clients.device)[round.clients]
    fine = torch.ones_like(round.clients, dtype=torch.bool)
    for name, leaf in _fields(uploads):
        if name == SAMPLES:
            claimed = leaf.reshape(len(leaf), -1).to(most.device)
            fine &= ((claimed > 0) & (claimed <= most[:, None])).all(1)
    return fine


def possible(uploads: Tree, had: Sequence[Tree], fine: Tensor, most: float) -> Tensor:
    """Whose numbers are of a possible size ``[m]``.

    A vector may be ``most`` times as long as the median one of its field, or as the longest of the
    vectors of its width that the client had, of which models are one. What the client had is
    measured only where the median does not settle it: fewer than three uploads have none. Numbers
    that the client had nothing like (losses, weights on others) may honestly differ by orders of
    magnitude: they may be a million, or a million times the median.
    """
    passed = torch.ones_like(fine)
    for _, leaf in _fields(uploads):
        if not leaf.is_floating_point() or not bool(fine.any()):
            continue
        lengths = _lengths(leaf).to(fine.device)
        typical = lengths[fine].median() if int(fine.sum()) >= FEWEST else lengths.new_zeros(())
        doubtful = fine & (lengths > most * typical)
        if bool(doubtful.any()):
            width = leaf.shape[-1] if leaf.dim() > 1 else 1
            starts = (v for m in had for v in _vectors(m) if v.shape[-1] == width > 1)
            known = [_lengths(start).to(fine.device) for start in starts]
            longest = torch.stack([torch.zeros_like(lengths), *known]).amax(0)
            limit = torch.where(longest > 0, most * longest, SINGLE * typical.clamp(min=1.0))
            passed &= ~doubtful | (lengths <= limit)
    return passed


def _lengths(leaf: Tensor) -> Tensor:
    """The length of each client's longest vector ``[m]``, float64.

    Lengths are taken in the numbers' own type, which is quick, and again where that overflows.
    """
    rows = leaf.reshape(len(leaf), *(1,) * (3 - leaf.dim()), *leaf.shape[1:]).flatten(1, -2)
    if not rows.shape[1]:
        return torch.zeros(len(leaf), dtype=torch.float64, device=leaf.device)
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1).amax(1).double()
    over = ~lengths.isfinite()
    if bool(over.any()):
        lengths[over] = torch.linalg.vector_norm(rows[over], dim=-1, dtype=torch.float64).amax(1)
    return lengths


def moderate(uploads: Tree, had: Sequence[Tree], fine: Tensor, most: float) -> Tensor:
    """Whose steps are at most ``most`` times the median step of those still in ``[m]``.

    A step is the distance from the nearest vector the client had, or from zero, which is where
    methods that send differences start.
    """
    passed = torch.ones_like(fine)
    if int(fine.sum()) < FEWEST:
        return passed
    starts = [leaf for message in had for leaf in _vectors(message)]
    for _, leaf in _fields(uploads):
        rows = leaf.reshape(len(leaf), -1)
        if not leaf.is_floating_point() or rows.shape[1] < 2:
            continue
        lengths = _norms(rows)
        for start in starts:
            if start.shape[-1] == rows.shape[1]:
                start = start.to(rows.device)
                apart = [_norms(rows - start[:, j]) for j in range(start.shape[1])]
                lengths = torch.stack([lengths, *apart]).amin(0)
        lengths = lengths.to(fine.device)
        typical = lengths[fine].median()
        passed &= (lengths <= most * typical) | (typical == 0)
    return passed


def _norms(rows: Tensor) -> Tensor:
    """Lengths in float64, without a copy of everything in float64."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return lengths


def _fields(message: Tree, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every array with the name of its field."""
    if isinstance(message, Tensor):
        yield name, message
    else:
        names = getattr(message, "_fields", [name] * len(message))
        for part_name, part in zip(names, message, strict=True):
            yield from _fields(part, part_name)


def _vectors(message: Tree) -> Iterator[Tensor]:
    """Every floating array with a row a client as ``[m, n, P]``; a Bank's models by their slots."""
    if isinstance(message, Bank):
        yield message.models[message.slot.clamp(min=0)]
    elif isinstance(message, Tensor):
        if message.is_floating_point() and message.dim() >= 2 and message.numel():
            yield message.reshape(len(message), -1, message.shape[-1])
    else:
        for part in message:
            yield from _vectors(part)
