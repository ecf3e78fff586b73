"""A client's own samples cut into train, validation and test."""

import numpy as np
import torch
from torch import Tensor

from .. import draws
from .arrays import VALIDATION
from .deal import largest_remainder
from .federation import Dataset


def take_share(dataset: Dataset, mine: Tensor, share: float, *words: int | str) -> Tensor:
    """A mask over ``mine``: a share of it, drawn class by class (stratified).

    The draw depends on the words and on positions within ``mine``, so a client's split does not
    change when clients are listed in another order. Something is taken from two samples or more,
    and something is always left.
    """
    count = len(mine)
    wanted = min(max(round(share * count), 1), count - 1) if share > 0 and count > 1 else 0
    if wanted == 0:
        return torch.zeros(count, dtype=torch.bool)
    luck = draws.uniform(*words, torch.arange(count)).numpy()
    cells = np.zeros(count, np.int64) if dataset.regression else dataset.y[mine].numpy()
    kinds, cells, sizes = np.unique(cells, return_inverse=True, return_counts=True)
    ties = np.array([luck[cells == kind].min() for kind in range(len(kinds))])
    quota = largest_remainder(wanted, sizes.astype(np.float64), ties)
    order = np.lexsort((luck, cells))
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return torch.from_numpy(rank < quota[cells])


def three_ways(
    dataset: Dataset,
    name: str,
    pool: Tensor,
    test: Tensor | None,
    shares: tuple[float, float],
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Train, validation and test of one client.

    ``shares`` are validation's share of what is not test, and test's share of all. Where the source
    has its own test or validation part, that part is used instead of a share.
    """
    val_share, test_share = shares
    key = draws.name_key(name)
    given = dataset.fixed is not None and bool((dataset.fixed == VALIDATION).any())
    val = pool[:0]
    if dataset.fixed is not None and given:
        held = dataset.fixed[pool] == VALIDATION
        pool, val = pool[~held], pool[held]
    if test is None:
        taken = take_share(dataset, pool, test_share, seed, "test", key)
        pool, test = pool[~taken], pool[taken]
    if not given:
        taken = take_share(dataset, pool, val_share, seed, "val", key)
        pool, val = pool[~taken], pool[taken]
    return pool, val, test
