"""Partitions: the base class, what all of them share, and the plain ones (IID, natural, shards).

A partition puts each sample into a *cell* (a class, a cluster, an owner) and says how many samples
of each cell every client gets. :func:`assigned` shuffles each cell once and gives the clients
consecutive blocks of it, so no sample is assigned twice and the assignment always terminates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core import random
from ...core.fields import Checked
from ...core.ranges import Count
from ...errors import ConfigError, DataError
from ..arrays import TEST, Floats, Ints
from ..federation import Dataset, Indices


class Quota(NamedTuple):
    """How many samples of each cell every client is to get."""

    clients: tuple[str, ...]
    cells: Ints  # [N] the cell of every sample
    names: tuple[str, ...]  # of the cells
    counts: Callable[[Ints, bool], Ints]  # (supply [cells], whether test part) -> [K, cells]
    groups: Ints | None = None  # [K]
    relabel: Ints | None = None  # [K, classes]
    note: str = ""


class Parts(NamedTuple):
    """The samples assigned to each client, before validation data is split off."""

    clients: tuple[str, ...]
    pool: Indices  # samples for training and validation, and for testing if ``test`` is None
    test: Indices | None  # samples of the source's own test part, if it has one
    groups: Tensor | None = None
    relabel: Tensor | None = None
    note: str = ""


def client_names(count: int) -> tuple[str, ...]:
    """Default names for clients without names."""
    return tuple(f"client{i}" for i in range(count))


def generator(*words: int | str) -> np.random.Generator:
    """numpy's generator for draws that :mod:`coterie.core.random` does not offer (Dirichlet)."""
    return np.random.default_rng(random.derive(*words))


