"""IID, pathological and natural partitions."""

from dataclasses import dataclass

import numpy as np

from ...core.ranges import Count
from ...errors import ConfigError, DataError
from ..assign import Ints, Plan, class_cells, client_names, even, generator, one_cell
from ..federation import Dataset
from .base import Partition


@dataclass(frozen=True)
class IID(Partition):
    """A uniform random equal split."""

    clients: Count = 10  # the number of clients

    def plan(self, dataset: Dataset, seed: int) -> Plan:
        """Plan equally many samples for each client, from one cell."""
        cells, names = one_cell(dataset)
        return Plan(
            client_names(self.clients),
            cells,
            names,
            lambda supply, test: even(int(supply[0]), self.clients)[:, None],
        )


@dataclass(frozen=True)
class Natural(Partition):
    """The natural clients of the source (writers, sites, speakers)."""

    def plan(self, dataset: Dataset, seed: int) -> Plan:
        """Plan each owner's samples for that owner."""
        if dataset.owners is None:
            raise DataError(
                f"{dataset.name} has no natural clients; choose another partition, or name the "
                "client column of a table with data.client"
            )
        groups = dataset.owner_groups
        return Plan(
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
    per_client: Count = 2  # classes (shards) per client
    distinct: bool = True  # False: a client may draw the same class twice, as in the public code

    def plan(self, dataset: Dataset, seed: int) -> Plan:
        """Plan a class for every shard, the same for the training and the test part."""
        cells, names = class_cells(dataset, "pathological")
        if self.distinct and self.per_client > dataset.classes:
            raise ConfigError(
                f"partition.per_client: found {self.per_client}, but {dataset.name} has only "
                f"{dataset.classes} classes; lower it or set distinct = false"
            )
        hands = shard_classes(self.clients, self.per_client, dataset.classes, self.distinct, seed)
        return Plan(
            client_names(self.clients),
            cells,
            names,
            lambda supply, test: shard_counts(hands, supply, names, test),
        )


def shard_classes(clients: int, each: int, classes: int, distinct: bool, seed: int) -> Ints:
    """The class of every client's shards ``[K, s]``; classes appear equally often (±1)."""
    rng = generator(seed, "pathological")
    rounds = -(-clients * each // classes)
    deck = np.concatenate([rng.permutation(classes) for _ in range(rounds)])[: clients * each]
    hands = rng.permutation(deck).reshape(clients, each)
    if not distinct:
        return hands
    return repair(hands, rng)


def repair(hands: Ints, rng: np.random.Generator) -> Ints:
    """Remove repeated classes by swaps, client by client; at most one pass over all pairs.

    If no swap helps, the sorted classes are given to the clients in turn instead. That never
    repeats a class, because no class appears more often than there are clients.
    """
    hands = hands.copy()
    for i in range(len(hands)):
        for a in range(hands.shape[1]):
            if (hands[i] == hands[i, a]).sum() > 1:
                _swap_away(hands, i, a, rng)
    if all(len(set(hand)) == len(hand) for hand in hands.tolist()):
        return hands
    return np.sort(hands, axis=None).reshape(hands.shape[1], -1).T[rng.permutation(len(hands))]


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
