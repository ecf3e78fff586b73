"""Measures of a collaboration matrix: how much weight lies on others, and inside true groups.

A matrix is a dense array or, for many clients, a scipy sparse one.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..core.metrics import Array, Floats, area_under_curve

UNIFORM_WITHIN = 0.01  # relative spread of a row's off-diagonal weights up to which it is uniform
ZERO_WITHIN = 1e-4  # a row's total off-diagonal weight up to which it is zero


class _Others(NamedTuple):
    """The positive off-diagonal weights of a matrix, dense or by its non-zero entries."""

    weight: Floats  # [K, K], or [n] for n non-zero entries
    row: Array  # of each weight; of the shape of ``weight``, or broadcast to it
    column: Array

    @property
    def sums(self) -> Floats:
        """The total weight of each client on others ``[K]``."""
        if self.weight.ndim == 2:
            return np.asarray(self.weight.sum(1))
        return np.bincount(self.row, self.weight).astype(np.float64)


def _others(A: Any) -> _Others:
    if isinstance(A, np.ndarray):
        K = np.arange(len(A))
        weight = np.where(np.eye(len(A), dtype=bool), 0.0, np.maximum(A, 0.0))
        return _Others(weight, K[:, None], K[None, :])
    entries = A.tocoo()
    there = (entries.row != entries.col) & (entries.data > 0)
    return _Others(entries.data[there], entries.row[there], entries.col[there])


def any_others(A: Any) -> bool:
    """Whether any off-diagonal entry is not zero, of whatever sign."""
    if isinstance(A, np.ndarray):
        return bool((A != 0).sum() > (A.diagonal() != 0).sum())
    return bool(A.count_nonzero() > np.count_nonzero(A.diagonal()))


def kinship(A: Any, models_change_hands: bool) -> Any:
    """The matrix that tells which clients work together.

    This is ``A`` itself, or ``A Aᵀ`` (how much two clients use the same models) for methods whose
    models change hands.
    """
    return A @ A.T if models_change_hands else A


def add_up(matrices: Iterable[Any], models_change_hands: bool) -> Any:
    """The sum of the matrices of all rounds, with negative entries set to zero; None without any.

    A round thus counts by how much clients rely on others in it, so a method that ends by training
    alone is judged by the rounds before.
    """
    total: Any = None
    for A in matrices:
        kin = kinship(A, models_change_hands)
        kin = np.maximum(kin, 0.0) if isinstance(kin, np.ndarray) else kin.maximum(0.0)
        total = kin.astype(np.float64) if total is None else total + kin
    return total


def in_group_weight(A: Any, groups: Array | None, wanted: Array | None = None) -> float | None:
    """The share of off-diagonal weight on clients of the same true group; None if there is none.

    ``wanted`` are the groups of the rows, if they differ from those of the columns: under foreign
    targets a client should rely on the group whose data judges it.

    >>> in_group_weight(np.array([[0.5, 0.3, 0.2], [1, 0, 0], [0, 0, 1]]), np.array([0, 0, 1]))
    0.8666666666666667
    """
    if groups is None:
        return None
    weight, row, column = _others(A)
    total = float(weight.sum())
    inside = (groups if wanted is None else wanted)[row] == groups[column]
    return float(weight[inside].sum()) / total if total > 0 else None


def weight_recovery(A: Array, groups: Array | None, wanted: Array | None = None) -> float | None:
    """The AUC of off-diagonal weights as a detector of "same true group"; None if undefined.

    ``wanted`` are the groups of the rows, as for :func:`in_group_weight`.
    """
    if groups is None:
        return None
    pairs = ~np.eye(len(A), dtype=bool)
    same = (groups if wanted is None else wanted)[:, None] == groups
    area = area_under_curve(A[pairs], same[pairs])
    return None if math.isnan(area) else area


def off_diagonal(A: Any, clients: Sequence[int]) -> Literal["zero", "uniform", "varied"]:
    """Whether the weights on other clients are all zero, uniform, or varied.

    Only the participants of the round count for "uniform", because only they could be weighed. With
    two participants every row is uniform, so that they count as varied.
    """
    if _others(A).sums.max(initial=0.0) <= ZERO_WITHIN:
        return "zero"
    n, here = len(clients), list(clients)
    among = A[here][:, here]
    among = among if isinstance(among, np.ndarray) else among.toarray()
    block = among[~np.eye(n, dtype=bool)].reshape(n, max(n - 1, 0))
    if n < 3 or (block.sum(1) <= ZERO_WITHIN).any():
        return "varied"
    wide = (block.max(1) - block.min(1)) / block.mean(1)
    return "uniform" if (wide <= UNIFORM_WITHIN).all() else "varied"
