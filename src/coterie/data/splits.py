"""Splits a client's own samples into train, validation and test.

A *block* is never split: the rows of one unit (a patient), or a single row without units.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core import random
from .arrays import VALIDATION
from .assign import largest_remainder
from .federation import Dataset

Ints = npt.NDArray[np.int64]


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


def set_apart(
    dataset: Dataset, name: str, pool: Tensor, share: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Draw a share of one client's samples for the federated test set: (what is left, drawn).

    If samples have times, the latest are drawn.
    """
    if dataset.times is not None:
        taken = take_latest(dataset, pool, share)
    else:
        taken = take_share(dataset, pool, share, seed, "federated", random.name_key(name))
    return pool[~taken], pool[taken]


def three_ways(
    dataset: Dataset,
    name: str,
    pool: Tensor,
    test: Tensor | None,
    shares: tuple[float, float],
    seed: int,
    given: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split one client's samples into train, validation and test.

    ``shares`` are the share of validation among the samples that are not test, and the share of
    test among all samples. If the source has its own test part (``test``) or validation part
    (``given``), at this client or another, that part is used instead. If samples have times, test
    data is the latest and validation data the latest of the rest.
    """
    val_share, test_share = shares
    key = random.name_key(name)

    def take(share: float, part: str) -> Tensor:
        if dataset.times is not None:
            return take_latest(dataset, pool, share)
        return take_share(dataset, pool, share, seed, part, key)

    val = pool[:0]
    if dataset.fixed is not None and given:
        held = dataset.fixed[pool] == VALIDATION
        pool, val = pool[~held], pool[held]
    if test is None:
        taken = take(test_share, "test")
        pool, test = pool[~taken], pool[taken]
    if not given:
        taken = take(val_share, "val")
        pool, val = pool[~taken], pool[taken]
    return pool, val, test
