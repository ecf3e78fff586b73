"""The partitions by name, and :func:`federate`."""

from ..errors import ConfigError
from .federation import Dataset, Federation
from .partitions.base import Partition
from .partitions.dirichlet import Dirichlet
from .partitions.groups import ConceptShift, LabelGroups
from .partitions.simple import IID, Natural, Pathological
from .splits import three_ways

PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "pathological": Pathological,
    "label_groups": LabelGroups,
    "concept_shift": ConceptShift,
    "dirichlet": Dirichlet,
    "natural": Natural,
}


def federate(
    dataset: Dataset,
    partition: Partition,
    *,
    val: float = 0.2,
    test: float = 0.2,
    seed: int = 0,
) -> Federation:
    """The federation a partition makes of a dataset.

    ``test`` is the share of a client's samples kept for testing, unless the source has a test part
    of its own; ``val`` is the share of the rest kept for validation.
    """
    for field, share in (("val", val), ("test", test)):
        if not 0 <= share < 1:
            raise ConfigError(f"data.{field}: found {share}, expected a share from 0 to below 1")
    parts = partition.split(dataset, seed)
    tests = parts.test if parts.test is not None else (None,) * len(parts.clients)
    splits = [
        three_ways(dataset, name, pool, held, (val, test), seed)
        for name, pool, held in zip(parts.clients, parts.pool, tests, strict=True)
    ]
    trains, vals, helds = zip(*splits, strict=True)
    return Federation(
        dataset=dataset,
        partition=repr(partition),
        clients=parts.clients,
        train=trains,
        val=vals,
        test=helds,
        groups=parts.groups,
        relabel=parts.relabel,
    )
