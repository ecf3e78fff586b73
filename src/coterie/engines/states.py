"""Stores the clients' states between rounds: on the device, on the host, or on disk."""

import os
import tempfile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core import tree
from ..core.rows import Allocate, StateRows
from ..core.tree import Tree


class StateStore:
    """The states of all clients, one row per client; a round reads and writes some rows.

    Clients whose states were never written share the initial row.
    """

    def __init__(self, states: Tree, allocate: Allocate) -> None:
        self.states: Tree = tree.walk(lambda rows: StateRows(rows, allocate), states)

    def rows(self, clients: Tensor) -> Tree:
        """A copy of the states of some clients."""
        return tree.take(self.states, clients)

    def all_rows(self) -> Tree:
        """The states of all clients without a copy; read only."""
        return tree.map_leaves(lambda leaf: leaf, self.states)

    def put(self, clients: Tensor, rows: Tree) -> None:
        """Replace the states of some clients."""
        tree.walk(lambda held, new: held.write(clients, new), self.states, rows)

    def view(self) -> Any:
        """A lazy view of all states: an array is assembled when its field is read."""
        return _viewed(self.states)


def in_memory(device: torch.device) -> Allocate:
    """An allocator of tensors in the memory of a device."""

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return allocate


def in_files(folder: Path | None = None) -> Allocate:
    """An allocator of tensors in unlinked files of a folder, which vanish with the process."""

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel()
        if not size:
            return torch.empty(shape, dtype=dtype)
        handle, name = tempfile.mkstemp(prefix=".states-", suffix=".tmp", dir=folder)
        try:
            mapped = torch.from_file(name, shared=True, size=size, dtype=dtype)
        finally:
            os.close(handle)
            Path(name).unlink()
        return mapped.view(shape)

    return allocate


def _viewed(states: Tree) -> Any:
    if isinstance(states, StateRows):
        return states.dense()
    return _View(states) if isinstance(states, _Named) else tuple(map(_viewed, states))


@runtime_checkable
class _Named(Protocol):
    _fields: tuple[str, ...]


class _View:
    def __init__(self, states: Tree) -> None:
        self._states = states

    def __getattr__(self, name: str) -> Any:
        return _viewed(getattr(self._states, name))
