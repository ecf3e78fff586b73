"""Who a client's model depends on: the weights it gave to others, and whose models entered it.

    average    j's part of i's weight on others, over all rounds in which i took part
    last       the same in the last round; 0 if i relied on nobody in it
    entered    whether j's model ever entered i's, directly or through others, and j's part of it

With A_r the weights of round r (a row that sums to less than 1 keeps the rest for itself; clients
that did not take part keep their model), the parts are the rows of A_R … A_2 A_1. Training moves no
parts. Where models change hands, j's part of a model is its part of all weight with which that
model was trained, and i's model has the parts of the models in its last row. Every page, card,
table and JSON value takes these numbers from here.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from ..algorithms import ALGORITHMS
from ..core.metrics import Floats
from ..core.paired_tests import LEVEL
from ..runs import collaboration
from ..runs.collaboration import ZERO_WITHIN
from ..runs.run import RAW, Line, Packed, Roster, Run, dense
from ..storage.files import strict

MOST_CLIENTS = 1000  # averages of more clients would take minutes and gigabytes
LARGEST_WEIGHT = 1e6  # larger entries, which a diverged run has, count as zero
FEWEST_ROUNDS = 3  # rounds that a test over rounds needs
OFTEN = 0.25  # share of its rounds in which a client with clear helpers relied on others
ABOVE = 1.5  # a clear share is at least so many times the uniform share


class Reliance(NamedTuple):
    """One row per client; columns are the clients that it relied on. The diagonal is zero."""

    share: Floats  # [K, K] parts of the weight on others; a row of zeros relied on nobody
    clear: NDArray[np.bool_]  # [K, K] shares that are shown to be above uniform
    rounds: NDArray[np.int64]  # [K] rounds in which the row's client relied on others
    of: NDArray[np.int64]  # [K] rounds in which it took part

    def helpers(self, i: int) -> list[int]:
        """The clients that client ``i`` clearly relied on, those with the largest share first."""
        return [int(j) for j in np.argsort(-self.share[i], kind="stable") if self.clear[i, j]]

    def seldom(self, i: int) -> str:
        """``in 5 of 100 rounds``; empty if client ``i`` relied on others in all of its rounds."""
        count, of = int(self.rounds[i]), int(self.of[i])
        return f"in {count} of {of} rounds" if count < of else ""

    def mostly(self, i: int) -> bool:
        """Whether the clear helpers of client ``i`` have more than half of its weight on others."""
        return bool(self.share[i][self.clear[i]].sum() > 0.5)


def reliance(runs: Sequence[Run]) -> Reliance | None:
    """The mean reliance over the rounds of runs of one method; None if there is no matrix.

    Only runs whose clients are in the same true groups as in the first run count, because a seed
    may give a client other data. A share is clear if it is ``ABOVE`` times the uniform share, and
    the weight exceeds the mean weight on others by a t-test over rounds, corrected for the number
    of other clients. Rounds are not independent, so the test is a filter and no proof. Nothing is
    clear of a client that relied on others in fewer than ``OFTEN`` of the rounds it took part in.
    """
    first = runs[0].roster
    drawn = [run for run in runs if run.matrices and _same_groups(run.roster, first)]
    if not drawn or len(first) > MOST_CLIENTS:
        return None
    K = len(first)
    count, total = np.zeros(K, dtype=np.int64), np.zeros((K, K))
    took = np.zeros(K, dtype=np.int64)
    for here in (here for run in drawn for here in presence(run)):
        took += here
    excess, squares = np.zeros((K, K)), np.zeros((K, K))
    for run in drawn:
        for weight in applied(run):
            over = weight - weight.sum(1, keepdims=True) / max(1, K - 1)
            count, total = count + (weight.sum(1) > 0), total + weight
            excess, squares = excess + over, squares + over**2
    share = parts_of(total)
    clear = _clear(share, excess, squares, count) & (count >= OFTEN * took)[:, None]
    return Reliance(share, clear, count, took)


def parts_of(weight: Floats) -> Floats:
    """Each row divided by its sum; rows of zeros stay zero."""
    sums = weight.sum(1, keepdims=True)
    parts: Floats = np.divide(weight, sums, out=np.zeros_like(weight), where=sums > 0)
    return parts


def applied(run: Run) -> Iterator[Floats]:
    """The weights on others in each round ``[K, K]``; rows of zeros for clients that had none."""
    for packed, here in zip(run.matrices, presence(run), strict=True):
        weight = on_others(packed, run.swaps)
        yield weight * ((weight.sum(1) > ZERO_WITHIN) & here)[:, None]


def presence(run: Run) -> list[NDArray[np.bool_]]:
    """The clients that took part in each round with a matrix ``[K]``."""
    lines = {line["round"]: line for line in run.lines}
    return [took_part(lines.get(index), run.roster) for index in run.matrix_rounds]


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


def coalitions(run: Run) -> list[list[str]]:
    """The names of each coalition's clients, if the method forms any and has done so."""
    numbers = run.lines[-1].get("coalition", [])
    found: dict[int, list[str]] = {}
    for name, number in zip(run.roster.clients, numbers, strict=False):
        found.setdefault(number, []).append(name)
    return list(found.values())


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


