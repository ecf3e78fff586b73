"""Convolutions of few channels for many clients on a CPU, in C++ (``cpp/conv.cpp``).

Libraries compute layers of few channels far below the CPU's speed. With many channels libraries are
faster: then every function here returns None, as it does if nothing could be compiled.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .native import at, library


def few(channels: int, filters: int) -> bool:
    """Whether a layer is computed here; for others oneDNN was faster (docs/results/speed.md).

    A layer of one channel and many filters is also computed here: oneDNN is slowest for it.
    """
    return channels == 1 or (channels <= 8 and filters <= 16)


def convolve(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    relu: bool,
) -> Tensor | None:
    """Convolve images ``[g, n, ci, h, w]`` with filters ``[g, co, ci, kh, kw]``."""
    layer = _layer(w.shape[1:3], x.shape[3:], w.shape[3:], stride, padding, x.dtype)
    if layer is None or x.is_cuda:
        return None
    high, wide = (
        n + 2 * p - k + 1 for n, p, k in zip(x.shape[3:], padding, w.shape[3:], strict=True)
    )
    x, w, b = x.contiguous(), w.contiguous(), None if b is None else b.contiguous()
    out = x.new_empty(*x.shape[:2], w.shape[1], high, wide)
    layer.convolve(*x.shape[:2], at(x), at(w), at(b), int(relu), at(out))
    return out


def to_images(
    d: Tensor, w: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor | None:
    """The derivative for images of this size: a gradient ``[g, n, co, h', w']`` with filters."""
    layer = _layer(w.shape[1:3], size, w.shape[3:], stride, padding, d.dtype)
    if layer is None or d.is_cuda or any(p >= k for p, k in zip(padding, w.shape[3:], strict=True)):
        return None
    d, w = d.contiguous(), w.contiguous()
    out = d.new_empty(*d.shape[:2], w.shape[2], *size)
    layer.to_images(*d.shape[:2], at(d), at(w), at(out))
    return out


def to_filters(
    d: Tensor, x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor | None:
    """The derivative for filters of this size: a gradient with images."""
    layer = _layer((d.shape[2], x.shape[2]), x.shape[3:], size, stride, padding, d.dtype)
    if layer is None or d.is_cuda:
        return None
    d, x = d.contiguous(), x.contiguous()
    out = d.new_empty(d.shape[0], d.shape[2], x.shape[2], *size)
    layer.to_filters(*d.shape[:2], at(d), at(x), at(out))
    return out


def _layer(
    width: Sequence[int],
    image: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dtype: torch.dtype,
) -> ctypes.CDLL | None:
    filters, channels = width
    if not few(channels, filters) or list(stride) != [1, 1]:
        return None
    return library(
        "conv", dtype, CHANNELS=channels, MAPS=filters, HEIGHT=image[0], WIDTH=image[1],
        ROWS=size[0], COLUMNS=size[1], PAD_Y=padding[0], PAD_X=padding[1],
    )  # fmt: skip
