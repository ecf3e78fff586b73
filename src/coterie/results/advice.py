"""Which kind of collaboration suits a federation: stay local, average, cluster or personalise.

Each kind is represented by its method with the best mean, and tested against each simpler kind on
the test samples of all clients and seeds (``results.mean_gain``). The best of several methods is
chosen on the same samples, so that p-values and intervals are corrected for their number. A choice
by validation data would favour methods that weigh models on it.

    a kind is beaten       if a less simple kind is shown to be better, and may be so by the margin
    a kind is a rival      of a simpler one if it may be better by the margin: the 95 % interval of
                           its gain does not end below the margin

The simplest kind that is not beaten is advised if it is itself shown to be better than each simpler
kind and has no rival. Otherwise the answer is that the runs cannot tell between these kinds. All
tests must agree for an advice, so that none needs a correction for the others: a wrong advice
passes at most as often as the one test that should stop it.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.metrics import METRICS, higher_is_better
from ..core.paired import LEVEL
from ..core.site_gain import site_gain
from .judgement import LOCAL
from .mean_gain import MANY, MeanGain, mean_gain, widened

if TYPE_CHECKING:
    from .comparison import Compared, MethodRow

# The kinds, the simplest first, with the methods that try them.
KINDS: dict[str, tuple[str, ...]] = {
    "stay local": (LOCAL,),
    "average": ("fedavg", "fedprox", "scaffold"),
    "cluster": ("ifca", "cfl"),
    "personalise": ("fedavg_ft", "fedamp", "fedfomo", "ditto"),
}
MARGIN = 2.0  # points: no smaller gain is worth a less simple kind
SHARE = 0.02  # the margin as a share of the score, for metrics that are no percents


class Contest(NamedTuple):
    """One kind against a simpler one, each by its best method."""

    kind: str
    simpler: str
    gain: MeanGain  # of the kind over the simpler one, corrected for the number of their methods

    @property
    def won(self) -> bool:
        """Whether the kind is shown to be better than the simpler one."""
        return self.gain.gain > 0 and self.gain.p < LEVEL


class Advice(NamedTuple):
    """The kind that is advised, or the kinds between which the runs cannot decide."""

    kind: str | None  # None: they cannot tell
    between: tuple[str, ...]  # the advised kind alone, or the kinds that are left
    methods: dict[str, str]  # of each kind, the method that represents it
    contests: tuple[Contest, ...]
    margin: float  # in the unit of the metric


def advise(comparison: "Compared[Any]") -> Advice:
    """What the runs of a comparison advise; kinds of which no method was run are left out."""
    rows = {row.method: row for row in comparison.rows}
    tried = {kind: [rows[m] for m in names if m in rows] for kind, names in KINDS.items()}
    tried = {kind: known for kind, known in tried.items() if known}
    methods = {kind: _best(comparison.metric, known) for kind, known in tried.items()}
    contests = tuple(
        Contest(kind, simpler, _corrected(gain, len(tried[kind]) * len(tried[simpler])))
        for simpler, kind in combinations(methods, 2)
        for gain in [method_gain(comparison, methods[kind], methods[simpler])]
    )
    margin = _margin(comparison.metric, rows[LOCAL].mean.mean)
    beaten = {one.simpler for one in contests if one.won and one.gain.high >= margin}
    simplest = next(kind for kind in methods if kind not in beaten)
    doubts = {one.simpler for one in contests if one.kind == simplest and not one.won}
    rivals = {one.kind for one in contests if one.simpler == simplest and one.gain.high >= margin}
    between = tuple(kind for kind in methods if kind in doubts | {simplest} | rivals)
    return Advice(simplest if len(between) == 1 else None, between, methods, contests, margin)


def _best(metric: str, rows: Sequence["MethodRow"]) -> str:
    """The method with the best mean over clients and seeds."""
    sign = 1.0 if higher_is_better(metric) else -1.0
    return max(rows, key=lambda row: sign * row.mean.mean).method


def _corrected(gain: MeanGain, tried: int) -> MeanGain:
    """The gain of the best of ``tried`` pairs of methods."""
    return widened(gain, tried)._replace(p=min(1.0, tried * gain.p))


def method_gain(comparison: "Compared[Any]", method: str, other: str) -> MeanGain:
    """The mean gain over clients of one method over another, on the answers of all seeds."""
    pairs = zip(_answers(comparison, method), _answers(comparison, other), strict=True)
    by_seed = [list(zip(a, b, strict=True)) for a, b in pairs]  # [S][K] pairs of answers
    each = [
        site_gain(comparison.metric, [seed[k] for seed in by_seed]).each
        for k in range(len(by_seed[0]))
    ]
    nothing = (math.nan, math.nan)
    table = np.array([[pair or nothing for pair in one] for one in each])  # [K, S, 2]
    found = mean_gain(table[:, :, 0].T, table[:, :, 1].T)
    if found is None:  # the metric is not defined on any client's test samples
        return MeanGain(0.0, math.inf, MANY, -math.inf, math.inf, 1.0, 0, math.inf, math.inf)
    return found


def _answers(comparison: "Compared[Any]", method: str) -> list[list[Any]]:
    """The answers of a method's predictors ``[S][K]``."""
    known = [run.history.outcomes for run in comparison.of_method(method)]
    return [list(outcomes.clients()) for outcomes in known if outcomes is not None]


def _margin(metric: str, score: float) -> float:
    return MARGIN if METRICS[metric].percent else SHARE * abs(score)