# ---- whose models entered a client's model -------------------------------------------------------


@strict
class Collaborator:
    """Another client whose model entered, or may have entered, a client's model."""

    name: str
    average: float | None  # part of the weight on others, over all rounds; None if not recorded
    last: float | None  # the same in the last round
    entered: float | None  # its part of the model; None if not recorded, so that it may be any


def collaborators(run: Run, i: int) -> tuple[Collaborator, ...]:
    """Everybody whose model ever entered the model of client ``i``, the largest weight first."""
    ever, parts = provenance(run, i)
    relied = reliance([run])
    if relied is None:
        return _named(run, ever, None, None, parts)
    *_, last = applied(run)
    return _named(run, ever, relied.share[i], parts_of(last)[i], parts)


def collaborators_of_mixture(
    run: Run, weights: Floats | None, made_of: Floats | None = None
) -> tuple[Collaborator, ...]:
    """Everybody whose model entered one that is made of the run's final models.

    ``weights`` are those of the models ``[K]``, None where all clients have one model. The mean of
    the models' parts by ``made_of`` (the weights, if they are all that it is made of) are its own.
    """
    if weights is None:
        return unknown_parts(run.roster.clients[j] for j in np.flatnonzero(senders(run)))
    share = parts_of(weights[None])[0]
    made_of = share if made_of is None else made_of
    ever, parts = made_of > 0, np.zeros(len(share))
    for j in np.flatnonzero(ever).tolist():
        more, of_one = provenance(run, j)
        ever, parts = ever | more, parts + made_of[j] * (math.nan if of_one is None else of_one)
    return _named(run, ever, share, share, parts)


def _named(
    run: Run,
    ever: NDArray[np.bool_],
    average: Floats | None,
    last: Floats | None,
    parts: Floats | None,
) -> tuple[Collaborator, ...]:
    def part(of: Floats | None, j: int) -> float | None:
        return None if of is None or np.isnan(of[j]) else float(f"{of[j]:.4g}")

    found = [
        Collaborator(run.roster.clients[j], part(average, j), part(last, j), part(parts, j))
        for j in np.flatnonzero(ever).tolist()
    ]
    return tuple(sorted(found, key=lambda one: (-(one.average or 0), -(one.entered or 0))))


def unknown_parts(names: Iterable[str]) -> tuple[Collaborator, ...]:
    """Clients whose models entered with weights that are not known."""
    return tuple(Collaborator(name, None, None, None) for name in names)


