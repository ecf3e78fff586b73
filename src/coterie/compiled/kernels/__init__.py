"""Fast layers for many clients at once, in place of torch's own, which are slow for that.

Under ``vmap`` a convolution with a weight for each client becomes one grouped convolution, which
libraries compute far below the machine's speed, and max pooling stores 64-bit indices.
:class:`ManyClients` replaces these layers while a call is traced (``compiled.trace``); the loop
engine never uses the replacements. Results are equal to rounding.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .conv import convolve
from .pool import max_pool

Pair = tuple[int, int]


class ManyClients(TorchFunctionMode):
    """While it is entered, replaces plain convolutions and max pools by ours."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call our function if it supports the arguments, else torch's."""
        kwargs = kwargs or {}
        ours = _OURS.get(function)
        result = ours(*args, **kwargs) if ours is not None else None
        return function(*args, **kwargs) if result is None else result


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    if isinstance(padding, str) or groups != 1 or _pair(dilation) != (1, 1) or x.dim() != 4:
        return None
    out = convolve(x, weight, _pair(stride), _pair(padding))
    return out if bias is None else out + bias[:, None, None]


def _max_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    size = _pair(kernel_size)
    if return_indices or x.dim() != 4 or size[0] < 2:
        return None
    if stride not in (None, [], ()) and _pair(stride) != size:
        return None
    if size[0] != size[1] or _pair(padding) != (0, 0) or _pair(dilation) != (1, 1) or ceil_mode:
        return None
    return max_pool(x, size[0])


def _adaptive_avg_pool2d(x: Tensor, output_size: Any) -> Tensor | None:
    if output_size is None or _pair(output_size) != (1, 1):
        return None
    return x.mean((-2, -1), keepdim=True)  # vmap fails on torch's own if channels come last


def _pair(value: Any) -> Pair:
    if isinstance(value, int):
        return value, value
    return (value[0], value[-1])


_OURS: dict[Any, Any] = {
    F.conv2d: _conv2d,
    F.max_pool2d: _max_pool2d,
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
}
