"""Optimisers as pure (init, step) pairs on one flat vector."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from .ranges import Count, NotNegative, Positive, ShareAboveZero, ShareBelowOne
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


# ---- clips vectors to a bounded norm, and adds noise to those that are shown to a peer ----------


def clipped(vectors: Tensor, bound: Tensor | float) -> Tensor:
    """Clip each row to an L2 norm of at most ``bound``.

    >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors * (bound / length.clamp(min=1e-30)).clamp(max=1)


def noised(vectors: Tensor, clip: float, noise: float, draws: Tensor) -> Tensor:
    """Clip each row to the norm ``clip`` and add ``noise * clip`` times the normal ``draws``."""
    return clipped(vectors, clip) + noise * clip * draws


def honest_length(clip: float, noise: float, width: int) -> float:
    """The norm that a vector of ``width`` entries made by :func:`noised` hardly exceeds."""
    return clip * (1 + noise * math.sqrt(width))


def shortened(g: Tensor, longest: float) -> Tensor:
    """Clip a gradient to the L2 norm ``longest``; 0 clips nothing.

    :func:`clipped` rounds otherwise: it would change digests of runs with ``train.clip``.
    """
    if not longest:
        return g
    length: Tensor = torch.linalg.vector_norm(g)
    return g * (longest / length.clamp(min=longest))


# ---- how a client trains in one round: the ``[train]`` table of a config ------------------------


@dataclass(frozen=True)
class Recipe:
    """How a client trains in one round.

    Fields:
        optimizer: ``sgd`` or ``adam``.
        lr: learning rate of the first round.
        epochs: passes over the client's training data.
        batch: samples per step; the last, shorter batch of an epoch is kept.
        momentum: heavy-ball momentum of sgd.
        weight_decay: added to the gradient as ``weight_decay * w``.
        decay: the rate of round t is ``max(floor, lr * decay**t)``.
        floor: smallest learning rate.
        steps: a number of steps in place of epochs, the same for every client.
        buffers: which batch-norm statistics a client's models use: ``average`` mixes
            them with the parameters; with ``local`` every client has one set, which only its own
            training updates, which it uses with every model and which never leaves it; with
            ``server`` all clients use the mean, weighted by samples, of the statistics with which
            the participants of the last round ended.
        clip: the largest L2 norm of a step's gradient, penalties included; 0 clips nothing.
        augment: ``crop_flip`` crops every image of a training batch at random out of a black
            frame of 4 pixels and mirrors every second one; ``none`` takes images as they are.
        class_weights: ``balanced`` multiplies the loss of a training sample of class c by
            n / (C n_c): the client's n training samples, C classes among them, n_c of this one.
            A batch's loss stays the mean over its samples. ``none`` weighs all samples alike.
        dropout: the rate of every ``nn.Dropout`` of the network; None keeps each layer's own rate.
        optimizer_state: Adam's moments and the momentum of sgd begin anew in every ``round``, or
            are ``kept``: a client goes on with those of the last round that it took part in.

    With batch norm a batch of a single sample is skipped and is not a step.
    Augmentation, class weights, dropout and clipping apply to training batches only.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Positive = 0.1
    epochs: Count = 1
    batch: Count = 32
    momentum: ShareBelowOne = 0.0
    weight_decay: NotNegative = 0.0
    decay: ShareAboveZero = 1.0
    floor: NotNegative = 0.0
    steps: Count | None = None
    buffers: Literal["average", "local", "server"] = "average"
    clip: NotNegative = 0.0
    augment: Literal["none", "crop_flip"] = "none"
    class_weights: Literal["none", "balanced"] = "none"
    dropout: ShareBelowOne | None = None
    optimizer_state: Literal["round", "kept"] = "round"

    def rate(self, round_index: int) -> float:
        """The learning rate of a round."""
        return max(self.floor, self.lr * self.decay**round_index)

    @property
    def continues(self) -> bool:
        """Whether the optimiser has a state that lives on between rounds."""
        return self.optimizer_state == "kept" and (self.optimizer != "sgd" or self.momentum > 0)

    def rule(self) -> Optimizer:
        """The optimiser as pure functions."""
        if self.optimizer == "sgd":
            return sgd(self.momentum, self.weight_decay)
        if self.optimizer == "adam":
            return adam(weight_decay=self.weight_decay)
        raise ConfigError(f"optimizer '{self.optimizer}' is unknown; expected 'sgd' or 'adam'")

    def batches(self, samples: int, least: int = 1) -> int:
        """Batches per pass over the samples; a batch of fewer than ``least`` is left out."""
        return samples // self.batch + (samples % self.batch >= least)

    def count(self, samples: int, least: int = 1) -> int:
        """Optimiser steps per round of a client with this many samples.

        >>> Recipe(epochs=2, batch=10).count(21), Recipe(epochs=2, batch=10).count(21, least=2)
        (6, 4)
        """
        batches = self.batches(samples, least)
        if self.steps is None:
            return self.epochs * batches
        return self.steps if batches else 0
