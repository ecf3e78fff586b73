"""Optimisers as pure functions on one flat vector, the recipe, and what training carries over."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import EngineError
from . import tree
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


# ---- vectors of a bounded norm ------------------------------------------------------------------


def shortened(g: Tensor, longest: float) -> Tensor:
    """Clip a gradient to the L2 norm ``longest``; 0 clips nothing."""
    if not longest:
        return g
    length: Tensor = torch.linalg.vector_norm(g)
    return g * (longest / length.clamp(min=longest))


# ---- the recipe: the ``[train]`` table of a config -----------------------------------------------


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
        buffers: which batch-norm statistics a client's models use (reading G-3): ``average`` mixes
            them with the parameters; with ``local`` every client keeps one set of its own for all
            models; with ``server`` all clients use the mean, weighted by samples, of the last
            round's participants; ``fedbn`` is ``local`` for the parameters of all normalisation
            layers too, which then never leave the client.
        clip: the largest L2 norm of a step's gradient, penalties included; 0 clips nothing.
        augment: ``crop_flip`` crops every image of a training batch at random out of a black
            frame of 4 pixels and mirrors every second one.
        class_weights: ``balanced`` multiplies the loss of a training sample of class c by
            n / (C n_c): the client's n training samples, C classes among them, n_c of this one.
        dropout: the rate of every ``nn.Dropout`` of the network; None keeps each layer's own rate.
        optimizer_state: Adam's moments and the momentum of sgd begin anew in every ``round``, or
            are ``kept``: a client goes on with those of the last round that it took part in.

    With batch norm a batch of a single sample is skipped and is not a step (reading G-4).
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
    buffers: Literal["average", "local", "server", "fedbn"] = "average"
    clip: NotNegative = 0.0
    augment: Literal["none", "crop_flip"] = "none"
    class_weights: Literal["none", "balanced"] = "none"
    dropout: ShareBelowOne | None = None
    optimizer_state: Literal["round", "kept"] = "round"

    def rate(self, round_index: int) -> float:
        return max(self.floor, self.lr * self.decay**round_index)

    @property
    def continues(self) -> bool:
        """Whether the optimiser has a state that lives on between rounds."""
        return self.optimizer_state == "kept" and (self.optimizer != "sgd" or self.momentum > 0)

    def passing(self, epochs: int) -> "Recipe":
        return replace(self, epochs=epochs, steps=None)

    def halved(self, least: int = 1) -> "Recipe":
        """The recipe that takes about as many steps on half of the samples."""
        if self.batch >= 2 * least:
            return replace(self, batch=self.batch // 2)
        return replace(self, epochs=2 * self.epochs)

    def rule(self) -> Optimizer:
        if self.optimizer == "sgd":
            return sgd(self.momentum, self.weight_decay)
        return adam(weight_decay=self.weight_decay)

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


# ---- what training changes beside a model: batch-norm statistics and optimiser states -----------

# Both objects are made for one call of a method's ``local`` or ``predictor`` and are updated by the
# :class:`~coterie.core.client.Client` that holds them.


class Statistics:
    """A client's batch-norm buffers where models exclude them: one set, updated by training.

    With ``train.buffers = "fedbn"`` the parameters of normalisation layers are in front of them.
    """

    def __init__(self, buffers: Tensor, *, fixed: bool = False) -> None:
        self.buffers, self.fixed = buffers, fixed
        self.crowded = False  # whether several models are being trained side by side
        self.slope: Any = None  # of the norms' parameters, from the last gradient
        self.rule: Tree = ()  # the state of their optimiser

    @property
    def carried(self) -> Tree:
        """What a training step hands on to the next."""
        return self.buffers, self.rule

    @carried.setter
    def carried(self, found: Tree) -> None:
        self.buffers, self.rule = found

    def move(self, buffers: Tensor) -> None:
        """Replace the buffers by those after a training pass, unless they are fixed."""
        if self.crowded:
            raise EngineError(
                "train.buffers: this method trains several models side by side on each client, and "
                "one set of batch-norm statistics cannot serve them all; use buffers = 'average', "
                "or a network with another norm (norm = 'group')"
            )
        self.buffers = self.buffers if self.fixed else buffers


class OptimizerStates:
    """The optimiser states that a client keeps between rounds ``[n, ...]``.

    The first training of a round begins with the first state, the second with the second, and so
    on. Models that are trained side by side (:meth:`beside`) begin with one state each; if the
    client keeps a single state, all of them begin with it, and a weighted mean of their last states
    is kept.
    """

    def __init__(self, states: Tree) -> None:
        self._before, self._begun = states, 0
        self._after: list[Tree] = []

    @property
    def _count(self) -> int:
        return len(next(tree.leaves(self._before)))

    def again(self) -> "OptimizerStates":
        """A copy that begins with the same states; what it is given does not change this one."""
        return OptimizerStates(self._before)

    def begin(self) -> Tree:
        """The state that the next training of the round begins with."""
        if self._begun == self._count:
            raise EngineError(
                f"train.optimizer_state: 'kept' needs one state per model that a client trains in "
                f"a round; found more trainings than the {self._count} that optimizers() of the "
                "method declares: raise it, or use optimizer_state = 'round'"
            )
        self._begun += 1
        return tree.row(self._before, self._begun - 1)

    def end(self, state: Tree) -> None:
        """Keep the state after the last step of a training."""
        self._after.append(state)

    def after(self) -> Tree:
        """The states after the round; one whose training did not begin is unchanged."""
        if len(self._after) != self._begun:
            raise EngineError(
                f"train.optimizer_state: 'kept' needs the state after every training; the method "
                f"began {self._begun} with client.begin() and gave {len(self._after)} back: call "
                "client.end(state) after client.scan(), or use optimizer_state = 'round'"
            )
        idle = [tree.row(self._before, n) for n in range(self._begun, self._count)]
        return tree.stack([*self._after, *idle])

    def rows(self, count: int) -> Tree:
        """The states that ``count`` models begin with which are trained side by side."""
        if self._count == count:
            return self._before
        return tree.map_leaves(lambda leaf: leaf[:1].expand(count, *leaf.shape[1:]), self._before)

    def within(self, f: Callable[..., Tree]) -> Callable[..., Tree]:
        """``f`` as a function of one model's state too; returns also the state after its training.

        The second result is () where ``f`` trains nothing.
        """

        def one(state: Tree, *parts: Tensor) -> Tree:
            outer = self._before, self._begun, self._after
            own = tree.map_leaves(lambda leaf: leaf.unsqueeze(0), state)
            self._before, self._begun, self._after = own, 0, []
            try:
                made = f(*parts)
                return made, tree.row(self.after(), 0) if self._begun else ()
            finally:
                self._before, self._begun, self._after = outer

        return one

    def beside(self, ends: Tree, count: int, shares: Tensor | None) -> None:
        """Keep the states ``ends`` of ``count`` models after training side by side."""
        if not tuple(tree.flatten(ends)):
            return
        if self._count == count:
            self._begun, self._after = count, [tree.row(ends, n) for n in range(count)]
            return
        if self._count > 1 or shares is None:
            raise EngineError(
                f"train.optimizer_state: 'kept' needs a state per model; the method trains {count} "
                f"models side by side and its optimizers() declares {self._count}: declare "
                f"{count}, or 1 and give client.map() the shares of the models, or use "
                "optimizer_state = 'round'"
            )
        self._begun, self._after = 1, [_mean(ends, shares)]


def _mean(states: Tree, shares: Tensor) -> Tree:
    """The mean of the rows, weighted by ``shares``; the first row where all shares are zero."""
    total = shares.sum()
    first = torch.arange(len(shares), device=shares.device) == 0
    p = torch.where(total > 0, shares / total, first.to(shares.dtype))

    def of(leaf: Tensor) -> Tensor:
        weight = p.to(leaf.dtype).view(-1, *[1] * (leaf.dim() - 1))
        return torch.where(weight > 0, weight * leaf, 0.0).sum(0)  # a share of 0 hides a NaN

    return tree.map_leaves(of, states)
