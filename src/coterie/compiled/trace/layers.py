"""Fuses the operations after a convolution or a pool into the same pass over memory."""

from typing import Any

import torch
from torch import fx

from ..kernels import native_pooled  # defines torch.ops.coterie
from .pool_gradients import join_pooled
from .rewrite import WHOLE_VIEWS, drop_unused, lies_otherwise, origin

aten, ours = torch.ops.aten, torch.ops.coterie


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
    if native_pooled.here(device):
        join_pooled(graph)
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
