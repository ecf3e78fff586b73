"""Traces one call as a list of operations on tensors, and replays it on other numbers.

Under ``vmap`` every operation of every step of a client's code passes through Python and functorch.
The operations that reach the tensors underneath are the same in every call. A :class:`Tracer`
records them once. A :class:`Trace` replays them on other numbers: a training loop as a loop whose
step was traced once, with less memory traffic (``rewrite``).

A trace contains no decision: whatever the code decides while it is traced is fixed. Decisions may
depend on shapes and not on numbers; code that reads a number from a tensor cannot be traced.
"""

from .modes import InDouble, doubled, sampled
from .replay import Trace
from .tracer import Tracer

__all__ = ["InDouble", "Trace", "Tracer", "doubled", "sampled"]
