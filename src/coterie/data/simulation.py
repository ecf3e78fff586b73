"""Prepares a federation for simulation: the problem that the server knows, and all shards."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core import random
from ..core.algorithm import Sharing
from ..core.losses import Losses
from ..core.optim import Recipe
from ..core.privacy import Privacy
from ..core.problem import Counts, Problem, SharedPool
from ..core.shards import Ragged, Scaling, Shards
from .federation import Federation, Indices
from .manifest import class_counts
from .streamed import refuse_streamed


class Pool(NamedTuple):
    """Training samples that all clients share."""

    samples: Tensor  # [n] sample indices, ascending
    owner: Tensor  # [n] the client that each sample comes from
    train: Indices  # the training samples that each client has for itself


class Simulation(NamedTuple):
    """The problem and the shards of a federation, in one process."""

    problem: Problem
    shards: Shards
    federation: Federation


def simulate(
    federation: Federation,
    factory: Callable[[], nn.Module],
    recipe: Recipe,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    merge_val: bool = False,
    sharing: Sharing | None = None,
    shares: bool = False,
    privacy: Privacy | None = None,
    loss: Losses | None = None,
) -> Simulation:
    """Make the problem and the shards of a federation.

    ``merge_val`` adds a client's own validation data to its training data, also if another client's
    data judges it (reading P1-9). A client without validation data weighs models on its training
    data instead (reading G-7). The declared training counts are those of a client's own samples: a
    shared pool is not counted (reading P1-15). ``shares`` adds the class shares of each client's
    own training and validation data, for metrics that weigh samples by them.
    """
    pool = None if sharing is None else form_pool(federation, sharing, seed)
    train = federation.train if pool is None else pool.train
    if merge_val:
        train = tuple(map(torch.cat, zip(train, federation.own_val, strict=True)))
    lent = tuple(b if len(b) else a for a, b in zip(train, federation.val, strict=True))
    store = _Samples(federation, torch.device(device), dtype)
    pooled = None if pool is None else store.as_read(pool.samples, pool.owner)
    aux, judged = _held(federation.aux, store), _held(_judged_together(federation), store)
    lists = {
        "train": train if pooled is None or pool is None else _with_pool(train, pool, pooled),
        "val": lent,
        "test": federation.test,
    }
    shards = store.shards({name: Ragged(part, store.device) for name, part in lists.items()})
    if shares:
        shards = replace(shards, shares=class_shares(federation).to(store.device))
    problem = Problem(
        clients=federation.clients,
        counts=Counts(
            train=tuple(map(len, train)),
            val=tuple(map(len, lent)),
            validated=tuple(len(part) > 0 and not merge_val for part in federation.val),
        ),
        factory=factory,
        recipe=recipe,
        classes=federation.dataset.classes,
        shape=federation.dataset.x.shape[1:],
        stored=federation.dataset.x.dtype,
        seed=seed,
        device=store.device,
        dtype=dtype,
        loss=loss,
        aux=None if aux is None else _server_shard(shards, aux),
        federated=None if judged is None else _server_shard(shards, judged),
        pool=None
        if pool is None or pooled is None
        else SharedPool(pool.owner.to(store.device), shards.x[pooled], shards.y[pooled]),
        privacy=privacy,
    )
    return Simulation(problem, shards, federation)


def class_shares(federation: Federation) -> Tensor:
    """The shares ``[K, classes]`` of the classes in each client's training and validation data."""
    counts = torch.from_numpy(class_counts(federation, federation.train, federation.own_val))
    if federation.relabel is not None:
        counts = torch.zeros_like(counts).scatter_add(1, federation.relabel, counts)
    return counts.double() / counts.sum(1, keepdim=True).clamp(min=1)


