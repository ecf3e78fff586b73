"""How calls and traces run while they are compared: in float64, and few steps of every loop.

float64 removes most of the rounding error of float32 code. All steps of one kind are the same
operations on other numbers, so a few of them show whether a trace computes what its call computes:
the first ones, where the carry leaves its start, the last ones, and at least one of every kind.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.utils._python_dispatch import TorchDispatchMode

from ...core import calls
from ...core.calls import Carry, Step

ENDS = 3  # steps at the beginning of a loop, and as many at its end
MOST = 2 * ENDS + 1  # steps of a loop whose last step alone is of another kind

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


# ---- few steps of every loop --------------------------------------------------------------------

_SAMPLING: ContextVar[bool] = ContextVar("coterie_sampling", default=False)


@contextmanager
def sampled() -> Iterator[None]:
    """Within it, the loops of calls and of traces run only the steps of :func:`chosen`."""
    before = _SAMPLING.set(True)
    try:
        with calls.traced_by(_Sampler()):
            yield
    finally:
        _SAMPLING.reset(before)


def chosen(kinds: Sequence[Hashable]) -> Sequence[int]:
    """The numbers of the steps that are run, of a loop with these kinds of steps."""
    numbers = range(len(kinds))
    if not _SAMPLING.get():
        return numbers
    first = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
    return sorted({*numbers[:ENDS], *numbers[-ENDS:], *first.values()})


def can_record(kinds: Sequence[Hashable]) -> bool:
    """Whether a loop is traced by its steps: it has equal steps, and is inside of vmap only."""
    levels = retrieve_all_functorch_interpreters()
    return len(kinds) > len(set(kinds)) and all(
        level.key() == TransformType.Vmap for level in levels
    )


class _Sampler:
    """Takes over the loops that a tracer takes over, and runs a few of their steps."""

    def __init__(self) -> None:
        self._stepping = False

    def takes(self, kinds: Sequence[Hashable]) -> bool:
        """Whether a tracer records this loop by its steps; a loop within a step is run whole."""
        return not self._stepping and can_record(kinds)

    def loop(self, step: Step[Carry], kinds: Sequence[Hashable], carry: Carry) -> Carry:
        """The carry after the chosen steps."""
        self._stepping = True
        for number in chosen(kinds):
            carry = step(number, kinds[number], carry)
        self._stepping = False
        return carry
