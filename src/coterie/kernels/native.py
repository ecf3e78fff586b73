"""C++ for this machine, compiled when it is first needed and kept in the user's cache.

The sources lie in ``cpp/`` and need nothing but a compiler: their sizes are macros, and they are
called through ``ctypes``, which lets other threads run meanwhile. Where there is no compiler, or it
fails, the caller goes on with torch. The environment's ``CXX`` names another compiler; empty, none.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from ..cache import folder

_LOG = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent / "cpp"
_OPTIONS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"),
    "-fno-strict-aliasing",  # vectors are read as numbers, and memory is used again
    "-fno-tree-slp-vectorize",  # of GCC 12 and 13 drops entries (docs/results/speed.md)
)
REALS = {torch.float32: "float", torch.float64: "double"}
_compiling = Lock()


def library(name: str, dtype: torch.dtype, **sizes: int) -> ctypes.CDLL | None:
    """The functions of a source for these sizes; None where they cannot be had."""
    if dtype not in REALS:
        return None
    macros = f"REAL={REALS[dtype]}", *(f"{key}={size}" for key, size in sizes.items())
    return compiled(name, (_SOURCES / f"{name}.cpp").read_text(), macros)


def compiled(name: str, source: str, macros: tuple[str, ...]) -> ctypes.CDLL | None:
    """The functions of this source; None where they cannot be had."""
    with _compiling:
        return _compiled(name, source, macros)


def at(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where a tensor lies."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    named = os.environ.get("CXX")
    candidates = ("c++", "g++", "clang++") if named is None else (named,)
    return next((found for name in candidates if (found := shutil.which(name))), None)


@cache
def _compiled(name: str, source: str, macros: tuple[str, ...]) -> ctypes.CDLL | None:
    command = compiler()
    if command is None:
        return None
    parts = (command, _machine(), *_OPTIONS, *macros, source, *_headers())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    kept = folder() / "native" / f"{name}-{key}.so"
    try:
        return _loaded(command, source, macros, kept)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        _LOG.info("%s is not compiled, which is slower: %s", name, said)
        return None


def _loaded(command: str, source: str, macros: tuple[str, ...], kept: Path) -> ctypes.CDLL:
    if kept.exists():
        try:
            return ctypes.CDLL(str(kept))
        except OSError:  # spoilt: it is made anew
            kept.unlink()
    _compile(command, source, macros, kept)
    return ctypes.CDLL(str(kept))


def _compile(command: str, source: str, macros: tuple[str, ...], kept: Path) -> None:
    """All of it or nothing, whoever else compiles the same."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as place:
        text, made = Path(place) / "source.cpp", Path(place) / "made.so"
        text.write_text(source)
        defined = [f"-D{macro}" for macro in macros]
        arguments = [command, *_OPTIONS, f"-I{_SOURCES}", *defined, str(text), "-o", str(made)]
        subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120)
        made.replace(kept)


@cache
def _headers() -> tuple[str, ...]:
    return tuple(path.read_text() for path in sorted(_SOURCES.glob("*.h")))


@cache
def _machine() -> str:
    """What code for this machine may not be run on another: its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith("flags")), "")
