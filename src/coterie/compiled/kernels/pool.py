"""Max pooling over windows that do not overlap, and gradients of convolutions that were pooled.

The positions of the largest entries are not stored. The gradient goes to the first of a window's
largest entries, as in torch, and that entry is searched again. So results have the same form
whether our kernels or torch compute them.

In every window one entry has a gradient and the others are zero: if windows are 2 x 2, the gradient
of a convolution that was pooled needs a quarter of the products. A trace with both gradients has
them fused (``compiled.trace.passes``). Without a C++ compiler both are computed one by one.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import triton_kernels
from .conv import in_front, operation
from .native import at, compiler, library

ours = torch.ops.coterie

_NONE = [0, 0], [1, 1], False  # padding, dilation, ceil_mode
_WIDEST = 16  # columns of a filter
_SPREAD = "Tensor g, Tensor y, Tensor out, int window, bool positive"
_HOW = "int[] size, int[] stride, int[] padding"


def max_pool(x: Tensor, size: int) -> Tensor:
    """``max_pool2d`` of ``[..., h, w]`` in windows of ``size``² entries."""
    out: Tensor = _Pool.apply(x, size)
    return out


@operation("pool(Tensor x, int size) -> Tensor")
def _pooled(x: Tensor, size: int) -> Tensor:
    found = triton_kernels.pool(x.contiguous(), size) if triton_kernels.fits(x) else None
    found = _cpp_pool(x, size) if found is None else found
    return _by_torch(x, size)[0].unflatten(0, x.shape[:-3]) if found is None else found


@operation("pool_gradient(Tensor g, Tensor x, Tensor out, int size, bool positive) -> Tensor")
def _gradient(g: Tensor, x: Tensor, out: Tensor, size: int, positive: bool) -> Tensor:
    """The gradient of a pool; with ``positive``, zero for windows without a positive entry."""
    if triton_kernels.fits(x):
        g, x, out = g.contiguous(), x.contiguous(), out.contiguous()
        return triton_kernels.gradient(g, x, out, size, positive=positive)
    found = _cpp_gradient(g, x, out, size, positive=positive)
    if found is not None:
        return found
    window, rows = [size, size], _images(x)
    derive = torch.ops.aten.max_pool2d_with_indices_backward
    result = derive(_images(g), rows, window, window, *_NONE, _by_torch(x, size)[1])
    if positive:
        result = torch.ops.aten.threshold_backward(result, rows, 0)
    spread: Tensor = result.unflatten(0, x.shape[:-3])
    return spread


def _by_torch(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The largest entries for all clients' images in one dimension, and their positions."""
    window = [size, size]
    found: tuple[Tensor, Tensor] = torch.ops.aten.max_pool2d_with_indices(
        _images(x), window, window, *_NONE
    )
    return found


def _images(x: Tensor) -> Tensor:
    """The images of all clients in one dimension: ``[images, c, h, w]``."""
    return x.flatten(0, -4)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, size: int) -> Tensor:
        out: Tensor = _pooled(x, size)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.size = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Spread.apply(g, *ctx.saved_tensors, ctx.size), None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, size: int) -> tuple[Tensor, int]:
        return _Pool.apply(x.movedim(dims[0], 0), size), 0


class _Spread(torch.autograd.Function):
    """The gradient of a pool; linear in ``g``, and constant in the other inputs."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, out: Tensor, size: int) -> Tensor:
        spread: Tensor = _gradient(g, x, out, size, False)
        return spread

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, *rest, ctx.size = inputs
        ctx.save_for_backward(*rest)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        (x, out), size = ctx.saved_tensors, ctx.size
        taken = d * _Spread.apply(torch.ones_like(out), x, out, size)
        high, wide = out.shape[-2:]
        cut = taken[..., : high * size, : wide * size]
        picked = cut.unflatten(-1, (wide, size)).sum(-1).unflatten(-2, (high, size)).sum(-2)
        return picked, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *given: Any) -> tuple[Tensor, int]:
        *tensors, size = given
        rows = [in_front(t, d, info.batch_size) for t, d in zip(tensors, dims, strict=False)]
        return _Spread.apply(*rows, size), 0


# ---- C++ (cpp/pool.cpp), with channels first or last in memory -----------------------------


def _cpp_pool(x: Tensor, size: int) -> Tensor | None:
    """The largest entry of every window of ``[..., c, h, w]``; None if it is not supported."""
    x, last = _contiguous(x)
    functions = _functions(x, size, last)
    if functions is None:
        return None
    out = _empty(x, (x.shape[-2] // size, x.shape[-1] // size), last)
    functions.pool(_planes(x, last), at(x), at(out))
    return out


def _cpp_gradient(g: Tensor, x: Tensor, out: Tensor, size: int, *, positive: bool) -> Tensor | None:
    """The gradient for ``x``: the first of a window's largest entries gets the whole gradient."""
    x, last = _contiguous(x)
    functions = _functions(x, size, last)
    if functions is None:
        return None
    g, out = (_with_layout(t, last=last) for t in (g, out))
    result = _empty(x, x.shape[-2:], last)
    functions.spread(_planes(x, last), at(g), at(x), at(out), int(positive), at(result))
    return result


