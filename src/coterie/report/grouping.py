"""Finds groups of clients that rely on each other, and an order that keeps groups together."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.metrics import Floats

LEAST = 0.25  # modularity below which groups are hardly told from chance
MOST_GROUPS = 40
BEST_ORDER_UP_TO = 200  # clients; scipy's optimal order of leaves takes long for more


class Grouping(NamedTuple):
    """The clients in the order of the figures, and the group that each was found in."""

    order: NDArray[np.int64]  # [K] clients
    groups: NDArray[np.int64]  # [K] the group of each client, counted from 0 in that order


def discovered(share: Floats) -> Grouping:
    """Cluster clients by their shares of each other's weight (average linkage).

    The tree is cut where the modularity is largest: the weight inside groups, beyond what as many
    groups would hold if weight fell on clients at random. Below ``LEAST`` all are one group.
    """
    from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
    from scipy.spatial.distance import squareform

    K, alike = len(share), share + share.T
    one = Grouping(np.arange(K), np.zeros(K, dtype=np.int64))
    if K < 3 or not alike.max() > 0:
        return one
    apart = 1 - alike / alike.max()
    np.fill_diagonal(apart, 0.0)
    tree = linkage(squareform(apart, checks=False), "average", K <= BEST_ORDER_UP_TO)
    order = leaves_list(tree).astype(np.int64)
    cuts = [fcluster(tree, k, "maxclust") for k in range(2, min(K // 2, MOST_GROUPS) + 1)]
    found = max(cuts, key=lambda groups: _modularity(alike, groups), default=one.groups)
    if _modularity(alike, found) < LEAST:
        return one._replace(order=order)
    ranks = {group: rank for rank, group in enumerate(dict.fromkeys(found[order].tolist()))}
    return Grouping(order, np.array([ranks[group] for group in found.tolist()]))


def _modularity(alike: Floats, groups: NDArray[np.int64]) -> float:
    total, degree = alike.sum(), alike.sum(1)
    same = groups[:, None] == groups
    return float((alike[same].sum() - (np.outer(degree, degree)[same] / total).sum()) / total)
