"""Fuses a pool's gradient into the gradients of the convolution before it."""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx

from ..kernels import native_pooled  # defines torch.ops.coterie
from .rewrite import VIEWS, WHOLE_VIEWS, item, lies_otherwise

aten, ours = torch.ops.aten, torch.ops.coterie

_TOGETHER: dict[Any, Any] = {
    ours.images_gradient.default: ours.pooled_images_gradient.default,
    ours.filters_gradient.default: ours.pooled_filters_gradient.default,
}
Read = tuple[fx.Node, fx.Node]  # a reader, and the view of a pool's gradient that it reads


def join_pooled(graph: fx.Graph) -> None:
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
    return native_pooled.suits(size, stride)  # type: ignore[arg-type]


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
    made_of = [_led(graph, value, lead) for value in spread.args[:4]]
    args = *made_of, *spread.args[4:], *reader.args[1:]
    return graph.call_function(_TOGETHER[reader.target], args)


def _led(graph: fx.Graph, value: Any, lead: list[int]) -> fx.Node:
    """Reshape a value so that the dimensions ``lead`` come before its last three."""
    shape = value.meta["shape"]
    new = (
        [*lead, *shape[-3:]] if shape[-1] else [*lead, 0]
    )  # an empty tensor: the positions of the largest entries are not stored
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
