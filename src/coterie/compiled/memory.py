"""What becomes of memory that is freed."""

import ctypes
import mmap
import sys
import weakref
from collections import deque

import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt
_MOST = 32 * 2**20  # glibc takes no more
_NEVER = 2**31 - 1
_LARGE = 4 * 2**20
_SPARE: deque[mmap.mmap] = deque(maxlen=4)  # stretches of memory that nobody uses any more


def keep_freed_memory() -> None:
    """Let the process keep what it frees for what it allocates next.

    A played round allocates and frees the same large tensors in every step. By default glibc gives
    them back to the system each time, and the system then hands out empty pages one by one: more
    than a third of a round of small models. Elsewhere than on Linux with glibc nothing happens.
    """
    if sys.platform != "linux":
        return
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_MMAP_THRESHOLD, _MOST)
        tune(_TRIM_THRESHOLD, _NEVER)


def roomy(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for a tensor of this shape.

    What is large on a CPU lies in huge pages where the system has them, and once nobody uses it
    any more it is the room of the next of its size: glibc would give back so much at once.
    """
    count, size = shape.numel(), shape.numel() * dtype.itemsize
    if sys.platform != "linux" or device.type != "cpu" or size < _LARGE:
        return torch.empty(shape, dtype=dtype, device=device)
    stretch = _stretch(size)
    view = memoryview(stretch)
    weakref.finalize(view, _SPARE.append, stretch).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=count).view(shape)


def _stretch(size: int) -> mmap.mmap:
    for spare in list(_SPARE):
        if len(spare) == size:
            try:
                _SPARE.remove(spare)
            except ValueError:  # another thread was faster
                continue
            return spare
    made = mmap.mmap(-1, size)
    made.madvise(mmap.MADV_HUGEPAGE)
    return made
