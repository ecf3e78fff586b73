"""Calls that come again and again: written down once, then played.

What a client's code does to tensors depends on shapes alone, so a call is recorded the first time
it comes in some form (``coterie.tape``) and played from then on: without Python's and functorch's
layers, with less traffic to memory, and on a GPU as one CUDA graph in place of thousands of
launches. A call that asked which round it is, and may have acted upon it, is never recorded.

Whether a call is played depends on its form and never on what came before: a run that was stopped
and resumed ends with the same bits.

A tape is trusted only if it gives what the call gives when its clients stand in another order and
all numbers are a little different: whatever was taken for the same in every round, and is not,
would show. Different, because rounds begin with everybody holding the same model, where a method
may divide one difference of rounding by another.
"""

import logging
import math
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
from ..tape import Recording, RecordingError, Room, Tape
from ..tree import Tree

_LOG = logging.getLogger(__name__)
KEPT = 64  # tapes; clients of ever new sizes would fill the memory with them
_EXACTLY, _ROUGHLY = 1e-6, 0.02  # relative; float32 drifts as training goes on
_SHAKE, _ROUNDING = 0.01, 1e-6  # how much numbers are changed to see what a call makes of it
_NOISE = 65_537  # draws that take turns: a prime, so that rows of a tensor get different ones
_TIMES = 4  # as much as the call itself changes with rounding


class Player:
    """Runs calls, each form of them from its tape: captured on a GPU, compiled on a CPU."""

    def __init__(self, *, capture: bool = False, compiled: bool = False) -> None:
        self._capture, self._compile = capture, compiled
        self._known: OrderedDict[Hashable, _Playing | None] = OrderedDict()
        self._learning = Lock()

    def __call__(
        self,
        key: Hashable,
        call: Callable[..., Tree],
        inputs: tuple[Tree, ...],
        clock: Clock | None = None,
        rooms: Callable[[int], Room] | None = None,
    ) -> Tree:
        """``call(*inputs)``, from its tape where there is one.

        ``rooms`` says where each tensor of the result is wanted; it need not be put there.
        """
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
        return playing(inputs, rooms)

    @property
    def uncompiled(self) -> int:
        """Forms of calls with loops that torch plays."""
        return sum(playing is not None and playing.slow for playing in self._known.values())

    @property
    def unplayed(self) -> int:
        """Forms of calls that are done as they are written."""
        return sum(playing is None for playing in self._known.values())

    def _recorded(
        self, call: Callable[..., Tree], inputs: tuple[Tree, ...], clock: Clock | None
    ) -> "_Playing | None":
        shaken = _shaken(inputs, _SHAKE)
        with _full_precision():
            expected = call(*shaken)
        if clock is not None and clock.asked:
            return None

        def check(playing: _Playing) -> None:
            with _full_precision():
                found = _turned(playing(tuple(map(_turned, shaken))))
                _compare(found, expected, lambda share: call(*_shaken(shaken, share)))

        try:
            playing = _Playing(*_taped(call, inputs))
            if not (self._compile and playing.compiled(call, inputs, check)):
                check(playing)
            if self._capture:
                playing.capture(inputs)
        except Exception as error:  # whatever cannot be recorded is done as it is written
            _LOG.info("a call is not played, which is slower: %s", error)
            return None
        return playing


def _taped(
    call: Callable[..., Tree], inputs: tuple[Tree, ...], *, plain: bool = False
) -> tuple[Tape, Tree]:
    """A recording of a call, and what it returned."""
    copies = list(map(_copied, _tensors(inputs)))  # no tensor twice among them
    with Recording(copies) as recording, ManyClients():
        result = call(*_rebuilt(inputs, iter(copies)))
    return Tape(recording, _tensors(result), plain=plain), result


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

    @property
    def slow(self) -> bool:
        """Whether torch plays its loops."""
        return any(loop.native is None for loop in self._tape.loops)

    def __call__(
        self, inputs: tuple[Tree, ...], rooms: Callable[[int], Room] | None = None
    ) -> Tree:
        flat = _tensors(inputs)
        found = self._tape(flat, rooms) if self._graph is None else self._graph.replay(flat)
        return _rebuilt(self._like, iter(found))

    def compiled(
        self,
        call: Callable[..., Tree],
        inputs: tuple[Tree, ...],
        check: Callable[["_Playing"], None],
    ) -> bool:
        """Put C++ in the place of its loops; whether that was possible, and right."""
        if not self._tape.loops:
            return False
        try:
            alone, _ = _taped(call, tuple(map(_first, inputs)), plain=True)
            self._tape.compile(alone)
            check(self)
        except Exception as error:  # then torch plays them
            _LOG.info("steps are not compiled, which is slower: %s", error)
            self._tape.uncompile()
            return False
        return True

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


def _first(rows: Tree) -> Tree:
    return tree.map_leaves(lambda leaf: leaf[:1], rows)


def _turned(rows: Tree) -> Tree:
    return tree.map_leaves(lambda leaf: leaf.flip(0), rows)


def _shaken(inputs: tuple[Tree, ...], share: float) -> tuple[Tree, ...]:
    """The same inputs with every number that is not whole changed by about such a share."""
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def one(at: int, leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        factors, times = 1 + share * noise.roll(at), -(-leaf.numel() // _NOISE)
        return leaf * factors.to(leaf).repeat(times)[: leaf.numel()].view(leaf.shape)

    leaves = (one(at, leaf) for at, leaf in enumerate(_tensors(inputs)))
    shaken: tuple[Tree, ...] = _rebuilt(inputs, leaves)
    return shaken


def _compare(found: Tree, expected: Tree, again: Callable[[float], Tree]) -> None:
    """Refuse what is not the same to rounding: that of the least exact numbers in the result.

    Some results are much less exact than what they are made of: differences of losses, the order
    of clients who are all alike. How exact a call is it tells itself when it is made ``again`` with
    inputs changed by a share that is little more than rounding.
    """
    wanted = _tensors(expected)
    exact = all(b.dtype == torch.float64 for b in wanted if b.is_floating_point())
    most = _EXACTLY if exact else _ROUGHLY

    def off(result: Tree) -> list[float]:
        return [_apart(a, b) for a, b in zip(_tensors(result), wanted, strict=True)]

    allowed = [most if b.is_floating_point() else 0.0 for b in wanted]  # whole numbers are equal
    apart = off(found)
    if all(far <= bound for far, bound in zip(apart, allowed, strict=True)):
        return
    if max(off(again(0.0)), default=0.0) > most:
        raise RecordingError("the same call gives something else every time")
    for at, (far, own) in enumerate(zip(apart, off(again(_ROUNDING)), strict=True)):
        bound = max(allowed[at], _TIMES * own)
        if not far <= bound:
            raise RecordingError(
                f"its clients in another order give something else: result {at}, "
                f"{tuple(wanted[at].shape)} of {wanted[at].dtype}, is {far:.2g} off, "
                f"expected at most {bound:.2g}"
            )


def _apart(a: Tensor, b: Tensor) -> float:
    """The relative distance of two tensors, or the share of whole numbers that are not equal."""
    if not b.is_floating_point():
        return float((a != b).double().mean())
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return math.inf
    a, b = a[finite].double(), b[finite].double()
    return float((a - b).norm() / (b.norm() + 1e-30))
