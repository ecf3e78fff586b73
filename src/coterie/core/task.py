"""A task: a federation, a model and a training recipe, on a device.

Engines take their clients from here. A method's ``init`` reads the start, the population and the
sizes; nothing else of it is for methods.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..data.federation import Federation, Indices
from ..data.shared import Pool, Sharing, form_pool
from ..errors import ConfigError
from . import random
from .flat import FlatModel, build
from .optim import Optimizer, adam, sgd
from .ranges import Count, NotNegative, Positive, ShareAboveZero, ShareBelowOne


@dataclass(frozen=True)
class Recipe:
    """How a client trains in one round.

    Fields:
        optimizer: ``sgd`` or ``adam``; its state starts anew every round.
        lr: learning rate of the first round.
        epochs: passes over the client's training data.
        batch: samples a step; the last, shorter batch of an epoch is kept.
        momentum: heavy-ball momentum of sgd.
        weight_decay: added to the gradient as ``weight_decay * w``.
        decay: the rate of round t is ``max(floor, lr * decay**t)``.
        floor: smallest rate.
        steps: a number of steps in place of epochs, the same for every client.
        buffers: whose batch-norm statistics a client's models have (spec 1.2): ``average`` mixes
            them with the parameters; with ``local`` every client has one set, which its own
            training moves and which never leaves it, whatever model arrives; with ``server`` all
            have the mean, by samples, of what the participants of the last round ended with.
        clip: the longest gradient a step follows (L2, penalties included); 0 clips nothing.
        augment: ``crop_flip`` crops every image of a training batch at random out of a black
            frame of 4 pixels and mirrors every second one; ``none`` takes images as they are.
        class_weights: ``balanced`` multiplies the loss of a training sample of class c by
            n / (C n_c): the client's n training samples, C classes among them, n_c of this one.
            A batch's loss stays the mean over its samples. ``none`` counts all alike.
        dropout: the rate of every ``nn.Dropout`` of the network; None leaves each its own.

    With batch norm a batch of a single sample is skipped and is not a step (spec 1.3). What is
    drawn, weighed or clipped concerns training batches; evaluations see samples as they are.
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

    def rate(self, round_index: int) -> float:
        """The learning rate of a round."""
        return max(self.floor, self.lr * self.decay**round_index)

    def rule(self) -> Optimizer:
        """The optimiser as pure functions."""
        if self.optimizer == "sgd":
            return sgd(self.momentum, self.weight_decay)
        if self.optimizer == "adam":
            return adam(weight_decay=self.weight_decay)
        raise ConfigError(f"optimizer '{self.optimizer}' is unknown; expected 'sgd' or 'adam'")

    def batches(self, samples: int, least: int = 1) -> int:
        """Batches of one pass over so many samples; those of fewer than ``least`` are left out."""
        return samples // self.batch + (samples % self.batch >= least)

    def count(self, samples: int, least: int = 1) -> int:
        """Steps a client with so many samples takes in a round.

        >>> Recipe(epochs=2, batch=10).count(21), Recipe(epochs=2, batch=10).count(21, least=2)
        (6, 4)
        """
        batches = self.batches(samples, least)
        if self.steps is None:
            return self.epochs * batches
        return self.steps if batches else 0


class Split(NamedTuple):
    """One split of one client, or with a leading dimension of several."""

    samples: Tensor  # [n] indices into the dataset; padded where sizes differ
    size: Tensor  # []


class View(NamedTuple):
    """What an engine hands to :class:`~coterie.core.client.Client`: tensors with a row a client."""

    id: Tensor  # []
    stream: Tensor  # [] the root of this client's draws in this round
    lr: Tensor  # []
    train: Split
    val: Split
    relabel: Tensor  # [classes], or [0] where labels mean the same to everybody


class Shared(NamedTuple):
    """The samples that all clients train on, beside their own."""

    owner: Tensor  # [n] the client they come from
    samples: (
        Tensor  # [n] indices into the task's arrays, where labels are as their owners read them
    )


