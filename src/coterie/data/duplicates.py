"""Finds duplicate samples: samples that occur in two splits of a client, or at two clients.

Two samples are the same if their inputs and their targets, as relabelled by the client, are equal.
"""

import hashlib
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from .federation import Federation


class Duplicates(NamedTuple):
    """The number of distinct samples that occur more than once."""

    across_splits: dict[str, int]  # by client: its samples in two or more of its splits
    across_clients: int  # samples that two or more clients hold
    holders: tuple[str, ...]  # the clients that hold them


def duplicates(federation: Federation) -> Duplicates:
    """Count the duplicates among every client's own samples (not those of foreign targets)."""
    inside: dict[str, int] = {}
    holders: dict[bytes, set[int]] = {}
    parts = zip(federation.train, federation.own_val, federation.own_test, strict=True)
    for i, splits in enumerate(parts):
        found = [set(_prints(federation, i, split)) for split in splits]
        often = Counter(sample for split in found for sample in split)
        twice = sum(count > 1 for count in often.values())
        if twice:
            inside[federation.clients[i]] = twice
        own = found[:2] if federation.common_test else found  # the common test set is nobody's
        for sample in set().union(*own):
            holders.setdefault(sample, set()).add(i)
    shared = [who for who in holders.values() if len(who) > 1]
    names = tuple(federation.clients[i] for i in sorted(set().union(*shared)))
    return Duplicates(inside, len(shared), names)


def _prints(federation: Federation, client: int, held: Tensor) -> list[bytes]:
    """A short hash of each of these samples of a client."""
    data = federation.dataset
    y = data.y[held]
    if federation.relabel is not None:
        y = federation.relabel[client, y]
    rows = zip(data.x[held].numpy(), y.numpy(), strict=True)
    return [
        hashlib.blake2b(x.tobytes() + target.tobytes(), digest_size=16).digest()
        for x, target in rows
    ]


def shared_units(federation: Federation) -> list[str]:
    """Names of units that two or more clients use: the same patient, or the same numbering."""
    names = federation.dataset.unit_names
    held = torch.cat([*federation.train, *federation.val, *federation.test])
    units = federation.units
    here = [] if units is None else [names[unit] for unit in units[held].unique().tolist()]
    return [name for name, count in Counter(here).items() if count > 1]