def _contiguous(x: Tensor) -> tuple[Tensor, bool]:
    """The tensor as contiguous memory, and whether channels come last."""
    last = not x.is_contiguous() and x.movedim(-3, -1).is_contiguous()
    return x if last else x.contiguous(), last


def _with_layout(x: Tensor, *, last: bool) -> Tensor:
    """The tensor as contiguous memory, with channels first or last."""
    return x.movedim(-3, -1).contiguous().movedim(-1, -3) if last else x.contiguous()


def _empty(x: Tensor, size: Sequence[int], last: bool) -> Tensor:
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


# ---- gradients of convolutions that were pooled ----------------------------------------------


@operation(f"pooled_images_gradient({_SPREAD}, Tensor w, {_HOW}) -> Tensor")
def _to_images(
    g: Tensor, y: Tensor, out: Tensor, window: int, positive: bool, *rest: Any
) -> Tensor:
    found = _cpp_to_images(PoolGradient(g, y, out, window, positive), *rest)
    if found is not None:
        return found
    spread = ours.pool_gradient(g, y, out, window, positive)
    written_out: Tensor = ours.images_gradient(spread, *rest)
    return written_out


@operation(f"pooled_filters_gradient({_SPREAD}, Tensor x, {_HOW}) -> (Tensor, Tensor)")
def _to_filters(
    g: Tensor, y: Tensor, out: Tensor, window: int, positive: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The gradients for the filters and for their biases."""
    found = _cpp_to_filters(PoolGradient(g, y, out, window, positive), *rest)
    if found is not None:
        return found
    spread = ours.pool_gradient(g, y, out, window, positive)
    return ours.filters_gradient(spread, *rest), spread.sum((1, 3, 4))


# ---- the same in C++ (cpp/pooled.cpp); None if the arguments are not supported ----------------


class PoolGradient(NamedTuple):
    """The inputs of a max pool's gradient, which itself is never stored."""

    g: Tensor  # the gradient of the pool's result
    y: Tensor  # the pool's input
    out: Tensor  # the pool's result
    window: int
    positive: bool  # whether windows without a positive entry have no gradient


def in_cpp(device: torch.device) -> bool:
    """Whether there is C++ for this device."""
    return device.type == "cpu" and compiler() is not None


def suits(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether there is C++ for filters of this size."""
    return list(stride) == [1, 1] and size[1] <= _WIDEST


def _cpp_to_images(
    spread: PoolGradient,
    w: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
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


def _cpp_to_filters(
    spread: PoolGradient,
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor] | None:
    """The derivatives for filters of this size and biases, with images ``[g, n, ci, h, w]``."""
    shape = (spread.y.shape[2], x.shape[2], *size)
    layer = _layer(spread, shape, x.shape[3:], stride, padding)
    if layer is None:
        return None
    clients, images = x.shape[:2]
    (x, last), entries = _contiguous(x), _Entries(spread)
    out, biases = x.new_empty(clients, *shape), x.new_empty(clients, shape[0])
    given = *entries.given, at(x), _way(x, last=last)
    layer.to_filters(clients, images, *given, at(out), at(biases))
    return out, biases


class _Entries:
    """A gradient as arguments of the C++ functions; keeps its tensors alive."""

    def __init__(self, spread: PoolGradient) -> None:
        self._y, last = _contiguous(spread.y)
        self._out = _with_layout(spread.out, last=last)
        self._g, other = _contiguous(spread.g)
        rest = at(self._out), at(self._y), int(last), int(spread.positive)
        self.given = at(self._g), _way(self._g, last=other), *rest


def _way(x: Tensor, *, last: bool) -> ctypes.Array[ctypes.c_ssize_t]:
    """The strides of channels and of pixels."""
    channels, *plane = x.shape[-3:]
    steps = (1, channels) if last else (torch.Size(plane).numel(), 1)
    return (ctypes.c_ssize_t * 2)(*steps)


def _layer(
    spread: PoolGradient,
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
