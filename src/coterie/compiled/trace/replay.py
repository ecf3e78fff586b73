"""Doing again what was recorded."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from . import rewrite
from .layers import fuse_layers
from .machine import Form, Native, Pattern, Room, Sizes
from .record import Body, Loop, Op, Recording, Registers, outside
from .tidy import quicken, tidy
from .writer import UnknownError

_NOWHERE: Mapping[int, Room] = {}  # in particular


class Segment:
    """Operations without a loop, as one function of registers."""

    def __init__(self, ops: Sequence[Op], later: set[int], registers: Registers) -> None:
        weaver = rewrite.Weaver(registers)
        self.ins = tuple(outside(ops, (), ()))
        self.outs = tuple(dict.fromkeys(r for op in ops for r in op.writes if r in later))
        for register in self.ins:
            weaver.take(register, None)
        for op in ops:
            weaver.add(op)
        graph = weaver.give((r, None) for r in self.outs)
        constants = tidy(graph)
        fuse_layers(graph, registers.device)
        quicken(graph)
        self.ins = tuple(_used(graph, self.ins))
        self.module = fx.GraphModule(constants, graph)
        self.play: Callable[..., tuple[Tensor, ...]] = self.module.forward

    @property
    def reads(self) -> tuple[int, ...]:
        """What must lie in memory as it did when it was recorded."""
        return self.ins

    def __call__(self, held: dict[int, Tensor]) -> Sequence[Tensor]:
        """Its outputs, given what is held."""
        return self.play(*(held[r] for r in self.ins))


class Step:
    """One step of a loop as a function of its number, what is carried, and what it reads."""

    def __init__(
        self,
        body: Body,
        registers: Registers,
        sizes: Sequence[Sizes],
        beside: Sequence[int],
        cuts: Sequence[Sizes],
        *,
        plain: bool,
    ) -> None:
        weaver = rewrite.Weaver(registers)
        weaver.take(body.number, None)
        for register, size in zip((*body.ins, *beside), (*sizes, *cuts), strict=True):
            weaver.take(register, size)
        for op in body.ops:
            weaver.add(op)
        graph = weaver.give(zip(body.outs, sizes, strict=True))
        constants = tidy(graph)
        fuse_layers(graph, registers.device)
        rewrite.fuse_descent(graph)
        carried = sum(1 if size is None else len(size) for size in sizes)
        rewrite.part_outputs(graph, carried, 1)
        rewrite.overwrite(graph, carried, 1)
        self.constants = constants
        if not plain:
            quicken(graph)
        self.module = fx.GraphModule(constants, graph)
        self.play: Callable[..., tuple[Tensor, ...]] = self.module.forward


class Steps:
    """A loop, played by torch, or in C++ once it was compiled.

    ``plain``: only a pattern for others, written with torch's own names.
    """

    def __init__(self, loop: Loop, registers: Registers, *, plain: bool) -> None:
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
            Step(body, registers, self.sizes, self._beside, self.cuts, plain=plain)
            for body in loop.bodies
        ]
        self._registers = registers
        self.native: Native | None = None
        self._numbers = torch.arange(len(loop.order), device=registers.device).unbind()

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return len(self._order)

    @property
    def ins(self) -> tuple[int, ...]:
        """What the first step begins with, and what all of them read."""
        return (*self._begin, *self._beside)

    @property
    def reads(self) -> tuple[int, ...]:
        """What must lie in memory as it did when it was recorded: it begins with copies."""
        return tuple(self._beside)

    @property
    def pattern(self) -> Pattern:
        """What a compiler needs to know of it."""

        def forms(registers: Sequence[int], sizes: Sequence[Sizes]) -> list[Form]:
            shapes, kinds = self._registers.shapes, self._registers.kinds
            return [Form(shapes[r], kinds[r], s) for r, s in zip(registers, sizes, strict=True)]

        return Pattern(
            forms(self._begin, self.sizes),
            forms(self._beside, self.cuts),
            [(body.module.graph, body.constants) for body in self.bodies],
            self._order,
        )

    def __call__(
        self, held: dict[int, Tensor], rooms: Mapping[int, Room] = _NOWHERE
    ) -> Sequence[Tensor]:
        """What the last step carries on; compiled steps put it where it is wanted."""
        if self.native is not None:
            begin, beside = ([held[r] for r in some] for some in (self._begin, self._beside))
            return self.native(begin, beside, [rooms.get(r) for r in self.outs])
        carry: Sequence[Tensor] = [
            p for r, s in zip(self._begin, self.sizes, strict=True) for p in _owned(held[r], s)
        ]
        beside = [
            p for r, s in zip(self._beside, self.cuts, strict=True) for p in _apart(held[r], s)
        ]
        for body, number in zip(self._order, self._numbers, strict=True):
            carry = self.bodies[body].play(number, *carry, *beside)
        parts = iter(carry)
        return [
            next(parts) if s is None else torch.cat([next(parts) for _ in s], -1)
            for s in self.sizes
        ]


def _used(graph: fx.Graph, ins: Sequence[int]) -> Iterator[int]:
    """The inputs that a graph reads; it forgets the others."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    for node, register in zip(given, ins, strict=True):
        if node.users:
            yield register
        else:
            graph.erase_node(node)


