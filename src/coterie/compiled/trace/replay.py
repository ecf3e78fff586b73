"""Replays a trace: segments without loops as functions, loops by torch or in C++."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from ...core.calls import Destination
from . import rewrite
from .cpp_writer import UnknownError
from .modes import chosen
from .native_loop import NativeLoop, Pattern, Sizes, TensorForm
from .passes import fuse_layers, simplify
from .tracer import Body, Loop, Op, Registers, Tracer, outside

_ANYWHERE: Mapping[int, Destination] = {}  # no output has a destination


class Segment:
    """Operations without a loop, as one function of registers."""

    def __init__(self, ops: Sequence[Op], later: set[int], registers: Registers) -> None:
        builder = rewrite.GraphBuilder(registers)
        self.ins = tuple(outside(ops, (), ()))
        self.outs = tuple(dict.fromkeys(r for op in ops for r in op.writes if r in later))
        for register in self.ins:
            builder.take(register, None)
        for op in ops:
            builder.add(op)
        graph = builder.give((r, None) for r in self.outs)
        constants = simplify(graph)
        fuse_layers(graph, registers.device)
        self.ins = tuple(_used(graph, self.ins))
        self.module = fx.GraphModule(constants, graph)
        self.replay: Callable[..., tuple[Tensor, ...]] = self.module.forward

    @property
    def reads(self) -> tuple[int, ...]:
        """Registers whose memory layout must be as it was when they were traced."""
        return self.ins

    def __call__(self, held: dict[int, Tensor]) -> Sequence[Tensor]:
        """Its outputs, given the values of the registers."""
        return self.replay(*(held[r] for r in self.ins))


class LoopBody:
    """One step of a loop as a function of its index, the carry, and the other values it reads."""

    def __init__(
        self,
        body: Body,
        registers: Registers,
        sizes: Sequence[Sizes],
        beside: Sequence[int],
        cuts: Sequence[Sizes],
    ) -> None:
        builder = rewrite.GraphBuilder(registers)
        builder.take(body.number, None)
        for register, size in zip((*body.ins, *beside), (*sizes, *cuts), strict=True):
            builder.take(register, size)
        for op in body.ops:
            builder.add(op)
        graph = builder.give(zip(body.outs, sizes, strict=True))
        constants = simplify(graph)
        fuse_layers(graph, registers.device)
        rewrite.fuse_descent(graph)
        carried = sum(1 if size is None else len(size) for size in sizes)
        rewrite.part_outputs(graph, carried, 1)
        rewrite.overwrite(graph, carried, 1)
        self.constants = constants
        self.module = fx.GraphModule(constants, graph)
        self.replay: Callable[..., tuple[Tensor, ...]] = self.module.forward


class TracedLoop:
    """A loop, replayed by torch, or in C++ once it is compiled."""

    def __init__(self, loop: Loop, registers: Registers) -> None:
        self._begin, self._order, self.outs = loop.begin, loop.order, loop.writes
        cuts = (rewrite.layers(body.ops, registers.shapes) or () for body in loop.bodies)
        cut = max(cuts, key=sum)
        self.sizes = [
            _sizes(same, registers, cut)
            for same in zip(loop.begin, *(body.ins for body in loop.bodies), strict=True)
        ]
        self._beside = list(dict.fromkeys(r for body in loop.bodies for r in body.beside))
        self.cuts = [_sizes((r,), registers, cut) for r in self._beside]
        self.bodies = [
            LoopBody(body, registers, self.sizes, self._beside, self.cuts) for body in loop.bodies
        ]
        self._registers = registers
        self.native: NativeLoop | None = None
        self._numbers = torch.arange(len(loop.order), device=registers.device).unbind()

    @property
    def steps(self) -> int:
        return len(self._order)

    @property
    def ins(self) -> tuple[int, ...]:
        """The carry before the first step, and what all steps read."""
        return (*self._begin, *self._beside)

    @property
    def reads(self) -> tuple[int, ...]:
        """Registers whose memory layout must be as traced; the carry is copied at the start."""
        return tuple(self._beside)

    @property
    def pattern(self) -> Pattern:
        """The description of the loop for the compiler."""

        def forms(registers: Sequence[int], sizes: Sequence[Sizes]) -> list[TensorForm]:
            shapes, kinds = self._registers.shapes, self._registers.kinds
            return [
                TensorForm(shapes[r], kinds[r], s) for r, s in zip(registers, sizes, strict=True)
            ]

        return Pattern(
            forms(self._begin, self.sizes),
            forms(self._beside, self.cuts),
            [(body.module.graph, body.constants) for body in self.bodies],
            self._order,
        )

    def __call__(
        self, held: dict[int, Tensor], destinations: Mapping[int, Destination] = _ANYWHERE
    ) -> Sequence[Tensor]:
        """The carry after the last step; compiled steps write it into its destinations."""
        if self.native is not None:
            begin, beside = ([held[r] for r in some] for some in (self._begin, self._beside))
            return self.native(begin, beside, [destinations.get(r) for r in self.outs])
        carry: Sequence[Tensor] = [
            p for r, s in zip(self._begin, self.sizes, strict=True) for p in _owned(held[r], s)
        ]
        beside = [
            p for r, s in zip(self._beside, self.cuts, strict=True) for p in _apart(held[r], s)
        ]
        for at in chosen(self._order):
            carry = self.bodies[self._order[at]].replay(self._numbers[at], *carry, *beside)
        parts = iter(carry)
        return [
            next(parts) if s is None else torch.cat([next(parts) for _ in s], -1)
            for s in self.sizes
        ]


def _used(graph: fx.Graph, ins: Sequence[int]) -> Iterator[int]:
    """The inputs that a graph reads; the others are removed from it."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    for node, register in zip(given, ins, strict=True):
        if node.users:
            yield register
        else:
            graph.erase_node(node)


