"""Decides which uploads may be aggregated, and gives a reason for every rejection.

With every engine, :func:`screen` checks the replies of the expected layout
(:mod:`coterie.core.messages`): finite numbers of a plausible size, a plausible sample count and, if
asked for, no outsized step. Last, :func:`aggregate` refuses an aggregate that is not finite. A
rejected client keeps its old state, and the other clients go on. The guard uses only what a server
knows: the messages it sent, and the norms of the vectors it accepted from each client before.

A clean run is not changed by a bit: nothing is clipped, reordered or rescaled.

By convention the sample count is the field ``size`` of an upload. An upload with several copies of
a client's work says in its field ``valid`` which copies are finite; the others are sent as zeros,
and the method leaves them out (WAFFLE, Weight Erosion). Such an upload is accepted, and the loss of
a copy is recorded as a rejection.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Round
from ..core.messages import Rejection
from ..core.ranges import AtLeastOne, Positive
from ..core.tree import Bank, Tree

SAMPLES, VALID, SENT = "size", "valid", "sent"
FEWEST = 3  # uploads that a meaningful median needs
SINGLE = 1e6  # bound on numbers that are not a model's: absolute, and relative to the median


@dataclass(frozen=True)
class Guard:
    """The checks beyond the layout of a message.

    Fields:
        on: reject numbers that are not finite, and impossible sample counts.
        norm: reject steps longer than so many times the median step, and clients that return
            what they were sent; None rejects none.
        bound: reject vectors so many times longer than the median of the round and than every
            vector the client was sent or had sent before (docs/reliability.md). None rejects none.
    """

    on: bool = True
    norm: Positive | None = None
    bound: AtLeastOne | None = 100.0


# ---- all uploads of a round ----------------------------------------------------------------------


def screen(
    uploads: Tree,
    round: Round,
    sizes: Tensor,
    guard: Guard,
    sent: Tree = (),
    accepted: Tensor | None = None,
) -> tuple[Tensor, tuple[Rejection, ...]]:
    """The positions of the uploads that may be aggregated, and the rejections with their reasons.

    ``sizes [population]`` are the sample counts that the clients declared; ``sent`` holds the
    messages to them, one row per client; ``accepted [population]`` is the largest norm of a vector
    that was accepted from each client so far (:func:`remember`).
    """
    none = torch.zeros(len(sizes), dtype=torch.float64)
    before = (none if accepted is None else accepted)[round.clients.cpu()]
    fine = torch.ones(len(round.clients), dtype=torch.bool, device=round.clients.device)
    if not guard.on:
        return fine.nonzero().flatten(), ()
    rejected: list[Rejection] = []
    checks = [("not_finite", finite(uploads, fine)), ("samples", counted(uploads, round, sizes))]
    for reason, passed in checks:
        rejected += _rejections(round, fine & ~passed, reason)
        fine &= passed
    if guard.bound is not None:
        passed = possible(uploads, sent, before, fine, guard.bound)
        rejected += _rejections(round, fine & ~passed, "outsized")
        fine &= passed
    if guard.norm is not None:
        found = [("norm", moderate(uploads, sent, fine, guard.norm))]
        found += [("idle", moved(uploads, sent, fine))]
        for reason, passed in found:
            rejected += _rejections(round, fine & ~passed, reason)
            fine &= passed
    rejected += _rejections(round, fine & ~complete(uploads, fine), "copies")
    return fine.nonzero().flatten(), tuple(rejected)


def _rejections(round: Round, whom: Tensor, reason: str) -> list[Rejection]:
    return [Rejection(client, reason) for client in round.clients[whom].tolist()]


def aggregate(
    algorithm: AnyAlgorithm, server: Tree, uploads: Tree, round: Round, guard: Guard
) -> tuple[Tree, Tensor, tuple[Rejection, ...]]:
    """The server after the round, the positions of the aggregated uploads, and the rejections.

    An upload that the method cannot aggregate is rejected. If the new server is not finite, the
    longest uploads are rejected until it is, as if those clients had not answered. If no upload is
    left, the server is unchanged.
    """
    rejected: list[Rejection] = []
    kept = torch.arange(len(round.clients), device=round.clients.device)
    while len(kept):
        part = round._replace(clients=round.clients[kept])
        whole = len(kept) == len(round.clients)
        try:
            new = algorithm.aggregate(server, uploads if whole else tree.take(uploads, kept), part)
        except Exception:
            out = _unfit(algorithm, server, uploads, round, kept)
            if bool(out.all()) or not guard.on:
                raise  # an error of the method, not of one client
            rejected += _rejections(part, out, "values")
            kept = kept[~out]
            continue
        if not guard.on or not spoiled(server, new):
            return new, kept, tuple(rejected)
        size = _longest(uploads, round.clients)[kept]
        out = size >= size.max() / 2
        rejected += _rejections(part, out, "overflow")
        kept = kept[~out]
    return server, kept, tuple(rejected)


def _unfit(
    algorithm: AnyAlgorithm, server: Tree, uploads: Tree, round: Round, kept: Tensor
) -> Tensor:
    """Which uploads the method cannot aggregate even alone, such as a choice of no cluster."""
    found = []
    for at in kept:
        alone = round._replace(clients=round.clients[at[None]])
        try:
            algorithm.aggregate(server, tree.take(uploads, at[None]), alone)
            found.append(False)
        except Exception:
            found.append(True)
    out = torch.tensor(found, device=kept.device)
    return out if bool(out.any()) else torch.ones_like(out)


def spoiled(before: Tree, after: Tree) -> bool:
    """Whether the server has more non-finite entries than before; some may be there initially.

    A RowTable is skipped: it holds uploads as they came, which were checked before.
    """
    return any(
        bool(~new.sum().isfinite()) and _flaws(new) > _flaws(old)
        for old, new in _arrays(before, after)
        if new.is_floating_point()
    )


def _arrays(before: Tree, after: Tree) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a server's arrays before and after a round."""
    had = dict(tree.flatten(before))
    for path, new in tree.flatten(after):
        old = had.get(path)
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            yield old, new


