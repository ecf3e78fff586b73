"""How a client trains in one round: the ``[train]`` table of a config."""

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from .optim import Optimizer, adam, sgd
from .ranges import Count, NotNegative, Positive, ShareAboveZero, ShareBelowOne


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
        buffers: which batch-norm statistics a client's models use (spec 1.2): ``average`` mixes
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

    With batch norm a batch of a single sample is skipped and is not a step (spec 1.3).
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
