"""Runs float32 code in float64, which removes most of its rounding error."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_PICKS = {  # read few entries of a tensor that may be large: the result is cast, not the tensor
    aten.index.Tensor,
    aten.index_select.default,
    aten.embedding.default,
    aten.select.int,
}
_VIEWS = {  # in float64 a layer may return another memory layout, where a view is impossible
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}


class InDouble(TorchDispatchMode):
    """While it is entered, every operation on floating-point numbers computes in float64.

    It casts the inputs and results of each operation, and dtypes among its arguments. The caller
    casts the inputs of the code with :func:`doubled`, so that code that reads their dtype sees
    float64.
    """

    def __init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The same operation in float64."""
        if function not in _PICKS:
            args, kwargs = doubled(args), doubled(kwargs or {})
        function = _VIEWS.get(function, function)
        return doubled(function(*args, **(kwargs or {})))


def doubled(value: Any) -> Any:
    """A tensor, a dtype or a container of them, with float64 for every smaller float."""
    if isinstance(value, Tensor):
        small = value.dtype is not torch.float64 and value.is_floating_point()
        return aten._to_copy.default(value, dtype=torch.float64) if small else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, dict):
        return {key: doubled(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [doubled(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
