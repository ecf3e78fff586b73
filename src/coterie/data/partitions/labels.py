"""Partitions by class labels: hidden groups, concept shift, Dirichlet, P4's lists, P5's groups."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from ...core.fields import Checked
from ...core.ranges import LARGEST, Count, CountOrZero, Interval, MinLen, ShareAboveZero
from ...errors import ConfigError, DataError
from ..arrays import Floats, Ints
from ..federation import Dataset
from .base import (
    Partition,
    Quota,
    class_cells,
    client_names,
    equal_shares,
    even,
    generator,
    largest_remainder,
    one_client_each,
    part_of,
)

# ---- hidden groups: label groups (reading P2-11) and concept shift ------------------------------


@dataclass(frozen=True)
class LabelGroups(Partition):
    """Classes are cut into groups with disjoint labels; each client belongs to one, at random."""

    clients: Count = 8  # the number of clients
    groups: Count = 2  # the number of hidden groups, each with its own classes
    fraction: ShareAboveZero = 1.0  # the share of the data used (P2: CIFAR-10 0.1, CIFAR-100 0.15)

    def check_together(self) -> None:
        """Every group needs a client."""
        one_client_each(self.clients, self.groups, "groups")

    def plan(self, dataset: Dataset, seed: int) -> Quota:
        labels, _ = class_cells(dataset, "label_groups")
        rng = generator(seed, "label_groups")
        group_of_class = cut_classes(dataset, self.groups, rng)
        groups = random_groups(self.clients, self.groups, rng)
        return Quota(
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
    has an independent permutation instead, as in P4, and there are no groups. Each of the last
    ``strangers`` clients is a group of its own.
    """

    clients: Count = 12  # the number of clients
    groups: Count = 3  # the number of hidden groups, each with its own class labels
    shared: bool = True  # whether the clients of a group share their class labels
    strangers: CountOrZero = 0  # clients beside the groups, each with its own class labels

    def check_together(self) -> None:
        """Every group needs a client."""
        needed = self.groups + self.strangers if self.shared else 1
        one_client_each(self.clients, needed, "groups and strangers")

    def plan(self, dataset: Dataset, seed: int) -> Quota:
        class_cells(dataset, "concept_shift")  # refuses regression
        groups = None
        if self.shared:
            friends = self.clients - self.strangers
            groups = np.arange(friends) * self.groups // friends
            groups = np.append(groups, self.groups + np.arange(self.strangers))
            relabel = conflicting(self.groups + self.strangers, dataset.classes, seed)[groups]
        else:
            relabel = independent(self.clients, dataset.classes, seed)
        return equal_shares(dataset, self.clients)._replace(groups=groups, relabel=relabel)


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


# ---- Dirichlet partitions -----------------------------------------------------------------------

# below the lower bound all drawn shares underflow to zero
Concentration = Annotated[float, Interval(ge=1e-6, le=LARGEST)]


@dataclass(frozen=True)
class Dirichlet(Partition):
    """For each class, client shares from a symmetric Dirichlet (P3: 100 clients, 0.9)."""

    clients: Count = 100  # the number of clients
    alpha: Concentration = 0.9  # concentration; the smaller, the more the clients differ

    def plan(self, dataset: Dataset, seed: int) -> Quota:
        """The same shares for the training and the test part."""
        cells, names = class_cells(dataset, "dirichlet")
        rng = generator(seed, "dirichlet")
        shares = rng.dirichlet(np.full(self.clients, self.alpha), size=dataset.classes).T
        return Quota(
            client_names(self.clients), cells, names, lambda supply, test: serve(shares, supply)
        )


@dataclass(frozen=True)
class DirichletClusters(Partition):
    """Classes in clusters; for each, client shares from a Dirichlet, then multinomial counts."""

    clients: Count = 10  # the number of clients
    clusters: Count = 4  # the number of clusters of classes
    alpha: Concentration = 0.4  # concentration; the smaller, the more the clients differ
    fraction: ShareAboveZero = 1.0  # the share of the data that is used

    def plan(self, dataset: Dataset, seed: int) -> Quota:
        """The same shares for the training and the test part; counts are drawn for each."""
        labels, _ = class_cells(dataset, "dirichlet_clusters")
        rng = generator(seed, "dirichlet_clusters")
        cluster = cut_classes(dataset, self.clusters, rng)
        shares = rng.dirichlet(np.full(self.clients, self.alpha), size=self.clusters)

        def counts(supply: Ints, test: bool) -> Ints:
            lots = generator(seed, "dirichlet_clusters", int(test))
            return lots.multinomial(part_of(supply, self.fraction), shares).T

        names = tuple(f"label cluster {c}" for c in range(self.clusters))
        return Quota(client_names(self.clients), cluster[labels], names, counts)


def serve(shares: Floats, supply: Ints) -> Ints:
    """Counts from shares of each class, given to clients in order until the class is exhausted."""
    wanted: Ints = np.rint(shares * supply).astype(np.int64).cumsum(axis=0)
    served: Ints = np.diff(np.minimum(wanted, supply), axis=0, prepend=0)
    return served


