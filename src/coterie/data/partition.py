"""Partitions by name, and :func:`federate`: clients, and each one's train, validation and test."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import random
from ..core.imports import INSTALLED_ONLY, Code, imported_dataclass
from ..errors import ConfigError, DataError, did_you_mean
from .arrays import TEST, VALIDATION, Ints
from .federation import Dataset, Federation
from .partitions.base import IID, Natural, Partition, Parts, Pathological, largest_remainder
from .partitions.labels import (
    ConceptShift,
    Dirichlet,
    DirichletClusters,
    LabelGroups,
    LabelLists,
    PracticalGroups,
)
from .partitions.latent import Latent
from .standard import standardised, with_unknown

# A *block* is never split: the rows of one unit (a patient), or a single row without units.


def take_share(dataset: Dataset, mine: Tensor, share: float, *words: int | str) -> Tensor:
    """Draw a share of the blocks of ``mine``, stratified by class; return a mask over ``mine``.

    The draw depends on the words and on positions within ``mine``, so a client's split does not
    change when clients are listed in another order. If there are two or more blocks, at least one
    is taken; at least one is always left.
    """
    block, count = _blocks(dataset, mine)
    wanted = min(max(round(share * count), 1), count - 1) if share > 0 and count > 1 else 0
    if wanted == 0:
        return torch.zeros(len(mine), dtype=torch.bool)
    luck = random.uniform(*words, torch.arange(count)).numpy()
    kinds, cells, sizes = np.unique(
        _kinds(dataset, mine, block, count), return_inverse=True, return_counts=True
    )
    ties = np.array([luck[cells == kind].min() for kind in range(len(kinds))])
    quota = largest_remainder(wanted, sizes.astype(np.float64), ties)
    order = np.lexsort((luck, cells))
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return torch.from_numpy((rank < quota[cells])[block])


def take_latest(dataset: Dataset, mine: Tensor, share: float) -> Tensor:
    """Take the latest blocks of ``mine``, as near to a share of the samples as times allow.

    Returns a mask over ``mine``. The time of a block is that of its first sample. Blocks of the
    same time stay together, so what is taken is later than what is left; nothing is taken if all
    blocks have the same time.
    """
    none = torch.zeros(len(mine), dtype=torch.bool)
    if dataset.times is None or share == 0 or len(mine) < 2:
        return none
    block, count = _blocks(dataset, mine)
    first = np.full(count, np.inf)
    np.minimum.at(first, block, dataset.times[mine].numpy())
    when = first[block]
    cuts = np.unique(when)[1:]
    if len(cuts) == 0:
        return none
    taken = len(when) - np.searchsorted(np.sort(when), cuts)  # samples at or after each cut
    off = np.abs(taken - share * len(when))
    return torch.from_numpy(when >= cuts[np.flatnonzero(off == off.min())[-1]])


class Fold(NamedTuple):
    """One of several parts of every client's samples, which test in turn."""

    part: int  # from 0
    of: int  # how many folds there are


def folds_of(dataset: Dataset, mine: Tensor, of: int, *words: int | str) -> Tensor:
    """The fold of each sample of ``mine``, of so many folds.

    Blocks are dealt to the folds class by class, so that folds have the same classes. If samples
    have times, a fold is a stretch of time; blocks of the same time stay together.
    """
    block, count = _blocks(dataset, mine)
    if dataset.times is not None:
        first = np.full(count, np.inf)
        np.minimum.at(first, block, dataset.times[mine].numpy())
        place = np.searchsorted(np.sort(first), first) * of // max(1, count)
    else:
        luck = random.uniform(*words, torch.arange(count)).numpy()
        place = np.empty(count, np.int64)
        place[np.lexsort((luck, _kinds(dataset, mine, block, count)))] = np.arange(count) % of
    return torch.from_numpy(place[block])


def _blocks(dataset: Dataset, mine: Tensor) -> tuple[Ints, int]:
    """The block of every sample, and the number of blocks."""
    if dataset.units is None:
        return np.arange(len(mine)), len(mine)
    found, block = np.unique(dataset.units[mine].numpy(), return_inverse=True)
    return block, len(found)


