"""Max pooling over windows that do not overlap.

The positions of the largest entries are not stored. The gradient goes to the first of a window's
largest entries, as in torch, and that entry is searched again. So results have the same form
whether our kernels or torch compute them.
"""

from typing import Any

import torch
from torch import Tensor

from . import native_pool, triton_pool
from .layout import in_front
from .operation import operation

_NONE = [0, 0], [1, 1], False  # padding, dilation, ceil_mode


def max_pool(x: Tensor, size: int) -> Tensor:
    """``max_pool2d`` of ``[..., h, w]`` in windows of ``size``² entries."""
    out, _ = _Pool.apply(x, size)
    result: Tensor = out
    return result


@operation("pool(Tensor x, int size) -> (Tensor, Tensor)")
def _pooled(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    found = triton_pool.pool(x.contiguous(), size) if triton_pool.fits(x) else None
    found = native_pool.pool(x, size) if found is None else found
    if found is None:
        found = _by_torch(x, size)[0].unflatten(0, x.shape[:-3])
    return found, x.new_empty(*x.shape[:-3], 0)


@operation(
    "pool_gradient(Tensor g, Tensor x, Tensor out, Tensor places, int size, bool positive)"
    " -> Tensor"
)
def _gradient(
    g: Tensor, x: Tensor, out: Tensor, places: Tensor, size: int, positive: bool
) -> Tensor:
    """The gradient of a pool; with ``positive``, zero for windows without a positive entry."""
    if triton_pool.fits(x):
        g, x, out = g.contiguous(), x.contiguous(), out.contiguous()
        return triton_pool.gradient(g, x, out, size, positive=positive)
    found = native_pool.gradient(g, x, out, size, positive=positive)
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
    def forward(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        out, places = _pooled(x, size)
        return out, places

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.size = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, *output)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Any:
        return _Spread.apply(g, *ctx.saved_tensors, ctx.size), None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, size: int) -> tuple[Any, tuple[int, int]]:
        return _Pool.apply(x.movedim(dims[0], 0), size), (0, 0)


class _Spread(torch.autograd.Function):
    """The gradient of a pool; linear in ``g``, and constant in the other inputs."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, out: Tensor, places: Tensor, size: int) -> Tensor:
        spread: Tensor = _gradient(g, x, out, places, size, False)
        return spread

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, *rest, ctx.size = inputs
        ctx.save_for_backward(*rest)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, out, places = ctx.saved_tensors
        size = ctx.size
        taken = d * _Spread.apply(torch.ones_like(out), x, out, places, size)
        high, wide = out.shape[-2:]
        cut = taken[..., : high * size, : wide * size]
        picked = cut.unflatten(-1, (wide, size)).sum(-1).unflatten(-2, (high, size)).sum(-2)
        return picked, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *given: Any) -> tuple[Tensor, int]:
        *tensors, size = given
        rows = [in_front(t, d, info.batch_size) for t, d in zip(tensors, dims, strict=False)]
        return _Spread.apply(*rows, size), 0
