"""C++ for this machine, compiled when it is first needed and kept in the user's cache.

The sources lie in ``cpp/`` and need nothing but a compiler: their sizes are macros, and they are
called through ``ctypes``, which lets other threads run meanwhile. Where there is no compiler, or it
fails, the caller goes on with torch. The environment's ``CXX`` names another compiler; empty, none.

A library in the cache is loaded only if this user wrote it and its sha256 is the one beside it
(``storage.cache``); otherwise it is compiled again. Its name holds a hash of everything that it was
made of: source, options, the compiler's version and the instructions of this processor.
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
    "-fno-strict-aliasing",  # vectors are read as numbers, and memory is used again
    "-fno-tree-slp-vectorize",  # of GCC 12 and 13 drops entries (docs/results/speed.md)
)
_CPUINFO = Path("/proc/cpuinfo")
_FEATURES = ("flags", "features", "isa", "cpu", "model name")  # lines of /proc/cpuinfo
REALS = {torch.float32: "float", torch.float64: "double"}
_compiling = threading.Lock()
_waits: list[float] = []  # seconds of this process for each library of kernels


def library(name: str, dtype: torch.dtype, **sizes: int) -> ctypes.CDLL | None:
    """The functions of a source for these sizes; None where they cannot be had."""
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
    """Seconds that this process has waited for libraries of kernels; they are needed once."""
    return sum(_waits)


def cached() -> bool:
    """Whether the user's cache holds machine code already."""
    folder = kept_files.folder() / "native"
    return folder.is_dir() and any(folder.glob("*.so"))


def compiled(name: str, source: str, macros: tuple[str, ...]) -> ctypes.CDLL:
    """The functions of this source; :class:`CompilerError` where they cannot be had."""
    with _compiling:
        found = _compiled(name, source, macros)
    if isinstance(found, CompilerError):
        raise found
    return found


def at(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where a tensor lies."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    named = os.environ.get("CXX")
    candidates = ("c++", "g++", "clang++") if named is None else (named,)
    return next((found for name in candidates if (found := shutil.which(name))), None)


def version() -> str | None:
    """The first line that the compiler says of itself; None without a compiler."""
    command = compiler()
    return None if command is None else _said(command, "--version").partition("\n")[0]


@cache
def sources() -> str:
    """A fingerprint of the C++ that comes with coterie."""
    text = "".join(path.read_text() for path in sorted(_SOURCES.iterdir()) if path.is_file())
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def _compiled(name: str, source: str, macros: tuple[str, ...]) -> ctypes.CDLL | CompilerError:
    """A library or what went wrong, which is not tried again."""
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
    """All of it or nothing, whoever else compiles the same."""
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        text, made = Path(place) / "source.cpp", Path(place) / "made.so"
        text.write_text(source)
        defined = [f"-D{macro}" for macro in macros]
        arguments = [command, *_OPTIONS, f"-I{_SOURCES}", *defined, str(text), "-o", str(made)]
        subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120)
        kept_files.put(made, path)


def _folder() -> Path:
    """The user's own folder for machine code, or one for this process where there can be none."""
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
    """What code for this machine may not be run on another: its instructions.

    The compiler says which it uses, on every architecture; Linux says which there are.
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
    """What the compiler answers; nothing where it does not."""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
