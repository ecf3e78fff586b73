"""Compiles C++ for this machine when it is first needed, and keeps it in the user's cache.

The sources are in ``cpp/`` and need only a compiler: their sizes are macros, and they are called
through ``ctypes``, which lets other threads run meanwhile. If there is no compiler, or it fails,
the caller falls back to torch. The environment variable ``CXX`` names another compiler; if it is
empty, none is used.

A library in the cache is loaded only if this user wrote it and its sha256 equals the one stored
beside it (``storage.cache``); otherwise it is compiled again. Its name contains a hash of source,
options, the compiler's version and the instruction set of this processor.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CompilerError
from ...storage import cache as kept_files

_LOG = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent / "cpp"
_OPTIONS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"),
    "-fno-strict-aliasing",  # vectors are read as numbers, and memory is reused
    "-fno-tree-slp-vectorize",  # in GCC 12 and 13 it drops entries (docs/results/speed.md)
)
_CPUINFO = Path("/proc/cpuinfo")
_FEATURES = ("flags", "features", "isa", "cpu", "model name")  # lines of /proc/cpuinfo
REALS = {torch.float32: "float", torch.float64: "double"}
_compiling = threading.Lock()
_waits: list[float] = []  # seconds that this process waited for each kernel library


def library(name: str, dtype: torch.dtype, **sizes: int) -> ctypes.CDLL | None:
    """The compiled library of a source for these sizes; None if it cannot be compiled."""
    if dtype not in REALS:
        return None
    macros = f"REAL={REALS[dtype]}", *(f"{key}={size}" for key, size in sizes.items())
    return _library(name, macros)


@cache
def _library(name: str, macros: tuple[str, ...]) -> ctypes.CDLL | None:
    began = time.perf_counter()
    try:
        return compiled(name, (_SOURCES / f"{name}.cpp").read_text(), macros)
    except CompilerError:
        return None
    finally:
        _waits.append(time.perf_counter() - began)


def waited() -> float:
    """Seconds that this process has waited for kernel libraries, each of which is made once."""
    return sum(_waits)


def cached() -> bool:
    """Whether the user's cache contains compiled libraries."""
    folder = kept_files.folder() / "native"
    return folder.is_dir() and any(folder.glob("*.so"))


def compiled(name: str, source: str, macros: tuple[str, ...]) -> ctypes.CDLL:
    """The compiled library of this source; raises :class:`CompilerError` if that fails."""
    with _compiling:
        found = _compiled(name, source, macros)
    if isinstance(found, CompilerError):
        raise found
    return found


def at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def compiler() -> str | None:
    named = os.environ.get("CXX")
    candidates = ("c++", "g++", "clang++") if named is None else (named,)
    return next((found for name in candidates if (found := shutil.which(name))), None)


def version() -> str | None:
    """The first line of the compiler's version; None without a compiler."""
    command = compiler()
    return None if command is None else _said(command, "--version").partition("\n")[0]


@cache
def _compiled(name: str, source: str, macros: tuple[str, ...]) -> ctypes.CDLL | CompilerError:
    """The library or the error; a failed compilation is not tried again."""
    command = compiler()
    if command is None:
        return CompilerError("there is no C++ compiler (CXX names one)")
    parts = (command, _said(command, "--version"), machine(command), *_OPTIONS, *macros)
    key = hashlib.sha256("\n".join((*parts, source, *_headers())).encode()).hexdigest()[:24]
    try:
        path = _folder() / f"{name}-{key}.so"
        if path.exists() or path.is_symlink():
            flaw = kept_files.flaw(path)
            if flaw is None:
                return ctypes.CDLL(str(path))
            _LOG.warning("%s is not trusted and is compiled again: %s", path, flaw)
        _compile(command, source, macros, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        _LOG.info("%s is not compiled, which is slower: %s", name, said)
        return CompilerError(f"{command} did not compile it: {said.strip()[:200]}")


def _compile(command: str, source: str, macros: tuple[str, ...], path: Path) -> None:
    """Compile to a file, atomically: other processes may compile the same source."""
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        text, made = Path(place) / "source.cpp", Path(place) / "made.so"
        text.write_text(source)
        defined = [f"-D{macro}" for macro in macros]
        arguments = [command, *_OPTIONS, f"-I{_SOURCES}", *defined, str(text), "-o", str(made)]
        subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120)
        kept_files.put(made, path)


def _folder() -> Path:
    """The user's folder for compiled libraries, or a temporary one if it cannot be used."""
    try:
        return kept_files.private(kept_files.folder() / "native")
    except OSError as error:
        _LOG.warning("machine code is compiled anew in every process: %s", error)
        return _for_this_process()


@cache
def _for_this_process() -> Path:
    made = tempfile.mkdtemp(prefix="coterie-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@cache
def _headers() -> tuple[str, ...]:
    return tuple(path.read_text() for path in sorted(_SOURCES.glob("*.h")))


@cache
def machine(command: str) -> str:
    """The instruction set of this machine: code compiled for it may not run on another.

    The compiler reports the instructions that it uses, on every architecture; Linux reports those
    that the processor has.
    """
    said = _said(command, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    named = {line for line in lines if line.partition(":")[0].strip().lower() in _FEATURES}
    return "\n".join((platform.machine(), platform.processor(), *sorted(named), said))


@cache
def _said(command: str, *arguments: str) -> str:
    """The compiler's output for these arguments; empty if it fails."""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
