"""What a server knows about a federation: the model, the recipe, the clients' declared counts.

A :class:`Problem` holds no client's data. A method's ``init`` and ``check`` read it, and every
engine passes it to its clients, in this process or at other sites.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError, EngineError
from . import random
from .flat import FlatModel, build
from .losses import Losses
from .optim import Recipe
from .privacy import Privacy
from .shards import Shards

Factory = Callable[[], nn.Module]
CPU = torch.device("cpu")


class Counts(NamedTuple):
    """The sample counts that the clients declare, one entry per client."""

    train: tuple[int, ...]  # the client's own training samples
    val: tuple[int, ...]  # samples on which the client weighs models
    validated: tuple[bool, ...]  # whether the val samples are its own and not used for training


class SharedPool(NamedTuple):
    """Raw samples that a method sends to all clients, with the labels of their owners."""

    owner: Tensor  # [n] the client that each sample comes from
    x: Tensor  # [n, ...]
    y: Tensor  # [n]


@dataclass(frozen=True, eq=False)
class Problem:
    """A federated learning problem without its data: model, recipe, shapes, seed and clients.

    Fields:
        clients: the clients' names; a client's random draws are derived from its name.
        counts: the sample counts that the clients declare.
        factory: makes the network.
        recipe: how clients train.
        classes: number of classes; 0 means regression.
        shape: of one sample as it is stored.
        stored: number type of the samples as they are stored; int64 are tokens.
        aux: the server's own samples, as the shard of one client; None where it has none.
        federated: samples that no client holds, on which a global model is scored; or None.
        pool: samples that the server sends to clients; None where clients share none.
        loss: the loss of each sample ``[B]`` from a model's outputs and the targets; None is
            cross-entropy, or half the squared error.
        secret: a site's own bytes, which its noise is derived from; None in a simulation.
        privacy: what keeps the clients' gradients private; None where nothing does.
    """

    clients: tuple[str, ...]
    counts: Counts
    factory: Factory
    recipe: Recipe
    classes: int
    shape: torch.Size
    stored: torch.dtype
    seed: int = 0
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    aux: Shards | None = None
    federated: Shards | None = None
    pool: SharedPool | None = None
    loss: Losses | None = None
    secret: bytes | None = None
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        self._check_recipe()
        self._check_randomness()

    def __getstate__(self) -> dict[str, object]:
        """Pickle all but the factory, which may be a closure; the built network is included.

        Clients elsewhere do not get the federated test set.
        """
        built = {"_built": self._built}
        return {**self.__dict__, **built, "factory": _made_elsewhere, "federated": None}

    @property
    def population(self) -> int:
        """The number of clients."""
        return len(self.clients)

    @property
    def regression(self) -> bool:
        """Whether targets are real numbers."""
        return self.classes == 0

    @property
    def least(self) -> int:
        """The smallest training batch: 2 samples with batch norm, else 1."""
        return 2 if self.model.coupled else 1

    @cached_property
    def keys(self) -> Tensor:
        """One number per client ``[K]``, derived from its name, as the key of its random draws."""
        return torch.tensor([random.name_key(name) for name in self.clients], device=self.device)

    @cached_property
    def sizes(self) -> Tensor:
        """The number of each client's own training samples ``[K]``."""
        return torch.tensor(self.counts.train, device=self.device)

    @cached_property
    def able(self) -> Tensor:
        """The indices of the clients that have training data ``[n]``."""
        return self.sizes.nonzero().flatten()

    @cached_property
    def validated(self) -> Tensor:
        """Whether each client's validation data is its own and not used for training ``[K]``."""
        return torch.tensor(self.counts.validated, device=self.device)

    # ---- the network -----------------------------------------------------------------------

    @cached_property
    def _built(self) -> tuple[FlatModel, Tensor, Tensor]:
        module = build(self.factory, self.seed, "start").to(self.device, self.dtype)
        apart, norms = self.recipe.buffers != "average", self.recipe.buffers == "fedbn"
        model = FlatModel(module, apart=apart, norms=norms, dropout=self.recipe.dropout)
        start = model.flatten(module).to(self.device, self.dtype)
        return model, start, model.statistics(module).to(self.device, self.dtype)

    @property
    def model(self) -> FlatModel:
        """The network as a function of a flat vector."""
        return self._built[0]

    @property
    def start(self) -> Tensor:
        """The common initial model ``[P]``."""
        return self._built[1]

    @property
    def statistics(self) -> Tensor:
        """The network's batch-norm statistics before training."""
        return self._built[2]

    def fresh(self, clients: Tensor) -> Tensor:
        """Independent initial models ``[m, P]``, one per client, derived from the client's name."""
        return self._starts([(self.clients[i],) for i in clients.tolist()])

    def starts(self, count: int, draw: int = 0) -> Tensor:
        """Different initial models ``[count, P]`` for a server that holds several.

        The first model of draw 0 is the common start.
        """
        models = self._starts([(f"model {j}", f"draw {draw}") for j in range(count)])
        return torch.cat([self.start[None], models[1:]]) if draw == 0 else models

    def _starts(self, words: list[tuple[str, ...]]) -> Tensor:
        modules = (build(self.factory, self.seed, "start", *word) for word in words)
        rows = [self.model.flatten(module.to(dtype=self.dtype)) for module in modules]
        return torch.stack(rows).to(self.device)

    def blank(self, samples: int) -> Tensor:
        """Model inputs of the right shape and type, all zero."""
        dtype = torch.int64 if self.stored == torch.int64 else self.dtype
        return torch.zeros(samples, *self.shape, dtype=dtype, device=self.device)

    def blank_batch(self) -> Tensor:
        """As :meth:`blank`: one batch, of no more samples than the largest client has."""
        return self.blank(min(self.recipe.batch, max(1, int(self.sizes.max()))))

    # ---- what does not fit is refused --------------------------------------------------------

    def _check_recipe(self) -> None:
        recipe, shape = self.recipe, list(self.shape)
        if recipe.batch < self.least:
            raise ConfigError(
                f"train.batch: found {recipe.batch}, but batch norm compares the samples of a "
                "batch; expected 2 or more, or a network with another norm (norm = 'group')"
            )
        if recipe.augment != "none" and (len(shape) != 3 or self.stored == torch.int64):
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

    def _check_randomness(self) -> None:
        """Refuse a network that draws from torch's generator, which knows no client or round."""
        whole = self.model.joined(self.start[: self.model.parameters], self.statistics)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            self.model(whole, self.blank(2), training=True, stream=random.bits(0))
            drawn = not torch.equal(before, torch.get_rng_state())
        if drawn:
            raise ConfigError(
                "model.name: the network draws random numbers from torch's generator when it is "
                "trained, so that no run could be repeated; expected nn.Dropout layers and no "
                "other dropout"
            )


def _made_elsewhere() -> nn.Module:
    raise EngineError(
        "a site builds no networks: it receives its starting point; this is a bug in coterie or in "
        "a method that calls problem.fresh or problem.starts outside of init"
    )
