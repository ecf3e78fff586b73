"""Gradients of convolutions whose results were max-pooled, on a CPU, in C++ (``cpp/pooled.cpp``).

Every function returns None if it does not support its arguments.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .native import at, compiler, library
from .native_pool import laid, lying

_WIDEST = 16  # columns of a filter


class Spread(NamedTuple):
    """The inputs of a max pool's gradient, which itself is never stored."""

    g: Tensor  # the gradient of the pool's result
    y: Tensor  # the pool's input
    out: Tensor  # the pool's result
    window: int
    positive: bool  # whether windows without a positive entry have no gradient


def here(device: torch.device) -> bool:
    """Whether there is C++ for this device."""
    return device.type == "cpu" and compiler() is not None


def suits(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether there is C++ for filters of this size."""
    return list(stride) == [1, 1] and size[1] <= _WIDEST


def to_images(
    spread: Spread, w: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor | None:
    """The derivative for images of this size, with filters ``[g, co, ci, kh, kw]``."""
    layer = _layer(spread, w.shape[1:], size, stride, padding)
    if layer is None:
        return None
    clients, images = spread.y.shape[:2]
    w, entries = w.contiguous(), _Entries(spread)
    out = w.new_empty(clients, images, *size, w.shape[2]).movedim(-1, -3)
    layer.to_images(clients, images, *entries.given, at(w), at(out))
    return out


def to_filters(
    spread: Spread, x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """The derivatives for filters of this size and biases, with images ``[g, n, ci, h, w]``."""
    shape = (spread.y.shape[2], x.shape[2], *size)
    layer = _layer(spread, shape, x.shape[3:], stride, padding)
    if layer is None:
        return None
    clients, images = x.shape[:2]
    (x, last), entries = lying(x), _Entries(spread)
    out, biases = x.new_empty(clients, *shape), x.new_empty(clients, shape[0])
    given = *entries.given, at(x), _way(x, last=last)
    layer.to_filters(clients, images, *given, at(out), at(biases))
    return out, biases


class _Entries:
    """A gradient as arguments of the C++ functions; keeps its tensors alive."""

    def __init__(self, spread: Spread) -> None:
        self._y, last = lying(spread.y)
        self._out = laid(spread.out, last=last)
        self._g, other = lying(spread.g)
        rest = at(self._out), at(self._y), int(last), int(spread.positive)
        self.given = at(self._g), _way(self._g, last=other), *rest


def _way(x: Tensor, *, last: bool) -> ctypes.Array[ctypes.c_ssize_t]:
    """The strides of channels and of pixels."""
    channels, *plane = x.shape[-3:]
    steps = (1, channels) if last else (torch.Size(plane).numel(), 1)
    return (ctypes.c_ssize_t * 2)(*steps)


def _layer(
    spread: Spread,
    filters: Sequence[int],
    image: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> ctypes.CDLL | None:
    maps, channels, rows, columns = filters
    if spread.y.is_cuda or not suits((rows, columns), stride):
        return None
    return library(
        "pooled", spread.y.dtype, CHANNELS=channels, MAPS=maps, HEIGHT=image[0], WIDTH=image[1],
        ROWS=rows, COLUMNS=columns, PAD_Y=padding[0], PAD_X=padding[1], WINDOW=spread.window,
    )  # fmt: skip
