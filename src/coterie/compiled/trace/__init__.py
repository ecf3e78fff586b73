"""A round written down: what one call did to tensors, to be done again to others.

Under ``vmap`` a client's code runs through layers of Python and of functorch for every operation
of every step. What reaches the tensors underneath is always the same list of operations. A
:class:`Recording` notes that list once; a :class:`Tape` does it again on other numbers, a training
loop as a loop whose step was noted once, with less traffic to memory (``rewrite``).

A tape holds no decision: what the code decides while it is recorded is decided for good. Shapes
may decide, numbers may not: code that looks at one cannot be recorded.
"""

from .double import InDouble, doubled
from .machine import Room
from .record import Recording, scan
from .replay import Tape

__all__ = ["InDouble", "Recording", "Room", "Tape", "doubled", "scan"]
