"""A loop over training steps, run as a Python ``for`` loop or handed to an active tracer.

A client's training is written as :func:`scan`. Usually that is a ``for`` loop. While a call is
traced (``compiled``), the tracer takes over the loop and traces one step of each kind instead of
all steps. The core imports no tracer: a tracer registers itself with :func:`traced_by`.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

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
