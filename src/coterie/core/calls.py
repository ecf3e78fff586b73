"""How an engine executes the calls it makes for many clients, and where their results go."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

WRITTEN, REPLAYED, COMPILED = "as written", "replayed", "compiled"  # ways of executing a call

# Returns the preallocated buffer for a result of this shape and dtype.
Destination = Callable[[torch.Size, torch.dtype], Tensor]


@dataclass
class Form:
    """The calls of one stage with inputs of the same shapes: how they are executed, and why so."""

    id: str  # the same in another process
    stage: str  # whose code it is
    way: str = WRITTEN
    why: str = ""  # why it is not replayed, or not compiled, though that was asked for
    seconds: float = 0.0  # of all calls, without tracing, checking and compiling
    tracing: float = 0.0  # seconds of tracing the call, and of compiling its steps
    checking: float = 0.0  # seconds of comparing the trace with the call

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds of one call."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began
