"""Records how an engine executes its calls (as written, replayed or compiled) and their time."""

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
