"""Sets threads, precision and allocator of the process for a run, and restores them afterwards.

No engine and no constructor changes the process: the code that starts a run enters
:func:`settings`.
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
    """Set the process for a run, and restore the old settings; None leaves a setting unchanged.

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

    The vmap engine's threads compute chunks with one core each, so its choice sets no threads of
    torch, and the server half uses those that are set already. Memory is kept for replay on a CPU,
    because a replayed round allocates and frees the same large tensors in every step.
    """
    threads = None if choice["engine"] == "vmap" else choice["threads"]
    return {"threads": threads, "keep_memory": bool(choice.get("trace")) and device.type == "cpu"}


@contextmanager
def kept_memory() -> Iterator[None]:
    """Let the process keep freed memory; does nothing except on Linux with glibc.

    By default glibc returns large tensors to the system each time they are freed, and the system
    then provides empty pages one by one: this takes more than a third of a replayed round of small
    models. The old thresholds of glibc cannot be queried. Afterwards the thresholds are those that
    glibc's own adjustment reaches in a process that has freed a tensor of 32 MiB, and unused memory
    is returned.
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
    """A function of the C library; None unless the C library is glibc."""
    found: Callable[..., int] | None = None
    if sys.platform == "linux":
        found = getattr(ctypes.CDLL(None), name, None)
    return found
