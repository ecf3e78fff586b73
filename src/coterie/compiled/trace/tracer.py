"""Traces what one call does to tensors as a list of operations."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _WeakTensorRef  # type: ignore[attr-defined]
from torch._C._functorch import _add_batch_dim, _remove_batch_dim
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ...core import calls, tree
from ...core.calls import Carry, Step
from ...errors import TraceError
from .modes import can_record

aten = torch.ops.aten

# In training these write into the running statistics (arguments 3 and 4); their schema omits that.
_BATCH_NORMS = {
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
}


class Ref(NamedTuple):
    """A tensor argument of an operation: the register that holds it."""

    register: int


class Op(NamedTuple):
    """One operation on registers."""

    function: Any  # a torch.ops overload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    places: tuple[int, ...]  # the index of each output in the returned list; () without a list


class Body(NamedTuple):
    """One step of a loop."""

    number: int
    ins: tuple[int, ...]
    ops: tuple[Op, ...]
    outs: tuple[int, ...]

    @property
    def beside(self) -> list[int]:
        """The registers that the step reads, except its index and the carry."""
        return outside(self.ops, (self.number, *self.ins), self.outs)


class Loop(NamedTuple):
    """Steps one after another; the carry begins in some registers and ends in others."""

    bodies: tuple[Body, ...]
    order: tuple[int, ...]  # the index of the body of every step
    begin: tuple[int, ...]
    reads: tuple[int, ...]  # ``begin``, and the other registers that the bodies read
    writes: tuple[int, ...]


class Registers(NamedTuple):
    """The properties of every register."""

    shapes: list[torch.Size]
    kinds: list[torch.dtype]
    whole: set[int]  # registers whose memory an operation writes into: never split into pieces
    device: torch.device


def outside(ops: Sequence[Op | Loop], ins: Sequence[int], outs: Sequence[int]) -> list[int]:
    """Registers that are read but not written here, in the order of their first use."""
    inside, found = set(ins), dict[int, None]()
    for op in ops:
        found.update(dict.fromkeys(r for r in op.reads if r not in inside))
        inside.update(op.writes)
    found.update(dict.fromkeys(r for r in outs if r not in inside))
    return list(found)


class Tracer(TorchDispatchMode):
    """Records every operation on tensors while it is entered, and records loops by their steps.

    It identifies tensors and their memory by address and keeps only constants alive. A weak
    reference to each tensor prevents its address from being used again.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.constants: dict[int, Tensor] = {}
        self.ops: list[Op | Loop] = []
        self._device = inputs[0].device
        self._notes: list[_Note] = []  # one per register
        self._known: dict[int, int] = {}  # address of a tensor -> its register
        self._born: set[int] = set()  # memory that every replay allocates anew
        self._kept: set[int] = set()  # memory that must not be written into
        self._gone: set[int] = set()  # registers of a finished loop body
        self._changed: set[int] = set()  # memory that an operation writes into
        self._paused = self._stepping = False
        self._scope = ExitStack()
        self.inputs = tuple(self._new(leaf) for leaf in inputs)
        self._kept |= self._born

    def __enter__(self) -> "Tracer":
        super().__enter__()
        self._scope.enter_context(calls.traced_by(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._scope.close()
        super().__exit__(*error)

    def register(self, value: Tensor) -> int:
        """The register of a tensor; a tensor that was not made here is a constant of the trace."""
        found = self._known.get(value._cdata)
        if found is None:
            if _memory(value) in self._born:
                raise TraceError("a tensor shares another's memory in a way that was not traced")
            found = self._new(value, constant=True)
        if found in self._gone:
            raise TraceError("a tensor that a loop's step made is used after the step")
        return found

    @property
    def registers(self) -> Registers:
        """The properties of all registers after tracing."""
        whole = {r for r, note in enumerate(self._notes) if note.memory in self._changed}
        shapes, kinds = [note.shape for note in self._notes], [note.kind for note in self._notes]
        return Registers(shapes, kinds, whole, self._device)

    def _new(self, value: Tensor, *, constant: bool = False) -> int:
        register = self._known[value._cdata] = len(self._notes)
        self._notes.append(_note(value))
        if constant:
            self.constants[register] = value
        (self._kept if constant else self._born).add(self._notes[-1].memory)
        return register

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Execute the operation and record it."""
        kwargs = kwargs or {}
        if self._paused:
            return function(*args, **kwargs)
        reads: list[int] = []
        noted = self._refs(args, reads), {k: self._refs(v, reads) for k, v in kwargs.items()}
        changed = {_memory(target) for target in _written(function, args, kwargs)}
        if changed & self._kept:
            raise TraceError(f"{function} writes into a tensor that outlives it")
        self._changed |= changed
        result = function(*args, **kwargs)
        listed = isinstance(result, list | tuple)
        outs = {at: out for at, out in enumerate(result if listed else [result]) if out is not None}
        if not all(isinstance(out, Tensor) for out in outs.values()):
            raise TraceError(f"{function} gives a number to decide by")
        writes = tuple(self._written_to(out) for out in outs.values())
        self.ops.append(Op(function, *noted, tuple(reads), writes, tuple(outs) if listed else ()))
        return result

    def _written_to(self, out: Tensor) -> int:
        known = self._known.get(out._cdata)
        if known is None:
            return self._new(out)
        self._notes[known] = _note(out)
        return known

    def _refs(self, value: Any, reads: list[int]) -> Any:
        if isinstance(value, Tensor):
            reads.append(self.register(value))
            return Ref(reads[-1])
        if isinstance(value, list | tuple):
            return type(value)(self._refs(part, reads) for part in value)
        return value

    # ---- loops -----------------------------------------------------------------------------

    def takes(self, kinds: Sequence[Hashable]) -> bool:
        """Whether a loop is recorded by its steps: one that is not within another's step."""
        return not self._stepping and can_record(kinds)

    def loop(self, step: Step[Carry], kinds: Sequence[Hashable], carry: Carry) -> Carry:
        """Record a loop: one step of every kind."""
        table = list(dict.fromkeys(kinds))
        begin = tree.map_leaves(_lowered, carry)
        start = tuple(self.register(leaf) for leaf in tree.leaves(begin))
        bodies = tuple(self._body(step, kind, begin) for kind in table)
        after = tree.map_leaves(self._fresh, begin)
        writes = tuple(self.register(leaf) for leaf in tree.leaves(after))
        beside = {r for body in bodies for r in body.beside}
        reads = (*start, *sorted(beside.difference(start)))
        order = tuple(table.index(kind) for kind in kinds)
        self.ops.append(Loop(bodies, order, start, reads, writes))
        result: Carry = tree.map_leaves(_lifted, after)
        return result

    def _body(self, step: Step[Any], kind: Hashable, begin: tree.Tree) -> Body:
        first = len(self._notes)
        with self._apart() as ops:
            number = self._fresh(torch.tensor(0, device=next(iter(tree.leaves(begin))).device))
            ins = tree.map_leaves(self._fresh, begin)
            end = step(number, kind, tree.map_leaves(_lifted, ins))
            end = tree.map_leaves(_lowered, end)
            _expect_alike(begin, end)
            into, out = (tuple(self.register(leaf) for leaf in tree.leaves(t)) for t in (ins, end))
            body = Body(self.register(number), into, tuple(ops), out)
        self._gone |= set(range(first, len(self._notes))).difference(self.constants)
        return body

    @contextmanager
    def _apart(self) -> Iterator[list[Any]]:
        """Record a step in a list of its own; it must not write into earlier tensors."""
        before = self.ops, self._kept
        self.ops, self._kept, self._stepping = [], self._kept | self._born, True
        yield self.ops
        self.ops, self._kept = before
        self._stepping = False
        self._kept |= {_memory(value) for value in self.constants.values()}

    def _fresh(self, like: Tensor) -> Tensor:
        """A new tensor that no recorded operation made."""
        self._paused = True
        value = like.clone(memory_format=torch.contiguous_format)
        self._paused = False
        self._new(value)
        return value


class _Note(NamedTuple):
    """What the tracer knows of a tensor that may have been freed."""

    shape: torch.Size
    kind: torch.dtype
    memory: int
    addresses: tuple[Any, Any]  # weak references: they keep both addresses from being used again


def _note(value: Tensor) -> _Note:
    weak = _WeakTensorRef(value), StorageWeakRef(value.untyped_storage())
    return _Note(value.shape, value.dtype, _memory(value), weak)


def _memory(value: Tensor) -> int:
    """The address of a tensor's memory; an empty tensor shares none."""
    storage = value.untyped_storage()
    return storage._cdata if storage.data_ptr() else -value._cdata


def writes_unsaid(function: Any, args: Sequence[Any]) -> bool:
    """Whether an operation changes an argument that its schema does not mark."""
    return function in _BATCH_NORMS and bool(args[5])


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The arguments that an operation writes into."""
    if writes_unsaid(function, args):
        yield from (part for part in args[3:5] if part is not None)
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (part for part in _flat(given) if isinstance(part, Tensor))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def _levels() -> list[Any]:
    """The functorch transforms around this call, outermost first."""
    return retrieve_all_functorch_interpreters()


def _lowered(value: Tensor) -> Tensor:
    """The tensor below all levels of vmap, with their dimensions in front."""
    for level in reversed(_levels()):
        value = _remove_batch_dim(value, level.level(), level.batch_size(), 0)
    return value


def _lifted(value: Tensor) -> Tensor:
    """The inverse of :func:`_lowered`."""
    for level in _levels():
        value = _add_batch_dim(value, 0, level.level())
    return value


def _expect_alike(begin: tree.Tree, end: tree.Tree) -> None:
    for a, b in zip(tree.leaves(begin), tree.leaves(end), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise TraceError("a loop's step changes the shape or dtype of what it carries")
