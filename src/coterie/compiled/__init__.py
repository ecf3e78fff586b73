"""Optional: traces the vmap engine's calls and replays them, as C++ or as CUDA graphs.

``engines/vmap.py`` imports this package when it is first asked to trace, and nothing else does.
Without the folder everything else works, and the vmap engine executes calls as they are written.
"""

from .executor import Allocator, Executor
from .kernels import native
from .trace.modes import MOST as CHECKED_STEPS

__all__ = ["CHECKED_STEPS", "Allocator", "Executor", "native"]
