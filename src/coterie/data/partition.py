"""The registry of partitions by name, and :func:`federate`, which divides a dataset by one."""

from dataclasses import replace

import torch
from torch import Tensor

from ..core import random
from ..errors import ConfigError, DataError
from .arrays import VALIDATION
from .federation import Dataset, Federation
from .partitions.base import Partition
from .partitions.dirichlet import Dirichlet, DirichletClusters
from .partitions.groups import ConceptShift, LabelGroups
from .partitions.label_lists import LabelLists
from .partitions.latent import Latent
from .partitions.practical import PracticalGroups
from .partitions.simple import IID, Natural, Pathological
from .shared import hold_aux
from .splits import three_ways
from .standard import standardised

PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "pathological": Pathological,
    "latent": Latent,
    "practical_groups": PracticalGroups,
    "waffle": LabelLists,
    "label_groups": LabelGroups,
    "concept_shift": ConceptShift,
    "dirichlet": Dirichlet,
    "dirichlet_clusters": DirichletClusters,
    "natural": Natural,
}


def federate(
    dataset: Dataset,
    partition: Partition,
    *,
    val: float = 0.2,
    test: float = 0.2,
    aux: float = 0.0,
    seed: int = 0,
    foreign_targets: bool = False,
) -> Federation:
    """Divide a dataset among clients by a partition, and make a federation of them.

    ``test`` is the share of a client's samples kept for testing, unless the source has a test part
    of its own; ``val`` is the share of the rest kept for validation. With ``foreign_targets`` each
    client is judged on another's validation and test data (P1's out-of-distribution study). ``aux``
    is the share of all test samples that the server is given instead (P3's Fisher data). The
    missing numbers of a table are filled in and its numbers standardised here, by the training data
    alone.
    """
    for field, share in (("val", val), ("test", test)):
        if not 0 <= share < 1:
            raise ConfigError(f"data.{field}: found {share}, expected a share from 0 to below 1")
    parts = partition.split(dataset, seed)
    tests = parts.test if parts.test is not None else (None,) * len(parts.clients)
    given = dataset.fixed is not None and bool((dataset.fixed == VALIDATION).any())
    splits = [
        three_ways(dataset, name, pool, held, (val, test), seed, given)
        for name, pool, held in zip(parts.clients, parts.pool, tests, strict=True)
    ]
    _refuse_divided_units(dataset, partition, parts.clients, splits)
    trains, vals, helds = zip(*splits, strict=True)
    made = Federation(
        dataset=standardised(dataset, trains),
        partition=repr(partition),
        clients=parts.clients,
        train=trains,
        val=vals,
        test=helds,
        groups=parts.groups,
        relabel=parts.relabel,
        source=dataset,
        note=parts.note,
    )
    made = shuffle_targets(made, seed) if foreign_targets else made
    return hold_aux(made, aux, seed)


def _refuse_divided_units(
    dataset: Dataset,
    partition: Partition,
    clients: tuple[str, ...],
    splits: list[tuple[Tensor, Tensor, Tensor]],
) -> None:
    """Refuse a partition that gives samples of the same unit to two clients."""
    if dataset.units is None:
        return
    owner: dict[int, int] = {}
    for i, parts in enumerate(splits):
        for unit in dataset.units[torch.cat(parts)].unique().tolist():
            if owner.setdefault(unit, i) != i:
                raise DataError(
                    f"{dataset.name}: {partition} gives rows of unit '{dataset.unit_names[unit]}' "
                    f"(data.unit) to {clients[owner[unit]]} and to {clients[i]}; use the data's "
                    "own clients (data.client, partition 'natural'), or leave data.unit out"
                )


def shuffle_targets(federation: Federation, seed: int) -> Federation:
    """Client i is given the validation and test data of client ``foreign[i]`` (spec 13.10).

    The permutation is uniform: a client may draw itself, as in P1.
    """
    if federation.relabel is not None:
        raise ConfigError(
            "partition.foreign_targets: cannot be combined with concept shift, where clients give "
            "the same class different names"
        )
    luck = random.bits(seed, "foreign targets", torch.arange(len(federation)))
    foreign = luck.argsort(stable=True)
    return replace(
        federation,
        val=tuple(federation.val[j] for j in foreign.tolist()),
        test=tuple(federation.test[j] for j in foreign.tolist()),
        foreign=foreign,
    )
