"""Where clients' states wait between rounds: on the device, on the host, or on disk."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import tree
from ..core.rows import Allocate, StateRows
from ..core.tree import Tree


def in_memory(device: torch.device) -> Allocate:
    """Allocate in the memory of a device."""

    def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return room


def in_files(folder: Path | None = None) -> Allocate:
    """Allocate in files of a folder. They have no names, and are gone when the process is."""

    def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
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

    return room


def shelve(states: Tree, room: Allocate) -> Tree:
    """States on shelves of their own."""
    return tree.walk(lambda rows: StateRows(rows, room), states)


def put(states: Tree, ids: Tensor, rows: Tree) -> None:
    """Replace the states of some clients."""
    tree.walk(lambda shelf, new: shelf.write(ids, new), states, rows)


def opened(states: Tree) -> Any:
    """States as a reader sees them: an array is put together when it is asked for."""
    if isinstance(states, StateRows):
        return states.dense()
    return _Opened(states) if hasattr(states, "_fields") else tuple(map(opened, states))


class _Opened:
    def __init__(self, states: Tree) -> None:
        self._states = states

    def __getattr__(self, name: str) -> Any:
        return opened(getattr(self._states, name))
