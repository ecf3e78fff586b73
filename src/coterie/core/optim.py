"""Optimisers as pure (init, step) pairs on one flat vector."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .tree import Tree


class Optimizer(NamedTuple):
    """``state = init(w)``; ``w, state = step(w, gradient, state, lr)``."""

    init: Callable[[Tensor], Tree]
    step: Callable[[Tensor, Tensor, Tree, Tensor | float], tuple[Tensor, Tree]]


def sgd(momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """Heavy-ball gradient descent: ``u ← μu + g + δw``, ``w ← w − ηu`` (torch.optim.SGD's rule)."""

    def init(w: Tensor) -> Tree:
        return (torch.zeros_like(w),) if momentum else ()

    def step(w: Tensor, g: Tensor, state: Tree, lr: Tensor | float) -> tuple[Tensor, Tree]:
        if weight_decay:
            g = g + weight_decay * w
        if momentum:
            g = momentum * state[0] + g
            state = (g,)
        return _minus(w, lr, g), state

    return Optimizer(init, step)


def _minus(w: Tensor, lr: Tensor | float, g: Tensor) -> Tensor:
    """``w − lr · g`` in one pass over memory: memory traffic bounds the speed of a small model.

    A tracer may fuse the ``addcmul`` with the matrix product that made ``g``
    (``compiled.trace.rewrite.fuse_descent``); without fusion the result is the same, but slower.
    """
    if isinstance(lr, Tensor):
        return torch.addcmul(w, lr, g, value=-1)
    return torch.add(w, g, alpha=-lr)


class AdamState(NamedTuple):
    """The number of steps and the running first and second moments."""

    steps: Tensor  # []
    mean: Tensor  # [P]
    square: Tensor  # [P]


def adam(
    beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """Adam (Kingma & Ba 2015) with bias correction, as torch.optim.Adam computes it."""

    def init(w: Tensor) -> AdamState:
        return AdamState(w.new_zeros(()), torch.zeros_like(w), torch.zeros_like(w))

    def step(w: Tensor, g: Tensor, state: Tree, lr: Tensor | float) -> tuple[Tensor, Tree]:
        if weight_decay:
            g = g + weight_decay * w
        steps = state.steps + 1
        mean = beta1 * state.mean + (1 - beta1) * g
        square = beta2 * state.square + (1 - beta2) * g * g
        scale = (square / (1 - beta2**steps)).sqrt() + eps
        return w - lr * (mean / (1 - beta1**steps)) / scale, AdamState(steps, mean, square)

    return Optimizer(init, step)
