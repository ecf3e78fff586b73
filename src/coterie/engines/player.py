"""Calls that come again and again: written down once, then played.

What a client's code does to tensors depends on shapes alone, so a call is recorded the first time
it comes in some form (``coterie.tape``) and played from then on: without Python's and functorch's
layers, with less traffic to memory, and on a GPU as one CUDA graph in place of thousands of
launches. A call that asked which round it is, and may have acted upon it, is never recorded.

Whether a call is played depends on its form and never on what came before: a run that was stopped
and resumed ends with the same bits.

A tape is trusted only if it gives what the call gives when its clients stand in another order:
whatever was taken for the same in every round, and is not, would show.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..client import Clock
from ..kernels import ManyClients
from ..tape import Recording, RecordingError, Tape
from ..tree import Tree

_LOG = logging.getLogger(__name__)
KEPT = 64  # tapes; clients of ever new sizes would fill the memory with them
_EXACTLY, _ROUGHLY = 1e-6, 0.02  # relative; float32 drifts as training goes on


class Player:
    """Runs calls, each form of them from its tape."""

    def __init__(self, *, capture: bool) -> None:
        self._capture = capture
        self._known: OrderedDict[Hashable, _Playing | None] = OrderedDict()
        self._learning = Lock()

    def __call__(
        self,
        key: Hashable,
        call: Callable[..., Tree],
        inputs: tuple[Tree, ...],
        clock: Clock | None = None,
    ) -> Tree:
        """``call(*inputs)``, from its tape where there is one."""
        form = (key, *((tuple(t.shape), t.dtype) for t in _tensors(inputs)))
        with self._learning:
            if form not in self._known:
                self._known[form] = self._recorded(call, inputs, clock)
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(form)
            playing = self._known[form]
            if playing is None:  # alone too: a module holds one client's parameters at a time
                return call(*inputs)
        return playing(inputs)

    @property
    def unplayed(self) -> int:
        """Forms of calls that are done as they are written."""
        return sum(playing is None for playing in self._known.values())

    def _recorded(
        self, call: Callable[..., Tree], inputs: tuple[Tree, ...], clock: Clock | None
    ) -> "_Playing | None":
        with _full_precision():
            expected = call(*inputs)
        if clock is not None and clock.asked:
            return None
        try:
            playing = _Playing(*_taped(call, inputs))
            with _full_precision():
                turned = playing(tuple(map(_turned, inputs)))
            if not _agree(_turned(turned), expected):
                raise RecordingError("its clients in another order give something else")
            if self._capture:
                playing.capture(inputs)
        except Exception as error:  # whatever cannot be recorded is done as it is written
            _LOG.info("a call is not played, which is slower: %s", error)
            return None
        return playing


def _taped(call: Callable[..., Tree], inputs: tuple[Tree, ...]) -> tuple[Tape, Tree]:
    """A recording of a call, and what it returned."""
    copies = list(map(_copied, _tensors(inputs)))  # no tensor twice among them
    with Recording(copies) as recording, ManyClients():
        result = call(*_rebuilt(inputs, iter(copies)))
    return Tape(recording, _tensors(result)), result


@contextmanager
def _full_precision() -> Iterator[None]:
    """Without tf32: differences of losses are compared, which it rounds away."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = False
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


class _Playing:
    """One form of a call."""

    def __init__(self, tape: Tape, like: Tree) -> None:
        self._tape, self._like = tape, tree.map_leaves(lambda leaf: leaf.new_empty(0), like)
        self._graph: _Graph | None = None

    def __call__(self, inputs: tuple[Tree, ...]) -> Tree:
        flat = [leaf.contiguous() for leaf in _tensors(inputs)]  # as it was recorded
        found = self._tape(flat) if self._graph is None else self._graph.replay(flat)
        return _rebuilt(self._like, iter(found))

    def capture(self, inputs: tuple[Tree, ...]) -> None:
        """Make one CUDA graph of it."""
        self._graph = _Graph(self._tape, _tensors(inputs))


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


def _tensors(value: Any) -> list[Tensor]:
    """Every tensor, a Bank's table too."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for part in value for leaf in _tensors(part)]


def _copied(leaf: Tensor) -> Tensor:
    return leaf.clone(memory_format=torch.contiguous_format)


def _rebuilt(like: Any, leaves: Any) -> Any:
    if isinstance(like, Tensor):
        return next(leaves)
    parts = [_rebuilt(part, leaves) for part in like]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def _turned(rows: Tree) -> Tree:
    return tree.map_leaves(lambda leaf: leaf.flip(0), rows)


def _agree(found: Tree, expected: Tree) -> bool:
    """Whether two results are the same to rounding: that of the least exact numbers in them."""
    pairs = list(zip(_tensors(found), _tensors(expected), strict=True))
    exact = all(b.dtype == torch.float64 for _, b in pairs if b.is_floating_point())
    return all(_close(a, b, _EXACTLY if exact else _ROUGHLY) for a, b in pairs)


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if not b.is_floating_point():
        return torch.equal(a, b)
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return False
    a, b = a[finite], b[finite]
    return bool((a - b).norm() <= tolerance * b.norm() + 1e-30)
