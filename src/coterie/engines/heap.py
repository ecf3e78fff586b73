"""What becomes of memory that is freed."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt
_MOST = 32 * 2**20  # glibc takes no more
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let the process keep what it frees for what it allocates next.

    A played round allocates and frees the same large tensors in every step. By default glibc gives
    them back to the system each time, and the system then hands out empty pages one by one: up to
    half the time of a round of small models. Elsewhere than on Linux with glibc nothing happens.
    """
    if sys.platform != "linux":
        return
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_MMAP_THRESHOLD, _MOST)
        tune(_TRIM_THRESHOLD, _NEVER)
