"""Dirichlet partitions (spec 13.7, 13.8)."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ...core.ranges import LARGEST, Count, Interval, ShareAboveZero
from ..assign import Floats, Ints, Plan, class_cells, client_names, generator, part_of
from ..federation import Dataset
from .base import Partition
from .groups import cut_classes

# below the lower bound all drawn shares underflow to zero
Concentration = Annotated[float, Interval(ge=1e-6, le=LARGEST)]


@dataclass(frozen=True)
class Dirichlet(Partition):
    """For each class, client shares from a symmetric Dirichlet (P3: 100 clients, 0.9)."""

    clients: Count = 100  # the number of clients
    alpha: Concentration = 0.9  # concentration; the smaller, the more the clients differ

    def plan(self, dataset: Dataset, seed: int) -> Plan:
        """Plan the same shares for the training and the test part."""
        cells, names = class_cells(dataset, "dirichlet")
        rng = generator(seed, "dirichlet")
        shares = rng.dirichlet(np.full(self.clients, self.alpha), size=dataset.classes).T
        return Plan(
            client_names(self.clients), cells, names, lambda supply, test: serve(shares, supply)
        )


@dataclass(frozen=True)
class DirichletClusters(Partition):
    """Classes in clusters; for each, client shares from a Dirichlet, then multinomial counts."""

    clients: Count = 10  # the number of clients
    clusters: Count = 4  # the number of clusters of classes
    alpha: Concentration = 0.4  # concentration; the smaller, the more the clients differ
    fraction: ShareAboveZero = 1.0  # the share of the data that is used

    def plan(self, dataset: Dataset, seed: int) -> Plan:
        """Plan the same shares for the training and the test part; counts are drawn for each."""
        labels, _ = class_cells(dataset, "dirichlet_clusters")
        rng = generator(seed, "dirichlet_clusters")
        cluster = cut_classes(dataset, self.clusters, rng)
        shares = rng.dirichlet(np.full(self.clients, self.alpha), size=self.clusters)

        def counts(supply: Ints, test: bool) -> Ints:
            lots = generator(seed, "dirichlet_clusters", int(test))
            return lots.multinomial(part_of(supply, self.fraction), shares).T

        names = tuple(f"label cluster {c}" for c in range(self.clusters))
        return Plan(client_names(self.clients), cluster[labels], names, counts)


def serve(shares: Floats, supply: Ints) -> Ints:
    """Counts from shares of each class, given to clients in order until the class is exhausted."""
    wanted: Ints = np.rint(shares * supply).astype(np.int64).cumsum(axis=0)
    served: Ints = np.diff(np.minimum(wanted, supply), axis=0, prepend=0)
    return served