def _flaws(leaf: Tensor) -> int:
    return int((~leaf.isfinite()).sum())


def _longest(uploads: Tree, like: Tensor) -> Tensor:
    """The largest norm of each client's vectors in any field ``[m]``."""
    none = torch.zeros(len(like), dtype=torch.float64, device=like.device)
    fields = (leaf for _, leaf in _fields(uploads) if leaf.is_floating_point())
    return torch.stack([none, *(_lengths(leaf).to(like.device) for leaf in fields)]).amax(0)


def complete(uploads: Tree, everybody: Tensor) -> Tensor:
    """Whether all copies of each client are valid ``[m]``; True if a method sends no copies."""
    whole = everybody.clone()
    for name, leaf in _fields(uploads):
        if name == VALID:
            whole &= leaf.reshape(len(leaf), -1).all(1).to(whole.device)
    return whole


def finite(uploads: Tree, everybody: Tensor) -> Tensor:
    """Whether all numbers of each client are finite ``[m]``.

    The norm of a vector with a NaN or an infinity is never finite, and computing it takes no
    memory. Only rows with a non-finite norm (it may have overflowed) are checked entry by entry.
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
    """Whether each client's sample count is above 0 and at most what it declared ``[m]``."""
    most = sizes.to(round.clients.device)[round.clients]
    fine = torch.ones_like(round.clients, dtype=torch.bool)
    for name, leaf in _fields(uploads):
        if name == SAMPLES:
            claimed = leaf.reshape(len(leaf), -1).to(most.device)
            fine &= ((claimed > 0) & (claimed <= most[:, None])).all(1)
    return fine


def remember(accepted: Tensor, uploads: Tree, clients: Tensor) -> Tensor:
    """The largest norm accepted from each client ``[population]``, updated after a round."""
    at = clients.cpu()
    vectors = [leaf for _, leaf in _fields(uploads) if leaf.is_floating_point() and leaf.dim() > 1]
    lengths = torch.stack([accepted[at], *(_lengths(leaf).cpu() for leaf in vectors)]).amax(0)
    return accepted.index_copy(0, at, lengths)


