"""Gradients of convolutions whose results were max-pooled, without storing the pool's gradient.

In every window of a pool one entry has a gradient and the others are zero: the convolution's
gradient needs a quarter of the products if windows are 2 x 2. A trace with both gradients has them
fused (``compiled.trace.pool_gradients``). Without a C++ compiler both are computed one by one.
"""

from typing import Any

import torch
from torch import Tensor

from . import native_pooled
from .native_pooled import Spread
from .operation import operation

_SPREAD = "Tensor g, Tensor y, Tensor out, Tensor places, int window, bool positive"
_HOW = "int[] size, int[] stride, int[] padding"

ours = torch.ops.coterie


@operation(f"pooled_images_gradient({_SPREAD}, Tensor w, {_HOW}) -> Tensor")
def _to_images(
    g: Tensor, y: Tensor, out: Tensor, places: Tensor, window: int, positive: bool, *rest: Any
) -> Tensor:
    found = native_pooled.to_images(Spread(g, y, out, window, positive), *rest)
    if found is not None:
        return found
    spread = ours.pool_gradient(g, y, out, places, window, positive)
    written_out: Tensor = ours.images_gradient(spread, *rest)
    return written_out


@operation(f"pooled_filters_gradient({_SPREAD}, Tensor x, {_HOW}) -> (Tensor, Tensor)")
def _to_filters(
    g: Tensor, y: Tensor, out: Tensor, places: Tensor, window: int, positive: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The gradients for the filters and for their biases."""
    found = native_pooled.to_filters(Spread(g, y, out, window, positive), *rest)
    if found is not None:
        return found
    spread = ours.pool_gradient(g, y, out, places, window, positive)
    return ours.filters_gradient(spread, *rest), spread.sum((1, 3, 4))
