"""Writes the steps of a loop as C++ for one client; every size and stride is known.

Torch itself computes the shapes and strides of results, with tensors on the ``meta`` device. The
modules ``pointwise`` and ``operations`` write the operations. An operation that neither knows
raises :class:`UnknownError`; torch then replays the steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ...errors import CompilerError
from ..kernels.native import REALS
from .rewrite import VIEWS, item

aten = torch.ops.aten

KINDS = {
    **REALS,
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}


class UnknownError(CompilerError):
    """An operation that cannot be written in C++ here."""


@dataclass
class Memory:
    """A block of memory."""

    name: str
    size: int  # bytes; 0 if the caller passes it
    kind: torch.dtype


@dataclass
class Value:
    """A tensor: its memory, and its shape and strides."""

    memory: Memory
    form: Tensor  # on the meta device

    def at(self, form: Tensor, places: Sequence[str]) -> str:
        """The expression of one entry, by its index in each dimension."""
        steps = [f"{i} * {s}" for i, s in zip(places, form.stride(), strict=True) if s and i != "0"]
        return f"{self.memory.name}[{' + '.join([str(form.storage_offset()), *steps])}]"

    @property
    def pointer(self) -> str:
        """The address of its first entry."""
        return f"({self.memory.name} + {self.form.storage_offset()})"


@dataclass
class Writer:
    """Collects C++ statements and the memory they need."""

    real: torch.dtype  # the dtype of products and convolutions
    steps: list[str] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)

    def body(self, graph: fx.Graph, ins: Sequence[Value], fixed: Sequence[Value]) -> list[Value]:
        """Write one body of inputs ``ins`` and constants ``fixed``; returns its outputs."""
        held: dict[fx.Node, Any] = {}
        given, constants = iter(ins), iter(fixed)
        for node in graph.nodes:
            if node.op == "placeholder":
                held[node] = next(given)
            elif node.op == "get_attr":
                held[node] = next(constants)
            elif node.op == "output":
                outs: list[Value] = [held[n] for n in node.args[0]]
                return outs
            else:
                held[node] = self._node(node, held)
        raise UnknownError("a graph without an output")

    def _node(self, node: fx.Node, held: dict[fx.Node, Any]) -> Any:
        args: Any = fx.map_arg(node.args, lambda n: held[n])
        kwargs: Any = fx.map_arg(dict(node.kwargs), lambda n: held[n])
        target: Any = node.target
        if target is item:
            return args[0][args[1]]
        if target in VIEWS:
            return self._view(target, args, kwargs)
        if target not in OPERATIONS:
            raise UnknownError(str(target))
        return OPERATIONS[target](self, target, args, kwargs)

    # ---- statements and memory ---------------------------------------------------------------

    def buffer(self, form: Tensor) -> Value:
        """New memory for a tensor of this shape and these strides."""
        if form.dtype not in KINDS:
            raise UnknownError(str(form.dtype))
        extent = sum((n - 1) * s for n, s in zip(form.shape, form.stride(), strict=True)) + 1
        size = max(extent, 1) * form.element_size()
        made = Memory(f"t{len(self.memories)}", size, form.dtype)
        self.memories.append(made)
        start = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device="meta")
        return Value(made, start)

    def copy(self, into: Value, value: Value) -> None:
        """Copy all entries."""
        self.loops([into, value], lambda to, at: f"{to} = {at};")

    def copying(self, into: Value, value: Value) -> list[str]:
        """The statements of a copy, without adding them to a step."""
        kept, self.steps = self.steps, []
        self.copy(into, value)
        made, self.steps = self.steps, kept
        return made

    # ---- operations --------------------------------------------------------------------------

    def _view(self, target: Any, args: Any, kwargs: Any) -> Value:
        value, *rest = args
        if target is aten.reshape.default:
            try:
                return Value(value.memory, value.form.view(*rest))
            except RuntimeError:
                copied = self.contiguous(value)
                return Value(copied.memory, copied.form.view(*rest))
        return Value(value.memory, formed(target, (value.form, *rest), kwargs))

    def contiguous(self, value: Value) -> Value:
        """The value as contiguous memory."""
        if value.form.is_contiguous():
            return value
        form = torch.empty(value.form.shape, dtype=value.form.dtype, device="meta")
        out = self.buffer(form)
        self.loops([out, value], lambda to, at: f"{to} = {at};")
        return out

    def loops(
        self,
        values: Sequence[Value],
        inner: Callable[..., str],
        order: Sequence[int] | None = None,
    ) -> None:
        """Write a loop over all entries of the first value; ``inner`` makes its body.

        Without an ``order`` of the dimensions the iterations must not depend on each other.
        """
        shape = values[0].form.shape
        forms = [value.form.expand(shape) for value in values]
        if order is None:
            strides = forms[0].stride()
            order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
        order = [d for d in order if shape[d] != 1]
        lines, places = [], ["0"] * len(shape)
        for d in order:
            places[d] = f"i{d}"
            lines.append(f"for (ptrdiff_t i{d} = 0; i{d} < {shape[d]}; i{d}++)")
        entries = [value.at(form, places) for value, form in zip(values, forms, strict=True)]
        if shape.numel():
            self.steps.append("\n".join([*lines, f"{{ {inner(*entries)} }}"]))


Handler = Callable[[Writer, Any, Any, Any], Any]  # (writer, target of torch.ops, args, kwargs)
OPERATIONS: dict[Any, Handler] = {}


def handles(*targets: Any) -> Callable[[Handler], Handler]:
    """Register the function that writes these operations."""

    def register(handler: Handler) -> Handler:
        OPERATIONS.update(dict.fromkeys(targets, handler))
        return handler

    return register


def asked(target: Any, args: Any, kwargs: Any) -> Tensor:
    """The shape, strides and dtype of an operation's result, as a tensor on the meta device."""
    forms = torch.utils._pytree.tree_map_only(Value, lambda value: value.form, (args, kwargs))
    args, kwargs = forms
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "meta"}
    kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    if target._schema.is_mutable:
        args = (torch.empty_like(args[0]), *args[1:])
    return formed(target, args, kwargs)


def formed(target: Any, args: Any, kwargs: Any) -> Tensor:
    """The result of an operation whose arguments are on the meta device."""
    try:
        result: Tensor = target(*args, **kwargs)
    except RuntimeError as error:  # the shapes of one client do not fit this step
        raise UnknownError(f"{target}: {error}") from error
    return result


def literal(value: Any, kind: torch.dtype) -> str:
    """A C++ literal of this dtype."""
    if isinstance(value, bool):
        return str(int(value))
    if not isinstance(value, int | float):
        raise UnknownError(f"the argument {value!r}")
    value = float(value) if kind.is_floating_point else value
    if isinstance(value, float) and not math.isfinite(value):
        special = '__builtin_nan("")' if math.isnan(value) else "__builtin_inf()"
        return f"({'-' if value < 0 else ''}({KINDS[kind]}){special})"
    return f"(({KINDS[kind]}){value!r}{'' if kind.is_floating_point else 'LL'})"
