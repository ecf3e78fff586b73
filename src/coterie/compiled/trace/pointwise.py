"""Writes pointwise operations as C++: each entry depends on the arguments' entries at its index."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .cpp_writer import KINDS, OPERATIONS, UnknownError, Value, Writer, asked, literal

aten = torch.ops.aten
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