# ---- the five distributions of P4 over ten agents and ten classes (readings P4-9, P4-10) --------

AGENTS = 10

# Entry c is the share of class c that agent 0 receives; the other agents use cyclic shifts.
LISTS: dict[str, tuple[float, ...]] = {
    "A": (0.1,) * 10,
    "B": (0.25,) * 4 + (0.0,) * 6,
    "C": (0.0, 0.0, 0.0, 0.1, 0.2, 0.4, 0.2, 0.1, 0.0, 0.0),
}
# The share of all data that each agent holds (P4's Table 4).
SIZES: dict[str, tuple[float, ...]] = {
    "A": (0.1,) * 10,
    "B": (0.21, 0.06, 0.11, 0.06, 0.11, 0.06, 0.16, 0.06, 0.11, 0.06),
    "C": (0.1, 0.1, 0.1, 0.1, 0.2, 0.05, 0.05, 0.1, 0.1, 0.1),
}


@dataclass(frozen=True)
class LabelLists(Partition):
    """P4's distributions A, B, C, and A*, B* with concept shift; agent 0 is Alice."""

    distribution: Literal["A", "B", "C", "A*", "B*"] = "A"  # how classes are spread over agents
    sizes: Literal["A", "B", "C"] = "A"  # the sizes of the agents' data; A is equal

    def plan(self, dataset: Dataset, seed: int) -> Quota:
        """Shares of every class; the test part has equal sizes."""
        cells, names = class_cells(dataset, "waffle")
        if dataset.classes != AGENTS:
            raise DataError(
                f"{dataset.name} has {dataset.classes} classes; partition 'waffle' needs ten, one "
                "for each of its ten agents"
            )
        shares = label_shares(LISTS[self.distribution[0]])
        sizes = np.array(SIZES[self.sizes])
        shifted = self.distribution.endswith("*")
        return Quota(
            client_names(AGENTS),
            cells,
            names,
            lambda supply, test: share_out(shares if test else sized(shares, sizes), supply),
            relabel=independent(AGENTS, dataset.classes, seed) if shifted else None,
        )


def label_shares(list_of_alice: tuple[float, ...]) -> Floats:
    """The share of every class that each agent receives ``[agents, classes]``."""
    return np.stack([np.roll(list_of_alice, agent) for agent in range(AGENTS)])


def sized(shares: Floats, sizes: Floats) -> Floats:
    """Shares for agents of unequal sizes, all reduced by one factor if a class would run out."""
    wanted = shares * (sizes * AGENTS)[:, None]
    return wanted / max(1.0, float(wanted.sum(axis=0).max()))


def share_out(shares: Floats, supply: Ints) -> Ints:
    """Integer counts of every class from shares; samples beyond the shares are not assigned.

    Samples left by rounding go to different agents from one class to the next.
    """
    columns = []
    for c, (share, available) in enumerate(zip(shares.T, supply, strict=True)):
        due = np.append(share, max(0.0, 1.0 - float(share.sum())))
        turn = (np.arange(len(due)) - c) % len(due)
        columns.append(largest_remainder(int(available), due, turn.astype(np.float64))[:-1])
    return np.stack(columns, axis=1)


# ---- groups of clients, each with its own dominating classes and sizes (reading P5-9) -----------

Flags = npt.NDArray[np.bool_]

RARE = 0.25  # of the usual supply of a class; a rarer class does not reduce the others' sizes


@dataclass(frozen=True)
class Group(Checked):
    """One row of the table of groups."""

    clients: Count  # the number of clients
    classes: Annotated[tuple[CountOrZero, ...], MinLen(1)]  # the dominating classes
    train: Count  # training samples per client
    test: CountOrZero  # samples per client from the source's test part


@dataclass(frozen=True)
class PracticalGroups(Partition):
    """Most of a client's samples are of its group's classes, the rest of all other classes.

    Without a table, P5's groups for EMNIST and our own for the other datasets are used (see
    ``standard_groups``). In a configuration, a row of the table is
    ``{clients = 30, classes = [0, 1, 2], train = 600, test = 50}``.
    """

    table: tuple[Group, ...] = ()  # the groups; empty: the standard groups of the dataset
    dominating: ShareAboveZero = 0.8  # the share of a client's samples of its group's classes
    clients: Count | None = None  # the number of clients, if not the table's; same proportions

    def check_together(self) -> None:
        """Every group needs a client."""
        if self.clients is not None:
            one_client_each(self.clients, len(self.table), "groups")

    def plan(self, dataset: Dataset, seed: int) -> Quota:
        cells, names = class_cells(dataset, "practical_groups")
        table, scaled = (self.table, False) if self.table else standard_groups(dataset)
        for number, group in enumerate(table):
            if max(group.classes) >= dataset.classes:
                raise ConfigError(
                    f"partition.table[{number}]: found class {max(group.classes)}, but "
                    f"{dataset.name} has classes 0 to {dataset.classes - 1}"
                )
        table = table if self.clients is None else resized(table, self.clients)
        groups = np.repeat(np.arange(len(table)), [group.clients for group in table])

        def counts(supply: Ints, test: bool) -> Ints:
            sizes = np.array([table[g].test if test else table[g].train for g in groups])
            chosen = [table[g].classes for g in groups]
            if scaled:
                return fitted(sizes, chosen, self.dominating, supply)
            return quotas(sizes, chosen, self.dominating, len(supply))

        return Quota(client_names(len(groups)), cells, names, counts, groups)


