"""Passes over a graph: fewer operations, and fewer passes over memory, for the same result.

The number of operations limits small models, memory traffic large ones.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx

from ..kernels.pool import in_cpp, suits  # defines torch.ops.coterie
from .rewrite import VIEWS, WHOLE_VIEWS, drop_unused, item, lies_otherwise, origin
from .tracer import writes_unsaid

aten, ours = torch.ops.aten, torch.ops.coterie

_SAME_SHAPE = {  # operations that change nothing if the shape stays the same
    aten.expand.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
}
_ZEROS = {aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default}
_LARGEST_CONSTANT = 2**20
_SAME = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}


def simplify(graph: fx.Graph) -> dict[str, Tensor]:
    """Remove operations that change nothing or are the same in every replay.

    Returns the constants that were folded, by their names in the graph.
    """
    writes = any(_writes(node) for node in graph.nodes)
    for node in list(graph.nodes):
        same = _unchanged(node)
        if same is None and not writes:  # else something may be written into the zeros
            same = _plus_zeros(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    return {} if writes else _fold(graph)


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The node that this node equals; None if this node computes something new."""
    before: Any = node.args[0] if node.args else None
    if not isinstance(before, fx.Node):
        return None
    if node.target in _SAME:
        return before
    if node.target in _SAME_SHAPE and "shape" in node.meta:
        return before if before.meta.get("shape") == node.meta["shape"] else None
    if node.target is aten.transpose.int and before.target is node.target:
        turned = {*node.args[1:]} == {*before.args[1:]}
        first: Any = before.args[0]
        return first if turned else None
    return None


def _plus_zeros(node: fx.Node) -> fx.Node | None:
    """The node that this one adds zeros to, as FlatModel.tapped does; None if it adds others."""
    if node.target is not aten.add.Tensor:
        return None
    before, added = node.args[:2]
    while isinstance(added, fx.Node) and added.target in VIEWS:
        added = added.args[0]
    zeros = isinstance(added, fx.Node) and added.target in _ZEROS
    if not zeros or not isinstance(before, fx.Node):
        return None
    return before if before.meta.get("shape") == node.meta["shape"] else None


def _fold(graph: fx.Graph) -> dict[str, Tensor]:
    """Compute the nodes that depend on no input, once, as constants."""
    values: dict[fx.Node, Tensor] = {}
    for node in graph.nodes:
        if node.op == "call_function" and all(before in values for before in node.all_input_nodes):
            result = node.target(*_given(node.args, values), **dict(node.kwargs))
            if isinstance(result, Tensor) and result.numel() <= _LARGEST_CONSTANT:
                values[node] = result
    kept = {}
    for node, value in values.items():
        if any(user not in values for user in node.users):
            kept[f"constant_{node.name}"] = value
            with graph.inserting_before(node):
                found = graph.create_node("get_attr", f"constant_{node.name}")
            found.meta["shape"] = value.shape
            node.replace_all_uses_with(found)
    for node in reversed(values):
        graph.erase_node(node)
    return kept


def _given(value: Any, values: dict[fx.Node, Tensor]) -> Any:
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, list | tuple):
        return type(value)(_given(part, values) for part in value)
    return value


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (schema.is_mutable or writes_unsaid(node.target, node.args))


# ---- the operations after a convolution or a pool --------------------------------------------

_TOGETHER: dict[Any, Any] = {
    ours.images_gradient.default: ours.pooled_images_gradient.default,
    ours.filters_gradient.default: ours.pooled_filters_gradient.default,
}
Read = tuple[fx.Node, fx.Node]  # a reader, and the view of a pool's gradient that it reads


def fuse_layers(graph: fx.Graph, device: torch.device) -> None:
    """Fuse a bias and a relu into the convolution before them, and a relu's gradient into a pool's.

    On a CPU, a pool's gradient is also fused into the convolution's.
    """
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor:
            _bias(graph, node)
    for node in list(graph.nodes):
        if node.target is aten.relu.default:
            _relu(node)
        elif node.target is aten.threshold_backward.default:
            _relu_gradient(node)
    drop_unused(graph)
    if in_cpp(device):
        _fuse_pooled(graph)
        drop_unused(graph)


def _bias(graph: fx.Graph, node: fx.Node) -> None:
    """Fuse ``convolve(x, w) + b``, with a bias for each client and filter."""
    for value, bias in (node.args, node.args[::-1]):
        conv: Any = _only(value, ours.convolve.default)
        if conv is None or conv.args[2] is not None or not isinstance(bias, fx.Node):
            continue
        x, w, _, *how = conv.args
        filters, shape = w.meta["shape"][1], list(node.meta["shape"])
        if list(bias.meta["shape"]) != [*shape[:-4], 1, filters, 1, 1]:
            continue
        with graph.inserting_before(node):
            flat = graph.call_function(aten.reshape.default, (bias, [-1, filters]))
            new = graph.call_function(ours.convolve.default, (x, w, flat, *how))
            whole = graph.call_function(aten.view.default, (new, shape))
        new.meta["shape"], whole.meta["shape"] = conv.meta["shape"], node.meta["shape"]
        node.replace_all_uses_with(whole)
        lies_otherwise(whole)
        return


def _relu(node: fx.Node) -> None:
    """Fuse ``relu(convolve(x, w) + b)``."""
    conv = _only(node.args[0], ours.convolve.default)
    if conv is not None:
        conv.args = (*conv.args[:-1], True)
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        lies_otherwise(conv)