def provenance(run: Run, i: int) -> tuple[NDArray[np.bool_], Floats | None]:
    """The others whose models entered that of client ``i`` ``[K]``, and all parts of it ``[K]``.

    Without matrices, in a method that averages everybody, these are all senders; parts are then
    None. A sender that may have entered where no weights were recorded has a part of NaN.
    """
    weights = [_positive(packed) for packed in run.matrices]
    others = np.arange(len(run.roster)) != i
    if not weights:
        return senders(run) & others, None
    ever, parts = (_of_models if run.swaps else _of_clients)(run, weights, i)
    if not _all_recorded(run):
        maybe = senders(run) & others & ~ever
        ever, parts = ever | maybe, np.where(maybe, np.nan, parts)
    return ever & others, parts


def _all_recorded(run: Run) -> bool:
    """Whether the matrices hold every weight that mixed models.

    A client that misses a round may later get a model that was averaged without it.
    """
    kind = ALGORITHMS.get(run.method.partition("@")[0].removesuffix("_ft"))
    again = kind is not None and kind().traits.weighs_again
    everybody = all(len(line["clients"]) == len(run.roster) for line in run.lines)
    return everybody and not again and len(run.matrices) == len(run.lines)


def senders(run: Run) -> NDArray[np.bool_]:
    """The clients from which a model was accepted in any round ``[K]``."""
    found = np.zeros(len(run.roster), dtype=bool)
    for line in run.lines:
        if line["bytes_up"] > 0:
            found |= took_part(line, run.roster)
    return found


# ---- who had whose own model ---------------------------------------------------------------------


def raw_rounds(run: Run) -> NDArray[np.int64]:
    """In how many rounds each client (row) was sent the own model or samples of each other one.

    What the server mixes before it sends it is nobody's own, and does not count.
    """
    K = len(run.roster)
    found = np.zeros((K, K), dtype=np.int64)
    for line in run.lines:
        for client, of in line.get(RAW, ()):
            if client < K:
                found[client, [owner for owner in of if owner < K]] += 1
    return found


def seen_by(run: Run) -> NDArray[np.int64]:
    """How many others ever had each client's own model or samples ``[K]``."""
    seen: NDArray[np.int64] = (raw_rounds(run) > 0).sum(0)
    return seen


def _positive(packed: Packed) -> Any:
    """The weights without a sign, dense or sparse; entries that are no number are zero."""
    entries = abs(packed)
    if isinstance(entries, np.ndarray):
        return np.where(entries < LARGEST_WEIGHT, entries, 0.0).astype(np.float64)
    entries.data = np.where(entries.data < LARGEST_WEIGHT, entries.data, 0.0).astype(np.float64)
    return entries


def _of_clients(run: Run, weights: list[Any], i: int) -> tuple[NDArray[np.bool_], Floats]:
    """Row ``i`` of A_R … A_1, from the last round to the first, and whom any path leads to.

    On a path a client's own past is never left behind, whatever weight it gives itself.
    """
    lines = {line["round"]: line for line in run.lines}
    parts = np.eye(1, len(run.roster), i)[0]
    ever = parts > 0
    for index, A in zip(reversed(run.matrix_rounds), reversed(weights), strict=True):
        here = took_part(lines.get(index), run.roster)
        sums = np.asarray(A.sum(1)).ravel()
        rest = np.maximum(0.0, 1.0 - sums)
        moved = here * parts / (sums + rest)
        parts = ~here * parts + moved * rest + moved @ A
        ever = ever | (ever @ A > 0)
    return ever, parts


def _of_models(run: Run, weights: list[Any], i: int) -> tuple[NDArray[np.bool_], Floats]:
    """The clients that trained the models that client ``i`` used, by the weights of all rounds."""
    total = sum(weights)
    used = np.asarray(total[[i]].sum(0)).ravel() > 0
    ever = total @ used > 0
    trained = np.asarray(total.sum(0)).ravel()
    now = np.asarray(weights[-1][[i]].sum(0)).ravel()
    parts: Floats = total @ (now / (now.sum() or 1.0) / np.where(trained > 0, trained, 1.0))
    return ever, parts
