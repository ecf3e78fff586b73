"""Inputs of a call with all numbers a little changed, and the precision in which calls compare."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.tree import Tree, flatten, unflatten

_NOISE = 65_537  # draws, used cyclically; a prime, so that rows of a tensor get different ones


@contextmanager
def full_precision() -> Iterator[None]:
    """Disable tf32, which would round away the differences that are compared."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = False
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


def tensors(value: Any) -> list[Tensor]:
    """Every tensor, including the table of a Bank."""
    return [leaf for _, leaf in flatten(value)]


def perturbed(inputs: tuple[Tree, ...], share: float, draw: int = 0) -> tuple[Tree, ...]:
    """The same inputs with every floating-point number changed by about this share."""
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(draw), dtype=torch.float64)

    def one(at: int, leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        factors, times = 1 + share * noise.roll(at), -(-leaf.numel() // _NOISE)
        return leaf * factors.to(leaf).repeat(times)[: leaf.numel()].view(leaf.shape)

    leaves = (one(at, leaf) for at, leaf in enumerate(tensors(inputs)))
    changed: tuple[Tree, ...] = unflatten(inputs, leaves)
    return changed
