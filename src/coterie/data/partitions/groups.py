"""Partitions with hidden groups: label groups (reading P2-11) and concept shift."""

from dataclasses import dataclass

import numpy as np

from ...core.ranges import Count, ShareAboveZero
from ...errors import ConfigError
from ..assign import (
    Ints,
    Plan,
    class_cells,
    client_names,
    even,
    generator,
    one_cell,
    part_of,
)
from ..federation import Dataset
from .base import Partition, one_client_each


@dataclass(frozen=True)
class LabelGroups(Partition):
    """Classes are cut into groups with disjoint labels; each client belongs to one, at random."""

    clients: Count = 8  # the number of clients
    groups: Count = 2  # the number of hidden groups, each with its own classes
    fraction: ShareAboveZero = 1.0  # the share of the data used (P2: CIFAR-10 0.1, CIFAR-100 0.15)

    def check_together(self) -> None:
        """Every group needs a client."""
        one_client_each(self.clients, self.groups, "groups")

    def plan(self, dataset: Dataset, seed: int) -> Plan:
        """Divide each group's samples equally among its clients."""
        labels, _ = class_cells(dataset, "label_groups")
        rng = generator(seed, "label_groups")
        group_of_class = cut_classes(dataset, self.groups, rng)
        groups = random_groups(self.clients, self.groups, rng)
        return Plan(
            client_names(self.clients),
            group_of_class[labels],
            tuple(f"label group {g}" for g in range(self.groups)),
            lambda supply, test: even_within(groups, part_of(supply, self.fraction)),
            groups,
        )


def cut_classes(dataset: Dataset, parts: int, rng: np.random.Generator) -> Ints:
    """The part of every class; the classes are shuffled and divided as evenly as possible."""
    if parts > dataset.classes:
        raise ConfigError(
            f"partition: found {parts} groups of classes, but {dataset.name} has only "
            f"{dataset.classes} classes to divide"
        )
    part = np.empty(dataset.classes, np.int64)
    part[rng.permutation(dataset.classes)] = np.repeat(
        np.arange(parts), even(dataset.classes, parts)
    )
    return part


def random_groups(clients: int, groups: int, rng: np.random.Generator) -> Ints:
    """The group of every client, drawn uniformly, except that no group is empty."""
    drawn = np.concatenate([np.arange(groups), rng.integers(groups, size=clients - groups)])
    return rng.permutation(drawn)


def even_within(groups: Ints, supply: Ints) -> Ints:
    """Divide cell g equally among the clients of group g; returns counts ``[K, cells]``."""
    counts = np.zeros((len(groups), len(supply)), np.int64)
    for cell, available in enumerate(supply):
        members = np.flatnonzero(groups == cell)
        if len(members):
            counts[members, cell] = even(int(available), len(members))
    return counts


@dataclass(frozen=True)
class ConceptShift(Partition):
    """IID samples, but every hidden group has its own permutation of the class labels.

    Any two groups label every class differently. With ``shared = false`` every client but the first
    has an independent permutation instead, as in P4, and there are no groups.
    """

    clients: Count = 12  # the number of clients
    groups: Count = 3  # the number of hidden groups, each with its own class labels
    shared: bool = True  # whether the clients of a group share their class labels

    def check_together(self) -> None:
        """Every group needs a client."""
        one_client_each(self.clients, self.groups if self.shared else 1, "groups")

    def plan(self, dataset: Dataset, seed: int) -> Plan:
        """Plan an equal share for each client, and its class labels."""
        class_cells(dataset, "concept_shift")  # refuses regression
        cells, names = one_cell(dataset)
        groups = None
        if self.shared:
            groups = np.arange(self.clients) * self.groups // self.clients
            relabel = conflicting(self.groups, dataset.classes, seed)[groups]
        else:
            relabel = independent(self.clients, dataset.classes, seed)
        return Plan(
            client_names(self.clients),
            cells,
            names,
            lambda supply, test: even(int(supply[0]), self.clients)[:, None],
            groups,
            relabel,
        )


def conflicting(groups: int, classes: int, seed: int) -> Ints:
    """Random permutations of the classes ``[groups, classes]``, no two of which agree on any class.

    They are rows of a shuffled cyclic Latin square, so there can be no more groups than classes.
    """
    if groups > classes:
        raise ConfigError(
            f"partition.groups: found {groups}, but only {classes} groups can disagree about every "
            f"one of {classes} classes"
        )
    rng = generator(seed, "concept_shift")
    column, symbol = rng.permutation(classes), rng.permutation(classes)
    shift = rng.permutation(classes)[:groups]
    return np.take(symbol, (column[None, :] + shift[:, None]) % classes)


def independent(clients: int, classes: int, seed: int) -> Ints:
    """A uniform permutation for every client but the first, which keeps the true labels (P4)."""
    rng = generator(seed, "concept_shift")
    others = [rng.permutation(classes) for _ in range(clients - 1)]
    return np.stack([np.arange(classes), *others])
