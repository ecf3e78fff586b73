"""What becomes of memory that is freed."""

import ctypes
import sys

import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt
_MOST = 32 * 2**20  # glibc takes no more
_NEVER = 2**31 - 1
_HUGE_PAGES, _HUGE = 14, 2**21  # madvise's name for them, and their size


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


def roomy(like: Tensor, rows: int) -> Tensor:
    """Room for rows like these, in huge pages where the system has them: fewer to hand out."""
    room = like.new_empty(rows, *like.shape[1:])
    size = room.numel() * room.element_size()
    if sys.platform == "linux" and room.device == torch.device("cpu") and size >= 2 * _HUGE:
        first = -(-room.data_ptr() // _HUGE) * _HUGE
        length = (room.data_ptr() + size - first) // _HUGE * _HUGE
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(first), ctypes.c_size_t(length), _HUGE_PAGES)
    return room
