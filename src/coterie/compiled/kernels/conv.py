"""Convolutions of many clients' images with each client's own filters.

There are three products of two tensors, each linear in both: images with filters, a gradient with
filters, images with a gradient. The derivatives of each are the other two, so derivatives of any
order consist of these three.

Shapes: images ``[g, n, ci, h, w]``, filters ``[g, co, ci, kh, kw]``, outputs ``[g, n, co, h', w']``
for ``g`` clients. A further ``vmap`` is folded into the clients, or, where the filters are shared
over it, into the images.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import triton_kernels
from .native import at, library

Pair = tuple[int, int]
Function = Callable[..., Any]

_LIBRARY = torch.library.Library("coterie", "DEF")
FIRST, LAST = torch.contiguous_format, torch.channels_last
_LARGE = 500_000  # entries


def operation(schema: str) -> Callable[[Function], Function]:
    """Register a function of plain tensors under ``torch.ops.coterie``.

    A trace then holds each call of it as one operation.
    """

    def register(function: Function) -> Function:
        name = _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        made: Function = getattr(torch.ops.coterie, schema.partition("(")[0]).default
        return made

    return register


def convolve(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """``conv2d`` of one client's images ``[n, ci, h, w]`` and filters ``[co, ci, kh, kw]``."""
    out: Tensor = _Convolve.apply(x.unsqueeze(0), weight.unsqueeze(0), stride, padding)
    return out.squeeze(0)


# ---- the three products --------------------------------------------------------------------


