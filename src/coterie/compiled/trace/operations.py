"""Writes operations that are not pointwise as C++: sums, indexing, products, layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import kernels  # noqa: F401  # defines torch.ops.coterie
from ..kernels.conv import few
from .cpp_writer import OPERATIONS, Handler, UnknownError, Value, Writer, asked, handles, literal

aten, ours = torch.ops.aten, torch.ops.coterie


def _fill(number: Any) -> Handler:
    def handler(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
        form = asked(target, args, kwargs)
        out = writer.buffer(form)
        value = number if number is not None else args[-1]
        writer.loops([out], lambda to: f"{to} = {literal(value, form.dtype)};")
        return out

    return handler


OPERATIONS |= {
    aten.zeros_like.default: _fill(0),
    aten.ones_like.default: _fill(1),
    aten.new_zeros.default: _fill(0),
    aten.new_ones.default: _fill(1),
    aten.zeros.default: _fill(0),
    aten.full_like.default: _fill(None),
    aten.full.default: _fill(None),
    aten.scalar_tensor.default: _fill(None),
}


@handles(aten.split_with_sizes.default)
def _split(writer: Writer, target: Any, args: Any, kwargs: Any) -> list[Value]:
    value, *rest = args
    return [Value(value.memory, part) for part in target(value.form, *rest, **kwargs)]


@handles(aten.cat.default)
def _cat(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    out, first = writer.buffer(asked(target, args, kwargs)), 0
    for part in parts:
        if part.form.shape == (0,):  # torch ignores such a part
            continue
        size = part.form.shape[dim]
        into = Value(out.memory, out.form.narrow(dim, first, size))
        writer.loops([into, part], lambda to, at: f"{to} = {at};")
        first += size
    return out


@handles(aten.repeat.default)
def _repeat(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x, times = args
    shape = [1] * (len(times) - x.form.dim()) + list(x.form.shape)
    out = writer.buffer(asked(target, args, kwargs))
    both = [n for pair in zip(times, shape, strict=True) for n in pair]
    once = [n for size in shape for n in (1, size)]
    form = writer.contiguous(x)
    values = [Value(out.memory, out.form.view(both)), Value(form.memory, form.form.view(once))]
    writer.loops(values, lambda to, at: f"{to} = {at};")
    return out


@handles(aten.slice_backward.default, aten.select_backward.default)
def _back_into(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    slope, size, dim, *place = args
    out = writer.buffer(torch.empty(size, dtype=slope.form.dtype, device="meta"))
    writer.loops([out], lambda to: f"{to} = 0;")
    cut = aten.slice.Tensor if target is aten.slice_backward.default else aten.select.int
    into = Value(out.memory, cut(out.form, dim, *place))
    writer.loops([into, slope], lambda to, at: f"{to} = {at};")
    return out


# ---- sums ---------------------------------------------------------------------------------------


@handles(aten.sum.dim_IntList, aten.mean.dim, aten.sum.default, aten.mean.default)
def _sum(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x: Value = args[0]
    if kwargs.get("dtype") not in (None, x.form.dtype) or not x.form.is_floating_point():
        raise UnknownError(f"{target} into another kind")
    out = writer.buffer(asked(target, args, kwargs))
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
    """Sum x over its last dimensions into out, which has the other dimensions."""
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
    """The value expanded along the last dimensions of a form."""
    more = [1] * (form.dim() - out.form.dim())
    return Value(out.memory, out.form.view(*out.form.shape, *more).expand(form.shape))


@handles(aten.linalg_vector_norm.default)
def _norm(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x = args[0]
    order, dims, keep = ([*args[1:], 2][0], *[*args[2:], None, False][:2])
    if order != 2 or kwargs:
        raise UnknownError("a norm that is not Euclidean")
    squares = writer.buffer(torch.empty(x.form.shape, dtype=x.form.dtype, device="meta"))
    writer.loops([squares, x], lambda to, at: f"{to} = {at} * {at};")
    every = list(range(x.form.dim())) if dims is None else dims
    out: Value = _sum(writer, aten.sum.dim_IntList, (squares, every, keep), {})
    writer.loops([out], lambda to: f"{to} = std::sqrt({to});")
    return out


@handles(aten._log_softmax.default)
def _log_softmax(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x, dim = args[0], args[1]
    out = writer.buffer(asked(target, args, kwargs))
    strides = f"<{x.form.shape[dim]}, {x.form.stride(dim)}, {out.form.stride(dim)}>"
    rows = [Value(v.memory, v.form.select(dim, 0)) for v in (out, x)]
    writer.loops(
        rows, lambda to, at: f"log_softmax{strides}(&{at}, &{to});", range(x.form.dim() - 1)
    )
    return out


@handles(aten._log_softmax_backward_data.default)
def _log_softmax_gradient(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    slope, result, dim = args[:3]
    out = writer.buffer(asked(target, args, kwargs))
    values = (out, slope, result)
    sizes = ", ".join(str(v.form.stride(dim)) for v in values)
    name = f"log_softmax_gradient<{slope.form.shape[dim]}, {sizes}>"
    rows = [Value(v.memory, v.form.select(dim, 0)) for v in values]
    writer.loops(rows, lambda to, g, y: f"{name}(&{g}, &{y}, &{to});", range(slope.form.dim() - 1))
    return out


# ---- indexing -----------------------------------------------------------------------------------


def _wrapped(place: str, size: int) -> str:
    return f"({place} < 0 ? {place} + {size} : {place})"


@handles(aten.index.Tensor)
def _index(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x, given = args
    dims = [d for d, index in enumerate(given) if index is not None]
    first, last = dims[0], dims[-1]
    if len(dims) != last - first + 1 or any(given[d].form.dtype != torch.int64 for d in dims):
        raise UnknownError("an index of another kind")
    out = writer.buffer(asked(target, args, kwargs))
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
    """The entries of x at index 0 of ``dim``, with the shape of ``index`` (``dim`` is expanded)."""
    form = x.form.select(dim, 0).unsqueeze(dim)
    for d, size in enumerate(index.form.shape):
        if d != dim % x.form.dim():
            form = form.narrow(d, 0, size)
    return Value(x.memory, form.expand(index.form.shape))


@handles(aten.gather.default)
def _gather(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x, dim, index = args[:3]
    out, step = writer.buffer(asked(target, args, kwargs)), x.form.stride(dim)
    values = [out, _chosen(x, dim, index), index]
    writer.loops(values, lambda to, at, place: f"{to} = (&{at})[{place} * {step}];")
    return out


@handles(aten.scatter_add.default)
def _scatter_add(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x, dim, index, source = args
    out = writer.buffer(asked(target, args, kwargs))
    writer.loops([out, x], lambda to, at: f"{to} = {at};")
    form = source.form
    for d, size in enumerate(index.form.shape):
        form = form.narrow(d, 0, size)
    values = [_chosen(out, dim, index), index, Value(source.memory, form)]
    step = out.form.stride(dim)
    writer.loops(
        values, lambda to, place, at: f"(&{to})[{place} * {step}] += {at};", range(index.form.dim())
    )
    return out


# ---- layers -------------------------------------------------------------------------------------


@handles(aten.bmm.default, aten.mm.default, aten.baddbmm.default, aten.baddbmm_.default)
def _product(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    *onto, a, b = args
    if a.form.dtype != writer.real or kwargs.get("beta", 1) != 1:
        raise UnknownError(f"{target} of another kind")
    if target is aten.baddbmm_.default:
        out: Value = onto[0]
    else:
        out = writer.buffer(asked(target, args, kwargs))
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
    call = f"{name}({', '.join(moved)}, {scale});"
    writer.steps.append(f"for (int i = 0; i < {many}; i++) {call}")
    return out


def _strides(form: Tensor) -> list[int]:
    """The strides of a matrix; for a dimension of one entry any stride is right."""
    return [1 if n == 1 else s for n, s in zip(form.shape[-2:], form.stride()[-2:], strict=True)]


def _layer(x: Sequence[int], w: Sequence[int], stride: Any, padding: Any) -> str:
    filters, channels, *size = w
    if not few(channels, filters) or list(stride) != [1, 1]:
        raise UnknownError("a convolution of many channels")
    return f"Layer<{', '.join(map(str, (channels, filters, *x, *size, *padding)))}>"


def _each(writer: Writer, call: str, values: Sequence[Value | None], clients: int) -> None:
    """Write the call for each client, with the client's parts of these values."""
    parts = [
        "nullptr" if v is None else f"{v.pointer} + i * {v.form.numel() // clients}" for v in values
    ]
    writer.steps.append(f"for (int i = 0; i < {clients}; i++) {call.format(*parts)};")


