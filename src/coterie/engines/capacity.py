"""How many clients fit into the memory of a device, and what is said when it is full."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import EngineError
from .base import Work

DEFAULT_CHUNK = {"cpu": 20, "cuda": 1000}
_DEFAULT_CPU_MIB, _GPU_SHARE = 4096, 0.5


def fitting(on: Work, wanted: int | None, memory_mib: int | None) -> int:
    """How many clients are computed at once: as many as wanted and as fit into the memory."""
    if wanted is None:
        wanted = DEFAULT_CHUNK[on.problem.device.type]
    if memory_mib is None:
        memory_mib = _budget(on.problem.device)
    return max(1, min(wanted, int(memory_mib * 2**20 / footprint(on))))


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
            f"the GPU's memory is full ({said}); compute fewer clients at once (engine.chunk, or "
            "engine.memory_mib), or end other programs that use this GPU; a run that was written "
            "to a folder can be resumed"
        ) from error
