"""Score against the number of labelled samples, for two ways to a model from the same samples."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from ..core import metrics
from ..core.paired import LEVEL, Pair, client_gain
from .mean_gain import MANY
from .statistics import OverSeeds, over_seeds


class CurvePoint(NamedTuple):
    """The scores of two ways with one number of samples, over several draws of these samples."""

    samples: int
    draws: int
    alone: OverSeeds  # over draws
    joined: OverSeeds
    gain: float  # of joined over alone; NaN where the metric is not defined on the test samples
    low: float  # of the 95 % interval
    high: float

    @property
    def shown(self) -> bool:
        """Whether the interval of the gain is above 0."""
        return self.low > 0


def curve_point(metric: str, samples: int, pairs: Sequence[Pair]) -> CurvePoint:
    """The point of one number of samples; a pair has the answers of joined and of alone.

    All draws are tested on the same samples: the interval covers the choice of the test samples,
    which draws do not average out, and the choice of the draws, which they do.
    """
    scores = [[metrics.score(metric, x.values, x.targets) for x in pair] for pair in pairs]
    joined, alone = (over_seeds(column) for column in zip(*scores, strict=True))
    found = client_gain(metric, pairs)
    if found is None:
        return CurvePoint(samples, len(pairs), alone, joined, math.nan, math.nan, math.nan)
    each = np.array([metrics.gains(np.array(a), np.array(b), metric) for a, b in scores])
    low, high = found.low, found.high
    if len(pairs) > 1 and np.isfinite(each).all():
        low, high = _ends(
            found.gain, found.variance, float(each.var(ddof=1)) / len(each), len(each)
        )
    return CurvePoint(samples, len(pairs), alone, joined, found.gain, low, high)


def _ends(gain: float, of_tests: float, of_draws: float, draws: int) -> tuple[float, float]:
    """The interval of a gain whose variance has two parts; Satterthwaite's degrees of freedom."""
    variance = of_tests + of_draws
    spread = of_tests**2 / MANY + of_draws**2 / (draws - 1)
    freedom = variance**2 / spread if spread > 0 else MANY
    reach = float(stdtrit(freedom, 1 - LEVEL / 2)) * math.sqrt(variance)
    return gain - reach, gain + reach
