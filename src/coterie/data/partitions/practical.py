"""Groups of clients, each group with its own dominating classes and sizes (P5, spec 13.4)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ...core.fields import Checked
from ...core.ranges import Count, CountOrZero, MinLen, ShareAboveZero
from ...errors import ConfigError, DataError
from ..assign import Ints, Plan, class_cells, client_names, even, largest_remainder
from ..federation import Dataset
from .base import Partition, one_client_each

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
    scale: bool | None = None  # shrink all sizes to the supply; None: as standard_groups says

    def check_together(self) -> None:
        """Every group needs a client."""
        if self.clients is not None:
            one_client_each(self.clients, len(self.table), "groups")

    def plan(self, dataset: Dataset, seed: int) -> Plan:
        """Plan quotas by largest remainder, for the training and the test part."""
        cells, names = class_cells(dataset, "practical_groups")
        table, made_up = (self.table, False) if self.table else standard_groups(dataset)
        _check_classes(table, dataset)
        table = table if self.clients is None else resized(table, self.clients)
        scaled = made_up if self.scale is None else self.scale
        groups = np.repeat(np.arange(len(table)), [group.clients for group in table])

        def counts(supply: Ints, test: bool) -> Ints:
            sizes = np.array([table[g].test if test else table[g].train for g in groups])
            chosen = [table[g].classes for g in groups]
            if scaled:
                return fitted(sizes, chosen, self.dominating, supply)
            return quotas(sizes, chosen, self.dominating, len(supply))

        return Plan(client_names(len(groups)), cells, names, counts, groups)


def _check_classes(table: tuple[Group, ...], dataset: Dataset) -> None:
    for number, group in enumerate(table):
        for c in group.classes:
            if not 0 <= c < dataset.classes:
                raise ConfigError(
                    f"partition.table[{number}]: found class {c}, but {dataset.name} has classes "
                    f"0 to {dataset.classes - 1}"
                )


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
    if clients < len(table):
        raise ConfigError(f"partition.clients: found {clients} for {len(table)} groups; one each")
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