def standard_groups(dataset: Dataset) -> tuple[tuple[Group, ...], bool]:
    """The table for a dataset, and whether its sizes are to be scaled to the supply.

    EMNIST's is P5's; FEMNIST stands in for it, scaled. P5 gives only the principle for the others:
    those of MNIST, Fashion-MNIST and CIFAR-100 are ours, and any other dataset gets MNIST's with
    its classes cut into three blocks, scaled.
    """
    if dataset.name in ("emnist", "femnist") and dataset.classes == 62:
        papers = (
            Group(10, tuple(range(10)), 1000, 100),
            Group(26, tuple(range(10, 36)), 700, 100),
            Group(26, tuple(range(36, 62)), 400, 100),
        )
        return papers, dataset.name == "femnist"
    if dataset.name == "cifar100" and dataset.superclass is not None:
        coarse = dataset.superclass.numpy()
        blocks = [
            np.flatnonzero((coarse >= a) & (coarse < b)) for a, b in ((0, 7), (7, 14), (14, 20))
        ]
        sizes = ((33, 500), (33, 400), (34, 300))
    else:
        if dataset.classes < 3:
            raise DataError(
                f"{dataset.name} has {dataset.classes} classes; three groups need three or more: "
                "give partition.table"
            )
        blocks = np.split(np.arange(dataset.classes), np.cumsum(even(dataset.classes, 3)[::-1])[:2])
        sizes = ((30, 600), (30, 500), (40, 400))
    table = tuple(
        Group(clients, tuple(block.tolist()), train, 50)
        for (clients, train), block in zip(sizes, blocks, strict=True)
    )
    return table, dataset.name not in ("mnist", "fashion_mnist", "cifar100")


def resized(table: tuple[Group, ...], clients: int) -> tuple[Group, ...]:
    """The same groups with another number of clients, each group keeping at least one."""
    one_client_each(clients, len(table), "groups")
    shares = np.array([group.clients for group in table], np.float64)
    counts = 1 + largest_remainder(clients - len(table), shares)
    return tuple(replace(g, clients=int(n)) for g, n in zip(table, counts, strict=True))


def quotas(
    sizes: Ints,
    chosen: Sequence[tuple[int, ...]],
    dominating: float,
    classes: int,
    rare: Flags | None = None,
) -> Ints:
    """The number of samples of every class that each client gets ``[K, classes]``.

    Samples left by rounding go to a different class from one client to the next. No client gets
    samples of the ``rare`` classes.
    """
    counts = np.zeros((len(sizes), classes), np.int64)
    for i, (size, mine) in enumerate(zip(sizes, chosen, strict=True)):
        inside = np.isin(np.arange(classes), mine)
        most = int(size) if inside.all() else round(dominating * int(size))
        for block, amount in ((inside, most), (~inside, int(size) - most)):
            members = block if rare is None else block & ~rare
            if amount and members.any():
                turn = (np.cumsum(members) - i) % members.sum()
                counts[i] += largest_remainder(amount, members.astype(float), turn.astype(float))
    return counts


def fitted(sizes: Ints, chosen: Sequence[tuple[int, ...]], dominating: float, supply: Ints) -> Ints:
    """Quotas with all sizes reduced by one factor, so that no class runs out.

    A class is rare if its supply divided by its demand is below ``RARE`` of the usual (the median
    over classes). A rare class would shrink all others to almost nothing, so it does not enter the
    factor: its samples are divided evenly among the clients that it dominates.
    """
    factor, wanted = 1.0, quotas(sizes, chosen, dominating, len(supply)).sum(axis=0)
    ratio = supply / np.maximum(wanted, 1)
    rare = (wanted > 0) & (ratio < RARE * np.median(ratio[wanted > 0]))
    for _ in range(50):  # rounding may demand a sample too many: a few small steps down suffice
        counts = quotas((sizes * factor).astype(np.int64), chosen, dominating, len(supply), rare)
        demand = counts.sum(axis=0)
        if (demand <= supply).all():
            break
        over = demand > supply
        factor *= min(0.999, float((supply[over] / demand[over]).min()))
    for c in np.flatnonzero(rare & (demand == 0)):
        members = np.flatnonzero([c in mine for mine in chosen])
        counts[members, c] = even(int(supply[c]), max(1, len(members)))[: len(members)]
    return counts