class _Samples:
    """Samples and targets of a federation on a device; relabelled samples are added as copies."""

    def __init__(self, federation: Federation, device: torch.device, dtype: torch.dtype) -> None:
        data = federation.dataset
        self.data, self.device, self.dtype = data, device, dtype
        self.x, self.y = data.x.to(device), data.y.to(device)
        if data.regression:
            self.y = self.y.to(dtype)
        none = torch.zeros(len(federation), 0, dtype=torch.int64)
        self.relabel = (none if federation.relabel is None else federation.relabel).to(device)
        self.literal: int | None = None

    def as_read(self, samples: Tensor, owner: Tensor) -> Tensor:
        """Indices of these samples with their owners' labels; adds copies if clients relabel."""
        if not self.relabel.shape[-1] or not len(samples):
            return samples
        refuse_streamed(self.data, "sharing samples among clients that relabel them")
        first = len(self.y)
        self.literal = first if self.literal is None else self.literal
        samples, owner = samples.to(self.device), owner.to(self.device)
        self.x = torch.cat([self.x, self.x[samples]])
        self.y = torch.cat([self.y, self.relabel[owner, self.y[samples]]])
        return torch.arange(first, len(self.y))

    def shards(self, splits: dict[str, Ragged]) -> Shards:
        """The shards of all clients."""
        units = self.data.units
        if units is not None:  # copies are only used in training and have no unit
            copies = torch.full((len(self.y) - len(units),), -1, dtype=units.dtype)
            units = torch.cat([units, copies]).to(self.device)
        return Shards(
            self.x, self.y, splits, self.relabel, self._scaling(), self.dtype, units, self.literal
        )

    def _scaling(self) -> Scaling:
        data, scale, shift = self.data, self.data.scale, self.data.shift
        targets = data.target_scale, data.target_shift
        if scale is None and shift is None:
            return Scaling(None, None, *targets)
        ones, zeros = torch.ones(()), torch.zeros(())
        return Scaling(
            (ones if scale is None else scale).to(self.device, self.dtype),
            (zeros if shift is None else shift).to(self.device, self.dtype),
            *targets,
        )


def _with_pool(train: Indices, pool: Pool, at: Tensor) -> Indices:
    """Each client's own training samples and the samples of the pool that it lacks."""
    own = (torch.isin(pool.samples, part) for part in train)
    return tuple(torch.cat([part, at[~o]]) for part, o in zip(train, own, strict=True))


def _judged_together(federation: Federation) -> Indices | None:
    """The samples, by owner, that a global model is judged on; None if there are none.

    A test set that all clients have is one, unless they give its classes different names.
    """
    if federation.federated is None and federation.common_test and federation.relabel is None:
        return federation.test[:1]
    return federation.federated


def _held(held: Indices | None, store: _Samples) -> Tensor | None:
    """The indices of samples that the server holds, given by owner; None if it holds none."""
    if held is None:
        return None
    owner = torch.cat([torch.full((len(part),), i) for i, part in enumerate(held)])
    samples = torch.cat(held)
    if not store.relabel.shape[-1]:  # clients that hold the same sample give it the same label
        once: Tensor = samples.unique()
        return once
    return store.as_read(samples, owner)


def _server_shard(shards: Shards, samples: Tensor) -> Shards:
    """The server's own samples as the shard of one client, without relabelling."""
    at = torch.arange(len(samples))
    held = Ragged([at], shards.device)
    return Shards(
        shards.x[samples],
        shards.y[samples],
        {"train": held, "val": held, "test": held},
        shards.relabel.new_zeros(1, 0),
        shards.scaling,
        shards.dtype,
    )


# ---- training samples that all clients share ----------------------------------------------------


def form_pool(federation: Federation, sharing: Sharing, seed: int) -> Pool:
    """Draw the samples that clients share, from training data only, never validation or test data.

    ``from_clients`` copies the same share of every client's samples; ``held_out`` takes equally
    many samples of every class away from the clients (all samples of a class that has too few).
    """
    train = federation.train
    owner = torch.cat([torch.full((len(own),), i) for i, own in enumerate(train)])
    samples = torch.cat(train)
    held_out = sharing.pool == "held_out"
    chosen = (
        _balanced(federation, samples, owner, sharing.share, seed)
        if held_out
        else torch.cat(from_each(federation, sharing.share, seed))
    )
    samples, owner = samples[chosen], owner[chosen]
    order = samples.argsort(stable=True)
    if held_out:
        train = tuple(own[~torch.isin(own, samples)] for own in train)
    return Pool(samples[order], owner[order], train)


def from_each(federation: Federation, share: float, seed: int) -> list[Tensor]:
    """A mask over each client's training samples."""
    masks = []
    for key, own in zip(federation.keys, federation.train, strict=True):
        luck = random.bits(seed, "pool", key, torch.arange(len(own)))
        masks.append(luck.argsort(stable=True).argsort() < int(share * len(own) + 0.5))
    return masks


def _balanced(
    federation: Federation, samples: Tensor, owner: Tensor, share: float, seed: int
) -> Tensor:
    """A mask over all training samples with equally many of every class, as their owners label."""
    classes = max(1, federation.dataset.classes)
    kind = torch.zeros_like(samples)
    if not federation.dataset.regression and federation.dataset.y.ndim == 1:
        kind = federation.dataset.y[samples]
        kind = kind if federation.relabel is None else federation.relabel[owner, kind]
    quota = int(share * len(samples) / classes + 0.5)
    luck = random.bits(seed, "pool", samples)
    chosen = torch.zeros(len(samples), dtype=torch.bool)
    for c in range(classes):
        mine = (kind == c).nonzero().flatten()
        chosen[mine[luck[mine].argsort(stable=True)[:quota]]] = True
    return chosen
