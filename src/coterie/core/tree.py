"""Messages and states as trees: tensors in NamedTuples, with a row a client.

``torch.utils._pytree`` walks such trees too; this module exists for :class:`Bank`, which must stay
one table for all clients where an ordinary leaf has a row for each.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rows import Rows, Shelf, Table, dense

Tree = Any  # a Tensor, a Bank, or a (named) tuple of trees; () is the empty message
Leaf = Tensor | Table | Shelf  # the last two only in what is kept: messages are tensors


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


def _rebuild(like: Tree, parts: list[Tree]) -> Tree:
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def walk(f: Callable[..., Tree], tree: Tree, *others: Tree) -> Tree:
    """Apply ``f`` leaf by leaf; a Bank keeps its table and is mapped on what has a row a client."""
    if isinstance(tree, Leaf):
        return f(tree, *others)
    if isinstance(tree, Bank):
        slots = f(tree.slot, *(other.slot for other in others))
        return Bank(tree.models, slots, f(tree.owner, *(other.owner for other in others)))
    return _rebuild(tree, [walk(f, *parts) for parts in zip(tree, *others, strict=True)])


def map_leaves(f: Callable[..., Tree], tree: Tree, *others: Tree) -> Tree:
    """As :func:`walk`, for an ``f`` of tensors: what has its rows apart is put together."""
    return walk(lambda *leaves: f(*map(dense, leaves)), tree, *others)


def leaves(tree: Tree) -> Iterator[Tensor]:
    """All tensors with a row a client, left to right."""
    if isinstance(tree, Leaf):
        yield dense(tree)
    elif isinstance(tree, Bank):
        yield from (tree.slot, tree.owner)
    else:
        for part in tree:
            yield from leaves(part)


def dims(tree: Tree) -> Tree:
    """``in_dims`` for vmap: 0 for what has a row a client, None for a Bank's table."""
    if isinstance(tree, Tensor):
        return 0
    if isinstance(tree, Bank):
        return Bank(None, 0, 0)  # type: ignore[arg-type]
    return _rebuild(tree, [dims(part) for part in tree])


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
    if isinstance(message, Tensor):
        return message.numel() * message.element_size()
    if isinstance(message, Bank):
        a_slot = message.models.shape[-1] * message.models.element_size()
        return int((message.slot >= 0).sum()) * (a_slot + message.owner.element_size())
    if isinstance(message, Parcels):
        return int(message.sent.sum()) * message.vectors.shape[-1] * message.vectors.element_size()
    return sum(count_bytes(part) for part in message)
