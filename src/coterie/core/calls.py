"""How an engine executes its calls, and the loop over training steps that a tracer may take over.

A client's training is written as :func:`scan`, usually a ``for`` loop. While a call is traced
(``compiled``), the tracer takes over the loop and traces one step of each kind instead of all
steps. The core imports no tracer: a tracer registers itself with :func:`traced_by`.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

WRITTEN, REPLAYED, COMPILED = "as written", "replayed", "compiled"  # ways of executing a call

# Returns the preallocated buffer for a result of this shape and dtype.
Destination = Callable[[torch.Size, torch.dtype], Tensor]


@dataclass
class Form:
    """The calls of one stage with inputs of the same shapes: how they are executed, and why."""

    id: str  # the same in every process
    stage: str  # the stage of the method whose code is called
    way: str = WRITTEN
    why: str = ""  # why the call is not replayed or compiled although that was requested
    seconds: float = 0.0  # total time of all calls, without tracing, checking and compiling
    tracing: float = 0.0  # seconds of tracing the call, and of compiling its steps
    checking: float = 0.0  # seconds of comparing the trace with the call

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the enclosed call to ``seconds``."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


class Clock:
    """The number of the round; ``asked`` records whether it was read, because a trace fixes it.

    A method that reads it may be traced only if ``Algorithm.trace_key`` declares what it reads.
    """

    def __init__(self, index: int, horizon: int) -> None:
        self._index, self._horizon = index, horizon
        self.asked = False

    @property
    def index(self) -> int:
        self.asked = True
        return self._index

    @property
    def horizon(self) -> int:
        self.asked = True
        return self._horizon


Carry = TypeVar("Carry")
Step = Callable[[Any, Any, Carry], Carry]  # (number, kind, carry) -> carry


class LoopTracer(Protocol):
    """The interface of a tracer that takes over the loops of a call."""

    def takes(self, kinds: Sequence[Hashable]) -> bool:
        """Whether the tracer takes over a loop with these kinds of steps; else all are run."""

    def loop(self, step: Step[Carry], kinds: Sequence[Hashable], carry: Carry) -> Carry:
        """The carry after the last step."""


_TRACER: ContextVar[LoopTracer | None] = ContextVar("coterie_tracer", default=None)


@contextmanager
def traced_by(tracer: LoopTracer) -> Iterator[None]:
    """Hand the loops of this thread to a tracer."""
    before = _TRACER.set(tracer)
    try:
        yield
    finally:
        _TRACER.reset(before)


def scan(step: Step[Carry], kinds: Sequence[Hashable], carry: Carry) -> Carry:
    """``carry = step(number, kind, carry)`` for every kind in turn.

    Shapes within a step may depend on its kind, never on its number. The number is an int, or a
    tensor while the loop is traced.

    >>> scan(lambda number, kind, carry: carry + number * kind, (10, 10, 5), 0)
    20
    """
    tracer = _TRACER.get()
    if tracer is not None and tracer.takes(kinds):
        return tracer.loop(step, kinds, carry)
    for number, kind in enumerate(kinds):
        carry = step(number, kind, carry)
    return carry
