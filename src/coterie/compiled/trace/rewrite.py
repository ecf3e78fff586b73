"""Builds a graph from traced operations that moves less memory; results are equal to rounding.

Methods see a model as one vector, networks as layers. Literally, every training step splits the
vector into layers, concatenates the layers' gradients and adds the two vectors. Here a vector is
held as *pieces*, one tensor per layer: splitting and concatenating cost nothing, and pointwise
operations work piece by piece. Three peephole optimisations follow. A gradient that is a matrix
product and is only used for a descent step is never stored: the product is accumulated onto the
weights. Views of views that change nothing are removed. The carry of a loop is overwritten in place
if nothing reads the old value any more.

What this relies on, and what happens otherwise: pieces come from one ``split`` of the model vector
(``FlatModel`` makes exactly one; without it vectors stay whole), and ``fuse_descent`` looks for
``addcmul(w, lr, gradient, value=-1)`` (``core.optim.sgd`` makes it; without it gradients are
stored). In both cases results stay right and only speed is lost; ``tests/test_trace.py`` checks it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .tracer import Op, Ref, Registers, writes_unsaid

aten = torch.ops.aten
Shape = torch.Size

_COPIES = {aten.alias.default, aten.detach.default, aten.clone.default}
_FILLS = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.alias.default,
    aten.detach.default,
    aten.transpose.int,
    aten.permute.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.t.default,
}
WHOLE_VIEWS = VIEWS - {aten.expand.default, aten.select.int, aten.slice.Tensor}
_IN_PLACE: dict[Any, Any] = {
    aten.baddbmm.default: aten.baddbmm_.default,
    aten.addcmul.default: aten.addcmul_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
}


class Pieces(NamedTuple):
    """A tensor in parts along its last dimension."""

    nodes: tuple[fx.Node, ...]
    sizes: tuple[int, ...]


Value = fx.Node | Pieces


class GraphBuilder:
    """Builds a graph from operations on registers."""

    def __init__(self, registers: Registers) -> None:
        self.graph = fx.Graph()
        self._shapes, self._stays_whole = registers.shapes, registers.whole
        self._held: dict[int, Value] = {}
        self._whole: dict[tuple[fx.Node, ...], fx.Node] = {}

    def take(self, register: int, sizes: tuple[int, ...] | None) -> None:
        """Add an input, in pieces where sizes are given."""
        shape = self._shapes[register]
        if sizes is None:
            self._held[register] = self._marked(self.graph.placeholder(f"r{register}"), shape)
            return
        nodes = [
            self._marked(self.graph.placeholder(f"r{register}_{i}"), (*shape[:-1], size))
            for i, size in enumerate(sizes)
        ]
        self._held[register] = Pieces(tuple(nodes), sizes)

    def give(self, outs: Iterable[tuple[int, tuple[int, ...] | None]]) -> fx.Graph:
        """Set the outputs and return the graph."""
        nodes: list[fx.Node] = []
        for register, sizes in outs:
            nodes += (
                [self._one(self._held[register])]
                if sizes is None
                else self._cut(self._held[register], sizes).nodes
            )
        self.graph.output(tuple(nodes))
        drop_unused(self.graph)
        return self.graph

    def add(self, op: Op) -> None:
        parts = self._by_pieces(op)
        if parts is not None:
            self._held[op.writes[0]] = parts
            return
        if op.function is aten.split_with_sizes.default and self._split(op):
            return
        args, kwargs = self._plain(op.args), self._plain(op.kwargs)
        result = self._call(op.function, args, kwargs)
        for at, register in enumerate(op.writes):
            if op.function._schema.is_mutable and register in self._held:
                continue
            node = self._call(item, (result, op.places[at])) if op.places else result
            self._held[register] = self._marked(node, self._shapes[register])

    # ---- pieces ----------------------------------------------------------------------------

    def _by_pieces(self, op: Op) -> Pieces | None:
        """The result, in pieces, of an operation on vectors in pieces; None if impossible."""
        if op.places or op.function._schema.is_mutable or op.writes[0] in self._stays_whole:
            return None
        if op.function is aten.cat.default:
            return self._joined(op)
        shape, held = self._shapes[op.writes[0]], [self._held.get(r) for r in op.reads]
        sizes = next((v.sizes for v in held if isinstance(v, Pieces)), None)
        if sizes is None or not shape:
            return None
        if op.function is aten.slice.Tensor:
            return self._sliced(op)
        same = op.function in _COPIES | _FILLS or torch.Tag.pointwise in op.function.tags
        if op.function is aten.view.default:
            same = shape == self._shapes[op.reads[0]]
        if not same or shape[-1] != sum(sizes):
            return None
        return self._spread(op, sizes)

    def _spread(self, op: Op, sizes: tuple[int, ...]) -> Pieces:
        shape, nodes = self._shapes[op.writes[0]], []
        cut: dict[int, Any] = {}
        for register in op.reads:
            own = self._shapes[register]
            wide = bool(own) and own[-1] == shape[-1] != 1
            value = self._held[register]
            cut[register] = self._cut(value, sizes) if wide else self._one(value)
        for i, size in enumerate(sizes):

            def node(ref: Ref, i: int = i) -> fx.Node:
                found = cut[ref.register]
                return found.nodes[i] if isinstance(found, Pieces) else found

            args, kwargs = _mapped(op.args, node), _mapped(op.kwargs, node)
            if op.function is aten.view.default:
                args = (args[0], [*shape[:-1], size])
            nodes.append(self._marked(self._call(op.function, args, kwargs), (*shape[:-1], size)))
        return Pieces(tuple(nodes), sizes)

    def _joined(self, op: Op) -> Pieces | None:
        refs, dim = op.args[0], op.args[1] if len(op.args) > 1 else 0
        shape = self._shapes[op.writes[0]]
        if dim not in (-1, len(shape) - 1) or len(shape) < 2:
            return None
        nodes: list[fx.Node] = []
        for ref in refs:
            value = self._held[ref.register]
            nodes += value.nodes if isinstance(value, Pieces) else (self._steady(ref, value),)
        return Pieces(tuple(nodes), tuple(n.meta["shape"][-1] for n in nodes))

    def _steady(self, ref: Ref, node: fx.Node) -> fx.Node:
        """A piece that no later operation writes into."""
        if ref.register not in self._stays_whole:
            return node
        return self._marked(self._call(aten.clone.default, (node,)), node.meta["shape"])

    def _split(self, op: Op) -> bool:
        """Split a vector at the ends of its pieces, which costs nothing; False if impossible."""
        value, sizes = self._held[op.reads[0]], tuple(op.args[1])
        shape = self._shapes[op.reads[0]]
        dim = op.args[2] if len(op.args) > 2 else 0
        if not isinstance(value, Pieces) or value.sizes != sizes or dim not in (-1, len(shape) - 1):
            return False
        self._held |= zip(op.writes, value.nodes, strict=True)
        return True

    def _sliced(self, op: Op) -> Pieces | None:
        value = self._held[op.reads[0]]
        given = list(op.args[1:])
        dim, start, stop, step = given + [0, 0, None, 1][len(given) :]
        shape = self._shapes[op.reads[0]]
        if not isinstance(value, Pieces) or dim not in (-1, len(shape) - 1) or step != 1:
            return None
        edges = [sum(value.sizes[:i]) for i in range(len(value.sizes) + 1)]
        start, stop = start or 0, edges[-1] if stop is None else min(stop, edges[-1])
        if start not in edges or stop not in edges or stop <= start:
            return None
        some = slice(edges.index(start), edges.index(stop))
        return Pieces(value.nodes[some], value.sizes[some])

    def _cut(self, value: Value, sizes: tuple[int, ...]) -> Pieces:
        """A value in pieces of these sizes."""
        if isinstance(value, Pieces) and value.sizes == sizes:
            return value
        whole = self._one(value)
        shape = whole.meta["shape"]
        parts = self._call(aten.split_with_sizes.default, (whole, list(sizes), len(shape) - 1))
        nodes = [
            self._marked(self._call(item, (parts, i)), (*shape[:-1], size))
            for i, size in enumerate(sizes)
        ]
        return Pieces(tuple(nodes), sizes)

    def _one(self, value: Value) -> fx.Node:
        """A value in one piece."""
        if isinstance(value, fx.Node):
            return value
        if len(value.nodes) == 1:
            return value.nodes[0]
        if value.nodes not in self._whole:
            shape = value.nodes[0].meta["shape"]
            node = self._call(aten.cat.default, (list(value.nodes), len(shape) - 1))
            self._whole[value.nodes] = self._marked(node, (*shape[:-1], sum(value.sizes)))
        return self._whole[value.nodes]

    # ---- nodes -----------------------------------------------------------------------------

    def _plain(self, value: Any) -> Any:
        return _mapped(value, lambda ref: self._one(self._held[ref.register]))

    def _call(self, function: Any, args: Any, kwargs: Any = None) -> fx.Node:
        return self.graph.call_function(function, tuple(args), kwargs or {})

    def _marked(self, node: fx.Node, shape: Iterable[int]) -> fx.Node:
        node.meta["shape"] = Shape(shape)
        return node


def _mapped(value: Any, node: Any) -> Any:
    if isinstance(value, Ref):
        return node(value)
    if isinstance(value, dict):
        return {key: _mapped(part, node) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, node) for part in value)
    return value


def item(values: Sequence[Tensor], place: int) -> Tensor:
    return values[place]


def layers(ops: Iterable[Any], shapes: Sequence[Shape]) -> tuple[int, ...] | None:
    """The sizes into which a step splits its longest vector; None if it splits none."""
    cuts = [
        tuple(op.args[1])
        for op in ops
        if isinstance(op, Op)
        and op.function is aten.split_with_sizes.default
        and (op.args[2] if len(op.args) > 2 else 0) == len(shapes[op.reads[0]]) - 1
    ]
    return max(cuts, key=sum, default=None)


def drop_unused(graph: fx.Graph) -> None:
    """Remove results that nothing reads, except operations that write into a tensor."""
    graph.eliminate_dead_code(
        lambda node: node.is_impure() or writes_unsaid(node.target, node.args)
    )


# ---- peepholes -----------------------------------------------------------------------------


def fuse_descent(graph: fx.Graph) -> None:
    """Compute ``w - η·(a @ b)`` as one ``baddbmm`` if ``a @ b`` is used for nothing else."""
    for node in list(graph.nodes):
        if node.target is not aten.addcmul.default or node.kwargs.get("value", 1) != -1:
            continue
        w, rate, step = _nodes(node)
        product = _product(step)
        if product is None or step.meta["shape"] != node.meta["shape"]:
            continue
        if rate.meta["shape"] and rate.meta["shape"][-1] != 1:  # one rate per entry
            continue
        a, b = _nodes(product)
        batch, rows, columns = product.meta["shape"]
        lead = node.meta["shape"][:-1]
        if lead.numel() != batch:  # one product for several models, of a batch of one sample
            continue
        with graph.inserting_before(node):
            rate = graph.call_function(aten.expand.default, (rate, [*lead, 1]))
            rate = graph.call_function(aten.reshape.default, (rate, [batch, 1, 1]))
            if a.meta["shape"].numel() <= b.meta["shape"].numel():
                a = graph.call_function(aten.mul.Tensor, (a, rate))
            else:
                b = graph.call_function(aten.mul.Tensor, (b, rate))
            onto = graph.call_function(aten.view.default, (w, [batch, rows, columns]))
            moved = graph.call_function(aten.baddbmm.default, (onto, a, b), {"alpha": -1})
            flat = graph.call_function(aten.view.default, (moved, [*node.meta["shape"]]))
        flat.meta["shape"] = node.meta["shape"]
        node.replace_all_uses_with(flat)
    drop_unused(graph)


def _product(node: fx.Node) -> fx.Node | None:
    """The matrix product that a node is a view of; None if there is none or it has other users."""
    chain: list[fx.Node] = []
    while node.target in VIEWS and len(node.users) == 1:
        chain.append(node)
        node = _nodes(node)[0]
    if node.target is not aten.bmm.default or len(node.users) != 1:
        return None
    value = torch.empty(node.meta["shape"], device="meta")
    for view in reversed(chain):
        if view.target is aten.expand.default:
            return None
        function: Any = view.target
        value = function(value, *view.args[1:], **view.kwargs)
    return node if value.is_contiguous() and value.numel() == node.meta["shape"].numel() else None


def part_outputs(graph: fx.Graph, carried: int, first: int) -> None:
    """Give each value of the new carry memory of its own, so that it may be overwritten."""
    inputs = _inputs(graph, carried, first)
    output = graph.output_node()
    outs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    owner: dict[fx.Node, Any] = {}
    for at, out in enumerate(outs):
        root, split = _root(out)
        foreign = root.op == "placeholder" and root is not inputs[at]
        me = at if split is None else split
        if foreign or out in outs[:at] or owner.setdefault(root, me) != me:
            with graph.inserting_before(output):
                outs[at] = graph.call_function(aten.clone.default, (out,))
    output.args = (tuple(outs),)


def _root(node: Any) -> tuple[Any, Any]:
    """The node that owns a node's memory, and the split between them, if any."""
    split = None
    while node.target in VIEWS or node.target in (item, aten.split_with_sizes.default):
        split = node if node.target is aten.split_with_sizes.default else split
        node = node.args[0]
    return node, split