@operation(
    "convolve(Tensor x, Tensor w, Tensor? b, int[] stride, int[] padding, bool relu) -> Tensor"
)
def _convolved(
    x: Tensor, w: Tensor, b: Tensor | None, stride: list[int], padding: list[int], relu: bool
) -> Tensor:
    if triton_kernels.fits(x, stride):
        bias = None if b is None else b.contiguous()
        return triton_kernels.convolve(x.contiguous(), w.contiguous(), padding, bias, relu=relu)
    found = _cpp_convolve(x, w, b, stride, padding, relu)
    if found is not None:
        return found
    if x.is_cuda:
        out = _grouped(x, w, b, stride, padding)
    else:
        size = (n + 2 * p - k for n, p, k in zip(x.shape[3:], padding, w.shape[3:], strict=True))
        high, wide = (n // s + 1 for n, s in zip(size, stride, strict=True))
        layout = faster(w[0].numel(), x.shape[1] * w.shape[1] * high * wide)
        biases = [None] * len(x) if b is None else b
        rows = zip(laid_out(x, layout), laid_out(w, layout), biases, strict=True)
        out = side_by_side((torch.conv2d(*row, stride, padding) for row in rows), len(x))
    return out.relu_() if relu else out


@operation("images_gradient(Tensor g, Tensor w, int[] size, int[] stride, int[] padding) -> Tensor")
def _to_images(
    g: Tensor, w: Tensor, size: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    around = [k - 1 - p for k, p in zip(w.shape[-2:], padding, strict=True)]
    if triton_kernels.fits(g, stride) and min(around) >= 0:
        turned = w.flip(-1, -2).transpose(1, 2).contiguous()
        return triton_kernels.convolve(g.contiguous(), turned, around)
    found = _cpp_to_images(g, w, size, stride, padding)
    if found is not None:
        return found
    x = g.new_empty(()).expand(*g.shape[:2], w.shape[2], *size)
    return _backward(g, x, w, stride, padding, images=True)


@operation(
    "filters_gradient(Tensor g, Tensor x, int[] size, int[] stride, int[] padding) -> Tensor"
)
def _to_filters(
    g: Tensor, x: Tensor, size: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    if triton_kernels.fits(g, stride):
        return triton_kernels.to_filters(g.contiguous(), x.contiguous(), size, padding)
    found = _cpp_to_filters(g, x, size, stride, padding)
    if found is not None:
        return found
    w = g.new_empty(()).expand(g.shape[0], g.shape[2], x.shape[2], *size)
    return _backward(g, x, w, stride, padding, images=False)


def _grouped(
    x: Tensor, w: Tensor, b: Tensor | None, stride: list[int], padding: list[int]
) -> Tensor:
    clients, images = x.shape[:2]
    wide = x.transpose(0, 1).reshape(images, -1, *x.shape[3:])
    bias = None if b is None else b.flatten()
    out = torch.conv2d(wide, w.flatten(0, 1), bias, stride, padding, groups=clients)
    return out.view(images, clients, w.shape[1], *out.shape[2:]).transpose(0, 1).contiguous()


def _backward(
    g: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], *, images: bool
) -> Tensor:
    """Compute one of the two derivatives by torch, client by client or (on a GPU) in groups."""
    rest = stride, padding, [1, 1], False, [0, 0]
    mask, wanted = [images, not images, False], 0 if images else 1
    derive = torch.ops.aten.convolution_backward
    if not g.is_cuda:
        size = (x if images else w).shape[1:]  # torch reads only the size of the other
        layout = faster(w[0].numel(), g[0].numel())
        other = [torch.empty(size, dtype=g.dtype, memory_format=layout)] * len(g)
        both = (other, laid_out(w, layout)) if images else (laid_out(x, layout), other)
        rows = zip(laid_out(g, layout), *both, strict=True)
        found = (derive(*row, None, *rest, 1, mask)[wanted] for row in rows)
        return side_by_side(found, len(g)) if images else torch.stack(list(found)).contiguous()
    clients, count = g.shape[:2]
    wide = [t.transpose(0, 1).reshape(count, -1, *t.shape[3:]) for t in (g, x)]
    out: Tensor = derive(*wide, w.flatten(0, 1), None, *rest, clients, mask)[wanted]
    if not images:
        return out.view(w.shape)
    return out.view(count, clients, *x.shape[2:]).transpose(0, 1).contiguous()


# ---- the layout of images in memory --------------------------------------------------------------


def faster(filters: int, outputs: int) -> torch.memory_format:
    """The faster layout to convolve one client's images, by the entries of filters and outputs.

    Channels last, unless the filters have many entries and more than the outputs, as for small
    images of many channels (docs/results/speed.md).
    """
    return FIRST if filters > max(_LARGE, outputs) else LAST


def laid_out(clients: Tensor, layout: torch.memory_format) -> list[Tensor]:
    """Each client's images or filters, in this layout."""
    return [one.contiguous(memory_format=layout) for one in clients]


def side_by_side(clients: Iterable[Tensor], count: int) -> Tensor:
    """Stack the clients' tensors into one, in the layout of the first.

    Each tensor is copied as soon as it is computed, while it is still in the cache.
    """
    given = iter(clients)
    first = next(given)
    if count == 1:
        return first.unsqueeze(0)
    if first.is_contiguous(memory_format=LAST):  # images with gaps are copied channels first
        n, c, h, w = first.shape
        out = first.new_empty(count, n, h, w, c).permute(0, 1, 4, 2, 3)
    else:
        out = first.new_empty(count, *first.shape)
    out[0] = first
    for place, one in zip(out[1:], given, strict=True):
        place.copy_(one)
    return out


def in_front(value: Tensor, dim: int | None, many: int) -> Tensor:
    """A tensor with the ``vmap`` dimension first; a tensor without one is expanded."""
    if dim is None:
        return value.unsqueeze(0).expand(many, *value.shape)
    return value.movedim(dim, 0)


# ---- C++ for few channels (cpp/conv.cpp) ---------------------------------------------------

# Libraries compute layers of few channels far below the CPU's speed. With many channels libraries
# are faster: then every function here returns None, as it does if nothing could be compiled.


def few(channels: int, filters: int) -> bool:
    """Whether a layer is computed here; for others oneDNN was faster (docs/results/speed.md).

    A layer of one channel and many filters is also computed here: oneDNN is slowest for it.
    """
    return channels == 1 or (channels <= 8 and filters <= 16)


def _cpp_convolve(
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


def _cpp_to_images(
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


def _cpp_to_filters(
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


# ---- derivatives and vmap ------------------------------------------------------------------


class _Convolve(torch.autograd.Function):
    """The product of images with filters: a convolution."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> Tensor:
        out: Tensor = _convolved(x, w, None, list(stride), list(padding), False)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        how = ctx.stride, ctx.padding
        to_x = _ToImages.apply(g, w, tuple(x.shape[3:]), *how) if ctx.needs_input_grad[0] else None
        to_w = _ToFilters.apply(g, x, tuple(w.shape[3:]), *how) if ctx.needs_input_grad[1] else None
        return to_x, to_w, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, *how: Any) -> tuple[Tensor, int]:
        return _mapped(_Convolve, info.batch_size, dims, x, w, how)


class _ToImages(torch.autograd.Function):
    """The product of a gradient with filters: the derivative for the images."""

    @staticmethod
    def forward(g: Tensor, w: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        out: Tensor = _to_images(g, w, list(size), list(stride), list(padding))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        g, w, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(g, w)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        g, w = ctx.saved_tensors
        how = ctx.stride, ctx.padding
        to_g = _Convolve.apply(d, w, *how) if ctx.needs_input_grad[0] else None
        to_w = _ToFilters.apply(g, d, tuple(w.shape[3:]), *how) if ctx.needs_input_grad[1] else None
        return to_g, to_w, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, g: Tensor, w: Tensor, *how: Any) -> tuple[Tensor, int]:
        return _mapped(_ToImages, info.batch_size, dims, g, w, how)


class _ToFilters(torch.autograd.Function):
    """The product of a gradient with images: the derivative for the filters."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        out: Tensor = _to_filters(g, x, list(size), list(stride), list(padding))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        g, x, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(g, x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        g, x = ctx.saved_tensors
        how = ctx.stride, ctx.padding
        to_g = _Convolve.apply(x, d, *how) if ctx.needs_input_grad[0] else None
        to_x = _ToImages.apply(g, d, tuple(x.shape[3:]), *how) if ctx.needs_input_grad[1] else None
        return to_g, to_x, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, g: Tensor, x: Tensor, *how: Any) -> tuple[Tensor, int]:
        a, b = (in_front(t, d, info.batch_size) for t, d in zip((g, x), dims, strict=False))
        out = _ToFilters.apply(a.flatten(0, 1), b.flatten(0, 1), *how)
        return out.unflatten(0, a.shape[:2]), 0


def _mapped(
    function: Any, many: int, dims: Any, images: Tensor, w: Tensor, how: Any
) -> tuple[Tensor, int]:
    """Fold a level of vmap into the clients, or into the images if the filters are shared."""
    if dims[1] is None:
        wide = images.movedim(dims[0], 1)
        out = function.apply(wide.flatten(1, 2), w, *how)
        return out.unflatten(1, wide.shape[1:3]), 1
    a, b = in_front(images, dims[0], many), in_front(w, dims[1], many)
    out = function.apply(a.flatten(0, 1), b.flatten(0, 1), *how)
    return out.unflatten(0, a.shape[:2]), 0
