"""One client as a method sees it: losses, gradients, minibatches and training on its data.

A method is written for one :class:`Client`. Under the vmap engine its tensors stand for many
clients at once, which is why sizes are tensors; no method sees that.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.func import grad, vmap

from . import calls, random, tree
from .batches import EVALUATION_BLOCK, Batch, Batches, Loss, Shape, SplitName, View, drawn
from .calls import Clock
from .losses import losses_of, of_mixture, refuse_own
from .optim import OptimizerStates, Recipe, Statistics, shortened
from .privacy import Mechanism, Penalty, mechanism_of
from .problem import Problem
from .shards import Shards, Split

Carry = TypeVar("Carry")


class Client:
    """One client: its data, its model function and its random draws.

    ``id`` is its index, ``size`` its number of training samples, ``steps`` its number of optimiser
    steps in this round and ``lr`` their learning rate; all are scalar tensors. ``round`` counts
    from 0; ``horizon`` is the number of rounds of the run.
    """

    def __init__(
        self,
        problem: Problem,
        shards: Shards,
        view: View,
        shape: Shape,
        clock: Clock,
        recipe: Recipe | None = None,
        statistics: Statistics | None = None,
        optimizers: OptimizerStates | None = None,
        mechanism: Mechanism | None = None,
    ) -> None:
        self._problem, self._shards, self._clock = problem, shards, clock
        self._view, self._shape, self._mechanism = view, shape, mechanism
        self.recipe = recipe or problem.recipe
        self._batches = Batches(problem, shards, view, shape, self.recipe, mechanism)
        self.model, self._optimizer = problem.model, self.recipe.rule()
        self.id, self.size, self.lr = view.id, view.train.size, view.lr
        self.population = problem.population
        self._statistics = statistics or Statistics(problem.statistics)
        self._optimizers = optimizers

    @property
    def round(self) -> int:
        """The number of this round, from 0."""
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
        """A copy of the client with other epochs, another learning rate or other minibatches.

        ``batches`` names the purpose of the other minibatches; each name gets its own draw.
        ``still`` leaves batch-norm statistics that are the client's own (reading G-3) unchanged.
        """
        view, recipe = self._view, self.recipe
        if batches is not None:
            view = view._replace(stream=random.bits(view.stream, batches))
        if lr is not None:
            view = view._replace(lr=torch.zeros_like(view.lr) + lr)
        if epochs is not None:
            recipe = recipe.passing(epochs)
        mine = Statistics(self._statistics.buffers, fixed=True) if still else self._statistics
        tuned = self._changed(view, self._shape, recipe, mine, self._optimizers)
        if batches is not None:
            tuned._batches.prepare()
        return tuned

    def halves(self) -> tuple["Client", "Client"]:
        """Two copies of the client with disjoint halves of its training samples.

        Each takes as many steps, each on half as many samples (one step fewer per epoch where the
        last batch is short), and leaves batch-norm statistics that are kept apart and optimiser
        states unchanged. The second is the smaller one if the number of samples is odd.
        How far their models end from each other shows how uncertain the client's data leave it.
        """
        return self._half(0, "other half"), self._half(1, "half")

    def _half(self, first: int, name: str) -> "Client":
        """A copy with every second training sample from ``first`` on."""
        recipe, split = self.recipe.halved(self._problem.least), self._view.train
        kept = split.samples[..., first::2] if self._batches.width > 1 else split.samples
        view = self._view._replace(
            stream=random.bits(self._view.stream, name),
            train=Split(kept, (split.size + 1 - first) // 2),
        )
        smallest = (self._shape.smallest + 1 - first) // 2
        even = {**self._shape.even, "train": self._shape.even["train"] and smallest > 0}
        shape = self._shape._replace(smallest=smallest, even=even)
        fixed = Statistics(self._statistics.buffers, fixed=True)
        again = None if self._optimizers is None else self._optimizers.again()
        return self._changed(view, shape, recipe, fixed, again)

    def holding(self, statistics: Statistics) -> "Client":
        """A copy of the client with these batch-norm statistics, kept apart from its models."""
        return self._changed(self._view, self._shape, self.recipe, statistics, self._optimizers)

    def continuing(self, optimizers: OptimizerStates) -> "Client":
        """A copy of the client whose training begins with these states and hands them back."""
        return self._changed(self._view, self._shape, self.recipe, self._statistics, optimizers)

    def private(self, *asked: tree.Tree) -> "Client":
        """A copy of the client whose gradients are private; ``asked`` is all that it was sent."""
        parts = self._problem, self._shards, self._view, self._shape, self._clock, self.recipe
        mechanism = mechanism_of(self._problem, *asked)
        return Client(*parts, self._statistics, self._optimizers, mechanism)

    def _changed(
        self,
        view: View,
        shape: Shape,
        recipe: Recipe,
        statistics: Statistics,
        optimizers: OptimizerStates | None,
    ) -> "Client":
        parts = self._problem, self._shards, view, shape, self._clock, recipe, statistics
        return Client(*parts, optimizers, self._mechanism)

    @property
    def own(self) -> Tensor:
        """The number of the client's own training samples: ``size`` without a shared pool's."""
        return self._problem.sizes[self.id]

    @property
    def class_counts(self) -> Tensor:
        """The number of the client's training targets of each class ``[classes]``."""
        return self._batches.class_counts

    @property
    def classes(self) -> int:
        """The number of classes; 0 means regression."""
        return self._problem.classes

    @property
    def validated(self) -> Tensor:
        """Whether its validation samples are its own and are not used for training."""
        return self._problem.validated[self.id]

    @property
    def steps(self) -> Tensor:
        """The number of optimiser steps of this client in this round."""
        return self._batches.steps

    # ---- loss ------------------------------------------------------------------------------

    def outputs(self, w: Tensor, batch: Batch, *, training: bool = False) -> Tensor:
        """The model's outputs for a batch, in evaluation mode unless ``training``."""
        stream = self._stream(batch) if training else None
        return self.model(self._whole(w), batch.x, training=training, stream=stream)

    def entering(self, layer: str, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The model's outputs for a batch, and the input of one of its layers, both ``[B, ...]``.

        The model is in training mode for a minibatch of :meth:`scan`, else in evaluation mode.
        """
        stream = self._stream(batch) if batch.training else None
        whole, training = self._whole(w), batch.training
        return self.model.entering(layer, whole, batch.x, training=training, stream=stream)

    def tapped(
        self, w: Tensor, batch: Batch, added: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The outputs for a minibatch where ``added`` is added to layers' outputs; their inputs."""
        return self.model.tapped(w, batch.x, added, self._stream(batch))

    def _whole(self, w: Tensor) -> Tensor:
        """The model with its buffers, which may be kept apart."""
        return self.model.joined(w, self._statistics.buffers) if self.model.apart else w

    def _stream(self, batch: Batch) -> Tensor | None:
        """The random stream for dropout in a training pass over a batch; None without dropout."""
        if not self.model.random or batch.step is None:
            return None
        return random.bits(self._view.stream, "dropout", batch.step)

    def losses(self, w: Tensor, batch: Batch) -> Tensor:
        """The loss of every sample of a batch ``[B]``: cross-entropy or half squared error.

        The model is in training mode for a minibatch of :meth:`scan`, else in evaluation mode.
        """
        return self.losses_of(self.outputs(w, batch, training=batch.training), batch)

    def losses_of(self, output: Tensor, batch: Batch) -> Tensor:
        """The loss of every sample, given the model's outputs for the batch."""
        found = losses_of(output, batch.y, self._problem.regression, self._problem.loss)
        return self._weighed(found, batch)

    def _weighed(self, found: Tensor, batch: Batch) -> Tensor:
        """Losses times the class weights in training; unchanged in evaluation."""
        if self.recipe.class_weights == "none" or not batch.training:
            return found
        return found * self._batches.class_weights[batch.y]

    def mixture_losses(self, weights: Tensor, models: Tensor, batch: Batch) -> Tensor:
        """The loss of every sample ``[B]`` for the weighted mixture of models ``[r, P]``."""
        refuse_own(self._problem.loss)
        training = batch.training
        outputs = torch.stack([self.outputs(w, batch, training=training) for w in models])
        regression = self._problem.regression
        found = of_mixture(weights, outputs, batch.y, regression=regression)
        return self._weighed(found, batch)

    def loss(self, w: Tensor, on: Batch | SplitName) -> Tensor:
        """The mean loss on a batch or on a whole split."""
        if isinstance(on, Batch):
            return mean(self.losses(w, on), on.mask)
        total, count = w.new_zeros(()), w.new_zeros(())
        for block in self.blocks(on):
            found = self.losses(w, block)
            weight = torch.ones_like(found) if block.mask is None else block.mask
            total, count = total + (found * weight).sum(), count + weight.sum()
        return total / count.clamp(min=1)

    def each_loss(self, w: Tensor, on: SplitName) -> tuple[Tensor, Tensor]:
        """The loss of every sample of a split ``[n]``, and 1 for a sample or 0 for padding."""
        blocks = list(self.blocks(on))
        found = torch.cat([self.losses(w, block) for block in blocks])
        masks = [block.mask for block in blocks if block.mask is not None]
        return found, torch.cat(masks) if masks else torch.ones_like(found)

    def error(self, w: Tensor, on: SplitName) -> Tensor:
        """The error rate of the model on a split; for a regression, the mean loss.

        An output that is not a number counts as an error.
        """
        if self._problem.regression:
            return self.loss(w, on).nan_to_num(nan=torch.inf)
        total, count = w.new_zeros(()), w.new_zeros(())
        for block in self.blocks(on):
            output = self.outputs(w, block)
            right = (output.argmax(-1) == block.y) & output.isfinite().all(-1)
            weight = torch.ones_like(output[..., 0]) if block.mask is None else block.mask
            weight = weight if weight.ndim == right.ndim else weight[:, None].expand_as(right)
            total, count = total + weight.where(~right, 0.0).sum(), count + weight.sum()
        return total / count.clamp(min=1)

    def gradient(
        self,
        w: Tensor,
        on: Batch | SplitName,
        loss: Loss | None = None,
        penalty: Penalty | None = None,
    ) -> Tensor:
        """The gradient of the mean loss, or of another function ``loss(w, batch)``.

        ``penalty(w)`` is added and must not depend on data; with privacy it is added last.
        """
        if self._mechanism is not None:
            return self._mechanism.gradient(self, w, on, self._view.stream, loss, penalty)
        base, mine = loss or self.loss, self._statistics

        def of(w: Tensor, on: Batch | SplitName) -> Tensor:
            value = base(w, on)  # type: ignore[arg-type]
            return value if penalty is None else value + penalty(w)

        if not self.model.scales:
            return grad(of)(w, on)  # type: ignore[no-any-return]
        before, count = mine.buffers, self.model.scales

        def both(w: Tensor, scales: Tensor) -> Tensor:
            mine.buffers = torch.cat([scales, before[count:]])
            return of(w, on)

        try:
            g, mine.slope = grad(both, argnums=(0, 1))(w, before[:count])
        finally:
            mine.buffers = before
        return g  # type: ignore[no-any-return]

    def map(
        self, f: Callable[..., tree.Tree], *rows: Tensor, shares: Tensor | None = None
    ) -> tree.Tree:
        """Apply ``f`` to every row of the tensors, in one vmap call where the engine uses vmap.

        ``shares [n]`` weighs the rows' models: a client that keeps one optimiser state between
        rounds keeps the mean of theirs (:class:`~coterie.core.optim.OptimizerStates`).
        """
        count, kept = len(rows[0]), self._optimizers
        if self._mechanism is not None:
            f, rows = self._mechanism.beside(f, rows)
        if count == 1:
            return tree.map_leaves(lambda leaf: leaf.unsqueeze(0), f(*(part[0] for part in rows)))
        before, self._statistics.crowded = self._statistics.crowded, True
        try:
            if kept is None:
                return self._over(f, rows)
            made, ends = self._over(kept.within(f), (kept.rows(count), *rows))
            kept.beside(ends, count, shares)
            return made
        finally:
            self._statistics.crowded = before

    def _over(self, f: Callable[..., tree.Tree], rows: tuple[tree.Tree, ...]) -> tree.Tree:
        if self._shape.batched:
            return vmap(f)(*rows)
        count = len(next(tree.leaves(rows)))
        return tree.stack([f(*tree.row(rows, n)) for n in range(count)])

    # ---- data ------------------------------------------------------------------------------

    def blocks(self, name: SplitName, size: int = EVALUATION_BLOCK) -> Iterator[Batch]:
        """A split in its stored order, in blocks that bound the memory of an evaluation."""
        return self._batches.blocks(name, size)

    def batch(self, number: int | Tensor, size: int | None = None) -> Batch:
        """Minibatch ``number`` of this round; ``size`` is needed where ``number`` is a tensor."""
        return self._batches.batch(number, size)

    def alike(self, batch: Batch) -> Batch:
        """This client's minibatch with the number of another client's minibatch ``batch``."""
        if batch.step is None:
            raise ValueError("only a minibatch of training has a number")
        return self.batch(batch.step, len(batch.y))

    # ---- training --------------------------------------------------------------------------

    def scan(self, step: Callable[[Carry, Batch], Carry], carry: Carry) -> Carry:
        """``carry = step(carry, batch)`` over this round's minibatches.

        Under vmap, a client with fewer minibatches than others keeps its carry after its last one.
        """
        steps, mine, even = self.steps, self._statistics, self._shape.even["train"]
        if self._mechanism is not None:
            self._mechanism.scan += 1
        self._batches.prepare()

        def one(
            number: int | Tensor, size: int, held: tuple[Carry, tree.Tree]
        ) -> tuple[Carry, tree.Tree]:
            old, mine.carried = held
            if self._mechanism is not None:
                self._mechanism.call = 0
            new = step(old, self.batch(number, size))
            if even:
                return new, mine.carried
            kept: tuple[Carry, tree.Tree] = tree.where(number < steps, (new, mine.carried), held)
            return kept

        if self.model.scales:
            mine.slope, mine.rule = None, self._optimizer.init(mine.buffers[: self.model.scales])
        carry, mine.carried = calls.scan(one, self._batches.sizes(), (carry, mine.carried))
        return carry

    def train(
        self,
        w: Tensor,
        *,
        loss: Loss | None = None,
        penalty: Penalty | None = None,
        only: Tensor | None = None,
    ) -> Tensor:
        """This round's local training from ``w``: one optimiser step per minibatch.

        ``loss`` replaces the mean loss of a batch; ``penalty(w)`` is added to the loss. Entries
        where the mask ``only`` is false do not change, not by momentum or weight decay either.
        """

        def step(carry: tuple[Tensor, tree.Tree], batch: Batch) -> tuple[Tensor, tree.Tree]:
            w, state = carry
            new, state = self.step(w, self.gradient(w, batch, loss, penalty), state, batch)
            return (new if only is None else torch.where(only, new, w)), state

        w, state = self.scan(step, (w, self.begin(w)))
        self.end(state)
        return w

    def begin(self, w: Tensor) -> tree.Tree:
        """The optimiser's state before the first step of a training."""
        if self._optimizers is not None:
            return self._optimizers.begin()
        return self._optimizer.init(self.trainable(w))

    def end(self, state: tree.Tree) -> None:
        """Hand back the optimiser's state after the last step, which the recipe may keep."""
        if self._optimizers is not None:
            self._optimizers.end(state)

    def step(
        self, w: Tensor, g: Tensor, state: tree.Tree, batch: Batch
    ) -> tuple[Tensor, tree.Tree]:
        """One optimiser step with gradient ``g`` of ``batch``; returns (w, state)."""
        moved, state = self.moved(w, g, state)
        if self.model.whole == self.model.parameters:
            return moved, state
        left = self.model.refreshed(self._whole(w), batch.x, self._stream(batch))
        buffers = self.model.split(left)
        if not self.model.apart:
            return torch.cat([moved, buffers]), state
        self._statistics.move(self._rescaled(w, buffers, batch))
        return moved, state

    def _rescaled(self, w: Tensor, own: Tensor, batch: Batch) -> Tensor:
        """What is kept apart, its norms' parameters after a step of their own optimiser."""
        mine, count = self._statistics, self.model.scales
        if not count or mine.fixed:
            return own
        if mine.slope is None:  # the method took its gradient elsewhere
            self.gradient(w, batch)
        g = shortened(mine.slope, self.recipe.clip)
        scales, mine.rule = self._optimizer.step(own[:count], g, mine.rule, self.lr)
        mine.slope = None
        return torch.cat([scales, own[count:]])

    def moved(self, w: Tensor, g: Tensor, state: tree.Tree) -> tuple[Tensor, tree.Tree]:
        """The parameters alone after one optimiser step with gradient ``g``; returns (w, state)."""
        g = shortened(self.trainable(g), self.recipe.clip)
        return self._optimizer.step(self.trainable(w), g, state, self.lr)

    def trainable(self, w: Tensor) -> Tensor:
        """The parameters of a vector without buffers: distances and optimisers use only these."""
        return w[..., : self.model.parameters]

    # ---- randomness ------------------------------------------------------------------------

    def draw(self, purpose: str, shape: tuple[int, ...] = (), at: int | Tensor = 0) -> Tensor:
        """Uniform draws on [0, 1), derived from (seed, round, client, purpose, at)."""
        return drawn(self._view.stream, purpose, shape, at)

    def noise(self, purpose: str, shape: tuple[int, ...] = (), at: int | Tensor = 0) -> Tensor:
        """Standard normal draws, derived as :meth:`draw` is; they hide nothing."""
        places = torch.arange(torch.Size(shape).numel(), device=self.size.device)
        return random.normal(self._view.stream, purpose, at, places).view(shape)


def descend(client: Client, w: Tensor, g: Tensor, rate: Tensor | float) -> Tensor:
    """``w − rate · g`` for the parameters; batch-norm statistics in ``w`` stay unchanged."""
    moved = client.trainable(w) - rate * client.trainable(g)
    return torch.cat([moved, w[len(moved) :]])


def mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over all entries that are not padding."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)
