"""Traces each distinct call once and replays the trace from then on.

What a client's code does to tensors depends on their shapes alone. So the first call of each form
(code and input shapes) is traced (``compiled.trace``), and later calls of that form replay the
trace: without the overhead of Python and functorch, with less memory traffic, and on a GPU as one
CUDA graph instead of thousands of kernel launches. A call that reads the round's number may depend
on it and is never traced. A trace is replayed only if ``compiled/trust.py`` finds that it computes
what the call computes.

Whether a call is replayed depends on its form and never on earlier calls, so a run that was stopped
and resumed ends with the same bits. The way each form is executed is kept in a
:class:`~coterie.core.calls.Form`, and a resumed run executes it in the same way.
"""

import hashlib
import logging
import mmap
import sys
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import tree
from ..core.calls import COMPILED, REPLAYED, WRITTEN, Clock, Destination, Form
from ..core.tree import Tree, unflatten
from ..errors import EngineError, MismatchError, SlowerError, TraceError
from .kernels import ManyClients, native
from .trace import InDouble, Trace, Tracer, doubled
from .trust import Call, TraceTrial, passed, passed_compiled, tensors

_LOG = logging.getLogger(__name__)
_LARGE = 4 * 2**20  # bytes; smaller tensors are allocated by torch
_SPARES = 4  # unused mappings that are kept for reuse
KEPT = 64  # traces at most, because clients of ever new sizes would fill the memory


class _Known(NamedTuple):
    """A form and its trace; None if the call is executed as it is written."""

    form: Form
    replay: "_Replay | None"


class Executor:
    """Executes calls, each form from its trace: captured on a GPU, compiled on a CPU.

    ``layers`` are the sizes of the layers of a model vector, by which traces are compared with
    their calls. ``before`` maps the id of a form to the way an earlier process executed it.
    """

    def __init__(
        self,
        *,
        capture: bool = False,
        compiled: bool = False,
        layers: Sequence[int] = (),
        before: Mapping[str, str] | None = None,
    ) -> None:
        self._capture, self._compile, self._layers = capture, compiled, tuple(layers)
        self._before = dict(before or {})
        self._trusted: set[str] = set()  # forms whose traces were compared and then dropped
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._seen: dict[str, Form] = {}
        self._learning = Lock()

    def __call__(
        self,
        key: Hashable,
        call: Call,
        inputs: tuple[Tree, ...],
        clock: Clock | None = None,
        destinations: Callable[[int], Destination] | None = None,
    ) -> Tree:
        """Compute ``call(*inputs)``, by replay if the call has a trace.

        ``destinations`` gives the buffer for each tensor of the result; using it is optional.
        """
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors(inputs))
        with self._learning:
            if (key, shapes) not in self._known:
                self._known[key, shapes] = self._learnt(key, shapes, call, inputs, clock)
                self._forget()
            self._known.move_to_end((key, shapes))
            form, replay = self._known[key, shapes]
            if replay is None:  # one call at a time: a module holds the parameters of one call
                with form.timed():
                    return call(*inputs)
        with form.timed():
            return replay(*inputs, destinations=destinations)

    @property
    def forms(self) -> tuple[Form, ...]:
        return tuple(self._seen.values())

    def _forget(self) -> None:
        """Drop the least recently used trace; its form is executed in the same way next time."""
        if len(self._known) > KEPT:
            _, (form, _) = self._known.popitem(last=False)
            self._before[form.id] = form.way
            self._trusted.add(form.id)

    def _learnt(
        self,
        key: Hashable,
        shapes: Hashable,
        call: Call,
        inputs: tuple[Tree, ...],
        clock: Clock | None,
    ) -> _Known:
        """A new form, traced if that is possible and, in a resumed run, was done before."""
        stage, rest = _named(key)
        name = hashlib.sha256(repr((stage, rest, shapes)).encode()).hexdigest()[:16]
        form = self._seen.setdefault(name, Form(name, stage))
        before = self._before.get(name)
        began, checked = _clock(), form.checking
        try:
            replay = self._traced(form, call, inputs, clock, before)
        except SlowerError as error:
            replay, form.way, form.why = None, WRITTEN, str(error)
            _tell(error, "a call of %s is not replayed, which is slower: %s", stage, error)
        form.tracing += _clock() - began - (form.checking - checked)
        if before not in (None, form.way):
            raise EngineError(
                f"{stage} was {before} when the run began and now can only be {form.way} "
                f"({form.why}): the last bits of the results would differ; resume where the run "
                "began (same machine, compiler and CXX), or start a new run"
            )
        return _Known(form, replay)

    def _traced(
        self,
        form: Form,
        call: Call,
        inputs: tuple[Tree, ...],
        clock: Clock | None,
        before: str | None,
    ) -> "_Replay":
        if before == WRITTEN:
            raise TraceError(form.why or "it was not replayed when the run began")
        with _checking(form):
            trial = None if form.id in self._trusted else _trial(call, inputs, self._layers)
        if clock is not None and clock.asked:
            raise TraceError("it asks which round it is (Algorithm.trace_key can tell)")
        with _bugs_told():
            replay = _Replay(*_trace(call, inputs))
            if trial is not None:
                with _checking(form):
                    trial = passed(trial, replay)
            form.way = REPLAYED
            if self._compile and replay.steps and before != REPLAYED:
                self._make_native(form, replay, trial, call, inputs)
            if self._capture:
                replay.capture(inputs)
                if trial is not None:
                    trial.captured(replay, replay.uncaptured)
        return replay

    def _make_native(
        self,
        form: Form,
        replay: "_Replay",
        trial: TraceTrial | None,
        call: Call,
        inputs: tuple[Tree, ...],
    ) -> None:
        """Replace the loops by C++ if that is possible and correct."""
        try:
            replay.compile(call, inputs)
            if trial is not None:
                with _checking(form):
                    anew = partial(replay.compile, call, inputs)
                    trial, shown = passed_compiled(trial, replay, replay.uncompile, anew)
                if not shown:
                    given = doubled(inputs)
                    exact = _Replay(*_trace(call, given, double=True))
                    exact.compile(call, given, double=True)
                    with _checking(form):
                        trial.exact(exact)
            form.way, form.why = COMPILED, ""
        except SlowerError as error:
            replay.uncompile()
            form.why = str(error)
            _tell(error, "steps of %s are not compiled, which is slower: %s", form.stage, error)