class Ragged:
    """Index lists of all clients in one flat tensor."""

    def __init__(self, lists: Indices, device: torch.device) -> None:
        self.sizes = [len(part) for part in lists]
        self._size = torch.tensor(self.sizes, device=device)
        self._offset = (self._size.cumsum(0) - self._size).to(device)
        empty = torch.zeros(1, dtype=torch.int64)  # padding points at a real sample
        self._flat = torch.cat([*(part.to(torch.int64) for part in lists), empty]).to(device)

    def rows(self, ids: list[int], step: int = 1) -> Split:
        """The lists of some clients, padded to the longest of them (and to one at least).

        Where they differ in length, they are padded to a multiple of ``step``: so other clients
        come in the same form more often.
        """
        at = torch.tensor(ids, device=self._flat.device)
        width = max(1, *(self.sizes[i] for i in ids))
        width = width if self.even(ids) else -(-width // step) * step
        inside = self._offset[at, None] + torch.arange(width, device=at.device)
        return Split(self._flat[inside.clamp(max=len(self._flat) - 1)], self._size[at])

    def even(self, ids: list[int]) -> bool:
        """Whether these clients hold equally many samples, and some: then nothing is padding."""
        sizes = {self.sizes[i] for i in ids}
        return len(sizes) == 1 and 0 not in sizes


class Task:
    """A federation, a model and a recipe on a device, all of it derived from one seed."""

    def __init__(
        self,
        federation: Federation,
        factory: Callable[[], nn.Module],
        recipe: Recipe,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        merge_val: bool = False,
        sharing: Sharing | None = None,
    ) -> None:
        self.federation, self.factory, self.recipe = federation, factory, recipe
        self.seed, self.device, self.dtype = seed, torch.device(device), dtype
        self.population = len(federation)
        module = build(factory, seed, "start")
        apart = recipe.buffers != "average"
        module = module.to(self.device, dtype)
        self.model = FlatModel(module, apart=apart, dropout=recipe.dropout)
        self.start = self.model.flatten(module).to(self.device, dtype)
        self.statistics = self.model.statistics(module).to(self.device, dtype)
        self.keys = federation.keys.to(self.device)
        self._load()
        self._split(merge_val, sharing)
        self.aux = self._server_side()
        self._check()

    @property
    def least(self) -> int:
        """Samples that a training batch must have: batch norm compares at least two."""
        return 2 if self.model.coupled else 1

    def _check(self) -> None:
        """Refuse a recipe that does not fit the data or the network."""
        recipe, shape = self.recipe, list(self.x.shape[1:])
        if recipe.batch < self.least:
            raise ConfigError(
                f"train.batch: found {recipe.batch}, but batch norm compares the samples of a "
                "batch; expected 2 or more, or a network with another norm (norm = 'group')"
            )
        if recipe.augment != "none" and (len(shape) != 3 or self.x.dtype == torch.int64):
            raise ConfigError(
                f"train.augment: '{recipe.augment}' needs images [channels, height, width]; a "
                f"sample here has shape {shape}; use 'none'"
            )
        if recipe.class_weights != "none" and self.regression:
            raise ConfigError(
                f"train.class_weights: '{recipe.class_weights}' needs classes, and the targets "
                "here are numbers; use 'none'"
            )
        if recipe.buffers != "average" and self.model.apart and self.aux is not None:
            raise ConfigError(
                f"train.buffers: '{recipe.buffers}' leaves the server without whole models, but "
                "data.aux gives it samples to judge them on; use 'average', or data.aux = 0"
            )
        self._check_randomness()

    def _check_randomness(self) -> None:
        """Nothing may be drawn from torch's own generator: it knows no client and no round."""
        index = torch.zeros(2, dtype=torch.int64, device=self.device)
        whole = torch.cat([self.start[: self.model.parameters], self.statistics])
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            self.model(whole, self.inputs(index), training=True, stream=random.bits(0))
            drawn = not torch.equal(before, torch.get_rng_state())
        if drawn:
            raise ConfigError(
                "model.name: the network draws random numbers from torch's generator when it is "
                "trained, so that no run could be repeated; expected nn.Dropout layers and no "
                "other dropout"
            )

    def _load(self) -> None:
        data = self.federation.dataset
        self.x, self.y = data.x.to(self.device), data.y.to(self.device)
        self.regression = data.regression
        if self.regression:
            self.y = self.y.to(self.dtype)
        ones, zeros = torch.ones(()), torch.zeros(())
        self.scaled = data.scale is not None or data.shift is not None
        self.scale = (ones if data.scale is None else data.scale).to(self.device, self.dtype)
        self.shift = (zeros if data.shift is None else data.shift).to(self.device, self.dtype)
        relabel = self.federation.relabel
        none = torch.zeros(self.population, 0, dtype=torch.int64)
        self.relabel = (none if relabel is None else relabel).to(self.device)
        self.literal: int | None = None  # samples from here on are labelled as they are read

    def _split(self, merge_val: bool, sharing: Sharing | None) -> None:
        """The samples that clients train on, weigh models on and are judged on.

        ``merge_val`` adds a client's own validation data to its training data, also where another
        client's data judges it (spec 17). A client without validation data is weighed on its
        training data instead (spec 1.8). ``unseen_validation`` says whose validation scores are of
        data nobody trained on; the others have none. ``sizes`` counts what is a client's own; a
        shared pool is not (spec 2.3).
        """
        train, val = self.federation.train, self.federation.val
        self.pool: Pool | None = None
        self.shared = Shared(*torch.zeros(2, 0, dtype=torch.int64, device=self.device))
        if sharing is not None:
            self.pool = form_pool(self.federation, sharing, self.seed)
            train = self.pool.train
        if merge_val:
            own = self.federation.own_val
            train = tuple(torch.cat([a, b]) for a, b in zip(train, own, strict=True))
        lent = tuple(b if len(b) else a for a, b in zip(train, val, strict=True))
        self.borrowed_validation = [i for i, b in enumerate(val) if not len(b) and len(train[i])]
        self.unseen_validation = [len(b) > 0 and not merge_val for b in val]
        self.validated = torch.tensor(self.unseen_validation, device=self.device)
        self.splits = {
            "train": Ragged(self._with_pool(train), self.device),
            "val": Ragged(lent, self.device),
            "test": Ragged(self.federation.test, self.device),
        }
        self.sizes = torch.tensor([len(part) for part in train], device=self.device)

    def _with_pool(self, train: Indices) -> Indices:
        """Everybody's own training samples and those of the pool that they lack."""
        if self.pool is None:
            return train
        at = self._as_read(self.pool.samples, self.pool.owner)
        self.shared = Shared(self.pool.owner.to(self.device), at.to(self.device))
        own = (torch.isin(self.pool.samples, part) for part in train)
        return tuple(torch.cat([part, at[~o]]) for part, o in zip(train, own, strict=True))

    def _server_side(self) -> Tensor | None:
        """The samples that the server holds; None where it holds none."""
        held = self.federation.aux
        if held is None:
            return None
        owner = torch.cat([torch.full((len(part),), i) for i, part in enumerate(held)])
        samples = torch.cat(held)
        if not self.relabel.shape[-1]:  # then a sample that several clients had is the same to all
            once: Tensor = samples.unique()
            return once.to(self.device)
        return self._as_read(samples, owner).to(self.device)

    def _as_read(self, samples: Tensor, owner: Tensor) -> Tensor:
        """Where these samples are found with the labels their owners read: copies if need be."""
        if not self.relabel.shape[-1] or not len(samples):
            return samples
        first = len(self.y)
        self.literal = first if self.literal is None else self.literal
        samples, owner = samples.to(self.device), owner.to(self.device)
        self.x = torch.cat([self.x, self.x[samples]])
        self.y = torch.cat([self.y, self.relabel[owner, self.y[samples]]])
        return torch.arange(first, len(self.y))

    def fresh(self, clients: Tensor) -> Tensor:
        """Independent starting points ``[m, P]``, one a client, derived from its name."""
        names = self.federation.clients
        modules = (build(self.factory, self.seed, "start", names[i]) for i in clients.tolist())
        rows = [self.model.flatten(module.to(dtype=self.dtype)) for module in modules]
        return torch.stack(rows).to(self.device)

    def starts(self, count: int, draw: int = 0) -> Tensor:
        """Starting points ``[count, P]`` of several models of one server, unlike each other.

        The first of draw 0 is the common start.
        """
        words = [(f"model {j}", f"draw {draw}") for j in range(count)]
        modules = (build(self.factory, self.seed, "start", *word) for word in words)
        models = [self.model.flatten(m.to(dtype=self.dtype)).to(self.device) for m in modules]
        if draw == 0:
            models[0] = self.start
        return torch.stack(models)

    def inputs(self, index: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Model inputs of some samples: numbers are scaled, tokens stay as they are.

        ``change`` is made to the samples as they are stored.
        """
        x = self.x[index]
        if x.dtype == torch.int64:
            return x
        if change is not None:
            x = change(x)
        x = x.to(self.dtype)
        return x * self.scale + self.shift if self.scaled else x

    def in_units(self, values: Tensor) -> Tensor:
        """Targets or predictions of a regression in the unit of the source's target column."""
        data = self.federation.dataset
        return values.double() * data.target_scale + data.target_shift

    def views(self, ids: list[int], round_index: int) -> View:
        """The rows of some clients for one round."""
        at = torch.tensor(ids, device=self.device)
        rate = torch.full((len(ids),), self.recipe.rate(round_index), dtype=self.dtype)
        return View(
            id=at,
            stream=random.bits(self.seed, round_index, self.keys[at]),
            lr=rate.to(self.device),
            train=self.splits["train"].rows(ids, self.recipe.batch),
            val=self.splits["val"].rows(ids, self.recipe.batch),
            relabel=self.relabel[at],
        )
