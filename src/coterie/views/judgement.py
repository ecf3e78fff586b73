"""Chooses the method that a comparison recommends, and tests gains over training alone.

Two kinds of claim are made, each of them tested:

    a client       its two predictors of this run (of these seeds) are not equally good on data like
                   its test data; Holm's correction over all clients and methods, in which the
                   clients of the method that validation data chose have half of the weight
    all clients    the mean gain of clients like these is not zero; Holm's correction over all
                   methods, however the recommended one was chosen: validation data comes from the
                   same clients, so that a choice by it favours what suits these clients by chance

The method with the best mean on validation data is recommended; if there is no validation data that
was not trained on, the method with the best mean on test data. This is a choice, not a claim.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from ..core import metrics
from ..core.metrics import Floats, higher_is_better
from ..core.paired import LEVEL, Gain, holm
from ..core.site_gain import SiteGain, site_gain
from ..runs.run import LOCAL, Run
from .mean_gain import MeanGain, mean_gain, of_one, widened

if TYPE_CHECKING:
    from .comparison import Comparison

Claim = Literal["better", "worse", "unclear"]


class ClientGain(NamedTuple):
    """The gain of one client by one method over its own local model, with its test."""

    client: str
    method: str
    gain: Gain
    p: float  # corrected over all clients and methods
    tests: float  # the number of tests of equal weight that ``p`` was corrected for

    @property
    def claim(self) -> Claim:
        """Whether a gain or a loss is shown."""
        return claim(self.gain.gain, self.p)


class Judgement(NamedTuple):
    """The tests of one method against training alone."""

    method: str
    overall: MeanGain  # its interval is corrected for the number of methods
    p: float  # of the mean gain, corrected for the number of methods
    tried: int  # the number of methods
    clients: tuple[ClientGain, ...]  # the clients that it serves and that can be judged

    @property
    def claim(self) -> Claim:
        """Whether a gain or a loss of the mean over clients is shown."""
        return claim(self.overall.gain, self.p)

    def shown(self, wanted: Claim) -> list[str]:
        """The names of the clients for which this claim is shown."""
        return [client.client for client in self.clients if client.claim == wanted]


class Choice(NamedTuple):
    """The method that is recommended."""

    method: str
    on: Literal["validation", "test", "nothing"]  # the data that decided; nothing if only one
    tried: int  # number of methods it was chosen among


def claim(gain: float, p: float) -> Claim:
    """The claim that a gain with this corrected p-value shows."""
    return "unclear" if p >= LEVEL or gain == 0 else "better" if gain > 0 else "worse"


# ---- the choice ----------------------------------------------------------------------------------


def served(comparison: "Comparison", method: str) -> frozenset[int]:
    """The clients that have test data and, with any seed, a predictor of the method."""
    known = ~np.isnan(comparison.gains(method)).all(0)
    return frozenset(np.flatnonzero(known).tolist())


def compared(comparison: "Comparison") -> list[str]:
    """The methods beside Local whose means can be compared: they serve the same clients.

    Of several sets of clients the largest is taken, and of equally large ones the first.
    """
    whom = {m: served(comparison, m) for m in comparison.methods if m != LOCAL}
    most = max(whom.values(), key=len, default=frozenset[int]())
    return [method for method, clients in whom.items() if clients == most and most]


def choose(comparison: "Comparison") -> Choice | None:
    """The method with the best mean in the last round, on validation data or else on test data."""
    rows, among = {row.method: row for row in comparison.rows}, compared(comparison)
    if len(among) < 2:
        return Choice(among[0], "nothing", 1) if among else None
    sign = 1.0 if higher_is_better(comparison.metric) else -1.0
    validated = {method: sign * rows[method].validation.mean for method in among}
    known = not any(math.isnan(value) for value in validated.values())
    means = validated if known else {m: sign * rows[m].mean.mean for m in among}
    return Choice(max(among, key=means.__getitem__), "validation" if known else "test", len(among))


def best_on_test(comparison: "Comparison") -> str:
    """The method with the best mean on test data in the last round; on a tie, Local.

    Local's mean is taken over the clients that the other methods serve.
    """
    rows, among = {row.method: row for row in comparison.rows}, compared(comparison)
    alone = rows[among[0]].alone.mean if among else rows[LOCAL].mean.mean
    means = {LOCAL: alone, **{method: rows[method].mean.mean for method in among}}
    sign = 1.0 if higher_is_better(comparison.metric) else -1.0
    known = {method: sign * mean for method, mean in means.items() if not math.isnan(mean)}
    return max(known, key=known.__getitem__, default=LOCAL)


def validation_scores(history: Run, served: Floats) -> Floats:
    """The last validation scores ``[K]``, of clients whose own such data was not trained on."""
    unseen = (history.roster.n_val > 0) & (not history.merge_val) & ~np.isnan(served)
    return np.where(unseen, history.val[-1], np.nan)


# ---- the tests -----------------------------------------------------------------------------------


def judge(comparison: "Comparison") -> dict[str, Judgement] | None:
    """Test every method beside Local; None if the clients' answers are not known."""
    tested = [method for method in comparison.methods if method != LOCAL]
    gains = comparison.site_gains or _site_gains(comparison, tested)
    if gains is None:
        return None
    names = comparison.runs[0].roster.clients
    return conclude({m: _found(names, gains[m]) for m in tested}, comparison.choice)


