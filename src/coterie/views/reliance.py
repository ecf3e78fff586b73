"""How much each client relied on each other client, averaged over the rounds it took part in."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from ..core.metrics import Floats
from ..core.paired_tests import LEVEL
from ..runs import collaboration
from ..runs.collaboration import ZERO_WITHIN
from ..runs.run import Line, Packed, Roster, Run, dense

MOST_CLIENTS = 1000  # averages of more clients would take minutes and gigabytes
LARGEST_WEIGHT = 1e6  # larger entries, which a diverged run has, count as zero
FEWEST_ROUNDS = 3  # rounds that a test over rounds needs
ABOVE = 1.5  # a clear share is at least so many times the uniform share


class Reliance(NamedTuple):
    """One row per client; columns are the clients that it relied on. The diagonal is zero."""

    share: Floats  # [K, K] parts of the weight on others; a row of zeros relied on nobody
    clear: NDArray[np.bool_]  # [K, K] shares that are shown to be above uniform
    rounds: NDArray[np.int64]  # [K] rounds in which the row's client relied on others

    def helpers(self, i: int) -> list[int]:
        """The clients that client ``i`` clearly relied on, those with the largest share first."""
        return [int(j) for j in np.argsort(-self.share[i], kind="stable") if self.clear[i, j]]

    def mostly(self, i: int) -> bool:
        """Whether the clear helpers of client ``i`` have more than half of its weight on others."""
        return bool(self.share[i][self.clear[i]].sum() > 0.5)


def reliance(histories: Sequence[Run]) -> Reliance | None:
    """The mean reliance over all rounds of runs of one method; None if there is no matrix.

    Only runs whose clients are in the same true groups as in the first run count, because a seed
    may give a client other data. A share is clear if it is ``ABOVE`` times the uniform share, and
    the weight exceeds the mean weight on others by a t-test over rounds, corrected for the number
    of other clients. Rounds are not independent, so the test is a filter and no proof.
    """
    first = histories[0].roster
    drawn = [one for one in histories if one.matrices and _same_groups(one.roster, first)]
    if not drawn or len(first) > MOST_CLIENTS:
        return None
    K = len(first)
    count, total = np.zeros(K, dtype=np.int64), np.zeros((K, K))
    excess, squares = np.zeros((K, K)), np.zeros((K, K))
    for history in drawn:
        lines = {line["round"]: line for line in history.lines}
        for index, packed in zip(history.matrix_rounds, history.matrices, strict=True):
            weight = on_others(packed, history.swaps)
            here = (weight.sum(1) > ZERO_WITHIN) & took_part(lines.get(index), history.roster)
            weight = weight * here[:, None]
            over = weight - weight.sum(1, keepdims=True) / max(1, K - 1)
            count, total = count + here, total + weight
            excess, squares = excess + over, squares + over**2
    sums = total.sum(1, keepdims=True)
    share = np.divide(total, sums, out=np.zeros_like(total), where=sums > 0)
    return Reliance(share, _clear(share, excess, squares, count), count)


def on_others(packed: Packed, swaps: bool) -> Floats:
    """The weights on other clients in one round ``[K, K]``; entries that are no weight are zero."""
    A = dense(packed).astype(np.float64)
    with np.errstate(invalid="ignore"):
        A = np.where(np.abs(A) < LARGEST_WEIGHT, A, 0.0)
    kin: Floats = np.maximum(collaboration.kinship(A, swaps), 0.0)
    np.fill_diagonal(kin, 0.0)
    return kin


def took_part(line: Line | None, roster: Roster) -> NDArray[np.bool_]:
    """The clients that took part in a round and whose upload was accepted ``[K]``."""
    there = np.zeros(len(roster), dtype=bool)
    if line is not None:
        out = {one["client"] for one in line["rejected"]}
        there[[i for i in line["clients"] if roster.clients[i] not in out]] = True
    return there


def _same_groups(one: Roster, other: Roster) -> bool:
    if one.groups is None or other.groups is None:
        return one.groups is other.groups
    return bool((one.groups == other.groups).all())


def _clear(
    share: Floats, excess: Floats, squares: Floats, count: NDArray[np.int64]
) -> NDArray[np.bool_]:
    K = len(share)
    if K < 3:  # the only other client is no choice
        return np.zeros((K, K), dtype=bool)
    n = np.maximum(count, FEWEST_ROUNDS)[:, None]
    mean = excess / n
    error = np.sqrt(np.maximum(squares / n - mean**2, 0.0) / (n - 1))
    needed = stdtrit(n - 1, 1 - LEVEL / (K - 1))
    shown: NDArray[np.bool_] = (mean > needed * error) & (share >= ABOVE / (K - 1))
    return shown & (count >= FEWEST_ROUNDS)[:, None]