def even(total: int, parts: int) -> Ints:
    """Divide a total into parts that differ by at most one, larger parts first.

    >>> even(10, 4).tolist()
    [3, 3, 2, 2]
    """
    return np.full(parts, total // parts) + (np.arange(parts) < total % parts)


def part_of(supply: Ints, fraction: float) -> Ints:
    """A fraction of every cell, rounded down."""
    return np.asarray(np.floor(fraction * supply + 1e-9), np.int64)


def largest_remainder(total: int, shares: Floats, ties: Floats | None = None) -> Ints:
    """Integer quotas in proportion to the shares, which add up to the total.

    Equal remainders are rounded up in the order of ``ties`` (smallest first), by default by index.

    >>> largest_remainder(5, np.array([0.5, 0.25, 0.25])).tolist()
    [3, 1, 1]
    """
    exact = total * shares / shares.sum()
    quota: Ints = np.floor(exact + 1e-9).astype(np.int64)
    order = np.lexsort(
        (np.zeros(len(shares)) if ties is None else ties, np.round(quota - exact, 9))
    )
    quota[order[: total - int(quota.sum())]] += 1
    return quota


def assigned(dataset: Dataset, plan: Quota, seed: int) -> Parts:
    """Carry out a plan on the training part, and on the source's test part if it has one."""
    is_test = np.zeros(len(dataset.y), bool)
    if dataset.fixed is not None:
        is_test = (dataset.fixed == TEST).numpy()
    pool = np.flatnonzero(~is_test)
    if len(plan.clients) > len(pool):
        raise DataError(
            f"{dataset.name}: {len(plan.clients)} clients but only {len(pool)} training samples; "
            "ask for fewer clients"
        )
    return Parts(
        clients=plan.clients,
        pool=_hand_out(plan, pool, False, seed),
        test=_hand_out(plan, np.flatnonzero(is_test), True, seed) if is_test.any() else None,
        groups=_tensor(plan.groups),
        relabel=_tensor(plan.relabel),
        note=plan.note,
    )


def _tensor(values: Ints | None) -> Tensor | None:
    return None if values is None else torch.from_numpy(values.astype(np.int64))


def _hand_out(plan: Quota, pool: Ints, test: bool, seed: int) -> Indices:
    cells = plan.cells[pool]
    supply = np.bincount(cells, minlength=len(plan.names))
    counts = plan.counts(supply, test)
    demand = counts.sum(axis=0)
    for cell in np.flatnonzero(demand > supply):
        raise DataError(
            f"{plan.names[cell]}: the partition asks for {demand[cell]} "
            f"{'test' if test else 'training'} samples but there are {supply[cell]}; ask for fewer "
            "clients or samples per client"
        )
    order = random.bits(seed, "deal", int(test), torch.arange(len(pool))).argsort().numpy()
    by_cell = order[np.argsort(cells[order], kind="stable")]
    start = np.cumsum(supply) - supply
    ends = start + np.cumsum(counts, axis=0)  # [K, cells]
    held = [
        np.concatenate([by_cell[b - n : b] for b, n in zip(*row, strict=True) if n])
        if row[1].any()
        else by_cell[:0]
        for row in zip(ends, counts, strict=True)
    ]
    return tuple(torch.from_numpy(np.sort(pool[mine])) for mine in held)


def class_cells(dataset: Dataset, partition: str) -> tuple[Ints, tuple[str, ...]]:
    """The class of every sample as its cell, and the class names; refuses other targets."""
    if dataset.regression or dataset.y.ndim > 1:
        found = "real-valued targets" if dataset.regression else "a target at every position"
        raise DataError(
            f"{dataset.name} has {found} and partition '{partition}' divides classes; use iid or "
            "natural"
        )
    names = dataset.class_names or tuple(str(c) for c in range(dataset.classes))
    return dataset.y.numpy(), tuple(f"class {name}" for name in names)


def equal_shares(dataset: Dataset, clients: int) -> Quota:
    """Equally many samples of one cell for each client."""
    return Quota(
        client_names(clients),
        np.zeros(len(dataset.y), np.int64),
        ("all",),
        lambda supply, test: even(int(supply[0]), clients)[:, None],
    )


class Partition(Checked, ABC):
    """A way to divide a dataset among clients. Concrete ones are frozen dataclasses."""

    @abstractmethod
    def plan(self, dataset: Dataset, seed: int) -> Quota:
        """Quota how many samples of each cell every client gets."""

    def split(self, dataset: Dataset, seed: int) -> Parts:
        """Assign samples to clients by the plan."""
        return assigned(dataset, self.plan(dataset, seed), seed)


def one_client_each(clients: int, groups: int, what: str) -> None:
    """Refuse more groups than clients: every group needs at least one client."""
    if clients < groups:
        raise ConfigError(
            f"partition.clients: found {clients} for {groups} {what}; expected at least {groups}, "
            "one each"
        )


# ---- IID, natural and pathological partitions ---------------------------------------------------


@dataclass(frozen=True)
class IID(Partition):
    """A uniform random equal split."""

    clients: Count = 10  # the number of clients

    def plan(self, dataset: Dataset, seed: int) -> Quota:
        return equal_shares(dataset, self.clients)


@dataclass(frozen=True)
class Natural(Partition):
    """The natural clients of the source (writers, sites, speakers)."""

    def plan(self, dataset: Dataset, seed: int) -> Quota:
        if dataset.owners is None:
            raise DataError(
                f"{dataset.name} has no natural clients; choose another partition, or name the "
                "client column of a table with data.client"
            )
        groups = dataset.owner_groups
        return Quota(
            dataset.owner_names,
            dataset.owners.numpy(),
            dataset.owner_names,
            lambda supply, test: np.diag(supply),
            None if groups is None else groups.numpy(),
        )


@dataclass(frozen=True)
class Pathological(Partition):
    """Each client holds shards of a few classes only, assigned at random."""

    clients: Count = 100  # the number of clients
    per_client: Count = 2  # different classes (shards) per client

    def plan(self, dataset: Dataset, seed: int) -> Quota:
        """A class for every shard, the same for the training and the test part."""
        cells, names = class_cells(dataset, "pathological")
        if self.per_client > dataset.classes:
            raise ConfigError(
                f"partition.per_client: found {self.per_client}, but {dataset.name} has only "
                f"{dataset.classes} classes; lower it"
            )
        hands = shard_classes(self.clients, self.per_client, dataset.classes, seed)
        return Quota(
            client_names(self.clients),
            cells,
            names,
            lambda supply, test: shard_counts(hands, supply, names, test),
        )


def shard_classes(clients: int, each: int, classes: int, seed: int) -> Ints:
    """The class of every client's shards ``[K, s]``; classes appear equally often (±1).

    Classes that a client would hold twice are swapped away, client by client. If no swap helps, the
    sorted classes are given to the clients in turn instead. That never repeats a class, because no
    class appears more often than there are clients.
    """
    rng = generator(seed, "pathological")
    rounds = -(-clients * each // classes)
    deck = np.concatenate([rng.permutation(classes) for _ in range(rounds)])[: clients * each]
    hands = rng.permutation(deck).reshape(clients, each)
    for i in range(clients):
        for a in range(each):
            if (hands[i] == hands[i, a]).sum() > 1:
                _swap_away(hands, i, a, rng)
    if all(len(set(hand)) == each for hand in hands.tolist()):
        return hands
    return np.sort(hands, axis=None).reshape(each, -1).T[rng.permutation(clients)]


def _swap_away(hands: Ints, i: int, a: int, rng: np.random.Generator) -> None:
    for j in rng.permutation(len(hands)):
        if hands[i, a] in hands[j]:
            continue
        for b in rng.permutation(hands.shape[1]):
            if hands[j, b] not in hands[i]:
                hands[i, a], hands[j, b] = hands[j, b], hands[i, a]
                return


def shard_counts(hands: Ints, supply: Ints, names: tuple[str, ...], test: bool) -> Ints:
    """The number of samples of each class in each client's shards ``[K, classes]``."""
    counts = np.zeros((len(hands), len(supply)), np.int64)
    for c, available in enumerate(supply):
        holders = np.flatnonzero(hands.reshape(-1) == c) // hands.shape[1]
        if len(holders) == 0:
            continue
        if available < len(holders) and not test:
            raise DataError(
                f"{names[c]}: the partition cuts it into {len(holders)} shards but there are "
                f"{available} training samples; ask for fewer clients or classes per client"
            )
        np.add.at(counts[:, c], holders, even(int(available), len(holders)))
    return counts