def _site_gains(
    comparison: "Comparison", methods: Sequence[str]
) -> dict[str, tuple[SiteGain, ...]] | None:
    """Each client's gain by each method, from the answers in the runs' own histories."""
    if any(run.outcomes is None for run in comparison.runs):
        return None
    answers = {
        (run.method, run.seed): list(run.outcomes.clients())
        for run in comparison.runs
        if run.outcomes is not None
    }
    found = {}
    for method in methods:
        known = ~np.isnan(comparison.gains(method))  # [S, K]
        pairs = [
            [
                (answers[method, run.seed][k], answers[LOCAL, run.seed][k]) if known[s, k] else None
                for s, run in enumerate(comparison.of_method(method))
            ]
            for k in range(known.shape[1])
        ]
        found[method] = tuple(site_gain(comparison.metric, one) for one in pairs)
    return found


Found = tuple[dict[str, Gain], MeanGain | None]  # of one method: gain of each client; mean gain


def conclude(found: Mapping[str, Found], choice: Choice | None) -> dict[str, Judgement]:
    """Correct all tests for one another; returns a judgement per method."""
    ahead = None if choice is None or choice.on == "test" else choice.method
    clients = _clients({method: own for method, (own, _) in found.items() if own}, ahead)
    overall = {method: mean for method, (_, mean) in found.items() if mean is not None}
    tried, several = len(overall), holm([mean.p for mean in overall.values()])
    return {
        method: Judgement(method, widened(mean, tried), p, tried, clients.get(method, ()))
        for (method, mean), p in zip(overall.items(), several, strict=True)
    }


def _clients(
    found: Mapping[str, Mapping[str, Gain]], ahead: str | None
) -> dict[str, tuple[ClientGain, ...]]:
    """The corrected tests of all clients, by method; ``ahead`` has half of the total weight."""
    weight = {
        method: (1.0 if method == ahead or ahead not in found else 1.0 / (len(found) - 1))
        / len(own)
        for method, own in found.items()
    }
    tests = [(method, name, gain) for method, own in found.items() for name, gain in own.items()]
    p = holm([gain.p for _, _, gain in tests], [weight[method] for method, _, _ in tests])
    total = sum(weight[method] for method, _, _ in tests)
    made = [
        ClientGain(name, method, gain, corrected, total / weight[method])
        for (method, name, gain), corrected in zip(tests, p, strict=True)
    ]
    return {method: tuple(one for one in made if one.method == method) for method in found}


def _found(names: Sequence[str], gains: Sequence[SiteGain]) -> Found:
    """The gain of each client over all seeds, and the mean gain over clients."""
    own = {
        name: one.together
        for name, one in zip(names, gains, strict=True)
        if one.together is not None
    }
    if len(own) == 1:
        return own, of_one(next(iter(own.values())))
    nothing = (math.nan, math.nan)
    table = np.array([[pair or nothing for pair in one.each] for one in gains])  # [K, S, 2]
    return own, mean_gain(table[:, :, 0].T, table[:, :, 1].T)


def served_mean(scores: Floats, served: Floats) -> float:
    """The mean score over the clients that another method serves."""
    return float(metrics.mean_known(np.where(np.isnan(served), np.nan, scores)))
