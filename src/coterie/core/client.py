"""What a method may do with one client's private data.

A :class:`Client` looks like one client. Under the vmap engine its tensors stand for many at once,
which is why sizes are tensors and shorter clients are padded and masked; no method sees that.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import grad, vmap

from ..errors import EngineError
from . import loops, random, tree
from .augment import crop_flip
from .task import Recipe, Split, Task, View

Carry = TypeVar("Carry")
SplitName = Literal["train", "val"]

EVALUATION_BLOCK = 500  # samples of a split that are evaluated at once


class Batch(NamedTuple):
    """Some samples of one client."""

    x: Tensor  # [B, ...]
    y: Tensor  # [B]
    mask: Tensor | None  # [B] 1 for a sample, 0 for padding; None where nothing is padding
    position: Tensor  # [B] place of each sample in the client's split
    step: int | Tensor | None  # number of this batch in the round; None outside training

    @property
    def training(self) -> bool:
        """Whether it is a minibatch of :meth:`Client.scan`, not part of an evaluation."""
        return self.step is not None


Loss = Callable[[Tensor, Batch], Tensor]


class Shape(NamedTuple):
    """What is the same for all clients that are computed together."""

    smallest: int  # training samples of the client with fewest of them
    even: dict[str, bool]  # split -> no padding in it
    batched: bool  # under vmap: inner maps may use vmap too


class Clock:
    """Which round it is. Remembers whether anybody asked: a recorded round must not act on it.

    It may where the method declares what it reads off it (``Algorithm.chapter``).
    """

    def __init__(self, index: int, horizon: int) -> None:
        self._index, self._horizon = index, horizon
        self.asked = False

    @property
    def index(self) -> int:
        """The round, from 0."""
        self.asked = True
        return self._index

    @property
    def horizon(self) -> int:
        """Rounds of the whole run."""
        self.asked = True
        return self._horizon


class Statistics:
    """A client's batch-norm buffers where its models come without: one set, moved by training."""

    def __init__(self, buffers: Tensor, *, fixed: bool = False) -> None:
        self.buffers, self.fixed = buffers, fixed
        self.crowded = False  # several models are trained side by side

    def move(self, buffers: Tensor) -> None:
        """What a training pass left behind."""
        if self.crowded:
            raise EngineError(
                "train.buffers: this method trains several models side by side on each client, and "
                "one set of batch-norm statistics cannot serve them all; use buffers = 'average', "
                "or a network with another norm (norm = 'group')"
            )
        self.buffers = self.buffers if self.fixed else buffers


