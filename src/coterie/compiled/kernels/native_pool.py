"""Max pooling on a CPU, in C++ (``cpp/pool.cpp``), with channels first or last in memory."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from .native import at, library


def pool(x: Tensor, size: int) -> Tensor | None:
    """The largest entry of every window of ``[..., c, h, w]``; None if it is not supported."""
    x, last = lying(x)
    functions = _functions(x, size, last)
    if functions is None:
        return None
    out = _room(x, (x.shape[-2] // size, x.shape[-1] // size), last)
    functions.pool(_planes(x, last), at(x), at(out))
    return out


def gradient(g: Tensor, x: Tensor, out: Tensor, size: int, *, positive: bool) -> Tensor | None:
    """The gradient for ``x``: the first of a window's largest entries gets the whole gradient."""
    x, last = lying(x)
    functions = _functions(x, size, last)
    if functions is None:
        return None
    g, out = (laid(t, last=last) for t in (g, out))
    result = _room(x, x.shape[-2:], last)
    functions.spread(_planes(x, last), at(g), at(x), at(out), int(positive), at(result))
    return result


def lying(x: Tensor) -> tuple[Tensor, bool]:
    """The tensor as contiguous memory, and whether channels come last."""
    last = not x.is_contiguous() and x.movedim(-3, -1).is_contiguous()
    return x if last else x.contiguous(), last


def laid(x: Tensor, *, last: bool) -> Tensor:
    """The tensor as contiguous memory, with channels first or last."""
    return x.movedim(-3, -1).contiguous().movedim(-1, -3) if last else x.contiguous()


def _room(x: Tensor, size: Sequence[int], last: bool) -> Tensor:
    *many, channels = x.shape[:-2]
    if last:
        return x.new_empty(*many, *size, channels).movedim(-1, -3)
    return x.new_empty(*many, channels, *size)


def _planes(x: Tensor, last: bool) -> ctypes.c_ssize_t:
    return ctypes.c_ssize_t(x.shape[: -3 if last else -2].numel())


def _functions(x: Tensor, size: int, last: bool) -> ctypes.CDLL | None:
    if x.is_cuda:
        return None
    channels, high, wide = x.shape[-3:]
    inner = channels if last else 1
    return library("pool", x.dtype, WINDOW=size, HEIGHT=high, WIDTH=wide, CHANNELS=inner)
