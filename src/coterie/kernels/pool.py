"""Max pooling over windows that do not overlap, without remembering places.

Of equal largest entries the first of a window takes the gradient, as in torch.
"""

from typing import Any

import torch
from torch import Tensor

from . import triton_pool
from .operation import operation


def max_pool(x: Tensor, size: int) -> Tensor:
    """``max_pool2d`` of ``[..., h, w]`` in windows of ``size``² entries, 4 at least."""
    out: Tensor = _Pool.apply(x, size)
    return out


@operation("pool(Tensor x, int size) -> Tensor")
def _pooled(x: Tensor, size: int) -> Tensor:
    if triton_pool.fits(x):
        return triton_pool.pool(x, size)
    return _largest(_largest(x, size, -1), size, -2)


@operation("pool_gradient(Tensor g, Tensor x, Tensor out, int size, bool positive) -> Tensor")
def _gradient(g: Tensor, x: Tensor, out: Tensor, size: int, positive: bool) -> Tensor:
    """``positive``: of windows whose largest entry is not, nothing comes back."""
    if triton_pool.fits(x):
        return triton_pool.gradient(g, x, out, size, positive=positive)
    across = _largest(x, size, -1)
    g = g * (out > 0) if positive else g
    return _given_back(_given_back(g, across, out, size, -2), x, across, size, -1)


def _largest(x: Tensor, size: int, dim: int) -> Tensor:
    """The largest of every ``size`` neighbours along one dimension."""
    first, *others = _places(x, size, dim)
    out = torch.maximum(first, others[0])
    for other in others[1:]:
        torch.maximum(out, other, out=out)
    return out


def _given_back(g: Tensor, x: Tensor, out: Tensor, size: int, dim: int) -> Tensor:
    """The gradient of :func:`_largest`: the first of the largest takes all."""
    result = torch.empty_like(x) if x.shape[dim] % size == 0 else torch.zeros_like(x)
    *some, last = zip(_places(x, size, dim), _places(result, size, dim), strict=True)
    for value, into in some:
        torch.mul(g, value == out, out=into)
        g = g - into
    last[1].copy_(g)  # somebody is the largest
    return result


def _places(x: Tensor, size: int, dim: int) -> list[Tensor]:
    """The first of every ``size`` neighbours, the second ones, and so on."""
    whole = x.shape[dim] // size * size
    if dim == -1:
        return [x[..., place:whole:size] for place in range(size)]
    return [x[..., place:whole:size, :] for place in range(size)]


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
        size = ctx.size
        taken = d * _Spread.apply(torch.ones_like(out), x, out, size)
        rows = torch.stack(_places(taken, size, -1)).sum(0)
        return torch.stack(_places(rows, size, -2)).sum(0), None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: Any, g: Tensor, x: Tensor, out: Tensor, size: int
    ) -> tuple[Tensor, int]:
        rows = [
            t.movedim(d, 0) if d is not None else t.expand(info.batch_size, *t.shape)
            for t, d in zip((g, x, out), dims, strict=False)
        ]
        return _Spread.apply(*rows, size), 0
