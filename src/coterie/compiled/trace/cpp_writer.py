"""Writes the steps of a loop as C++ for one client; every size and stride is known.

Torch itself computes the shapes and strides of results, with tensors on the ``meta`` device.
Pointwise operations are written here, the others in ``operations``. An operation that neither knows
raises :class:`UnknownError`; torch then replays the steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
        self, values: Sequence[Value], inner: Callable[..., str], order: Sequence[int] | None = None
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


# ---- pointwise operations: each entry depends on the arguments' entries at its index -------------

# Unsigned types for sums and products, because signed overflow is undefined behaviour in C++.
_WRAPPING = {torch.int64: "uint64_t", torch.int32: "uint32_t"}


class Rule(NamedTuple):
    """How an operation computes an entry from the entries of its arguments."""

    text: Callable[[list[str], dict[str, str], torch.dtype], str]
    compares: bool = False  # compare in the common dtype of both sides
    wraps: bool = False  # sums and products of integers wrap around on overflow


def _of(template: str, *, compares: bool = False, wraps: bool = False) -> Rule:
    """A rule from a template with the arguments as {0}, {1}, ... and ``alpha`` and ``value``."""

    def text(terms: list[str], names: dict[str, str], kind: torch.dtype) -> str:
        one = literal(1, kind)
        return template.format(*terms, **({"alpha": one, "value": one} | names))

    return Rule(text, compares, wraps)


def _function(name: str) -> Rule:
    """A rule for a function of the C library."""
    return Rule(lambda terms, names, kind: f"std::{name}({', '.join(terms)})")


def _floored(terms: list[str], names: dict[str, str], kind: torch.dtype) -> str:
    a, b = terms
    if kind.is_floating_point:
        return f"std::floor({a} / {b})"
    return f"({a} / {b} - (({a} % {b} != 0) && (({a} < 0) != ({b} < 0))))"


def _remainder(terms: list[str], names: dict[str, str], kind: torch.dtype) -> str:
    a, b = terms
    if kind.is_floating_point:
        return f"({a} - {b} * std::floor({a} / {b}))"
    return f"(({a} % {b} + {b}) % {b})"


def _clamped(terms: list[str], names: dict[str, str], kind: torch.dtype) -> str:
    value = terms[0]
    if "max" in names:
        value = f"({value} > {names['max']} ? {names['max']} : {value})"
    return f"({value} < {names['min']} ? {names['min']} : {value})" if "min" in names else value


def _compared(sign: str) -> Rule:
    return _of(f"({{0}} {sign} {{1}})", compares=True)


_SAME = _of("{0}")
POINTWISE: dict[Any, Rule] = {
    aten.add.Tensor: _of("({0} + {alpha} * {1})", wraps=True),
    aten.add_.Tensor: _of("({0} + {alpha} * {1})", wraps=True),
    aten.add.Scalar: _of("({0} + {1})", wraps=True),
    aten.sub.Tensor: _of("({0} - {alpha} * {1})", wraps=True),
    aten.sub_.Tensor: _of("({0} - {alpha} * {1})", wraps=True),
    aten.rsub.Scalar: _of("({1} - {0})", wraps=True),
    aten.mul.Tensor: _of("({0} * {1})", wraps=True),
    aten.mul.Scalar: _of("({0} * {1})", wraps=True),
    aten.div.Tensor: _of("({0} / {1})"),
    aten.div.Scalar: _of("({0} / {1})"),
    aten.neg.default: _of("(-{0})", wraps=True),
    aten.addcmul.default: _of("({0} + {value} * {1} * {2})"),
    aten.addcmul_.default: _of("({0} + {value} * {1} * {2})"),
    aten.addcdiv.default: _of("({0} + {value} * {1} / {2})"),
    aten.relu.default: _of("({0} < 0 ? 0 : {0})"),
    aten.threshold_backward.default: _of("({1} <= {2} ? 0 : {0})"),
    aten.sqrt.default: _function("sqrt"),
    aten.exp.default: _function("exp"),
    aten.log.default: _function("log"),
    aten.abs.default: _function("abs"),
    aten.tanh.default: _function("tanh"),
    aten.tanh_backward.default: _of("({0} * (1 - {1} * {1}))"),
    aten.sigmoid_backward.default: _of("({0} * {1} * (1 - {1}))"),
    aten.pow.Tensor_Scalar: _function("pow"),
    aten.pow.Scalar: _function("pow"),
    aten.pow.Tensor_Tensor: _function("pow"),
    aten.reciprocal.default: _of("(1 / {0})"),
    aten.rsqrt.default: _of("(1 / std::sqrt({0}))"),
    aten.sigmoid.default: _of("(1 / (1 + std::exp(-{0})))"),
    aten.where.self: _of("({0} ? {1} : {2})"),
    aten.clone.default: _SAME,
    aten._to_copy.default: _SAME,
    aten.lt.Tensor: _compared("<"),
    aten.lt.Scalar: _compared("<"),
    aten.le.Tensor: _compared("<="),
    aten.le.Scalar: _compared("<="),
    aten.gt.Tensor: _compared(">"),
    aten.gt.Scalar: _compared(">"),
    aten.ge.Tensor: _compared(">="),
    aten.ge.Scalar: _compared(">="),
    aten.eq.Tensor: _compared("=="),
    aten.eq.Scalar: _compared("=="),
    aten.ne.Tensor: _compared("!="),
    aten.ne.Scalar: _compared("!="),
    aten.remainder.Scalar: Rule(_remainder),
    aten.remainder.Tensor: Rule(_remainder),
    aten.floor_divide.default: Rule(_floored),
    aten.bitwise_and.Tensor: _of("({0} & {1})"),
    aten.bitwise_and.Scalar: _of("({0} & {1})"),
    aten.logical_and.default: _of("({0} && {1})"),
    aten.bitwise_xor.Tensor: _of("({0} ^ {1})"),
    aten.bitwise_xor.Scalar: _of("({0} ^ {1})"),
    aten.__rshift__.Scalar: _of("({0} >> {1})"),
    aten.__lshift__.Scalar: _of("({0} << {1})"),
    aten.clamp.default: Rule(_clamped),
    aten.clamp_min.default: _of("({0} < {1} ? {1} : {0})"),
    aten.clamp_max.default: _of("({0} > {1} ? {1} : {0})"),
    aten.maximum.default: _of("({0} > {1} || {0} != {0} ? {0} : {1})"),
    aten.minimum.default: _of("({0} < {1} || {0} != {0} ? {0} : {1})"),
}


def _pointwise(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    rule, form = POINTWISE[target], asked(target, args, kwargs)
    tensors = [a for a in args if isinstance(a, Value)]
    written = target._schema.is_mutable
    out = tensors[0] if written else writer.buffer(form)
    if written and form.shape != out.form.shape:
        raise UnknownError(f"{target} of another shape")
    kind = form.dtype
    if rule.compares:
        kind = torch.result_type(*(a.form if isinstance(a, Value) else a for a in args[:2]))
    if kind not in KINDS:
        raise UnknownError(str(kind))
    name = _WRAPPING.get(kind, KINDS[kind]) if rule.wraps else KINDS[kind]

    def inner(to: str, *entries: str) -> str:
        # read all entries first: GCC 12 at -O3 read wrong ones if a condition came before
        lines = [f"const auto v{i} = {entry};" for i, entry in enumerate(entries)]
        left = iter(range(len(entries)))
        terms = [
            f"(({name})v{next(left)})" if isinstance(a, Value) else literal(a, kind) for a in args
        ]
        if target is aten.where.self:
            terms[0] = "v0"
        names = {k: literal(v, kind) for k, v in kwargs.items() if isinstance(v, int | float)}
        return " ".join([*lines, f"{to} = {rule.text(terms, names, kind)};"])

    writer.loops([out, *tensors], inner)
    return out


def _bounded(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    """Write a clamp with its bounds by name; one of them may be missing."""
    bounds = {**dict(zip(("min", "max"), args[1:], strict=False)), **kwargs}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    return _pointwise(writer, target, args[:1], given)


OPERATIONS |= dict.fromkeys(POINTWISE, _pointwise) | {aten.clamp.default: _bounded}