def _inputs(graph: fx.Graph, carried: int, first: int) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"][first : first + carried]


def overwrite(graph: fx.Graph, carried: int, first: int) -> None:
    """Write the new carry into the memory of the old one, if nothing else reads the old one."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    inputs = _inputs(graph, carried, first)
    outputs: Any = graph.output_node().args[0]
    for into, out in zip(inputs, outputs, strict=True):
        node = origin(out)
        target = _IN_PLACE.get(node.target)
        free = target is not None and origin(node.args[0]) is into
        if free and all(order[user] <= order[node] for user in _readers(into)):
            node.target = target


def origin(node: Any) -> Any:
    """The node of which a node is a view with all entries."""
    while node.target in WHOLE_VIEWS:
        node = node.args[0]
    return node


def lies_otherwise(node: fx.Node) -> None:
    """Turn views of a value into copies, because its memory layout differs from the traced one."""
    for user in node.users:
        if user.target in (aten.view.default, aten._unsafe_view.default):
            user.target = aten.reshape.default
        if user.target in VIEWS:
            lies_otherwise(user)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """All nodes that read the memory of a node."""
    for user in node.users:
        yield user
        if user.target in VIEWS or user.target in (item, aten.split_with_sizes.default):
            yield from _readers(user)


def _nodes(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.args)