class Client:
    """One client: its data, its model function, its randomness.

    ``id`` is its index, ``size`` its number of training samples, ``steps`` the steps it takes this
    round and ``lr`` the rate of them; all are scalar tensors. ``round`` counts from 0 up to the
    ``horizon`` of the run.
    """

    def __init__(
        self,
        task: Task,
        view: View,
        shape: Shape,
        clock: Clock,
        recipe: Recipe | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self._task, self._view, self._shape, self._clock = task, view, shape, clock
        self.recipe = recipe or task.recipe
        self.model, self._optimizer = task.model, self.recipe.rule()
        self.id, self.size, self.lr = view.id, view.train.size, view.lr
        self.population = task.population
        self._statistics = statistics or Statistics(task.statistics)

    @property
    def round(self) -> int:
        """The round this is, from 0."""
        return self._clock.index

    @property
    def horizon(self) -> int:
        """Rounds of the whole run."""
        return self._clock.horizon

    def tuned(
        self,
        *,
        epochs: int | None = None,
        lr: float | Tensor | None = None,
        batches: str | None = None,
        still: bool = False,
    ) -> "Client":
        """The same client with another number of epochs, another rate or other minibatches.

        ``batches`` names what the other minibatches are for; they are drawn anew for each name.
        ``still`` keeps batch-norm statistics that are the client's own (spec 1.2) as they are.
        """
        view, recipe = self._view, self.recipe
        if batches is not None:
            view = view._replace(stream=random.bits(view.stream, batches))
        if lr is not None:
            view = view._replace(lr=torch.zeros_like(view.lr) + lr)
        if epochs is not None:
            recipe = replace(recipe, epochs=epochs, steps=None)
        mine = Statistics(self._statistics.buffers, fixed=True) if still else self._statistics
        tuned = Client(self._task, view, self._shape, self._clock, recipe, mine)
        if batches is not None:
            tuned._prepare()
        return tuned

    def half(self) -> "Client":
        """The same client with every second training sample only.

        It takes as many steps, each on half as many samples (one step fewer per epoch where the
        last batch is short), and leaves batch-norm statistics that are kept apart as they are. What
        it learns tells how much one's own data leave open.
        """
        least, recipe, split = self._task.least, self.recipe, self._view.train
        if recipe.batch >= 2 * least:
            recipe = replace(recipe, batch=recipe.batch // 2)
        else:
            recipe = replace(recipe, epochs=2 * recipe.epochs)
        kept = split.samples[..., 1::2] if self._width > 1 else split.samples
        view = self._view._replace(
            stream=random.bits(self._view.stream, "half"), train=Split(kept, split.size // 2)
        )
        smallest = self._shape.smallest // 2
        even = {**self._shape.even, "train": self._shape.even["train"] and smallest > 0}
        shape = self._shape._replace(smallest=smallest, even=even)
        fixed = Statistics(self._statistics.buffers, fixed=True)
        return Client(self._task, view, shape, self._clock, recipe, fixed)

    def holding(self, statistics: Statistics) -> "Client":
        """The same client with batch-norm statistics that are kept apart from its models."""
        return Client(self._task, self._view, self._shape, self._clock, self.recipe, statistics)

    @property
    def own(self) -> Tensor:
        """Training samples that are this client's: ``size`` without what a shared pool adds."""
        return self._task.sizes[self.id]

    @property
    def validated(self) -> Tensor:
        """Whether its validation data is its own and not trained on: neither lent nor merged."""
        return self._task.validated[self.id]

    @property
    def steps(self) -> Tensor:
        """Optimiser steps of this client this round."""
        if self.recipe.steps is not None:
            return torch.where(self._batches > 0, self.recipe.steps, 0)
        return self.recipe.epochs * self._batches

    @property
    def _batches(self) -> Tensor:
        """Batches an epoch; a client without data has one of padding, of which nothing is learnt.

        With batch norm a batch of one sample is none (spec 1.3).
        """
        batch, least = self.recipe.batch, self._task.least
        whole = self.size // batch + (self.size % batch >= least)
        return whole if least > 1 else whole.clamp(min=1)

    # ---- loss ------------------------------------------------------------------------------

    def outputs(self, w: Tensor, batch: Batch, *, training: bool = False) -> Tensor:
        """What the model says of a batch, in evaluation mode unless it is trained."""
        stream = self._stream(batch) if training else None
        return self.model(self._whole(w), batch.x, training=training, stream=stream)

    def _whole(self, w: Tensor) -> Tensor:
        """A model with its buffers, wherever they are kept."""
        return torch.cat([w, self._statistics.buffers]) if self.model.apart else w

    def _stream(self, batch: Batch) -> Tensor | None:
        """What the dropout of a training pass over a batch is drawn from."""
        if not self.model.random or batch.step is None:
            return None
        return random.bits(self._view.stream, "dropout", batch.step)

    def losses(self, w: Tensor, batch: Batch) -> Tensor:
        """The loss of every sample of a batch ``[B]``: cross-entropy or half squared error.

        A minibatch of :meth:`scan` is seen in training mode, a split in evaluation mode.
        """
        return self.losses_of(self.outputs(w, batch, training=batch.training), batch)

    def losses_of(self, output: Tensor, batch: Batch) -> Tensor:
        """The loss of every sample, given what a model said of the batch."""
        if self._task.regression:
            return 0.5 * (output.squeeze(-1) - batch.y) ** 2
        chosen = output.log_softmax(-1).gather(-1, batch.y.unsqueeze(-1))
        return self._weighed(-chosen.squeeze(-1), batch)

    def _weighed(self, losses: Tensor, batch: Batch) -> Tensor:
        """The losses of a training batch by the weights of their classes."""
        if self.recipe.class_weights == "none" or not batch.training:
            return losses
        return losses * self._class_weights[batch.y]

    @cached_property
    def _class_weights(self) -> Tensor:
        """``n / (C n_c)`` of this client's training labels; of a class it lacks, 1."""
        places = torch.arange(self._width, device=self.size.device)
        inside = (places < self.size).to(self._task.dtype)
        y = self._labels("train", places)
        none = torch.zeros(self._task.federation.dataset.classes, dtype=inside.dtype)
        count = none.to(y.device).scatter_add(0, y, inside)
        balanced = self.size / ((count > 0).sum() * count.clamp(min=1))
        return torch.where(count > 0, balanced.to(inside.dtype), 1.0)

    def mixture_losses(self, weights: Tensor, models: Tensor, batch: Batch) -> Tensor:
        """The loss of every sample ``[B]`` when models ``[r, P]`` answer together.

        Probabilities are mixed, or the values of a regression.
        """
        training = batch.training
        outputs = torch.stack([self.outputs(w, batch, training=training) for w in models])
        if self._task.regression:
            return 0.5 * (weights @ outputs.squeeze(-1) - batch.y) ** 2
        each = outputs.log_softmax(-1).gather(-1, batch.y.expand(len(models), -1)[..., None])
        logs = each.squeeze(-1)
        top = logs.max(0).values.detach()
        total = weights @ (logs - top).exp()  # not logsumexp: a weight may be 0
        losses = -(total.clamp(min=torch.finfo(total.dtype).tiny).log() + top)
        return self._weighed(losses, batch)

    def loss(self, w: Tensor, on: Batch | SplitName) -> Tensor:
        """The mean loss on a batch or on a whole split."""
        if isinstance(on, Batch):
            return mean(self.losses(w, on), on.mask)
        total, count = w.new_zeros(()), w.new_zeros(())
        for block in self.blocks(on):
            losses = self.losses(w, block)
            weight = torch.ones_like(losses) if block.mask is None else block.mask
            total, count = total + (losses * weight).sum(), count + weight.sum()
        return total / count.clamp(min=1)

    def error(self, w: Tensor, on: SplitName) -> Tensor:
        """The share of a split that the model gets wrong; of a regression the mean loss.

        An output that is not a number is wrong.
        """
        if self._task.regression:
            return self.loss(w, on).nan_to_num(nan=torch.inf)
        total, count = w.new_zeros(()), w.new_zeros(())
        for block in self.blocks(on):
            output = self.outputs(w, block)
            right = (output.argmax(-1) == block.y) & output.isfinite().all(-1)
            weight = torch.ones_like(output[..., 0]) if block.mask is None else block.mask
            total, count = total + weight.where(~right, 0.0).sum(), count + weight.sum()
        return total / count.clamp(min=1)

    def gradient(self, w: Tensor, on: Batch | SplitName, loss: Loss | None = None) -> Tensor:
        """The gradient of the mean loss, or of another loss of (w, batch)."""
        result: Tensor = grad(loss or self.loss)(w, on)  # type: ignore[arg-type]
        return result

    def map(self, f: Callable[..., tree.Tree], *rows: Tensor) -> tree.Tree:
        """``f`` of every row of the tensors, as one batched call where the engine is batched."""
        if len(rows[0]) == 1:
            return tree.map_leaves(lambda leaf: leaf.unsqueeze(0), f(*(part[0] for part in rows)))
        before, self._statistics.crowded = self._statistics.crowded, True
        try:
            if self._shape.batched:
                return vmap(f)(*rows)
            return tree.stack([f(*parts) for parts in zip(*rows, strict=True)])
        finally:
            self._statistics.crowded = before

    # ---- data ------------------------------------------------------------------------------

    def blocks(self, name: SplitName, size: int = EVALUATION_BLOCK) -> Iterator[Batch]:
        """A split in its stored order, in blocks that bound the memory of an evaluation."""
        split = self._split(name)
        places = torch.arange(split.samples.shape[-1], device=split.samples.device)
        for place in places.split(size):
            yield self._gather(name, place, place < split.size, None)

    def _split(self, name: SplitName) -> Split:
        return self._view.train if name == "train" else self._view.val

    def _gather(
        self, name: SplitName, place: Tensor, inside: Tensor, step: int | Tensor | None
    ) -> Batch:
        index = self._split(name).samples[place]
        mask = None if self._shape.even[name] else inside.to(self._task.dtype)
        change = None
        if step is not None and self.recipe.augment == "crop_flip":

            def change(x: Tensor) -> Tensor:
                return crop_flip(x, self.draw("augment", (len(x), 3), at=step))

        x = self._task.inputs(index, change)
        return Batch(x, self._labels(name, place), mask, place, step)

    def _labels(self, name: SplitName, place: Tensor) -> Tensor:
        """Targets as this client reads them."""
        index = self._split(name).samples[place]
        y = self._task.y[index]
        if not self._view.relabel.shape[-1]:
            return y
        read, first = self._view.relabel[y], self._task.literal
        return read if first is None else torch.where(index < first, read, y)

    # ---- training --------------------------------------------------------------------------

    def scan(self, step: Callable[[Carry, Batch], Carry], carry: Carry) -> Carry:
        """``carry = step(carry, batch)`` over this round's minibatches.

        A client that has fewer of them than its neighbours under vmap keeps its carry.
        """
        steps, mine, even = self.steps, self._statistics, self._shape.even["train"]
        self._prepare()

        def one(
            number: int | Tensor, size: int, held: tuple[Carry, Tensor]
        ) -> tuple[Carry, Tensor]:
            old, mine.buffers = held
            new = step(old, self.batch(number, size))
            if even:
                return new, mine.buffers
            kept: tuple[Carry, Tensor] = tree.where(number < steps, (new, mine.buffers), held)
            return kept

        sizes = self._batch_sizes()
        carry, mine.buffers = loops.scan(one, sizes, (carry, mine.buffers))
        return carry

    def _prepare(self) -> None:
        """Compute now what every step reads: a step that is recorded keeps nothing for later."""
        self._orders  # noqa: B018
        if self.recipe.class_weights != "none":
            self._class_weights  # noqa: B018

    def _batch_sizes(self) -> list[int]:
        """Samples of every minibatch, padding included."""
        width, batch = self._width, self.recipe.batch
        count = self.recipe.count(width, self._task.least)
        if not self._shape.even["train"]:
            return [min(batch, width)] * count
        an_epoch = max(1, self.recipe.batches(width, self._task.least))
        return [min(batch, width - number % an_epoch * batch) for number in range(count)]

    def batch(self, number: int | Tensor, size: int | None = None) -> Batch:
        """Minibatch ``number`` of this round; its samples are counted where a tensor numbers it."""
        if size is None:
            size = self._batch_sizes()[int(number)]
        within = torch.arange(size, device=self.size.device)
        if self._shape.even["train"]:  # sizes are alike: the last batch is short for everybody
            many = max(1, self.recipe.batches(self._width, self._task.least))
            rank = number % many * self.recipe.batch + within
            place = self._orders.view(-1)[number // many * self._width + rank]
            return self._gather("train", place, place >= 0, number)
        mine = self._batches.clamp(min=1)
        rank = number % mine * self.recipe.batch + within
        order = self._orders[(number // mine).clamp(max=len(self._orders) - 1)]
        place = order[rank.clamp(max=self._width - 1)]
        return self._gather("train", place, rank < self.size, number)

    def alike(self, batch: Batch) -> Batch:
        """The minibatch with the number of another's, of a client that differs in its batches."""
        if batch.step is None:
            raise ValueError("only a minibatch of training has a number")
        return self.batch(batch.step, len(batch.y))

    @property
    def _width(self) -> int:
        return self._view.train.samples.shape[-1]

    @cached_property
    def _orders(self) -> Tensor:
        """A random order of this client's samples for every epoch; padding comes last."""
        places = torch.arange(self._width, device=self.size.device)
        fewest = max(1, self.recipe.batches(self._shape.smallest, self._task.least))
        passes = (
            -(-self.recipe.count(self._width) // fewest)
            if self.recipe.steps
            else self.recipe.epochs
        )
        epochs = torch.arange(passes, device=self.size.device)
        keys = random.bits(self._view.stream, "batches", epochs[:, None], places) >> 1
        keys = torch.where(places < self.size, keys, torch.iinfo(torch.int64).max)
        return keys.argsort(dim=-1, stable=True)

    def train(
        self,
        w: Tensor,
        *,
        loss: Loss | None = None,
        penalty: Callable[[Tensor], Tensor] | None = None,
        only: Tensor | None = None,
    ) -> Tensor:
        """This round's local training from ``w``: one optimiser step a minibatch.

        ``loss`` replaces the mean loss of a batch, ``penalty`` of the parameters is added to it.
        Where the mask ``only`` is false nothing moves, not by momentum or weight decay either.
        """
        base = loss or self.loss

        def objective(w: Tensor, batch: Batch) -> Tensor:
            value = base(w, batch)
            return value if penalty is None else value + penalty(w)

        def step(carry: tuple[Tensor, tree.Tree], batch: Batch) -> tuple[Tensor, tree.Tree]:
            w, state = carry
            new, state = self.step(w, self.gradient(w, batch, objective), state, batch)
            return (new if only is None else torch.where(only, new, w)), state

        return self.scan(step, (w, self.begin(w)))[0]

    def begin(self, w: Tensor) -> tree.Tree:
        """The optimiser's state before the first step."""
        return self._optimizer.init(self.trainable(w))

    def step(
        self, w: Tensor, g: Tensor, state: tree.Tree, batch: Batch
    ) -> tuple[Tensor, tree.Tree]:
        """One optimiser step along ``g`` after seeing ``batch``; returns (w, state)."""
        g = shortened(self.trainable(g), self.recipe.clip)
        moved, state = self._optimizer.step(self.trainable(w), g, state, self.lr)
        if self.model.whole == self.model.parameters:
            return moved, state
        left = self.model.refreshed(self._whole(w), batch.x, self._stream(batch))
        buffers = left[self.model.parameters :]
        if not self.model.apart:
            return torch.cat([moved, buffers]), state
        self._statistics.move(buffers)
        return moved, state

    def trainable(self, w: Tensor) -> Tensor:
        """The part of a vector that distances, gradients and optimisers see: no buffers."""
        return w[..., : self.model.parameters]

    # ---- randomness ------------------------------------------------------------------------

    def draw(self, purpose: str, shape: tuple[int, ...] = (), at: int | Tensor = 0) -> Tensor:
        """Uniform draws on [0, 1), derived from (seed, round, client, purpose, at)."""
        count = torch.Size(shape).numel()
        places = torch.arange(count, device=self.size.device)
        return random.uniform(self._view.stream, purpose, at, places).view(shape)

    def noise(self, purpose: str, shape: tuple[int, ...] = (), at: int | Tensor = 0) -> Tensor:
        """Standard normal draws, derived as :meth:`draw`."""
        places = torch.arange(torch.Size(shape).numel(), device=self.size.device)
        return random.normal(self._view.stream, purpose, at, places).view(shape)


def of_server(task: Task, round_index: int, horizon: int) -> Client | None:
    """The server's own samples, looked at as one more client; None where it holds none."""
    if task.aux is None:
        return None
    held = Split(task.aux, torch.tensor(len(task.aux), device=task.device))
    view = View(
        id=torch.tensor(task.population, device=task.device),
        stream=random.bits(task.seed, round_index, "server").to(task.device),
        lr=torch.tensor(task.recipe.rate(round_index), dtype=task.dtype, device=task.device),
        train=held,
        val=held,
        relabel=task.relabel.new_zeros(0),
    )
    shape = Shape(len(task.aux), {"train": True, "val": True}, batched=True)
    return Client(task, view, shape, Clock(round_index, horizon))


def shortened(g: Tensor, longest: float) -> Tensor:
    """A gradient of at most this L2 norm; 0 leaves it as it is."""
    if not longest:
        return g
    length: Tensor = torch.linalg.vector_norm(g)
    return g * (longest / length.clamp(min=longest))


def mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over what is not padding."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)
