"""Finds groups of clients that rely on each other, and an order that keeps groups together."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.metrics import Floats

LEAST_GAP = 0.1  # of the largest distance; a smaller step between merges separates no groups
BEST_ORDER_UP_TO = 200  # clients; scipy's optimal order of leaves takes long for more


class Grouping(NamedTuple):
    """The clients in the order of the figures, and the group that each was found in."""

    order: NDArray[np.int64]  # [K] clients
    groups: NDArray[np.int64]  # [K] the group of each client, counted from 0 in that order


def discovered(share: Floats) -> Grouping:
    """Cluster clients by their shares of each other's weight (average linkage).

    The tree is cut at the largest step between two merges. Without a clear step, or if the step
    would leave more than half as many groups as clients, all clients are one group.
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
    order, heights = leaves_list(tree).astype(np.int64), tree[:, 2]
    steps = np.diff(heights)
    cut = int(steps.argmax())
    if steps[cut] < LEAST_GAP or K - 1 - cut > K / 2:
        return one._replace(order=order)
    found = fcluster(tree, (heights[cut] + heights[cut + 1]) / 2, "distance")
    ranks = {group: rank for rank, group in enumerate(dict.fromkeys(found[order].tolist()))}
    return Grouping(order, np.array([ranks[group] for group in found.tolist()]))