def _sizes(same: Sequence[int], registers: Registers, cut: tuple[int, ...]) -> Sizes:
    """How a vector is cut; None where it is none. One without buffers has the first parts only."""
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


class Tape:
    """A recorded call as a function of tensors."""

    def __init__(
        self, recording: Recording, outputs: Sequence[Tensor], *, plain: bool = False
    ) -> None:
        self._inputs, self._constants = recording.inputs, recording.constants
        self._outputs = [recording.register(leaf) for leaf in outputs]
        self.parts = list(_parts(recording.ops, self._outputs, recording.registers, plain))
        self._over = self._last_uses()
        read = {r for part in self.parts for r in part.reads}
        self._anyhow = set(self._inputs) - read - set(self._outputs)

    def _last_uses(self) -> list[list[int]]:
        """What is not needed any more after each part."""
        last = {r: at for at, part in enumerate(self.parts) for r in (*part.ins, *part.outs)}
        kept = {*self._outputs, *self._constants}
        over: list[list[int]] = [[] for _ in self.parts]
        for register, at in last.items():
            if register not in kept:
                over[at].append(register)
        return over

    def compile(self, one: "Tape") -> None:
        """Put C++ in the place of the loops, by the pattern of a tape of a single client."""
        if len(one.loops) != len(self.loops):
            raise UnknownError("other loops for one client than for many")
        for mine, alone in zip(self.loops, one.loops, strict=True):
            mine.native = Native(alone.pattern, mine.pattern)

    def uncompile(self) -> None:
        """Let torch play the loops again."""
        for loop in self.loops:
            loop.native = None

    @property
    def loops(self) -> list[Steps]:
        """The parts that are loops."""
        return [part for part in self.parts if isinstance(part, Steps)]

    @property
    def segments(self) -> Iterator[Segment | Step]:
        """Everything that is one graph."""
        for part in self.parts:
            yield from (part,) if isinstance(part, Segment) else part.bodies

    def __call__(
        self, inputs: Sequence[Tensor], rooms: Callable[[int], Room] | None = None
    ) -> list[Tensor]:
        """The outputs for these inputs; ``rooms`` says where an output is wanted."""
        held = dict(self._constants)
        for register, value in zip(self._inputs, inputs, strict=True):
            held[register] = value if register in self._anyhow else value.contiguous()
        wanted = {r: rooms(at) for at, r in enumerate(self._outputs)} if rooms else _NOWHERE
        with torch.no_grad():
            for part, over in zip(self.parts, self._over, strict=True):
                made = part(held) if isinstance(part, Segment) else part(held, wanted)
                held |= zip(part.outs, made, strict=True)
                for register in over:
                    held.pop(register, None)
        return [held[r] for r in self._outputs]


def _parts(
    ops: Sequence[Op | Loop],
    outputs: Sequence[int],
    registers: Registers,
    plain: bool,
) -> Iterator[Segment | Steps]:
    """Operations between loops as segments, and the loops."""
    run: list[Op] = []
    for at, op in enumerate((*ops, None)):
        if isinstance(op, Op):
            run.append(op)
            continue
        if run:
            later = {r for other in ops[at:] for r in other.reads}
            yield Segment(run, later.union(outputs), registers)
        if op is not None:
            yield Steps(op, registers, plain=plain)
        run = []
