"""The process and the memory of a run.

Threads and precision of the process are set for a run and restored afterwards. No engine
and no constructor changes them: the code that starts a run enters :func:`settings`. The memory of
the device decides how many clients are computed at once (:func:`fitting`).
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import EngineError
from .base import Work
from .settings import EngineSettings


@contextmanager
def settings(*, threads: int | None = None, tf32: bool | None = None) -> Iterator[None]:
    """Set the process for a run, and restore the old settings; None leaves a setting unchanged.

    ``threads`` are torch's threads within an operation, ``tf32`` permits that precision on a GPU.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_num_threads(), products.allow_tf32, convolutions.allow_tf32
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        if tf32 is not None:
            products.allow_tf32 = convolutions.allow_tf32 = tf32
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(before[0])
        if tf32 is not None:
            products.allow_tf32, convolutions.allow_tf32 = before[1:]


def threads_of(choice: Mapping[str, Any]) -> int | None:
    """The threads of torch that a resolved engine (``Engine.choice``) runs under; None sets none.

    The vmap engine's threads compute chunks with one core each, so the server half uses those that
    are set already.
    """
    return None if choice["engine"] == "vmap" else choice["threads"]


# ---- the memory of a device ---------------------------------------------------------------------

DEFAULT_CHUNK = {"cpu": 20, "cuda": 1000}
_DEFAULT_CPU_MIB, _GPU_SHARE = 4096, 0.5


def fitting(asked: EngineSettings, on: Work) -> int:
    """How many clients are computed at once: as many as are asked for, or as fit the memory."""
    return asked.chunk or at_most(DEFAULT_CHUNK[on.problem.device.type], on)


def at_most(wanted: int, on: Work) -> int:
    """As many clients as wanted, or as fit into the memory."""
    return max(1, min(wanted, int(_budget(on.problem.device) * 2**20 / footprint(on))))


def _budget(device: torch.device) -> int:
    if device.type == "cuda":
        gc.collect()  # so that what earlier runs of this process held counts as free
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _GPU_SHARE / 2**20)
    return _DEFAULT_CPU_MIB


def footprint(on: Work) -> int:
    """Bytes that one client needs in training: vectors of its model, activations of a batch."""
    activations = 0

    def count(_module: Any, _inputs: Any, output: Any) -> None:
        nonlocal activations
        for part in output if isinstance(output, tuple) else (output,):
            activations += part.numel() if isinstance(part, torch.Tensor) else 0

    hooks = [m.register_forward_hook(count) for m in on.problem.model.module.modules()]
    try:
        with torch.no_grad():
            on.problem.model.module(on.problem.blank_batch())
    finally:
        for hook in hooks:
            hook.remove()
    vectors = 8 if on.problem.recipe.optimizer == "adam" else 6
    return (vectors * on.problem.model.size + 3 * activations) * on.problem.start.element_size()


@contextmanager
def full_memory_told() -> Iterator[None]:
    """Within it, a GPU without free memory is an error that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error).partition(". ")[0]
        raise EngineError(
            f"the GPU's memory is full ({said}); compute fewer clients at once "
            "(engine.chunk), or end other programs that use this GPU; a run that was written to a "
            "folder can be resumed"
        ) from error
