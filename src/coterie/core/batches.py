"""One client's samples in evaluation blocks and training minibatches, with their augmentation.

Under the vmap engine the tensors stand for many clients at once: sizes are tensors, and the samples
of smaller clients are padded and masked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import random
from .optim import Recipe
from .privacy import Mechanism, room
from .problem import Problem
from .shards import Shards, Split

SplitName = Literal["train", "val"]
Loss = Callable[[Tensor, "Batch"], Tensor]

EVALUATION_BLOCK = 500  # samples per evaluation pass


class Batch(NamedTuple):
    """Some samples of one client."""

    x: Tensor  # [B, ...]
    y: Tensor  # [B], or [B, T] with a target at every position
    mask: Tensor | None  # [B] 1 for a sample, 0 for padding; None where there is no padding
    position: Tensor  # [B] index of each sample in the client's split
    step: int | Tensor | None  # number of this batch in the round; None outside training

    @property
    def training(self) -> bool:
        """Whether the batch is a minibatch of :meth:`Client.scan`, not an evaluation block."""
        return self.step is not None


class View(NamedTuple):
    """What an engine passes to :class:`~coterie.core.client.Client`; one row per client."""

    id: Tensor  # []
    stream: Tensor  # [] the seed of this client's random draws in this round
    lr: Tensor  # []
    train: Split
    val: Split
    relabel: Tensor  # [classes], or [0] where labels mean the same to all clients


class Shape(NamedTuple):
    """Properties shared by all clients that are computed together."""

    smallest: int  # training samples of the client that has the fewest
    even: dict[str, bool]  # split -> whether it has no padding
    batched: bool  # whether Client.map uses vmap, as under the vmap engine


def views(problem: Problem, shards: Shards, ids: list[int], round_index: int) -> View:
    """The :class:`View` of some clients for one round, one row per client."""
    at = torch.tensor(ids, device=problem.device)
    recipe = problem.recipe
    rate = torch.full((len(ids),), recipe.rate(round_index), dtype=problem.dtype)
    return View(
        id=at,
        stream=random.bits(problem.seed, round_index, problem.keys[at]),
        lr=rate.to(problem.device),
        train=shards.splits["train"].rows(ids, recipe.batch),
        val=shards.splits["val"].rows(ids, recipe.batch),
        relabel=shards.relabel[at],
    )


def shape_of(shards: Shards, ids: list[int], *, batched: bool) -> Shape:
    """The :class:`Shape` of these clients when they are computed together."""
    return Shape(
        smallest=min(shards.splits["train"].sizes[i] for i in ids),
        even={name: shards.splits[name].even(ids) for name in ("train", "val")},
        batched=batched,
    )


@dataclass(frozen=True, eq=False)
class Batches:
    """One client's splits, and the minibatches that a recipe draws from its training split."""

    problem: Problem
    shards: Shards
    view: View
    shape: Shape
    recipe: Recipe
    mechanism: Mechanism | None = None  # draws Poisson samples

    @property
    def size(self) -> Tensor:
        return self.view.train.size

    @property
    def width(self) -> int:
        """The number of training samples, padding included."""
        return self.view.train.samples.shape[-1]

    @property
    def per_epoch(self) -> Tensor:
        """Batches per epoch; a client without data has one batch of padding, which trains nothing.

        With batch norm a batch of one sample is skipped (reading G-4).
        """
        batch, least = self.recipe.batch, self.problem.least
        whole = self.size // batch + (self.size % batch >= least)
        return whole if least > 1 else whole.clamp(min=1)

    @property
    def steps(self) -> Tensor:
        """Optimiser steps of this client in this round."""
        if self.recipe.steps is not None:
            return torch.where(self.per_epoch > 0, self.recipe.steps, 0)
        return self.recipe.epochs * self.per_epoch

    def sizes(self) -> list[int]:
        """The size of every minibatch of the round, padding included."""
        width, batch, least = self.width, self.recipe.batch, self.problem.least
        count = self.recipe.count(width, least)
        if self.mechanism is not None:
            return [room(batch)] * count
        if not self.shape.even["train"]:
            return [min(batch, width)] * count
        an_epoch = max(1, self.recipe.batches(width, least))
        return [min(batch, width - number % an_epoch * batch) for number in range(count)]

    def prepare(self) -> None:
        """Compute the cached values that every step reads: a traced step must not fill a cache."""
        if self.mechanism is None:
            self.orders  # noqa: B018
        else:
            count = self.recipe.count(self.width, self.problem.least)
            self.mechanism.prepare(self._drawn_for, count, self.problem.model.parameters)
        if self.recipe.class_weights != "none":
            self.class_weights  # noqa: B018

    @property
    def _drawn_for(self) -> tuple[Tensor, Tensor, int]:
        return self.view.stream, self.size, self.recipe.batch

    def batch(self, number: int | Tensor, size: int | None = None) -> Batch:
        """Minibatch ``number`` of this round; ``size`` is needed where ``number`` is a tensor."""
        if self.mechanism is not None:
            place = self.mechanism.places(self._drawn_for, number)
            return self._gather("train", place, place < self.size, number)
        if size is None:
            size = self.sizes()[int(number)]
        within = torch.arange(size, device=self.size.device)
        if self.shape.even["train"]:  # equal sizes: the last batch is equally short for all clients
            many = max(1, self.recipe.batches(self.width, self.problem.least))
            rank = number % many * self.recipe.batch + within
            place = self.orders.view(-1)[number // many * self.width + rank]
            return self._gather("train", place, place >= 0, number)
        mine = self.per_epoch.clamp(min=1)
        rank = number % mine * self.recipe.batch + within
        order = self.orders[(number // mine).clamp(max=len(self.orders) - 1)]
        place = order[rank.clamp(max=self.width - 1)]
        return self._gather("train", place, rank < self.size, number)

    def blocks(self, name: SplitName, size: int = EVALUATION_BLOCK) -> Iterator[Batch]:
        """A split in its stored order, in blocks that bound the memory of an evaluation."""
        split = self._split(name)
        places = torch.arange(split.samples.shape[-1], device=split.samples.device)
        for place in places.split(size):
            yield self._gather(name, place, place < split.size, None)

    @cached_property
    def orders(self) -> Tensor:
        """A random order of this client's samples, one row per epoch; padding comes last."""
        places = torch.arange(self.width, device=self.size.device)
        fewest = max(1, self.recipe.batches(self.shape.smallest, self.problem.least))
        passes = (
            -(-self.recipe.count(self.width) // fewest) if self.recipe.steps else self.recipe.epochs
        )
        epochs = torch.arange(passes, device=self.size.device)
        keys = random.bits(self.view.stream, "batches", epochs[:, None], places) >> 1
        keys = torch.where(places < self.size, keys, torch.iinfo(torch.int64).max)
        return keys.argsort(dim=-1, stable=True)

    @cached_property
    def class_counts(self) -> Tensor:
        """The number of this client's training targets of each class ``[classes]``."""
        places = torch.arange(self.width, device=self.size.device)
        inside = (places < self.size).to(self.problem.dtype)
        y = self._labels("train", places)
        inside = inside.view(-1, *[1] * (y.dim() - 1)).expand(y.shape)
        none = torch.zeros(self.problem.classes, dtype=inside.dtype)
        return none.to(y.device).scatter_add(0, y.flatten(), inside.flatten())

    @cached_property
    def class_weights(self) -> Tensor:
        """``n / (C n_c)`` for each class of this client's training labels; 1 for absent classes."""
        count = self.class_counts
        balanced = self.size / ((count > 0).sum() * count.clamp(min=1))
        return torch.where(count > 0, balanced.to(count.dtype), 1.0)

    def _split(self, name: SplitName) -> Split:
        return self.view.train if name == "train" else self.view.val

    def _gather(
        self, name: SplitName, place: Tensor, inside: Tensor, step: int | Tensor | None
    ) -> Batch:
        place = place if self.mechanism is None else place.clamp(max=self.width - 1)
        index = self._split(name).samples[place]
        sure = self.shape.even[name] and (self.mechanism is None or step is None)
        mask = None if sure else inside.to(self.problem.dtype)
        change = None
        if step is not None and self.recipe.augment == "crop_flip":

            def change(x: Tensor) -> Tensor:
                return crop_flip(x, drawn(self.view.stream, "augment", (len(x), 3), step))

        x = self.shards.inputs(index, change)
        return Batch(x, self._labels(name, place), mask, place, step)

    def _labels(self, name: SplitName, place: Tensor) -> Tensor:
        """The targets, relabelled as this client's labels are."""
        index = self._split(name).samples[place]
        y = self.shards.y[index]
        if not self.view.relabel.shape[-1]:
            return y
        read, first = self.view.relabel[y], self.shards.literal
        return read if first is None else torch.where(index < first, read, y)


def drawn(stream: Tensor, purpose: str, shape: tuple[int, ...], at: int | Tensor) -> Tensor:
    """Uniform draws on [0, 1) from a client's stream."""
    places = torch.arange(torch.Size(shape).numel(), device=stream.device)
    return random.uniform(stream, purpose, at, places).view(shape)


PADDING = 4  # pixels of black around an image before it is cropped


def crop_flip(x: Tensor, luck: Tensor) -> Tensor:
    """Pad images ``[B, C, H, W]`` with black, crop them at random and mirror some of them.

    ``luck [B, 3]`` is uniform on [0, 1) and decides, per image, the vertical offset, the horizontal
    offset and whether the image is mirrored.
    """
    B, C, H, W = x.shape
    offset = (luck[:, :2] * (2 * PADDING + 1)).long() - PADDING
    rows = torch.arange(H, device=x.device) + offset[:, :1]  # [B, H]
    columns = torch.arange(W, device=x.device)
    columns = torch.where(luck[:, 2:] < 0.5, columns.flip(0), columns) + offset[:, 1:2]
    inside = ((rows >= 0) & (rows < H))[:, :, None] & ((columns >= 0) & (columns < W))[:, None, :]
    each, channel = torch.arange(B, device=x.device), torch.arange(C, device=x.device)
    moved = x[
        each[:, None, None, None],
        channel[:, None, None],
        rows.clamp(0, H - 1)[:, None, :, None],
        columns.clamp(0, W - 1)[:, None, None, :],
    ]
    return torch.where(inside[:, None], moved, torch.zeros((), dtype=x.dtype, device=x.device))
