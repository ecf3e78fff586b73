"""Reads the pickles of CIFAR without executing any code in them.

A pickle is a program that may call any function it can name. This reader knows three names, those
that numpy arrays need, and gives the program inert placeholders for them. The result consists of
lists, dictionaries, strings, numbers, and :class:`PickledArray` objects, which :func:`array`
converts to numpy arrays.
"""

import io
import math
import pickle
from typing import Any

import numpy as np

from ...errors import DataError
from ..arrays import Array


class PickledArray:
    """The pickle's description of one array, before it is checked and converted."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Kind:
    """The pickle's description of a dtype."""

    __slots__ = ("code",)

    def __init__(self, code: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and the like, which do not matter for single bytes."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return "ndarray"
        if (module, name) == ("numpy", "dtype"):
            return self._kind
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return self._reconstruct
        raise DataError(f"it names '{module}.{name}', which no CIFAR file needs; nothing was run")

    # Bound methods: a pickle can set attributes of a function or class, but not of a bound method.
    def _kind(self, code: Any, *_: Any) -> _Kind:
        return _Kind(code)

    def _reconstruct(self, *_: Any) -> PickledArray:
        return PickledArray()


def loads(content: bytes, where: str) -> dict[str, Any]:
    """Load the dictionary in a CIFAR pickle, with its keys as text."""
    try:
        found = _Reader(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a broken pickle can raise anything
        raise DataError(
            f"{where}: not a CIFAR batch: {error}; fetch the original from its publisher"
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{where}: not a CIFAR batch: expected a dictionary")
    return {text(key): value for key, value in found.items()}


def text(value: Any) -> str:
    """Convert a string of Python 2 or 3 to text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def array(stored: Any, where: str) -> Array:
    """Check the pickle's description of an array, and convert it to a numpy array of bytes."""
    try:
        _, shape, kind, fortran, raw = stored.state
        good = isinstance(raw, bytes) and text(kind.code) == "u1" and not fortran
        good = good and all(isinstance(n, int) and n >= 0 for n in shape)
    except (AttributeError, TypeError, ValueError):
        good = False
    if not good or len(raw) != math.prod(shape):
        raise DataError(f"{where}: expected an array of bytes and the shape it has")
    return np.frombuffer(raw, np.uint8).reshape(shape)
