"""Simplifies a graph: fewer operations for the same result. Their number limits small models."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from .tracer import writes_unsaid

aten = torch.ops.aten

_SAME_SHAPE = {  # operations that change nothing if the shape stays the same
    aten.expand.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
}
_LARGEST_CONSTANT = 2**20
_SAME = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
_SHORT: dict[Any, Any] = {  # the same operations with less overhead than torch.ops
    aten.add.Tensor: torch.add,
    aten.addcmul.default: torch.addcmul,
    aten.addcmul_.default: Tensor.addcmul_,
    aten.baddbmm.default: torch.baddbmm,
    aten.baddbmm_.default: Tensor.baddbmm_,
    aten.bmm.default: torch.bmm,
    aten.div.Tensor: torch.div,
    aten.expand.default: Tensor.expand,
    aten.gather.default: torch.gather,
    aten.mul.Tensor: torch.mul,
    aten.neg.default: torch.neg,
    aten.relu.default: torch.relu,
    aten.reshape.default: torch.reshape,
    aten.sub.Tensor: torch.sub,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: Tensor.view,
    aten._unsafe_view.default: Tensor.view,
    aten.where.self: torch.where,
}


def simplify(graph: fx.Graph) -> dict[str, Tensor]:
    """Remove operations that change nothing, are computed twice, or are the same in every replay.

    Returns the constants that were folded, by their names in the graph.
    """
    for node in list(graph.nodes):
        same = _unchanged(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    if any(_writes(node) for node in graph.nodes):
        return {}
    _merge(graph)
    return _fold(graph)


def shorten_calls(graph: fx.Graph) -> None:
    """Replace ``torch.ops`` by functions with less overhead; other passes must run before."""
    for node in graph.nodes:
        node.target = _SHORT.get(node.target, node.target)


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


def _merge(graph: fx.Graph) -> None:
    seen: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = repr((node.target, node.args, sorted(node.kwargs.items())))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


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
