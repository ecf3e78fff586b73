"""Group norm of many clients' images on a CPU, each client with its own scale and shift.

Under ``vmap`` torch decomposes the gradient into a dozen passes over the images. Here torch's own
gradient is called client by client. Higher derivatives are taken of the formula (``_formula``).

Shapes: images ``[g, n, c, h, w]``, scale and shift ``[g, c]``, mean and inverse deviation
``[g, n, groups]`` for ``g`` clients.
"""

from typing import Any

import torch
from torch import Tensor

from .operation import in_front, laid_out, layout_of, operation, side_by_side

aten = torch.ops.aten


def group_norm(x: Tensor, groups: int, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """``group_norm`` of one client's images ``[n, c, h, w]``."""
    parts = (x, scale, shift)
    out, _, _ = _Norm.apply(*(part.unsqueeze(0) for part in parts), groups, eps)
    result: Tensor = out.squeeze(0)
    return result


@operation(
    "group_norm(Tensor x, Tensor scale, Tensor shift, int groups, float eps)"
    " -> (Tensor, Tensor, Tensor)"
)
def _normed(
    x: Tensor, scale: Tensor, shift: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised images, and the mean and inverse deviation of every group."""
    images, channels, pixels = x.shape[1], x.shape[2], x.shape[3:].numel()
    means, spreads = (x.new_empty(len(x), images, groups) for _ in range(2))
    scale, shift = scale.contiguous(), shift.contiguous()

    def each() -> Any:
        for at, one in enumerate(laid_out(x, layout_of(x[0]))):
            out, means[at], spreads[at] = aten.native_group_norm(
                one, scale[at], shift[at], images, channels, pixels, groups, eps
            )
            yield out

    return side_by_side(each(), len(x)), means, spreads


@operation(
    "group_norm_gradient(Tensor d, Tensor x, Tensor mean, Tensor spread, Tensor scale, int groups)"
    " -> (Tensor, Tensor, Tensor)"
)
def _gradients(
    d: Tensor, x: Tensor, mean: Tensor, spread: Tensor, scale: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for the images, the scale and the shift."""
    images, channels, pixels = x.shape[1], x.shape[2], x.shape[3:].numel()
    to_scale, to_shift = (scale.new_empty(len(x), channels) for _ in range(2))
    mean, spread, scale = mean.contiguous(), spread.contiguous(), scale.contiguous()

    layout = layout_of(x[0])

    def each() -> Any:
        for at, pair in enumerate(zip(laid_out(d, layout), laid_out(x, layout), strict=True)):
            rest = mean[at], spread[at], scale[at], images, channels, pixels, groups, [True] * 3
            out, to_scale[at], to_shift[at] = aten.native_group_norm_backward(*pair, *rest)
            yield out

    return side_by_side(each(), len(x)), to_scale, to_shift


def _formula(d: Tensor, x: Tensor, scale: Tensor, groups: int, eps: float) -> tuple[Tensor, ...]:
    """The gradients by operations that torch can differentiate."""
    rows = x.reshape(*x.shape[:2], groups, -1)
    away = rows - rows.mean(-1, keepdim=True)
    spread = (away.square().mean(-1, keepdim=True) + eps).rsqrt()
    normal = away * spread
    weighed = (d * scale[:, None, :, None, None]).reshape(rows.shape)
    along = (weighed * normal).mean(-1, keepdim=True)
    to_x = spread * (weighed - weighed.mean(-1, keepdim=True) - normal * along)
    to_scale = (d * normal.reshape(x.shape)).sum((1, 3, 4))
    return to_x.reshape(x.shape), to_scale, d.sum((1, 3, 4))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, shift: Tensor, groups: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        out: tuple[Tensor, Tensor, Tensor] = _normed(x, scale, shift, groups, eps)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, scale, _, ctx.groups, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, *output[1:], scale)

    @staticmethod
    def backward(ctx: Any, d: Tensor, *_: Tensor) -> Any:
        found = _Gradients.apply(d, *ctx.saved_tensors, ctx.groups, ctx.eps)
        return *found, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *given: Any) -> Any:
        return _mapped(_Norm, info.batch_size, dims, given, 3)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(d: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, groups, _ = given
        out: tuple[Tensor, Tensor, Tensor] = _gradients(d, *tensors, groups)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        d, x, _, _, scale, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(d, x, scale)

    @staticmethod
    def backward(ctx: Any, *wanted: Tensor) -> Any:
        def formula(d: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
            return _formula(d, x, scale, ctx.groups, ctx.eps)

        derive: Any = torch.func.vjp(formula, *ctx.saved_tensors)[1]
        to_d, to_x, to_scale = derive(wanted)
        return to_d, to_x, None, None, to_scale, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *given: Any) -> Any:
        return _mapped(_Gradients, info.batch_size, dims, given, 5)


def _mapped(function: Any, many: int, dims: Any, given: Any, tensors: int) -> Any:
    """Fold a level of vmap into the clients."""
    rows = [in_front(t, d, many) for t, d in zip(given[:tensors], dims, strict=False)]
    found = function.apply(*(row.flatten(0, 1) for row in rows), *given[tensors:])
    return tuple(out.unflatten(0, rows[0].shape[:2]) for out in found), (0, 0, 0)