def _relu_gradient(node: fx.Node) -> None:
    """Fuse the gradient of ``pool(relu(·))``: zero if the largest entry is not positive."""
    spread = _only(node.args[0], ours.pool_gradient.default)
    if spread is None or node.args[2] != 0 or origin(spread.args[1]) is not origin(node.args[1]):
        return
    spread.args = (*spread.args[:-1], True)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    lies_otherwise(spread)


def _only(node: Any, target: Any) -> fx.Node | None:
    """The operation that a node is a view of, if it is ``target`` and nothing else reads it."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target is target:
            return node
        if node.target not in WHOLE_VIEWS:
            return None
        node = node.args[0]
    return None


def _fuse_pooled(graph: fx.Graph) -> None:
    """Compute a convolution's gradients from the inputs of the pool's gradient.

    This is done if nothing else reads the pool's gradient. The sum over images and pixels for the
    biases is computed with the gradient of the filters.
    """
    for node in list(graph.nodes):
        if node.target is ours.pool_gradient.default:
            reads = list(_reads(node))
            if _joinable(graph, node, reads):
                _join(graph, node, reads)


def _joinable(graph: fx.Graph, spread: fx.Node, reads: list[Read]) -> bool:
    images, filters, sums = _kinds(reads)
    layers, known = [*images, *filters], set(takewhile(lambda n: n is not spread, graph.nodes))
    return (
        len(layers) + len(sums) == len(reads)
        and all(view.meta["shape"][-3:] == spread.meta["shape"][-3:] for _, view in reads)
        and all(_suits(reader) for reader, _ in layers)
        and all(filters and _for_biases(reader, view, filters[0][1]) for reader, view in sums)
        and all(_known_before(spread, reader.args[1], known) for reader, _ in layers)
    )


def _join(graph: fx.Graph, spread: fx.Node, reads: list[Read]) -> None:
    images, filters, sums = _kinds(reads)
    with graph.inserting_before(spread):
        for reader, view in images:
            made = _together(graph, spread, reader, view)
            _replace(reader, made)
            lies_otherwise(made)
        for reader, view in filters:
            both = _together(graph, spread, reader, view)
            _replace(reader, graph.call_function(item, (both, 0)))
            for sum_, _ in sums:
                biases = graph.call_function(item, (both, 1))
                shape = list(sum_.meta["shape"])
                _replace(sum_, graph.call_function(aten.reshape.default, (biases, shape)))


def _kinds(reads: list[Read]) -> tuple[list[Read], list[Read], list[Read]]:
    """The readers that are gradients of images, gradients of filters, and sums."""

    def of(target: Any) -> list[Read]:
        return [read for read in reads if read[0].target is target]

    images, filters = (of(target) for target in _TOGETHER)
    return images, filters, of(aten.sum.dim_IntList)


def _suits(reader: fx.Node) -> bool:
    _, other, size, stride, _ = reader.args
    weights: Any = other
    if reader.target is ours.images_gradient.default:
        size = weights.meta["shape"][3:]
    return suits(size, stride)  # type: ignore[arg-type]


def _for_biases(reader: fx.Node, view: fx.Node, like: fx.Node) -> bool:
    """Whether a reader sums the gradient for each client and filter, which gives the biases'."""
    shape = view.meta["shape"]
    dims: Any = reader.args[1] or range(len(shape))
    summed = {dim % len(shape) for dim in dims}
    kept = [dim for dim in range(len(shape)) if dim not in summed]
    front = len(kept) - 1
    in_front = kept == [*range(front), len(shape) - 3]
    alike = shape[: max(front, 0)].numel() == like.meta["shape"][0]
    return in_front and alike and not reader.kwargs


def _known_before(place: fx.Node, value: Any, known: set[fx.Node]) -> bool:
    """Whether a value is computed before ``place``; a view of such a value is moved there."""
    if value in known:
        return True
    if value.target not in VIEWS or not _known_before(place, value.args[0], known):
        return False
    place.prepend(value)
    known.add(value)
    return True


def _together(graph: fx.Graph, spread: fx.Node, reader: fx.Node, view: fx.Node) -> fx.Node:
    """A convolution's gradient, computed from the inputs of the pool's gradient."""
    lead = list(view.meta["shape"][:-3])
    made_of = [_led(graph, value, lead) for value in spread.args[:3]]
    args = *made_of, *spread.args[3:], *reader.args[1:]
    return graph.call_function(_TOGETHER[reader.target], args)


def _led(graph: fx.Graph, value: Any, lead: list[int]) -> fx.Node:
    """Reshape a value so that the dimensions ``lead`` come before its last three."""
    shape = value.meta["shape"]
    new = [*lead, *shape[-3:]]
    found: fx.Node = value
    return found if new == list(shape) else graph.call_function(aten.reshape.default, (value, new))


def _replace(node: fx.Node, by: fx.Node) -> None:
    by.meta["shape"] = node.meta["shape"]
    node.replace_all_uses_with(by)


def _reads(node: fx.Node) -> Iterator[Read]:
    """All readers of a value's entries, in order, each with the view that it reads."""
    for user in node.users:
        if user.target in WHOLE_VIEWS and _keeps_order(user):
            yield from _reads(user)
        else:
            yield user, node


def _keeps_order(view: fx.Node) -> bool:
    """Whether a view keeps the order of the entries."""
    before: Any = view.args[0]
    function: Any = view.target
    value = torch.empty(before.meta["shape"], device="meta")
    moved: Tensor = function(value, *view.args[1:], **view.kwargs)
    return moved.is_contiguous()
