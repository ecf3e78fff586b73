"""Measures the peak memory of a block of code, beyond what was held before it.

On a GPU torch's allocator reports it. On a CPU it is the rise of the process's resident memory, by
the kernel's high-water mark. Freed memory is returned to the system first; otherwise a round would
seem to need only what the last one did not leave behind. None if the kernel keeps no such mark.
"""

import ctypes
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 2**20


class Peak:
    """The peak memory of a block; set when the block ends."""

    mib: float | None = None


@contextmanager
def watched(device: torch.device) -> Iterator[Peak]:
    """Measure the peak memory of the block."""
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.mib = (torch.cuda.max_memory_allocated(device) - before) / MIB
        return
    resident = _fresh_mark()
    yield peak
    highest = _kib("VmHWM")
    if resident is not None and highest is not None:
        peak.mib = max(0, highest - resident) / 1024


def _fresh_mark() -> int | None:
    """Reset the high-water mark to the current resident memory, and return that in KiB."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc: freed memory may hide what the block needs
        return None
    trim(0)
    try:
        RESET.write_text("5")
    except OSError:
        return None
    return _kib("VmRSS")


def _kib(field: str) -> int | None:
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1])
