"""Collects the rows of chunks of clients into one tensor per leaf, if possible without copies."""

from collections.abc import Callable
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from ..core import tree
from ..core.calls import Destination
from ..core.tree import Tree

Chunk = list[int]  # positions among the round's clients
Empty = Callable[[torch.Size, torch.dtype, torch.device], Tensor]  # allocates a tensor


class Gathered:
    """Collects the rows of all chunks in one tensor per leaf."""

    def __init__(self, count: int, empty: Empty) -> None:
        self._count, self._empty, self._making = count, empty, Lock()
        self._buffers: dict[int, Tensor] = {}  # by the index of a result: its preallocated buffer
        self._rows: dict[int, Tensor] = {}  # by the index of a leaf: its rows, maybe in a buffer
        self._like: Tree = None

    @property
    def rows(self) -> Tree:
        """The rows of all chunks."""
        leaves = iter(range(len(self._rows)))
        return tree.map_leaves(lambda _: self._rows[next(leaves)], self._like)

    def destinations(self, chunk: Chunk) -> Callable[[int], Destination] | None:
        """Slices of preallocated buffers for a chunk's results, so that they need no copy."""
        if not in_order(chunk):
            return None

        def destination(at: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            with self._making:
                if at not in self._buffers:
                    self._buffers[at] = self._allocated(shape, dtype, torch.device("cpu"))
            return self._buffers[at][span(chunk)]

        return lambda at: partial(destination, at)

    def put(self, chunk: Chunk, part: Tree) -> None:
        """Store the rows of a chunk."""
        self._like = part
        for at, leaf in enumerate(tree.leaves(part)):
            if in_order(chunk) and len(chunk) == self._count:
                self._rows[at] = leaf
                continue
            with self._making:
                if at not in self._rows:
                    self._rows[at] = self._buffer(at, leaf)
            _put(self._rows[at], chunk, leaf)

    def _buffer(self, at: int, leaf: Tensor) -> Tensor:
        """The preallocated buffer if its shape and dtype match, else a new one."""
        made = self._buffers.get(at)
        if made is not None and (made.shape[1:], made.dtype) == (leaf.shape[1:], leaf.dtype):
            return made
        return self._allocated(leaf.shape, leaf.dtype, leaf.device)

    def _allocated(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._empty(torch.Size((self._count, *shape[1:])), dtype, device)


def _put(rows: Tensor, chunk: Chunk, leaf: Tensor) -> None:
    if not in_order(chunk):
        rows.index_copy_(0, torch.tensor(chunk, device=rows.device), leaf)
        return
    place = rows[span(chunk)]
    if place.data_ptr() != leaf.data_ptr() or not leaf.is_contiguous():
        place.copy_(leaf)


def span(chunk: Chunk) -> slice:
    """The slice of the rows of a chunk of consecutive positions."""
    return slice(chunk[0], chunk[-1] + 1)


def rows_of(rows: Tree, chunk: Chunk) -> Tree:
    """The rows of a chunk; a view if its positions are consecutive, else a copy."""
    if in_order(chunk):
        return tree.map_leaves(lambda leaf: leaf[span(chunk)], rows)
    return tree.take(rows, torch.tensor(chunk))


def in_order(positions: Chunk) -> bool:
    """Whether the positions are consecutive and ascending."""
    return positions == list(range(positions[0], positions[0] + len(positions)))