def possible(uploads: Tree, sent: Tree, accepted: Tensor, fine: Tensor, most: float) -> Tensor:
    """Whether each client's numbers are of a plausible size ``[m]``.

    A vector may be ``most`` times as long as the median vector of its field, as the longest of its
    width that the client was sent, or as the longest that was ``accepted [m]`` from it before. The
    latter two are computed only if the median does not decide: fewer than three uploads have none.
    Numbers unlike any that were sent or accepted before (losses, weights on others) may honestly
    differ by orders of magnitude: they may be a million, or a million times the median.
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
            starts = (v for v in _vectors(sent) if v.shape[-1] == width > 1)
            known = [_lengths(start).to(fine.device) for start in starts]
            before = accepted.to(fine.device) if width > 1 else torch.zeros_like(lengths)
            longest = torch.stack([before, *known]).amax(0)
            limit = torch.where(longest > 0, most * longest, SINGLE * typical.clamp(min=1.0))
            passed &= ~doubtful | (lengths <= limit)
    return passed


def _lengths(leaf: Tensor) -> Tensor:
    """The largest norm of each client's vectors ``[m]``, float64.

    Norms are computed in the tensor's own dtype, which is fast, and again if that overflows.
    """
    rows = leaf.reshape(len(leaf), *(1,) * (3 - leaf.dim()), *leaf.shape[1:]).flatten(1, -2)
    if not rows.shape[1]:
        return torch.zeros(len(leaf), dtype=torch.float64, device=leaf.device)
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1).amax(1).double()
    over = ~lengths.isfinite()
    if bool(over.any()):
        lengths[over] = torch.linalg.vector_norm(rows[over], dim=-1, dtype=torch.float64).amax(1)
    return lengths


def moderate(uploads: Tree, sent: Tree, fine: Tensor, most: float) -> Tensor:
    """Whether each client's steps are at most ``most`` times the median of ``fine`` ``[m]``."""
    passed = torch.ones_like(fine)
    for lengths, typical, _ in _steps(uploads, sent, fine):
        passed &= lengths <= most * typical
    return passed


def moved(uploads: Tree, sent: Tree, fine: Tensor) -> Tensor:
    """Whether each client did more than to return the models that it was sent ``[m]``.

    A client that sends no vector, because nobody asked it for one, is not blamed.
    """
    steps = [lengths > 0 for lengths, _, model in _steps(uploads, sent, fine) if model]
    quiet = [~leaf.any(-1) for name, leaf in _fields(uploads) if name == SENT]
    return torch.stack([*steps, *quiet]).any(0) if steps else torch.ones_like(fine)


def _steps(uploads: Tree, sent: Tree, fine: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Each client's step in a field ``[m]``, the median of ``fine``, and whether it is a model's.

    A step is the distance from the nearest vector that the client was sent, or from zero, which is
    the starting point of methods that send differences. Fields whose median is zero are left out.
    """
    if int(fine.sum()) < FEWEST:
        return
    starts = list(_vectors(sent))
    widths = {start.shape[-1] for start in starts}
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
        if typical > 0:
            yield lengths, typical, leaf.shape[-1] in widths


def _norms(rows: Tensor) -> Tensor:
    """Norms in float64, without a float64 copy of all rows."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return lengths


def _fields(message: Tree) -> Iterator[tuple[str, Tensor]]:
    """Every array with the name of its field; an index in a plain tuple is not a name."""
    for path, leaf in tree.flatten(message):
        names = [step for step in path.split(".") if step and not step.isdigit()]
        yield names[-1] if names else "", leaf


def _vectors(message: Tree) -> Iterator[Tensor]:
    """Every floating-point array as ``[m, n, P]`` (m clients); of a Bank, the models in use."""
    for _, leaf in tree.flatten(message, (Bank,)):
        if isinstance(leaf, Bank):
            yield leaf.models[leaf.slot.clamp(min=0)]
        elif leaf.is_floating_point() and leaf.dim() >= 2 and leaf.numel():
            yield leaf.reshape(len(leaf), -1, leaf.shape[-1])
