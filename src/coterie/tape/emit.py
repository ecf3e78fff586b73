"""A loop's steps as C++ for one client: every size and stride is known, nothing is allocated.

What operations do to shapes and strides is asked of torch itself, with tensors on the ``meta``
device. An operation that is not known here is an :class:`UnknownError`: torch plays the steps then.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .. import kernels  # noqa: F401  # defines torch.ops.coterie
from ..kernels.native import REALS
from ..kernels.native_conv import FEW
from .rewrite import VIEWS, item

aten, ours = torch.ops.aten, torch.ops.coterie

KINDS = {
    **REALS,
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.bool: "bool",
}
_ALIGNED = 64


class UnknownError(Exception):
    """Something that is not written in C++ here."""


@dataclass
class Memory:
    """A stretch of memory: where it is, and from which to which statement it is needed."""

    name: str
    size: int  # bytes
    kind: torch.dtype
    first: int
    last: int = 0
    given: bool = False  # by the caller; or else it lies in the room for what is made here


@dataclass
class Value:
    """A tensor: memory, and how it lies there."""

    memory: Memory
    form: Tensor  # on the meta device

    def at(self, form: Tensor, places: Sequence[str]) -> str:
        """An entry, by its place in each dimension of a form of this value."""
        steps = [f"{i} * {s}" for i, s in zip(places, form.stride(), strict=True) if s and i != "0"]
        return f"{self.memory.name}[{' + '.join([str(form.storage_offset()), *steps])}]"

    @property
    def pointer(self) -> str:
        """Where its first entry lies."""
        return f"({self.memory.name} + {self.form.storage_offset()})"


@dataclass
class Writer:
    """Statements, and the memory they need."""

    real: torch.dtype  # the kind of number that products and convolutions are of
    before: list[str] = field(default_factory=list)  # what is the same in every step
    steps: list[str] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    always: set[str] = field(default_factory=set)  # names of memory that is needed throughout
    _hoisting: bool = False

    def body(self, graph: fx.Graph, ins: Sequence[Value], fixed: Sequence[Value]) -> list[Value]:
        """The statements of one body; gives its outputs.

        ``ins`` are its inputs, ``fixed`` its constants; what depends on neither the number of the
        step nor what is carried is done once.
        """
        held: dict[fx.Node, Any] = {}
        given, constants, settled = iter(ins), iter(fixed), set[fx.Node]()
        for node in graph.nodes:
            if node.op == "placeholder":
                held[node] = next(given)
                if held[node].memory.given:
                    settled.add(node)
            elif node.op == "get_attr":
                held[node] = next(constants)
                settled.add(node)
            elif node.op == "output":
                outs: list[Value] = [held[n] for n in node.args[0]]
                return outs
            else:
                still = settled.issuperset(node.all_input_nodes)
                self._hoisting = still
                held[node] = self._node(node, held)
                if still:
                    settled.add(node)
        raise UnknownError("a graph without an output")

    def _node(self, node: fx.Node, held: dict[fx.Node, Any]) -> Any:
        args: Any = fx.map_arg(node.args, lambda n: held[n])
        kwargs: Any = fx.map_arg(dict(node.kwargs), lambda n: held[n])
        target: Any = node.target
        if target is item:
            return args[0][args[1]]
        if target in VIEWS:
            return self._view(target, args, kwargs)
        if target is aten.clamp.default:  # with its bounds by name: one may be missing
            bounds = zip(("min", "max"), args[1:], strict=False)
            args, kwargs = args[:1], {**kwargs, **{k: v for k, v in bounds if v is not None}}
        if target in POINTWISE:
            return self._pointwise(target, POINTWISE[target], args, kwargs)
        if target in _OTHERS:
            return _OTHERS[target](self, target, args, kwargs)
        raise UnknownError(str(target))

    # ---- statements and memory ---------------------------------------------------------------

    def say(self, statement: str, *used: Value) -> None:
        """One more statement, which reads or writes these values."""
        (self.before if self._hoisting else self.steps).append(statement)
        for value in used:
            value.memory.last = len(self.steps)
            if self._hoisting:
                self.always.add(value.memory.name)

    def room(self, form: Tensor) -> Value:
        """Memory for a tensor of this form."""
        if form.dtype not in KINDS:
            raise UnknownError(str(form.dtype))
        extent = sum((n - 1) * s for n, s in zip(form.shape, form.stride(), strict=True)) + 1
        size = max(extent, 1) * form.element_size()
        made = Memory(f"t{len(self.memories)}", size, form.dtype, len(self.steps))
        self.memories.append(made)
        if self._hoisting:
            self.always.add(made.name)
        start = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device="meta")
        return Value(made, start)

    def copy(self, into: Value, value: Value) -> None:
        """All entries."""
        self._hoisting = False
        self.loops([into, value], lambda to, at: f"{to} = {at};")

    def apart(self, into: Value, value: Value) -> list[str]:
        """The same, as statements that belong to no step."""
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
        form = target(value.form, *rest, **kwargs)
        return Value(value.memory, form)

    def contiguous(self, value: Value) -> Value:
        """The value without gaps, in the order of its dimensions."""
        if value.form.is_contiguous():
            return value
        form = torch.empty(value.form.shape, dtype=value.form.dtype, device="meta")
        out = self.room(form)
        self.loops([out, value], lambda to, at: f"{to} = {at};")
        return out

    def loops(
        self,
        values: Sequence[Value],
        inner: Callable[..., str],
        order: Sequence[int] | None = None,
    ) -> None:
        """A statement for every entry of the first value, given the entries of all.

        Without an order of its dimensions the statements must not depend on each other.
        """
        shape = values[0].form.shape
        forms = [value.form.expand(shape) for value in values]
        apart = order is None
        if order is None:
            strides = forms[0].stride()
            order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
        order = [d for d in order if shape[d] != 1]
        lines, places = [], ["0"] * len(shape)
        for d in order:
            places[d] = f"i{d}"
            lines.append(f"for (int i{d} = 0; i{d} < {shape[d]}; i{d}++)")
        if apart and lines:
            lines.insert(-1, "#pragma GCC ivdep")
        entries = [value.at(form, places) for value, form in zip(values, forms, strict=True)]
        if shape.numel():
            self.say("\n".join([*lines, f"{{ {inner(*entries)} }}"]), *values)

    def _pointwise(self, target: Any, rule: "Rule", args: Any, kwargs: Any) -> Value:
        form = _asked(target, args, kwargs)
        tensors = [a for a in args if isinstance(a, Value)]
        written = target._schema.is_mutable
        out = tensors[0] if written else self.room(form)
        if written and form.shape != out.form.shape:
            raise UnknownError(f"{target} of another shape")
        kind = form.dtype
        if rule.compares:
            kind = torch.result_type(*(a.form if isinstance(a, Value) else a for a in args[:2]))
        if kind not in KINDS:
            raise UnknownError(str(kind))

        def inner(to: str, *entries: str) -> str:
            left = iter(entries)
            terms = [
                f"(({KINDS[kind]}){next(left)})" if isinstance(a, Value) else literal(a, kind)
                for a in args
            ]
            if target is aten.where.self:
                terms[0] = entries[0]
            names = {k: literal(v, kind) for k, v in kwargs.items() if isinstance(v, int | float)}
            return f"{to} = {rule.text(terms, names, kind)};"

        self.loops([out, *tensors], inner)
        return out


# ---- entry by entry -----------------------------------------------------------------------------


@dataclass
class Rule:
    """How an operation computes an entry from the entries of its arguments."""

    text: Callable[[list[str], dict[str, str], torch.dtype], str]
    compares: bool = False


def literal(value: Any, kind: torch.dtype) -> str:
    """A number of this kind."""
    if isinstance(value, bool):
        return str(int(value))
    if not isinstance(value, int | float):
        raise UnknownError(f"the argument {value!r}")
    value = float(value) if kind.is_floating_point else value
    if isinstance(value, float) and not math.isfinite(value):
        special = '__builtin_nan("")' if math.isnan(value) else "__builtin_inf()"
        return f"({'-' if value < 0 else ''}({KINDS[kind]}){special})"
    return f"(({KINDS[kind]}){value!r}{'' if kind.is_floating_point else 'LL'})"


def _of(template: str, *, compares: bool = False) -> Rule:
    """A rule from a template with the arguments as {0}, {1}, ... and ``alpha`` and ``value``."""

    def text(terms: list[str], names: dict[str, str], kind: torch.dtype) -> str:
        one = literal(1, kind)
        return template.format(*terms, **({"alpha": one, "value": one} | names))

    return Rule(text, compares)


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
    aten.add.Tensor: _of("({0} + {alpha} * {1})"),
    aten.add_.Tensor: _of("({0} + {alpha} * {1})"),
    aten.add.Scalar: _of("({0} + {1})"),
    aten.sub.Tensor: _of("({0} - {alpha} * {1})"),
    aten.sub_.Tensor: _of("({0} - {alpha} * {1})"),
    aten.rsub.Scalar: _of("({1} - {0})"),
    aten.mul.Tensor: _of("({0} * {1})"),
    aten.mul.Scalar: _of("({0} * {1})"),
    aten.div.Tensor: _of("({0} / {1})"),
    aten.div.Scalar: _of("({0} / {1})"),
    aten.neg.default: _of("(-{0})"),
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


def _asked(target: Any, args: Any, kwargs: Any) -> Tensor:
    """What torch says about the form of a result."""
    forms = torch.utils._pytree.tree_map_only(Value, lambda value: value.form, (args, kwargs))
    args, kwargs = forms
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "meta"}
    kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    if target._schema.is_mutable:
        args = (torch.empty_like(args[0]), *args[1:])
    result: Tensor = target(*args, **kwargs)
    return result


# ---- everything else ----------------------------------------------------------------------------

Handler = Callable[[Writer, Any, Any, Any], Any]
_OTHERS: dict[Any, Handler] = {}


def _handles(*targets: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _OTHERS.update(dict.fromkeys(targets, handler))
        return handler

    return register


def _fill(number: Any) -> Handler:
    def handler(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
        form = _asked(target, args, kwargs)
        out = writer.room(form)
        value = number if number is not None else args[-1]
        writer.loops([out], lambda to: f"{to} = {literal(value, form.dtype)};")
        return out

    return handler


_OTHERS |= {
    aten.zeros_like.default: _fill(0),
    aten.ones_like.default: _fill(1),
    aten.new_zeros.default: _fill(0),
    aten.new_ones.default: _fill(1),
    aten.zeros.default: _fill(0),
    aten.full_like.default: _fill(None),
    aten.full.default: _fill(None),
    aten.scalar_tensor.default: _fill(None),
}


@_handles(aten.split_with_sizes.default)
def _split(writer: Writer, target: Any, args: Any, kwargs: Any) -> list[Value]:
    value, *rest = args
    return [Value(value.memory, part) for part in target(value.form, *rest, **kwargs)]


@_handles(aten.cat.default)
def _cat(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    out, first = writer.room(_asked(target, args, kwargs)), 0
    for part in parts:
        if part.form.shape == (0,):  # torch takes such a part for none
            continue
        size = part.form.shape[dim]
        into = Value(out.memory, out.form.narrow(dim, first, size))
        writer.loops([into, part], lambda to, at: f"{to} = {at};")
        first += size
    return out


@_handles(aten.slice_backward.default, aten.select_backward.default)
def _back_into(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    slope, size, dim, *place = args
    out = writer.room(torch.empty(size, dtype=slope.form.dtype, device="meta"))
    writer.loops([out], lambda to: f"{to} = 0;")
    cut = aten.slice.Tensor if target is aten.slice_backward.default else aten.select.int
    into = Value(out.memory, cut(out.form, dim, *place))
    writer.loops([into, slope], lambda to, at: f"{to} = {at};")
    return out


# ---- sums ---------------------------------------------------------------------------------------


@_handles(aten.sum.dim_IntList, aten.mean.dim, aten.sum.default, aten.mean.default)
def _sum(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x: Value = args[0]
    if kwargs.get("dtype") not in (None, x.form.dtype) or not x.form.is_floating_point():
        raise UnknownError(f"{target} into another kind")
    out = writer.room(_asked(target, args, kwargs))
    some = args[1] if len(args) > 1 else None
    summed = [d % x.form.dim() for d in some] if some else list(range(x.form.dim()))
    kept = [d for d in range(x.form.dim()) if d not in summed]
    writer.loops([out], lambda to: f"{to} = 0;")
    rows = Value(x.memory, x.form.permute(*kept, *sorted(summed)))
    _add_up(writer, rows, Value(out.memory, out.form.view([x.form.shape[d] for d in kept])))
    if target in (aten.mean.dim, aten.mean.default):
        count = x.form.numel() // max(out.form.numel(), 1)
        writer.loops([out], lambda to: f"{to} /= {count};")
    return out


def _add_up(writer: Writer, x: Value, out: Value) -> None:
    """Add the last dimensions of x onto out, which has the others."""
    kept, form = out.form.dim(), x.form
    while form.dim() > kept + 1 and form.stride(-2) == form.stride(-1) * form.shape[-1]:
        form = form.flatten(-2)
    if form.dim() > kept and form.stride(-1) == 1 and x.form.dtype == writer.real:
        run, head = form.shape[-1], Value(x.memory, form.select(-1, 0))
        into = _alongside(out, head.form)
        order = list(range(head.form.dim()))
        writer.loops([into, head], lambda to, at: f"{to} += sum(&{at}, {run});", order)
        return
    strides = form.stride()
    inner = sorted(range(kept), key=lambda d: -strides[d])
    order = [*range(kept, form.dim()), *inner]
    whole = Value(x.memory, form)
    writer.loops([_alongside(out, form), whole], lambda to, at: f"{to} += {at};", order)


def _alongside(out: Value, form: Tensor) -> Value:
    """A value that is the same along the last dimensions of a form."""
    more = [1] * (form.dim() - out.form.dim())
    return Value(out.memory, out.form.view(*out.form.shape, *more).expand(form.shape))


@_handles(aten.linalg_vector_norm.default)
def _norm(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x = args[0]
    order, dims, keep = ([*args[1:], 2][0], *[*args[2:], None, False][:2])
    if order != 2 or kwargs:
        raise UnknownError("a norm that is not Euclidean")
    squares = writer.room(torch.empty(x.form.shape, dtype=x.form.dtype, device="meta"))
    writer.loops([squares, x], lambda to, at: f"{to} = {at} * {at};")
    every = list(range(x.form.dim())) if dims is None else dims
    out: Value = _sum(writer, aten.sum.dim_IntList, (squares, every, keep), {})
    writer.loops([out], lambda to: f"{to} = std::sqrt({to});")
    return out


@_handles(aten._log_softmax.default)
def _log_softmax(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x, dim = args[0], args[1]
    out = writer.room(_asked(target, args, kwargs))
    strides = f"<{x.form.shape[dim]}, {x.form.stride(dim)}, {out.form.stride(dim)}>"
    rows = [Value(v.memory, v.form.select(dim, 0)) for v in (out, x)]
    writer.loops(
        rows, lambda to, at: f"log_softmax{strides}(&{at}, &{to});", range(x.form.dim() - 1)
    )
    return out


@_handles(aten._log_softmax_backward_data.default)
def _log_softmax_gradient(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    slope, result, dim = args[:3]
    out = writer.room(_asked(target, args, kwargs))
    values = (out, slope, result)
    sizes = ", ".join(str(v.form.stride(dim)) for v in values)
    name = f"log_softmax_gradient<{slope.form.shape[dim]}, {sizes}>"
    rows = [Value(v.memory, v.form.select(dim, 0)) for v in values]
    writer.loops(rows, lambda to, g, y: f"{name}(&{g}, &{y}, &{to});", range(slope.form.dim() - 1))
    return out


# ---- entries by their places --------------------------------------------------------------------


def _wrapped(place: str, size: int) -> str:
    return f"({place} < 0 ? {place} + {size} : {place})"


@_handles(aten.index.Tensor)
def _index(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x, given = args
    dims = [d for d, index in enumerate(given) if index is not None]
    first, last = dims[0], dims[-1]
    if len(dims) != last - first + 1 or any(given[d].form.dtype != torch.int64 for d in dims):
        raise UnknownError("an index of another kind")
    out = writer.room(_asked(target, args, kwargs))
    places = torch.broadcast_shapes(*(given[d].form.shape for d in dims))
    form = x.form
    for _ in dims:
        form = form.select(first, 0)
    for _ in places:
        form = form.unsqueeze(first)
    behind = (1,) * (x.form.dim() - last - 1)
    indices = [Value(given[d].memory, given[d].form[(..., *(None for _ in behind))]) for d in dims]

    def inner(to: str, at: str, *found: str) -> str:
        steps = [
            f"{_wrapped(f, x.form.shape[d])} * {x.form.stride(d)}"
            for f, d in zip(found, dims, strict=True)
        ]
        return f"{to} = (&{at})[{' + '.join(steps)}];"

    writer.loops([out, Value(x.memory, form.expand(out.form.shape)), *indices], inner)
    return out


def _chosen(x: Value, dim: int, index: Value) -> Value:
    """The entries of x that an index of its shape but for one dimension may mean, at place 0."""
    form = x.form.select(dim, 0).unsqueeze(dim)
    for d, size in enumerate(index.form.shape):
        if d != dim % x.form.dim():
            form = form.narrow(d, 0, size)
    return Value(x.memory, form.expand(index.form.shape))


@_handles(aten.gather.default)
def _gather(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x, dim, index = args[:3]
    out, step = writer.room(_asked(target, args, kwargs)), x.form.stride(dim)
    values = [out, _chosen(x, dim, index), index]
    writer.loops(values, lambda to, at, place: f"{to} = (&{at})[{place} * {step}];")
    return out


@_handles(aten.scatter_add.default)
def _scatter_add(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x, dim, index, source = args
    out = writer.room(_asked(target, args, kwargs))
    writer.loops([out, x], lambda to, at: f"{to} = {at};")
    form = source.form
    for d, size in enumerate(index.form.shape):
        form = form.narrow(d, 0, size)
    values = [_chosen(out, dim, index), index, Value(source.memory, form)]
    step = out.form.stride(dim)
    writer.loops(
        values,
        lambda to, place, at: f"(&{to})[{place} * {step}] += {at};",
        range(index.form.dim()),
    )
    return out


# ---- layers -------------------------------------------------------------------------------------


@_handles(aten.bmm.default, aten.mm.default, aten.baddbmm.default, aten.baddbmm_.default)
def _product(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    *onto, a, b = args
    if a.form.dtype != writer.real or kwargs.get("beta", 1) != 1:
        raise UnknownError(f"{target} of another kind")
    if target is aten.baddbmm_.default:
        out: Value = onto[0]
    else:
        out = writer.room(_asked(target, args, kwargs))
        if onto:
            writer.loops([out, onto[0]], lambda to, at: f"{to} = {at};")
    forms = [v.form if v.form.dim() == 3 else v.form.unsqueeze(0) for v in (a, b, out)]
    many, rows, inner = forms[0].shape
    columns = forms[1].shape[-1]
    (a_row, a_inner), (b_inner, b_column), (c_row, c_column) = (_strides(f) for f in forms)
    if c_column != 1:
        raise UnknownError("a product into columns")
    sizes = (rows, columns, inner, a_row, a_inner, b_inner, b_column, c_row)
    name = f"Product<{', '.join(map(str, sizes))}, {'true' if onto else 'false'}>::apply"
    moved = [f"{v.pointer} + i * {f.stride(0)}" for v, f in zip((a, b, out), forms, strict=True)]
    scale = literal(kwargs.get("alpha", 1), writer.real)
    writer.say(f"for (int i = 0; i < {many}; i++) {name}({', '.join(moved)}, {scale});", a, b, out)
    return out


def _strides(form: Tensor) -> list[int]:
    """The strides of a matrix; along a single entry any would do."""
    return [1 if n == 1 else s for n, s in zip(form.shape[-2:], form.stride()[-2:], strict=True)]


def _layer(x: Sequence[int], w: Sequence[int], stride: Any, padding: Any) -> str:
    filters, channels, *size = w
    if channels > FEW or list(stride) != [1, 1]:
        raise UnknownError("a convolution of many channels")
    return f"Layer<{', '.join(map(str, (channels, filters, *x, *size, *padding)))}>"


def _each(writer: Writer, call: str, values: Sequence[Value | None], clients: int) -> None:
    """A call for each client, with the parts of these values."""
    parts = [
        "nullptr" if v is None else f"{v.pointer} + i * {v.form.numel() // clients}" for v in values
    ]
    used = [v for v in values if v is not None]
    writer.say(f"for (int i = 0; i < {clients}; i++) {call.format(*parts)};", *used)


def _checked(writer: Writer, *values: Any) -> list[Any]:
    """The values without gaps, those that are there."""
    if any(v is not None and v.form.dtype != writer.real for v in values):
        raise UnknownError("two kinds of numbers")
    return [None if v is None else writer.contiguous(v) for v in values]


@_handles(ours.convolve.default)
def _convolve(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x, w, b, stride, padding, relu = args
    layer = _layer(x.form.shape[3:], w.form.shape[1:], stride, padding)
    clients, images = x.form.shape[:2]
    size = [
        n + 2 * p - k + 1
        for n, p, k in zip(x.form.shape[3:], padding, w.form.shape[3:], strict=True)
    ]
    out = writer.room(x.form.new_empty(clients, images, w.form.shape[1], *size))
    call = f"{layer}::convolve({images}, {{0}}, {{1}}, {{2}}, {int(relu)}, {{3}})"
    _each(writer, call, [*_checked(writer, x, w, b), out], clients)
    return out


@_handles(ours.images_gradient.default)
def _to_images(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    d, w, size, stride, padding = args
    if any(p >= k for p, k in zip(padding, w.form.shape[3:], strict=True)):
        raise UnknownError("more zeros than a filter reaches")
    layer = _layer(size, w.form.shape[1:], stride, padding)
    clients, images = d.form.shape[:2]
    out = writer.room(d.form.new_empty(clients, images, w.form.shape[2], *size))
    call = f"{layer}::to_images({images}, {{0}}, {{1}}, {{2}})"
    _each(writer, call, [*_checked(writer, d, w), out], clients)
    return out


@_handles(ours.filters_gradient.default)
def _to_filters(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    d, x, size, stride, padding = args
    shape = [d.form.shape[2], x.form.shape[2], *size]
    layer = _layer(x.form.shape[3:], shape, stride, padding)
    clients, images = d.form.shape[:2]
    out = writer.room(d.form.new_empty(clients, *shape))
    call = f"{layer}::to_filters({images}, {{0}}, {{1}}, {{2}})"
    _each(writer, call, [*_checked(writer, d, x), out], clients)
    return out


@_handles(ours.pool.default)
def _pool(writer: Writer, target: Any, args: Any, kwargs: Any) -> list[Value]:
    x, size = args
    (x,) = _checked(writer, x)
    *many, high, wide = x.form.shape
    out = writer.room(x.form.new_empty(*many, high // size, wide // size))
    planes = torch.Size(many).numel()
    call = f"Windows<{high}, {wide}, {size}, 1>::pool({planes}, {{0}}, {{1}})"
    _each(writer, call, [x, out], 1)
    return [out, writer.room(x.form.new_empty(*many[:-1], 0))]


@_handles(ours.pool_gradient.default)
def _pool_gradient(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    d, x, largest, _, size, positive = args
    d, x, largest = _checked(writer, d, x, largest)
    *many, high, wide = x.form.shape
    out = writer.room(x.form.new_empty(x.form.shape))
    planes = torch.Size(many).numel()
    call = (
        f"Windows<{high}, {wide}, {size}, 1>::spread("
        f"{planes}, {{0}}, {{1}}, {{2}}, {int(positive)}, {{3}})"
    )
    _each(writer, call, [d, x, largest, out], 1)
    return out


# ---- the whole ----------------------------------------------------------------------------------


def laid_out(memories: Iterable[Memory], always: set[str]) -> tuple[dict[str, int], int]:
    """Where each memory begins in a common room, and how large that is.

    Memory that is not needed any more is given to what comes later.
    """
    places: dict[str, int] = {}
    busy: list[tuple[int, int, Memory]] = []  # begin, end, whose
    most = 0
    for memory in sorted(memories, key=lambda m: (m.name not in always, m.first)):
        size = -(-memory.size // _ALIGNED) * _ALIGNED
        taken = sorted(
            (begin, end)
            for begin, end, other in busy
            if memory.name in always
            or other.name in always
            or (other.first < memory.last and memory.first < other.last)
        )
        begin = 0
        for start, end in taken:
            if start - begin >= size:
                break
            begin = max(begin, end)
        places[memory.name] = begin
        busy.append((begin, begin + size, memory))
        most = max(most, begin + size)
    return places, most
