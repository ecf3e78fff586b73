"""Compiles a traced loop to one C++ function that runs all steps of one client in sequence.

A small model stays in the cache from its first step to its last, and no interpreter runs in
between. The loop is written for one client. Comparing a trace of one client with a trace of many
shows which dimension of each tensor is that of the clients.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ...core.calls import Destination
from ..kernels.native import REALS, compiled
from . import operations  # noqa: F401  # registers the writers of operations
from .cpp_writer import KINDS, Memory, UnknownError, Value, Writer
from .modes import chosen

Sizes = tuple[int, ...] | None
_ALIGNED = 64


class TensorForm(NamedTuple):
    """Shape and dtype of an input of a loop, and the sizes of its pieces."""

    shape: torch.Size
    kind: torch.dtype
    sizes: Sizes


class Pattern(NamedTuple):
    """A loop as it was traced."""

    begin: list[TensorForm]
    beside: list[TensorForm]
    bodies: list[tuple[fx.Graph, dict[str, Tensor]]]  # one step of every kind, and its constants
    order: tuple[int, ...]


class NativeLoop:
    """Runs all steps of all clients in C++."""

    def __init__(self, one: Pattern, many: Pattern) -> None:
        sizes = [(len(p.begin), len(p.beside), p.order) for p in (one, many)]
        if sizes[0] != sizes[1]:
            raise UnknownError("the loop of one client differs from that of many")
        self._order = one.order
        self._rows = [_row(a, b) for a, b in zip(one.beside, many.beside, strict=True)]
        source = _Source(one, many)
        self._constants = source.constants
        self._run = compiled("steps", source.text, (f"REAL={REALS[source.real]}",)).run

    def __call__(
        self,
        begin: Sequence[Tensor],
        beside: Sequence[Tensor],
        destinations: Sequence[Destination | None],
    ) -> list[Tensor]:
        """The carry after the last step, written into the destinations if those are given."""
        numbers = chosen(self._order)
        starts = [v if v[0].is_contiguous() else v.contiguous() for v in begin]
        others = [value.contiguous() for value in beside]
        outs = [
            torch.empty(v.shape, dtype=v.dtype) if where is None else where(v.shape, v.dtype)
            for v, where in zip(starts, destinations, strict=True)
        ]
        held = [*starts, *others, *self._constants, *outs]
        apart = [
            *(v.stride(0) for v in starts),
            *(
                0 if row is None else v.stride(row)
                for v, row in zip(others, self._rows, strict=True)
            ),
            *(0 for _ in self._constants),
            *(v.stride(0) for v in outs),
        ]
        steps = [n * v.element_size() for n, v in zip(apart, held, strict=True)]
        self._run(
            ctypes.c_int64(len(starts[0])),
            (ctypes.c_void_p * len(held))(*(v.data_ptr() for v in held)),
            (ctypes.c_int64 * len(held))(*steps),
            (ctypes.c_int * len(numbers))(*(self._order[number] for number in numbers)),
            (ctypes.c_int64 * len(numbers))(*numbers),
            ctypes.c_int64(len(numbers)),
        )
        return outs


def _row(one: TensorForm, many: TensorForm) -> int | None:
    """The dimension of the clients; None if they share the tensor."""
    if len(one.shape) != len(many.shape) or one.kind != many.kind or one.sizes != many.sizes:
        raise UnknownError("the shapes of one client do not fit those of many")
    other = [d for d, (a, b) in enumerate(zip(one.shape, many.shape, strict=True)) if a != b]
    if not other:
        return None
    if len(other) > 1 or one.shape[other[0]] != 1:
        raise UnknownError("the shapes of one client do not fit those of many")
    return other[0]


class _Source:
    """The C++ source of the function."""

    def __init__(self, one: Pattern, many: Pattern) -> None:
        self.real = next((f.kind for f in one.begin if f.kind in REALS), torch.float32)
        self.constants: list[Tensor] = []
        self._writer = Writer(self.real)
        self._names: list[str] = []  # the names of the pointers that the caller passes
        self._declared: list[str] = []
        self._copied_in: list[str] = []
        self._copied_out: list[str] = []
        carried = [self._carried(form) for form in one.begin]
        beside = [self._beside(a, b) for a, b in zip(one.beside, many.beside, strict=True)]
        ins = [self._number(), *(v for part in (*carried, *beside) for v in part)]
        flat = [value for part in carried for value in part]
        cases = [self._case(graph, held, ins, flat) for graph, held in one.bodies]
        for form, values in zip(one.begin, carried, strict=True):
            self._give_back(form, values)
        self.text = self._text(cases)

    def _given(self, kind: torch.dtype) -> str:
        """Declare one more pointer that the caller passes, and return its name."""
        name = f"given{len(self._names)}"
        self._names.append(name)
        self._declared.append(
            f"{KINDS[kind]}* {name} = ({KINDS[kind]}*)at[{len(self._names) - 1}];"
        )
        return name

    def _number(self) -> Value:
        form = torch.empty((), dtype=torch.int64, device="meta")
        return Value(Memory("number", 8, torch.int64), form)

    def _carried(self, form: TensorForm) -> list[Value]:
        _known(form.kind)
        name = self._given(form.kind)
        values = []
        for part in self._within(name, form):
            value = self._writer.buffer(
                torch.empty(part.form.shape, dtype=form.kind, device="meta")
            )
            self._copied_in += self._writer.copying(value, part)
            values.append(value)
        return values

    def _give_back(self, form: TensorForm, values: list[Value]) -> None:
        parts = self._within(self._given(form.kind), form)
        for part, value in zip(parts, values, strict=True):
            self._copied_out += self._writer.copying(part, value)

    def _within(self, name: str, form: TensorForm, like: TensorForm | None = None) -> list[Value]:
        """The parts of an input; its entries have the strides of ``like``."""
        memory = Memory(name, 0, form.kind)
        steps = torch.empty((like or form).shape, device="meta").stride()
        whole = torch.empty_strided(form.shape, steps, dtype=form.kind, device="meta")
        if form.sizes is None:
            return [Value(memory, whole)]
        return [
            Value(memory, whole.narrow(-1, end - size, size))
            for size, end in zip(form.sizes, accumulate(form.sizes), strict=True)
        ]

    def _beside(self, one: TensorForm, many: TensorForm) -> list[Value]:
        _known(one.kind)
        return self._within(self._given(one.kind), one, many)

    def _case(
        self, graph: fx.Graph, held: dict[str, Tensor], ins: list[Value], carried: list[Value]
    ) -> list[str]:
        fixed = [self._constant(held[n.target]) for n in graph.nodes if n.op == "get_attr"]
        first = len(self._writer.steps)
        outs = self._writer.body(graph, ins, fixed)
        memories = {id(value.memory) for value in carried}
        for into, out in zip(carried, outs, strict=True):
            if out.memory is into.memory and out.form.stride() == into.form.stride():
                continue
            if id(out.memory) in memories:
                raise UnknownError("the carry changes its place")
            self._writer.copy(into, out)
        return self._writer.steps[first:]

    def _constant(self, value: Tensor) -> Value:
        _known(value.dtype)
        self.constants.append(value.contiguous())
        form = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return Value(Memory(self._given(value.dtype), 0, value.dtype), form)

    def _text(self, cases: list[list[str]]) -> str:
        writer = self._writer
        sizes = [-(-memory.size // _ALIGNED) * _ALIGNED for memory in writer.memories]
        buffers = [
            f"{KINDS[m.kind]}* {m.name} = ({KINDS[m.kind]}*)(buffer + {end - size});"
            for m, size, end in zip(writer.memories, sizes, accumulate(sizes), strict=True)
        ]
        bodies = [
            line for at, case in enumerate(cases) for line in (f"case {at}: {{", *case, "} break;")
        ]
        lines = [
            '#include "step.h"',
            "static void client(char** at, char* buffer, const int* order,",
            "                   const int64_t* numbers, int64_t steps) {",
            *self._declared, *buffers, *self._copied_in,
            "for (int64_t step = 0; step < steps; step++) {",
            "const int64_t number[1] = {numbers[step]};",
            "switch (order[step]) {", *bodies, "}", "}",
            *self._copied_out,
            "}",
            'extern "C" void run(int64_t clients, char** first, const int64_t* apart,',
            "                    const int* order, const int64_t* numbers, int64_t steps) {",
            f"char* buffer = (char*)aligned_alloc(64, {max(sum(sizes), _ALIGNED)});",
            f"char* at[{len(self._names)}];",
            "for (int64_t i = 0; i < clients; i++) {",
            f"for (int k = 0; k < {len(self._names)}; k++) at[k] = first[k] + i * apart[k];",
            "client(at, buffer, order, numbers, steps);",
            "}",
            "free(buffer);",
            "}",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"


def _known(kind: torch.dtype) -> None:
    if kind not in KINDS:
        raise UnknownError(str(kind))
