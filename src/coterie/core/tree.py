"""Messages and states as trees: tensors in (named) tuples, with one row per client.

:func:`flatten` and :func:`unflatten` are the only code that walks such trees. An ordinary leaf has
one row per client; the models of a :class:`Bank` are one table that all clients share.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rows import Rows, dense

Tree = Any  # a Tensor, a Bank, or a (named) tuple of trees; () is the empty message


class Bank(NamedTuple):
    """Models that several clients receive, without a copy for each client.

    Copies are made only when they are sent over a network. A slot of -1 is empty.
    """

    models: Tensor  # [n, P], one table for all clients
    slot: Tensor  # [m, M] rows of the table; [M] inside ``local``
    owner: Tensor  # [m, M] the client that owns the model of each slot

    def rows(self) -> tuple[Tensor, Tensor]:
        """The models of one client's slots ``[M, P]`` and which slots hold one ``[M]``."""
        return self.models[self.slot.clamp(min=0)], self.slot >= 0


def bank(models: Rows, owner: Tensor) -> Bank:
    """A :class:`Bank` of the models of ``owner [m, M]`` (-1: empty slot), from ``models [K, P]``.

    Where fewer than K models are asked for, only those are copied into the table.
    """
    if owner.numel() >= len(models):
        return Bank(dense(models), owner, owner)
    slot = torch.arange(owner.numel(), device=owner.device).view(owner.shape)
    return Bank(models[owner.flatten().clamp(min=0)], torch.where(owner >= 0, slot, -1), owner)


class Parcels(NamedTuple):
    """Vectors of which only some are sent: the others are empty, or the receiver has them already.

    In a simulation a message holds all vectors; only those that are sent count as traffic.
    """

    vectors: Tensor  # [m, n, P]; [n, P] inside ``local``
    sent: Tensor  # [m, n] whether each vector is sent over the network


# ---- walking -------------------------------------------------------------------------------------


def flatten(tree: Tree, whole: tuple[type, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf of a tree with its path, left to right.

    A path has a dot before each step: the name of a field, or a number in a plain tuple. Everything
    that is not a tuple is a leaf, and so is a tuple of one of the types ``whole``. The path of a
    tree that is a leaf itself is empty.

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
    """A tree with the structure of ``like`` and other leaves, in the order of :func:`flatten`."""
    return _filled(like, iter(leaves), whole)


def _filled(like: Tree, leaves: Iterator[Any], whole: tuple[type, ...]) -> Tree:
    if not isinstance(like, tuple) or isinstance(like, whole):
        return next(leaves)
    parts = [_filled(part, leaves, whole) for part in like]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def walk(f: Callable[..., Tree], tree: Tree, *others: Tree) -> Tree:
    """Apply ``f`` leaf by leaf to trees of one structure.

    A Bank keeps its table; ``f`` is applied to its slots and owners, which have one row per client.
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
    """As :func:`walk`, for an ``f`` of tensors: a RowTable or StateRows becomes one tensor."""
    return walk(lambda *leaves: f(*map(dense, leaves)), tree, *others)


def leaves(tree: Tree) -> Iterator[Tensor]:
    """All tensors that have one row per client, left to right."""
    for _, leaf in flatten(tree, (Bank,)):
        yield from (leaf.slot, leaf.owner) if isinstance(leaf, Bank) else (dense(leaf),)


def dims(tree: Tree) -> Tree:
    """``in_dims`` for vmap: 0 for leaves with one row per client, None for a Bank's table."""
    per_client = Bank(None, 0, 0)  # type: ignore[arg-type]
    found = flatten(tree, (Bank,))
    return unflatten(
        tree, [per_client if isinstance(leaf, Bank) else 0 for _, leaf in found], (Bank,)
    )


# ---- rows ----------------------------------------------------------------------------------------


def take(tree: Tree, rows: Tensor) -> Tree:
    return walk(lambda leaf: leaf[rows.to(leaf.device)], tree)


def row(tree: Tree, i: int) -> Tree:
    return map_leaves(lambda leaf: leaf[i], tree)


def stack(trees: list[Tree]) -> Tree:
    """Stack the trees of single clients into one tree with one row per client."""
    return map_leaves(lambda *parts: torch.stack(parts), trees[0], *trees[1:])


def concat(trees: list[Tree]) -> Tree:
    """Concatenate chunks of rows into one tree."""
    return map_leaves(lambda *parts: torch.cat(parts), trees[0], *trees[1:])


def where(condition: Tensor, new: Tree, old: Tree) -> Tree:
    """``new`` where the (scalar) condition holds, else ``old``."""
    return map_leaves(lambda a, b: torch.where(condition, a, b), new, old)


def move(tree: Tree, device: torch.device) -> Tree:
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True), tree)


def count_bytes(message: Tree) -> int:
    """The size of a message on a network in bytes, all rows together.

    A Bank counts a model and its owner for every filled slot: a client that asks for five models is
    sent five. Parcels count only the vectors that are sent.
    """
    return sum(_bytes(part) for _, part in flatten(message, (Bank, Parcels)))


def _bytes(part: Tensor | Bank | Parcels) -> int:
    if isinstance(part, Bank):
        a_slot = part.models.shape[-1] * part.models.element_size()
        return int((part.slot >= 0).sum()) * (a_slot + part.owner.element_size())
    if isinstance(part, Parcels):
        return int(part.sent.sum()) * part.vectors.shape[-1] * part.vectors.element_size()
    return part.numel() * part.element_size()
