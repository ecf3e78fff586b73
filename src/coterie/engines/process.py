"""What a run sets for the whole process: threads, precision, allocator. Restored when it ends.

No engine and no constructor changes the process. Whoever begins a run enters :func:`settings`.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # glibc's parameters of mallopt
_LARGEST = 32 * 2**20  # glibc accepts no larger mmap threshold
_NEVER = 2**31 - 1


@contextmanager
def settings(
    *, threads: int | None = None, tf32: bool | None = None, keep_memory: bool = False
) -> Iterator[None]:
    """Set the process for a run, and restore what was set before; None leaves a setting alone.

    ``threads`` are torch's threads within an operation, ``tf32`` permits that precision on a GPU,
    ``keep_memory`` keeps freed memory for the next allocation (:func:`kept_memory`).
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_num_threads(), products.allow_tf32, convolutions.allow_tf32
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        if tf32 is not None:
            products.allow_tf32 = convolutions.allow_tf32 = tf32
        if keep_memory:
            with kept_memory():
                yield
        else:
            yield
    finally:
        if threads is not None:
            torch.set_num_threads(before[0])
        if tf32 is not None:
            products.allow_tf32, convolutions.allow_tf32 = before[1:]


def of_engine(choice: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The settings that a resolved engine (``Engine.choice``) runs under.

    Threads of the vmap engine compute chunks, each with one core; the server half of a method then
    uses the threads that are set. A replayed round on a CPU allocates and frees the same large
    tensors in every step.
    """
    threads = None if choice["engine"] == "vmap" else choice["threads"]
    return {"threads": threads, "keep_memory": bool(choice.get("play")) and device.type == "cpu"}


@contextmanager
def kept_memory() -> Iterator[None]:
    """Let the process keep freed memory; does nothing except on Linux with glibc.

    By default glibc returns large tensors to the system each time they are freed, and the system
    then hands out empty pages one by one: more than a third of a replayed round of small models.
    glibc cannot be asked for its thresholds. Afterwards they are those that its own adjustment
    reaches in a process that has freed a tensor of 32 MiB, and unused memory is returned.
    """
    tune, trim = _glibc("mallopt"), _glibc("malloc_trim")
    if tune is None or trim is None:
        yield
        return
    tune(_MMAP_THRESHOLD, _LARGEST)
    tune(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        tune(_TRIM_THRESHOLD, 2 * _LARGEST)
        trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library, where the C library is glibc."""
    found: Callable[..., int] | None = None
    if sys.platform == "linux":
        found = getattr(ctypes.CDLL(None), name, None)
    return found