def _trial(call: Call, inputs: tuple[Tree, ...], layers: Sequence[int]) -> TraceTrial:
    try:
        return TraceTrial(call, inputs, layers)
    except (RuntimeError, TypeError, ValueError, AssertionError, EngineError) as error:
        call(*inputs)  # an error of the call itself is raised here, unchanged
        raise TraceError(f"it cannot be compared in float64: {error}") from error


def _trace(call: Call, inputs: tuple[Tree, ...], *, double: bool = False) -> tuple[Trace, Tree]:
    """A trace of a call, and the call's result; with ``double`` the call computes in float64."""
    copies = list(map(_copied, tensors(inputs)))  # so that no tensor occurs twice
    exactly = InDouble() if double else nullcontext()
    with Tracer(copies) as tracer, exactly, ManyClients():
        result = call(*unflatten(inputs, iter(copies)))
    return Trace(tracer, tensors(result)), result


class _Replay:
    """Replays the trace of one form of a call."""

    def __init__(self, trace: Trace, like: Tree) -> None:
        self._trace, self._like = trace, tree.map_leaves(lambda leaf: leaf.new_empty(0), like)
        self._graph: _CudaGraph | None = None

    @property
    def steps(self) -> int:
        """The number of steps of the longest loop; 0 without a loop."""
        return max((loop.steps for loop in self._trace.loops), default=0)

    def __call__(
        self, *inputs: Tree, destinations: Callable[[int], Destination] | None = None
    ) -> Tree:
        if self._graph is None:
            return self.uncaptured(*inputs, destinations=destinations)
        return unflatten(self._like, iter(self._graph.replay(tensors(inputs))))

    def uncaptured(
        self, *inputs: Tree, destinations: Callable[[int], Destination] | None = None
    ) -> Tree:
        """Replay the trace itself, even if it was captured as a CUDA graph."""
        return unflatten(self._like, iter(self._trace(tensors(inputs), destinations)))

    def compile(self, call: Call, inputs: tuple[Tree, ...], *, double: bool = False) -> None:
        """Replace the loops by C++, written from a trace of the first client alone."""
        first = tree.map_leaves(lambda leaf: leaf[:1], inputs)
        alone, _ = _trace(call, first, double=double)
        self._trace.compile(alone)

    def uncompile(self) -> None:
        self._trace.uncompile()

    def capture(self, inputs: tuple[Tree, ...]) -> None:
        try:
            self._graph = _CudaGraph(self._trace, tensors(inputs))
        except RuntimeError as error:  # an operation that waits for the host
            raise TraceError(f"it cannot be captured as a CUDA graph: {error}") from error


