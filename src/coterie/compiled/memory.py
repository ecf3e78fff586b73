"""Reuses large buffers for results that every round allocates anew."""

import mmap
import sys
import weakref
from collections import deque

import torch
from torch import Tensor

_LARGE = 4 * 2**20  # bytes; smaller tensors are allocated by torch
_SPARES = 4  # unused mappings that are kept for reuse


class Allocator:
    """Allocates tensors; a large buffer on a CPU is reused once nothing refers to it.

    Large buffers are mapped in huge pages if the system has them. glibc would return memory of that
    size to the system as soon as it is freed, and the next round would fault in every page.
    """

    def __init__(self) -> None:
        self._spare: deque[mmap.mmap] = deque(maxlen=_SPARES)

    def empty(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of this shape whose entries are not initialised."""
        count, size = shape.numel(), shape.numel() * dtype.itemsize
        if sys.platform != "linux" or device.type != "cpu" or size < _LARGE:
            return torch.empty(shape, dtype=dtype, device=device)
        mapping = self._mapping(size)
        view = memoryview(mapping)
        weakref.finalize(view, self._spare.append, mapping).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=count).view(shape)

    def _mapping(self, size: int) -> mmap.mmap:
        for spare in list(self._spare):
            if len(spare) == size:
                try:
                    self._spare.remove(spare)
                except ValueError:  # another thread took it
                    continue
                return spare
        made = mmap.mmap(-1, size)
        made.madvise(mmap.MADV_HUGEPAGE)
        return made