def _sizes(same: Sequence[int], registers: Registers, cut: tuple[int, ...]) -> Sizes:
    """The layer sizes into which a vector is split; None for a tensor that is no model vector.

    A vector without buffers has the first layers only.
    """
    shape = registers.shapes[same[0]]
    if len(shape) < 2 or not registers.whole.isdisjoint(same):
        return None
    for count in range(len(cut), 1, -1):
        if shape[-1] == sum(cut[:count]):
            return cut[:count]
    return None


def _apart(value: Tensor, sizes: Sizes) -> list[Tensor]:
    return [value] if sizes is None else [p.contiguous() for p in value.split(sizes, -1)]


def _owned(value: Tensor, sizes: Sizes) -> list[Tensor]:
    parts = [value] if sizes is None else value.split(sizes, -1)
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


class Trace:
    """A traced call as a function of tensors."""

    def __init__(self, tracer: Tracer, outputs: Sequence[Tensor]) -> None:
        self._inputs, self._constants = tracer.inputs, tracer.constants
        self._outputs = [tracer.register(leaf) for leaf in outputs]
        self.parts = list(_parts(tracer.ops, self._outputs, tracer.registers))
        self._over = self._last_uses()
        read = {r for part in self.parts for r in part.reads}
        self._any_layout = set(self._inputs) - read - set(self._outputs)

    def _last_uses(self) -> list[list[int]]:
        """The registers that are not needed after each part."""
        last = {r: at for at, part in enumerate(self.parts) for r in (*part.ins, *part.outs)}
        kept = {*self._outputs, *self._constants}
        over: list[list[int]] = [[] for _ in self.parts]
        for register, at in last.items():
            if register not in kept:
                over[at].append(register)
        return over

    def compile(self, one: "Trace") -> None:
        """Replace the loops by C++, written from a trace of a single client."""
        if len(one.loops) != len(self.loops):
            raise UnknownError("the loops of one client differ from those of many")
        for mine, alone in zip(self.loops, one.loops, strict=True):
            mine.native = NativeLoop(alone.pattern, mine.pattern)

    def uncompile(self) -> None:
        """Let torch replay the loops again."""
        for loop in self.loops:
            loop.native = None

    @property
    def loops(self) -> list[TracedLoop]:
        return [part for part in self.parts if isinstance(part, TracedLoop)]

    @property
    def segments(self) -> Iterator[Segment | LoopBody]:
        for part in self.parts:
            yield from (part,) if isinstance(part, Segment) else part.bodies

    def __call__(
        self, inputs: Sequence[Tensor], destinations: Callable[[int], Destination] | None = None
    ) -> list[Tensor]:
        """The outputs for these inputs; ``destinations`` gives the buffer for each output."""
        held = dict(self._constants)
        for register, value in zip(self._inputs, inputs, strict=True):
            held[register] = value if register in self._any_layout else value.contiguous()
        wanted = _ANYWHERE
        if destinations:
            wanted = {r: destinations(at) for at, r in enumerate(self._outputs)}
        with torch.no_grad():
            for part, over in zip(self.parts, self._over, strict=True):
                made = part(held) if isinstance(part, Segment) else part(held, wanted)
                held |= zip(part.outs, made, strict=True)
                for register in over:
                    held.pop(register, None)
        return [held[r] for r in self._outputs]


def _parts(
    ops: Sequence[Op | Loop], outputs: Sequence[int], registers: Registers
) -> Iterator[Segment | TracedLoop]:
    """Split a trace into its loops, and the operations between them as segments."""
    run: list[Op] = []
    for at, op in enumerate((*ops, None)):
        if isinstance(op, Op):
            run.append(op)
            continue
        if run:
            later = {r for other in ops[at:] for r in other.reads}
            yield Segment(run, later.union(outputs), registers)
        if op is not None:
            yield TracedLoop(op, registers)
        run = []
