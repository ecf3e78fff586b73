"""Records each distinct call once and plays the recording from then on.

What a client's code does to tensors depends on shapes alone, so a call is recorded the first time
it comes in some form (``compiled.trace``) and played from then on: without Python's and functorch's
layers, with less traffic to memory, and on a GPU as one CUDA graph in place of thousands of
launches. A call that asked which round it is, and may have acted upon it, is never recorded. A
recording is played only if ``compiled/trust.py`` finds that it gives what the call gives.

Whether a call is played depends on its form and never on what came before: a run that was stopped
and resumed ends with the same bits. How each form was done is noted (:class:`Form`), and a resumed
run does it that way again.
"""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import tree
from ..core.client import Clock
from ..core.tree import Tree
from ..engines.base import COMPILED, PLAYED, WRITTEN, Form
from ..errors import EngineError, MismatchError, RecordingError, SlowerError
from .kernels import ManyClients
from .trace import InDouble, Recording, Room, Tape, doubled
from .trust import Call, Trial, rebuilt, tensors

_LOG = logging.getLogger(__name__)
KEPT = 64  # recordings; clients of ever new sizes would fill the memory with them


class _Known(NamedTuple):
    """A form and its recording; None where it is done as it is written."""

    form: Form
    playing: "_Playing | None"


