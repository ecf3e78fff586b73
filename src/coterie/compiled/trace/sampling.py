"""Runs only a few steps of every loop, to compare a trace with its call in less time.

All steps of one kind are the same operations on other numbers, so a few of them show whether a
trace computes what its call computes: the first ones, where the carry leaves its start, the last
ones, and at least one of every kind.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

from ...core import calls
from ...core.calls import Carry, Step

ENDS = 3  # steps at the beginning of a loop, and as many at its end
MOST = 2 * ENDS + 1  # steps of a loop whose last step alone is of another kind

_SAMPLING: ContextVar[bool] = ContextVar("coterie_sampling", default=False)


@contextmanager
def sampled() -> Iterator[None]:
    """Within it, the loops of calls and of traces run only the steps of :func:`chosen`."""
    before = _SAMPLING.set(True)
    try:
        with calls.traced_by(_Sampler()):
            yield
    finally:
        _SAMPLING.reset(before)


def chosen(kinds: Sequence[Hashable]) -> Sequence[int]:
    """The numbers of the steps that are run, of a loop with these kinds of steps."""
    numbers = range(len(kinds))
    if not _SAMPLING.get():
        return numbers
    first = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
    return sorted({*numbers[:ENDS], *numbers[-ENDS:], *first.values()})


def can_record(kinds: Sequence[Hashable]) -> bool:
    """Whether a loop is traced by its steps: it has equal steps, and is inside of vmap only."""
    levels = retrieve_all_functorch_interpreters()
    return len(kinds) > len(set(kinds)) and all(
        level.key() == TransformType.Vmap for level in levels
    )


class _Sampler:
    """Takes over the loops that a tracer takes over, and runs a few of their steps."""

    def __init__(self) -> None:
        self._stepping = False

    def takes(self, kinds: Sequence[Hashable]) -> bool:
        """Whether a tracer records this loop by its steps; a loop within a step is run whole."""
        return not self._stepping and can_record(kinds)

    def loop(self, step: Step[Carry], kinds: Sequence[Hashable], carry: Carry) -> Carry:
        """The carry after the chosen steps."""
        self._stepping = True
        for number in chosen(kinds):
            carry = step(number, kinds[number], carry)
        self._stepping = False
        return carry
