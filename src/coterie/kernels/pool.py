"""Max pooling over windows that do not overlap, without remembering places.

Of equal largest entries the first of a window takes the gradient, as in torch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import triton_pool
from .operation import operation


def max_pool(x: Tensor, size: int) -> Tensor:
    """``max_pool2d`` of ``[..., h, w]`` in windows of ``size``² entries."""
    out: Tensor = _Pool.apply(x, size)
    return out


@operation("pool(Tensor x, int size) -> Tensor")
def _pooled(x: Tensor, size: int) -> Tensor:
    if triton_pool.fits(x):
        return triton_pool.pool(x, size)
    corners = _corners(x, size)
    out = next(corners).clone(memory_format=torch.contiguous_format)
    for corner in corners:
        torch.maximum(out, corner, out=out)
    return out


@operation("pool_gradient(Tensor g, Tensor x, Tensor out, int size, bool positive) -> Tensor")
def _gradient(g: Tensor, x: Tensor, out: Tensor, size: int, positive: bool) -> Tensor:
    """``positive``: of windows whose largest entry is not, nothing comes back."""
    if triton_pool.fits(x):
        return triton_pool.gradient(g, x, out, size, positive=positive)
    result = torch.zeros_like(x, memory_format=torch.contiguous_format)
    left = g * (out > 0) if positive else g.clone(memory_format=torch.contiguous_format)
    for corner, into in zip(_corners(x, size), _corners(result, size), strict=True):
        torch.mul(left, corner == out, out=into)
        left.sub_(into)
    return result


def _corners(x: Tensor, size: int) -> Iterator[Tensor]:
    """The first entries of all windows, the second ones, and so on."""
    high, wide = (side // size * size for side in x.shape[-2:])
    for row in range(size):
        for column in range(size):
            yield x[..., row:high:size, column:wide:size]


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, size: int) -> Tensor:
        return _pooled(x.contiguous(), size)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.size = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Spread.apply(g, *ctx.saved_tensors, ctx.size), None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, size: int) -> tuple[Tensor, int]:
        return _Pool.apply(x.movedim(dims[0], 0), size), 0


class _Spread(torch.autograd.Function):
    """The gradient of a pool; linear in ``g``, and constant in the rest."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, out: Tensor, size: int) -> Tensor:
        return _gradient(g.contiguous(), x.contiguous(), out.contiguous(), size, False)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, x, out, ctx.size = inputs
        ctx.save_for_backward(x, out)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, out = ctx.saved_tensors
        places = _Spread.apply(torch.ones_like(out), x, out, ctx.size)
        picked = sum(_corners(d * places, ctx.size))
        return picked, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: Any, g: Tensor, x: Tensor, out: Tensor, size: int
    ) -> tuple[Tensor, int]:
        rows = [
            t.movedim(d, 0) if d is not None else t.expand(info.batch_size, *t.shape)
            for t, d in zip((g, x, out), dims, strict=False)
        ]
        return _Spread.apply(*rows, size), 0