class Player:
    """Runs calls, each form of them from its recording: captured on a GPU, compiled on a CPU.

    ``layers`` are the sizes of a model's parts, which recordings are compared by. ``before`` says
    in which way an earlier process did each form (by its id).
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
        self._trusted: set[str] = set()  # forms whose recordings were compared, and let go
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._seen: dict[str, Form] = {}
        self._learning = Lock()

    def __call__(
        self,
        key: Hashable,
        call: Call,
        inputs: tuple[Tree, ...],
        clock: Clock | None = None,
        rooms: Callable[[int], Room] | None = None,
    ) -> Tree:
        """``call(*inputs)``, from its recording where there is one.

        ``rooms`` says where each tensor of the result is wanted; it need not be put there.
        """
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors(inputs))
        with self._learning:
            if (key, shapes) not in self._known:
                self._known[key, shapes] = self._learnt(key, shapes, call, inputs, clock)
                self._forget()
            self._known.move_to_end((key, shapes))
            form, playing = self._known[key, shapes]
            if playing is None:  # alone too: a module holds one client's parameters at a time
                with _timed(form):
                    return call(*inputs)
        with _timed(form):
            return playing(*inputs, rooms=rooms)

    @property
    def forms(self) -> tuple[Form, ...]:
        """Every form that came so far."""
        return tuple(self._seen.values())

    @property
    def uncompiled(self) -> int:
        """Forms of calls with loops that torch plays."""
        return sum(one.playing is not None and one.playing.slow for one in self._known.values())

    @property
    def unplayed(self) -> int:
        """Forms of calls that are done as they are written."""
        return sum(one.playing is None for one in self._known.values())

    def _forget(self) -> None:
        """Let the oldest recording go; its form is done in the same way when it comes again."""
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
        """A form that comes for the first time, recorded if that can be and was so before."""
        stage, rest = _named(key)
        name = hashlib.sha256(repr((stage, rest, shapes)).encode()).hexdigest()[:16]
        form = self._seen.setdefault(name, Form(name, stage))
        before = self._before.get(name)
        try:
            playing = self._recorded(form, call, inputs, clock, before)
        except SlowerError as error:
            playing, form.way, form.why = None, WRITTEN, str(error)
            _told(error, "a call of %s is not played, which is slower: %s", stage, error)
        if before not in (None, form.way):
            raise EngineError(
                f"{stage} was {before} when the run began and now can only be done {form.way} "
                f"({form.why}): the last bits of the results would differ; resume where the run "
                "began (same machine, compiler and CXX), or start a new run"
            )
        return _Known(form, playing)

    def _recorded(
        self,
        form: Form,
        call: Call,
        inputs: tuple[Tree, ...],
        clock: Clock | None,
        before: str | None,
    ) -> "_Playing":
        if before == WRITTEN:
            raise RecordingError(form.why or "it was not played when the run began")
        trial = None if form.id in self._trusted else _trial(call, inputs, self._layers)
        if clock is not None and clock.asked:
            raise RecordingError("it asks which round it is (Algorithm.chapter can tell)")
        with _bugs_told():
            playing = _Playing(*_taped(call, inputs))
            if trial is not None:
                trial.recorded(playing)
            form.way = PLAYED
            if self._compile and playing.steps and before != PLAYED:
                self._make_native(form, playing, trial, call, inputs)
            if self._capture:
                playing.capture(inputs)
                if trial is not None:
                    trial.captured(playing, playing.uncaptured)
        return playing

    def _make_native(
        self,
        form: Form,
        playing: "_Playing",
        trial: Trial | None,
        call: Call,
        inputs: tuple[Tree, ...],
    ) -> None:
        """Put C++ in the place of the loops, where that is possible and right."""
        try:
            playing.compile(call, inputs)
            if trial is not None and not trial.compiled(playing, playing.steps):
                given = doubled(inputs)
                exact = _Playing(*_taped(call, given, double=True))
                exact.compile(call, given, double=True)
                trial.exact(exact)
            form.way, form.why = COMPILED, ""
        except SlowerError as error:
            playing.uncompile()
            form.why = str(error)
            _told(error, "steps of %s are not compiled, which is slower: %s", form.stage, error)


def _trial(call: Call, inputs: tuple[Tree, ...], layers: Sequence[int]) -> Trial:
    try:
        return Trial(call, inputs, layers)
    except (RuntimeError, TypeError, ValueError, AssertionError, EngineError) as error:
        call(*inputs)  # an error that is the call's own is raised here, as it is
        raise RecordingError(f"it cannot be compared in float64: {error}") from error


def _taped(
    call: Call, inputs: tuple[Tree, ...], *, plain: bool = False, double: bool = False
) -> tuple[Tape, Tree]:
    """A recording of a call, and what it returned; ``double`` of what it does in float64."""
    copies = list(map(_copied, tensors(inputs)))  # no tensor twice among them
    exactly = InDouble() if double else nullcontext()
    with Recording(copies) as recording, exactly, ManyClients():
        result = call(*rebuilt(inputs, iter(copies)))
    return Tape(recording, tensors(result), plain=plain), result


class _Playing:
    """The recording of one form of a call."""

    def __init__(self, tape: Tape, like: Tree) -> None:
        self._tape, self._like = tape, tree.map_leaves(lambda leaf: leaf.new_empty(0), like)
        self._graph: _Graph | None = None

    @property
    def slow(self) -> bool:
        """Whether torch plays its loops."""
        return any(loop.native is None for loop in self._tape.loops)

    @property
    def steps(self) -> int:
        """Steps of its longest loop; 0 without a loop."""
        return max((loop.steps for loop in self._tape.loops), default=0)

    def __call__(self, *inputs: Tree, rooms: Callable[[int], Room] | None = None) -> Tree:
        if self._graph is None:
            return self.uncaptured(*inputs, rooms=rooms)
        return rebuilt(self._like, iter(self._graph.replay(tensors(inputs))))

    def uncaptured(self, *inputs: Tree, rooms: Callable[[int], Room] | None = None) -> Tree:
        """The same from the tape itself, where there is a CUDA graph of it, too."""
        return rebuilt(self._like, iter(self._tape(tensors(inputs), rooms)))

    def compile(self, call: Call, inputs: tuple[Tree, ...], *, double: bool = False) -> None:
        """Put C++ in the place of its loops, by a recording of the first client alone."""
        alone, _ = _taped(call, tuple(map(_first, inputs)), plain=True, double=double)
        self._tape.compile(alone)

    def uncompile(self) -> None:
        """Let torch play its loops."""
        self._tape.uncompile()

    def capture(self, inputs: tuple[Tree, ...]) -> None:
        """Make one CUDA graph of it."""
        try:
            self._graph = _Graph(self._tape, tensors(inputs))
        except RuntimeError as error:  # an operation that waits for the host
            raise RecordingError(f"it cannot be captured as a CUDA graph: {error}") from error


class _Graph:
    """A tape as a CUDA graph, with the memory it reads and writes."""

    def __init__(self, tape: Tape, inputs: list[Tensor]) -> None:
        self._inputs = list(map(_copied, inputs))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up outside the recording
            tape(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = tape(self._inputs)

    def replay(self, inputs: list[Tensor]) -> list[Tensor]:
        """The outputs for other numbers of the same shapes."""
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self._graph.replay()
        return [leaf.clone() for leaf in self._outputs]


@contextmanager
def _bugs_told() -> Iterator[None]:
    """Let an error of the recorder or of the compiler be seen, and say how to go on without them.

    A RuntimeError of torch is made another error: ``auto`` takes those for a lack of memory.
    """
    advice = "engine.play = false runs calls as they are written, engine.compiled = false in torch"
    try:
        yield
    except (SlowerError, EngineError):
        raise
    except torch.OutOfMemoryError as error:
        raise RecordingError(f"it needs more memory than there is: {error}") from error
    except RuntimeError as error:
        raise AssertionError(
            f"a recorded call failed ({error}), which is a bug; {advice}"
        ) from error
    except Exception as error:
        error.add_note(f"coterie failed to record or to compile a call, which is a bug; {advice}")
        raise


@contextmanager
def _timed(form: Form) -> Iterator[None]:
    began = time.perf_counter()
    yield
    form.seconds += time.perf_counter() - began


def _told(error: SlowerError, *words: object) -> None:
    """A result that is wrong is worth a warning, something that cannot be done is not."""
    level = logging.WARNING if isinstance(error, MismatchError) else logging.INFO
    _LOG.log(level, *words)


def _named(key: Hashable) -> tuple[str, Hashable]:
    """The name of a key's code, and the rest of the key."""
    code, *rest = key if isinstance(key, tuple) else (key,)
    return getattr(code, "__qualname__", str(code)), tuple(rest)


def _copied(leaf: Tensor) -> Tensor:
    return leaf.clone(memory_format=torch.contiguous_format)


def _first(rows: Tree) -> Tree:
    return tree.map_leaves(lambda leaf: leaf[:1], rows)
