"""Messages and states as trees: tensors in (named) tuples, with one row per client.

:func:`flatten` and :func:`unflatten` are the only code that walks such trees. A :class:`Bank` stays
one table for all clients, where an ordinary leaf has a row for each.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rows import Rows, dense

Tree = Any  # a Tensor, a Bank, or a (named) tuple of trees; () is the empty message


class Bank(NamedTuple):
    """Models that several clients receive, without a copy for each.

    Only a network has to send copies. A slot of -1 is empty.
    """

    models: Tensor  # [n, P], one table for everybody
    slot: Tensor  # [m, M] rows of the table; [M] inside ``local``
    owner: Tensor  # [m, M] whose models they are

    def rows(self) -> tuple[Tensor, Tensor]:
        """The models of one client's slots ``[M, P]`` and which slots hold one ``[M]``."""
        return self.models[self.slot.clamp(min=0)], self.slot >= 0


def bank(models: Rows, owner: Tensor) -> Bank:
    """The models of some owners ``[m, M]``, -1 for nobody, out of everybody's ``[K, P]``.

    Where those are fewer than everybody, only they are looked at.
    """
    if owner.numel() >= len(models):
        return Bank(dense(models), owner, owner)
    slot = torch.arange(owner.numel(), device=owner.device).view(owner.shape)
    return Bank(models[owner.flatten().clamp(min=0)], torch.where(owner >= 0, slot, -1), owner)


class Parcels(NamedTuple):
    """Vectors of which only some travel: the others are nothing, or lie with the receiver already.

    In a simulation a message holds them all; on a wire only what is sent has weight.
    """

    vectors: Tensor  # [m, n, P]; [n, P] inside ``local``
    sent: Tensor  # [m, n] whether it crosses the wire


# ---- walking -------------------------------------------------------------------------------------


def flatten(tree: Tree, whole: tuple[type, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf, left to right, with the path that leads to it.

    A path has a dot before each step: the name of a field, or a number in a plain tuple. All that
    is no tuple is a leaf, and so is a tuple of one of the types ``whole``. The path of a tree that
    is a leaf itself is empty.

    >>> [path for path, _ in flatten((Parcels(torch.zeros(1), torch.ones(1)), torch.zeros(2)))]
    ['.0.vectors', '.0.sent', '.1']
    """
    if not isinstance(tree, tuple) or isinstance(tree, whole):
        yield "", tree
        return
    names = getattr(tree, "_fields", range(len(tree)))
    for name, part in zip(names, tree, strict=True):
        for path, leaf in flatten(part, whole):
            yield f".{name}{path}", leaf


def unflatten(like: Tree, leaves: Iterable[Any], whole: tuple[type, ...] = ()) -> Tree:
    """A tree of the structure of ``like`` with other leaves, as :func:`flatten` lists them."""
    return _filled(like, iter(leaves), whole)


def _filled(like: Tree, leaves: Iterator[Any], whole: tuple[type, ...]) -> Tree:
    if not isinstance(like, tuple) or isinstance(like, whole):
        return next(leaves)
    parts = [_filled(part, leaves, whole) for part in like]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def walk(f: Callable[..., Tree], tree: Tree, *others: Tree) -> Tree:
    """Apply ``f`` leaf by leaf to trees of one structure.

    A Bank keeps its table; ``f`` is applied to what has a row per client.
    """
    lists = [[leaf for _, leaf in flatten(each, (Bank,))] for each in (tree, *others)]
    found = [_applied(f, *leaves) for leaves in zip(*lists, strict=True)]
    return unflatten(tree, found, (Bank,))


def _applied(f: Callable[..., Tree], leaf: Any, *others: Any) -> Tree:
    if not isinstance(leaf, Bank):
        return f(leaf, *others)
    slots = f(leaf.slot, *(other.slot for other in others))
    return Bank(leaf.models, slots, f(leaf.owner, *(other.owner for other in others)))


def map_leaves(f: Callable[..., Tree], tree: Tree, *others: Tree) -> Tree:
    """As :func:`walk`, for an ``f`` of tensors: rows that are held apart are put together."""
    return walk(lambda *leaves: f(*map(dense, leaves)), tree, *others)


def leaves(tree: Tree) -> Iterator[Tensor]:
    """All tensors with a row per client, left to right."""
    for _, leaf in flatten(tree, (Bank,)):
        yield from (leaf.slot, leaf.owner) if isinstance(leaf, Bank) else (dense(leaf),)


def dims(tree: Tree) -> Tree:
    """``in_dims`` for vmap: 0 for what has a row per client, None for a Bank's table."""
    per_client = Bank(None, 0, 0)  # type: ignore[arg-type]
    found = flatten(tree, (Bank,))
    return unflatten(
        tree, [per_client if isinstance(leaf, Bank) else 0 for _, leaf in found], (Bank,)
    )


# ---- rows ----------------------------------------------------------------------------------------


def take(tree: Tree, rows: Tensor) -> Tree:
    """The rows of some clients."""
    return walk(lambda leaf: leaf[rows.to(leaf.device)], tree)


def row(tree: Tree, i: int) -> Tree:
    """One client's part."""
    return map_leaves(lambda leaf: leaf[i], tree)


def stack(trees: list[Tree]) -> Tree:
    """Rows of single clients as one tree."""
    return map_leaves(lambda *parts: torch.stack(parts), trees[0], *trees[1:])


def concat(trees: list[Tree]) -> Tree:
    """Chunks of rows as one tree."""
    return map_leaves(lambda *parts: torch.cat(parts), trees[0], *trees[1:])


def where(condition: Tensor, new: Tree, old: Tree) -> Tree:
    """``new`` where the (scalar) condition holds, else ``old``."""
    return map_leaves(lambda a, b: torch.where(condition, a, b), new, old)


def move(tree: Tree, device: torch.device) -> Tree:
    """The tree on a device."""
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True), tree)


def count_bytes(message: Tree) -> int:
    """What a message weighs on a wire, all rows together.

    A Bank counts a model and its owner for every filled slot: who asks for five is sent five.
    Parcels count what is sent.
    """
    return sum(_bytes(part) for _, part in flatten(message, (Bank, Parcels)))


def _bytes(part: Tensor | Bank | Parcels) -> int:
    if isinstance(part, Bank):
        a_slot = part.models.shape[-1] * part.models.element_size()
        return int((part.slot >= 0).sum()) * (a_slot + part.owner.element_size())
    if isinstance(part, Parcels):
        return int(part.sent.sum()) * part.vectors.shape[-1] * part.vectors.element_size()
    return part.numel() * part.element_size()
