"""Data beyond the clients' own: samples that the server holds, and a pool that all clients share.

The random draws depend on names and sample numbers only, so that the order of the clients does not
matter.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import random
from ..core.algorithm import Sharing
from ..errors import ConfigError
from .federation import Federation, Indices


class Pool(NamedTuple):
    """Training samples that all clients share."""

    samples: Tensor  # [n] sample indices, ascending
    owner: Tensor  # [n] the client that each sample comes from
    train: Indices  # the training samples that each client has for itself


def hold_aux(federation: Federation, share: float, seed: int) -> Federation:
    """Move a share of the federation's test data to the server.

    If there is a federated test set, the share is taken from it. Moved samples are in no test data
    any more. A client that would be left without test data keeps its own.
    """
    if not 0 <= share < 1:
        raise ConfigError(f"data.aux: found {share}, expected a share from 0 to below 1")
    source = federation.test if federation.federated is None else federation.federated
    samples = torch.cat(source).unique()
    count = int(share * len(samples) + 0.5)
    if count == 0:
        return federation
    taken = samples[random.bits(seed, "aux", samples).argsort(stable=True)[:count]]
    for mine in source if federation.federated is None else ():
        if bool(torch.isin(mine, taken).all()):
            taken = taken[~torch.isin(taken, mine)]
    gone = [torch.isin(mine, taken) for mine in source]
    aux = tuple(mine[out] for mine, out in zip(source, gone, strict=True))
    left = tuple(mine[~out] for mine, out in zip(source, gone, strict=True))
    if federation.federated is not None:
        return replace(federation, federated=left, aux=aux)
    return replace(federation, test=left, aux=aux)


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