def _kinds(dataset: Dataset, mine: Tensor, block: Ints, count: int) -> Ints:
    """The class of every block, for a unit its most frequent class.

    All are 0 in a regression, and where samples have a target at every position.
    """
    if dataset.regression or dataset.y.ndim > 1:
        return np.zeros(count, np.int64)
    y: Ints = dataset.y[mine].numpy()
    if dataset.units is None:
        return y
    pairs, often = np.unique(block * dataset.classes + y, return_counts=True)
    kinds = np.empty(count, np.int64)
    for pair in pairs[np.argsort(often, kind="stable")]:  # the most frequent class is written last
        kinds[pair // dataset.classes] = pair % dataset.classes
    return kinds


def take(
    dataset: Dataset, name: str, pool: Tensor, share: float, seed: int, part: str
) -> tuple[Tensor, Tensor]:
    """Take a share of one client's samples, the latest if they have times: (left, taken)."""
    if dataset.times is not None:
        taken = take_latest(dataset, pool, share)
    else:
        taken = take_share(dataset, pool, share, seed, part, random.name_key(name))
    return pool[~taken], pool[taken]


def three_ways(
    dataset: Dataset,
    name: str,
    pool: Tensor,
    test: Tensor | None,
    shares: tuple[float, float],
    seed: int,
    given: bool,
    fold: Fold | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split one client's samples into train, validation and test.

    ``shares`` are the share of validation among the samples that are not test, and the share of
    test among all samples. If the source has its own test part (``test``) or validation part
    (``given``), at this client or another, that part is used instead. If samples have times, test
    data is the latest and validation data the latest of the rest. A ``fold`` tests in place of a
    share of the samples.
    """
    val = pool[:0]
    if dataset.fixed is not None and given:
        held = dataset.fixed[pool] == VALIDATION
        pool, val = pool[~held], pool[held]
    if fold is not None:
        if test is not None:
            raise ConfigError(
                f"run.folds: {dataset.name} comes with test data of its own; expected data that "
                "folds can divide; leave --folds out"
            )
        taken = folds_of(dataset, pool, fold.of, seed, "fold", random.name_key(name)) == fold.part
        pool, test = pool[~taken], pool[taken]
    if test is None:
        pool, test = take(dataset, name, pool, shares[1], seed, "test")
    if not given:
        pool, val = take(dataset, name, pool, shares[0], seed, "val")
    return pool, val, test


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


def partition_class(name: str, code: Code = INSTALLED_ONLY) -> type[Partition]:
    """The class of a name in PARTITIONS, or a user's own ``package.module:Class``."""
    if name in PARTITIONS:
        return PARTITIONS[name]
    if ":" not in name:
        known = did_you_mean(name, ["auto", *PARTITIONS, "package.module:Class"])
        raise ConfigError(f"partition.name: there is no partition '{name}'; {known}")
    return imported_dataclass(name, Partition, "partition.name", code)


def federate(
    dataset: Dataset,
    partition: Partition,
    *,
    val: float = 0.2,
    test: float = 0.2,
    aux: float = 0.0,
    federated: float = 0.0,
    seed: int = 0,
    foreign_targets: bool = False,
    common_test: bool = False,
    first: int | None = None,
    above: int | None = None,
    fold: Fold | None = None,
) -> Federation:
    """Divide a dataset among clients by a partition, and make a federation of them.

    ``test`` is the share of a client's samples kept for testing, unless the source has a test part
    of its own; ``val`` is the share of the rest kept for validation. With ``foreign_targets`` each
    client is judged on another's validation and test data (P1's out-of-distribution study), with
    ``common_test`` on all test samples of the source. ``federated`` is the share of a client's
    samples that goes into the federated test set, which no client holds (reading P3-12). ``aux`` is
    the share of all test samples, or of the federated test set, that the server is given instead
    (P3's Fisher data). ``first`` keeps so many clients at most, ``above`` those with more samples
    than that. With a ``fold`` every client's test data is that part of its samples. The missing
    numbers of a table are filled in and its numbers standardised here, by the training data alone,
    and some categories of training rows are hidden (:func:`coterie.data.standard.with_unknown`).
    """
    _check_shares(dataset, val, test, federated, aux)
    parts = _selected(partition.split(dataset, seed), first, above)
    tests = parts.test if parts.test is not None else (None,) * len(parts.clients)
    given = dataset.fixed is not None and bool((dataset.fixed == VALIDATION).any())
    apart = [
        take(dataset, name, pool, federated, seed, "federated")
        for name, pool in zip(parts.clients, parts.pool, strict=True)
    ]
    shares = val, test / (1 - federated)
    splits = [
        three_ways(dataset, name, pool, held, shares, seed, given, fold)
        for name, (pool, _), held in zip(parts.clients, apart, tests, strict=True)
    ]
    everything = [(*split, out) for split, (_, out) in zip(splits, apart, strict=True)]
    _refuse_divided_units(dataset, partition, parts.clients, everything)
    trains, vals, helds = zip(*splits, strict=True)
    if common_test:
        helds = (_common_test(dataset),) * len(parts.clients)
    made = Federation(
        dataset=standardised(with_unknown(dataset, parts.clients, trains), trains),
        partition=repr(partition),
        clients=parts.clients,
        train=trains,
        val=vals,
        test=helds,
        groups=parts.groups,
        relabel=parts.relabel,
        source=dataset,
        note=parts.note,
        federated=tuple(out for _, out in apart) if federated else None,
        common_test=common_test,
    )
    made = shuffle_targets(made, seed) if foreign_targets else made
    return hold_aux(made, aux, seed)


def _check_shares(dataset: Dataset, val: float, test: float, federated: float, aux: float) -> None:
    """Refuse shares out of range, and a federated test set of a regression."""
    shares = {"val": val, "test": test, "federated": federated, "aux": aux}
    for field, share in shares.items():
        if not 0 <= share < 1:
            raise ConfigError(f"data.{field}: found {share}, expected a share from 0 to below 1")
    if federated and test + federated >= 1:
        raise ConfigError(
            f"data.federated: found {federated} beside data.test = {test}; expected that some "
            "samples are left to train on"
        )
    if federated and dataset.regression:
        raise ConfigError(
            f"data.federated: found {federated}, but {dataset.name} has real-valued targets; the "
            "federated test set measures accuracy and needs classes; leave it out"
        )


def _selected(parts: Parts, first: int | None, above: int | None) -> Parts:
    """The first clients of a partition that have more samples than ``above``, in its order."""
    if first is None and above is None:
        return parts
    sizes = torch.tensor([len(own) for own in parts.pool])
    if parts.test is not None:
        sizes += torch.tensor([len(own) for own in parts.test])
    kept = (sizes > (above or 0)).nonzero().flatten()[:first]
    if len(kept) == 0:
        raise ConfigError(
            f"partition.above: found {above}, but the largest client has {int(sizes.max())} "
            "samples; lower it"
        )
    at, note = kept.tolist(), f"{len(kept)} of {len(sizes)} clients"
    return Parts(
        clients=tuple(parts.clients[i] for i in at),
        pool=tuple(parts.pool[i] for i in at),
        test=None if parts.test is None else tuple(parts.test[i] for i in at),
        groups=None if parts.groups is None else parts.groups[kept],
        relabel=None if parts.relabel is None else parts.relabel[kept],
        note=f"{parts.note}; {note}" if parts.note else note,
    )


def _common_test(dataset: Dataset) -> Tensor:
    """All test samples of the source; refuses a source without a test part of its own."""
    if dataset.fixed is None or not bool((dataset.fixed == TEST).any()):
        raise ConfigError(
            f"partition.common_test: {dataset.name} has no test part of its own that all clients "
            "could be tested on; leave it out"
        )
    found: Tensor = (dataset.fixed == TEST).nonzero().flatten()
    return found


def _refuse_divided_units(
    dataset: Dataset,
    partition: Partition,
    clients: tuple[str, ...],
    splits: Sequence[tuple[Tensor, ...]],
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
    """Client i is given the validation and test data of client ``foreign[i]`` (reading P1-9).

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


def hold_aux(federation: Federation, share: float, seed: int) -> Federation:
    """Move a share of the federation's test data to the server (reading P3-4).

    If there is a federated test set, the share is taken from it. Moved samples are in no test data
    any more. A client that would be left without test data keeps its own.
    """
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
