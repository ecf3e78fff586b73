"""Caches the choices of ``auto``, so that a second run gets the same engine and digest."""

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import StoreError
from ..storage import files
from ..storage.cache import folder
from .base import MOST_THREADS, Work
from .vmap import can_trace

_MOST_BYTES = 1 << 20  # of the cache file; a larger file was not written by coterie


def cache_file() -> Path:
    """The cache file with all choices."""
    return folder() / "engines.json"


def key_of(on: Work, *asked: object) -> str:
    """The key of a choice: a hash of all that affects an engine's speed, and of ``asked``."""
    parts = (
        repr(on.problem.model.module),
        tuple(on.problem.shape),
        on.problem.recipe,
        min(on.problem.population, 50),
        str(on.problem.dtype),
        _device_name(on.problem.device),
        torch.get_num_threads(),
        torch.__version__,
        __version__,
        can_trace() and shutil.which(os.environ.get("CXX", "c++")),
        *asked,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def recall(key: str, most_clients: int) -> dict[str, Any] | None:
    """The cached choice for a key; None if there is none or its format is invalid."""
    found = _read().get(key)
    return found if isinstance(found, dict) and _valid(found, most_clients) else None


def _valid(found: dict[str, Any], most_clients: int) -> bool:
    if found.get("engine") not in ("loop", "vmap"):
        return False
    numbers, flags = {"threads": MOST_THREADS}, list[str]()
    if found["engine"] == "vmap":
        numbers["chunk"], flags = most_clients, ["trace", "compiled"]
    return all(
        type(found.get(name)) is int and 1 <= found[name] <= most for name, most in numbers.items()
    ) and all(type(found.get(name)) is bool for name in flags)


def remember(key: str, choice: dict[str, Any]) -> None:
    """Store a choice in the cache; a cache that cannot be written is ignored."""
    path = cache_file()
    with contextlib.suppress(OSError, StoreError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps({**_read(), key: choice}, indent=1))


def _read() -> dict[str, Any]:
    try:
        path = cache_file()
        found = json.loads(path.read_text()) if path.stat().st_size <= _MOST_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