class _CudaGraph:
    """A trace captured as a CUDA graph, with the memory it reads and writes."""

    def __init__(self, trace: Trace, inputs: list[Tensor]) -> None:
        self._inputs = list(map(_copied, inputs))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries initialise outside the capture
            trace(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = trace(self._inputs)

    def replay(self, inputs: list[Tensor]) -> list[Tensor]:
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self._graph.replay()
        return [leaf.clone() for leaf in self._outputs]


@contextmanager
def _bugs_told() -> Iterator[None]:
    """Raise errors of the tracer and of the compiler with advice how to run without them.

    A RuntimeError of torch becomes an AssertionError, because ``auto`` would treat a RuntimeError
    as a lack of memory.
    """
    advice = "engine.trace = false runs calls as they are written, engine.compiled = false in torch"
    try:
        yield
    except (SlowerError, EngineError):
        raise
    except torch.OutOfMemoryError as error:
        raise TraceError(f"it needs more memory than there is: {error}") from error
    except RuntimeError as error:
        raise AssertionError(f"a traced call failed ({error}), which is a bug; {advice}") from error
    except Exception as error:
        error.add_note(f"coterie failed to trace or to compile a call, which is a bug; {advice}")
        raise


@contextmanager
def _checking(form: Form) -> Iterator[None]:
    """Add the seconds spent inside to the form's time of checking."""
    began = _clock()
    try:
        yield
    finally:
        form.checking += _clock() - began


def _clock() -> float:
    """A clock in seconds that excludes compiling kernels, which other forms need as well."""
    return time.perf_counter() - native.waited()


def _tell(error: SlowerError, *words: object) -> None:
    """Log a wrong result as a warning, and an unsupported call as information."""
    level = logging.WARNING if isinstance(error, MismatchError) else logging.INFO
    _LOG.log(level, *words)


def _named(key: Hashable) -> tuple[str, Hashable]:
    """The name of a key's code, and the rest of the key."""
    code, *rest = key if isinstance(key, tuple) else (key,)
    return getattr(code, "__qualname__", str(code)), tuple(rest)


def _copied(leaf: Tensor) -> Tensor:
    return leaf.clone(memory_format=torch.contiguous_format)


class Allocator:
    """Allocates tensors; a large buffer on a CPU is reused once nothing refers to it.

    Large buffers are mapped in huge pages if the system has them. glibc would return memory of that
    size to the system as soon as it is freed, and the next round would fault in every page.
    """

    def __init__(self) -> None:
        self._spare: deque[mmap.mmap] = deque(maxlen=_SPARES)

    def empty(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of this shape whose entries are not initialised."""
        count, size = shape.numel(), shape.numel() * dtype.itemsize
        if sys.platform != "linux" or device.type != "cpu" or size < _LARGE:
            return torch.empty(shape, dtype=dtype, device=device)
        mapping = self._mapping(size)
        view = memoryview(mapping)
        weakref.finalize(view, self._spare.append, mapping).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=count).view(shape)

    def _mapping(self, size: int) -> mmap.mmap:
        for spare in list(self._spare):
            if len(spare) == size:
                try:
                    self._spare.remove(spare)
                except ValueError:  # another thread took it
                    continue
                return spare
        made = mmap.mmap(-1, size)
        made.madvise(mmap.MADV_HUGEPAGE)
        return made