def _checked(writer: Writer, *values: Any) -> list[Any]:
    """The values that are not None, as contiguous memory."""
    if any(v is not None and v.form.dtype != writer.real for v in values):
        raise UnknownError("two kinds of numbers")
    return [None if v is None else writer.contiguous(v) for v in values]


@handles(ours.convolve.default)
def _convolve(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x, w, b, stride, padding, relu = args
    layer = _layer(x.form.shape[3:], w.form.shape[1:], stride, padding)
    clients, images = x.form.shape[:2]
    size = [
        n + 2 * p - k + 1
        for n, p, k in zip(x.form.shape[3:], padding, w.form.shape[3:], strict=True)
    ]
    out = writer.buffer(x.form.new_empty(clients, images, w.form.shape[1], *size))
    call = f"{layer}::convolve({images}, {{0}}, {{1}}, {{2}}, {int(relu)}, {{3}})"
    _each(writer, call, [*_checked(writer, x, w, b), out], clients)
    return out


@handles(ours.images_gradient.default)
def _to_images(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    d, w, size, stride, padding = args
    if any(p >= k for p, k in zip(padding, w.form.shape[3:], strict=True)):
        raise UnknownError("more zeros than a filter reaches")
    layer = _layer(size, w.form.shape[1:], stride, padding)
    clients, images = d.form.shape[:2]
    out = writer.buffer(d.form.new_empty(clients, images, w.form.shape[2], *size))
    call = f"{layer}::to_images({images}, {{0}}, {{1}}, {{2}})"
    _each(writer, call, [*_checked(writer, d, w), out], clients)
    return out


@handles(ours.filters_gradient.default)
def _to_filters(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    d, x, size, stride, padding = args
    shape = [d.form.shape[2], x.form.shape[2], *size]
    layer = _layer(x.form.shape[3:], shape, stride, padding)
    clients, images = d.form.shape[:2]
    out = writer.buffer(d.form.new_empty(clients, *shape))
    call = f"{layer}::to_filters({images}, {{0}}, {{1}}, {{2}})"
    _each(writer, call, [*_checked(writer, d, x), out], clients)
    return out


@handles(ours.pool.default)
def _pool(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    x, size = args
    (x,) = _checked(writer, x)
    *many, high, wide = x.form.shape
    out = writer.buffer(x.form.new_empty(*many, high // size, wide // size))
    planes = torch.Size(many).numel()
    call = f"Windows<{high}, {wide}, {size}, 1>::pool({planes}, {{0}}, {{1}})"
    _each(writer, call, [x, out], 1)
    return out


@handles(ours.pool_gradient.default)
def _pool_gradient(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    d, x, largest, size, positive = args
    d, x, largest = _checked(writer, d, x, largest)
    *many, high, wide = x.form.shape
    out = writer.buffer(x.form.new_empty(x.form.shape))
    planes = torch.Size(many).numel()
    call = (
        f"Windows<{high}, {wide}, {size}, 1>::spread("
        f"{planes}, {{0}}, {{1}}, {{2}}, {int(positive)}, {{3}})"
    )
    _each(writer, call, [d, x, largest, out], 1)
    return out


# ---- gradients of pooled layers -----------------------------------------------------------------


def _pooled(args: Any, filters: Sequence[int], image: Sequence[int]) -> str:
    """The C++ class of a pooled layer."""
    window, padding = args[3], args[-1]
    maps, channels, *size = filters
    return f"Pooled<{', '.join(map(str, (channels, maps, *image, *size, *padding, window)))}>"


def _entries(writer: Writer, args: Any) -> tuple[list[Value], str]:
    """The inputs of a pool's gradient, and the arguments that pass them."""
    g, y, largest, _, positive = args[:5]
    (y, largest), g = _checked(writer, y, largest), _dense(writer, g)
    return [g, largest, y], f"{{0}}, {_way(g)}, {{1}}, {{2}}, false, {int(positive)}"


def _dense(writer: Writer, value: Value) -> Value:
    """The value as contiguous memory, with channels first or last."""
    last = value.form.movedim(-3, -1).is_contiguous()
    return value if last and value.form.dtype == writer.real else _checked(writer, value)[0]


def _way(value: Value) -> str:
    """The strides of channels and of pixels."""
    channel, _, pixel = value.form.stride()[-3:]
    return f"Lie({channel}, {pixel})"


@handles(ours.pooled_images_gradient.default)
def _pooled_to_images(writer: Writer, target: Any, args: Any, kwargs: Any) -> Value:
    w, size = args[5:7]
    layer = _pooled(args, w.form.shape[1:], size)
    entries, given = _entries(writer, args)
    clients, images = entries[0].form.shape[:2]
    out = writer.buffer(w.form.new_empty(clients, images, *size, w.form.shape[2]).movedim(-1, -3))
    call = f"{layer}::to_images({images}, {given}, {{3}}, {{4}})"
    _each(writer, call, [*entries, *_checked(writer, w), out], clients)
    return out


@handles(ours.pooled_filters_gradient.default)
def _pooled_to_filters(writer: Writer, target: Any, args: Any, kwargs: Any) -> list[Value]:
    x, size = args[5:7]
    entries, given = _entries(writer, args)
    shape = [entries[2].form.shape[2], x.form.shape[2], *size]
    layer = _pooled(args, shape, x.form.shape[3:])
    clients, images = x.form.shape[:2]
    outs = [writer.buffer(x.form.new_empty(clients, *rest)) for rest in (shape, shape[:1])]
    x = _dense(writer, x)
    call = f"{layer}::to_filters({images}, {given}, {{3}}, {_way(x)}, {{4}}, {{5}})"
    _each(writer, call, [*entries, x, *outs], clients)
    return outs
