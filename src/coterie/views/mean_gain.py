"""Whether a method is better than training alone on the mean over clients.

Clients, their test samples and seeds all count as random draws, as in a hierarchical bootstrap. The
percentiles of that bootstrap are far too narrow with few clients that differ. Its two levels are
therefore computed in closed form, which needs only the gain of each client and the sampling
variance of that gain. Gains vary from client to client because true gains differ and because test
samples are random; this variance is never estimated below what the test samples alone cause (gains
may agree by chance). Quantiles are Student's, with one degree of freedom less than there are
clients. The effect of a seed that all clients share is a term of its own; it contains the sampling
noise once more, so that the test errs on the side of claiming nothing. ``docs/results/verdict.md``
has the calibration.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from ..core.metrics import Floats
from ..core.paired import LEVEL, Gain, mcnemar, two_sided

POWER = 0.8  # probability with which a planned comparison should show the gain that was seen
AT_MOST = 30.0  # times as much data as there was: more than that is not advised
MANY = 1e9  # degrees of freedom of a known variance


class MeanGain(NamedTuple):
    """The mean gain over clients, with its standard error, interval and p-value."""

    gain: float
    error: float  # standard error of the gain
    freedom: float  # degrees of freedom of the standard error
    low: float
    high: float
    p: float  # two-sided, not corrected for the number of methods
    clients: int
    between: float  # variance of the clients' true gains
    within: float  # mean variance of a client's gain by the choice of its test samples


def mean_gain(gains: Floats, variances: Floats) -> MeanGain | None:
    """The mean of gains ``[seeds, clients]``, tested with their sampling variances.

    Clients that could not be judged with every seed are left out; returns None if none is left. A
    gain of minus infinity, of a client that diverged, makes the mean a loss whatever the others
    gain.
    """
    known = ~np.isnan(gains).any(0)
    gains, variances = gains[:, known], variances[:, known]
    if gains.size == 0:
        return None
    if not np.isfinite(gains).all():
        side = -math.inf if (gains == -math.inf).any() else math.inf
        K = gains.shape[1]
        return MeanGain(side, math.inf, MANY, side, side, 0.0, K, math.inf, math.inf)
    S, K = gains.shape
    mean, within = float(gains.mean()), float(variances.mean()) / S
    over_clients = max(float(gains.mean(0).var(ddof=1)), within) if K > 1 else within
    parts, most = [over_clients / K], K - 1.0 if K > 1 else MANY
    freedoms = [most]
    if S > 1:  # the effect of a seed on all clients; it cannot be estimated from one seed
        parts.append(float(gains.mean(1).var(ddof=1)) / S)
        freedoms.append(S - 1.0)
    variance = sum(parts)
    spread = sum(part**2 / freedom for part, freedom in zip(parts, freedoms, strict=True))
    freedom = min(variance**2 / spread, most) if spread > 0 else most  # Satterthwaite's
    between = over_clients - within
    return _made(mean, math.sqrt(variance), freedom, K, between, within)


def _made(
    mean: float, error: float, freedom: float, clients: int, between: float, within: float
) -> MeanGain:
    reach = float(stdtrit(freedom, 1 - LEVEL / 2)) * error
    p = 1.0 if mean == 0 else two_sided(mean, error, freedom)
    return MeanGain(mean, error, freedom, mean - reach, mean + reach, p, clients, between, within)


def widened(found: MeanGain, tried: int) -> MeanGain:
    """The mean gain with an interval that holds for all of ``tried`` methods together."""
    if tried == 1 or not math.isfinite(found.error):
        return found
    reach = float(stdtrit(found.freedom, 1 - LEVEL / (2 * tried))) * found.error
    return found._replace(low=found.gain - reach, high=found.gain + reach)


def of_one(gain: Gain) -> MeanGain:
    """The mean gain of a single client: its own gain and test."""
    error = math.sqrt(gain.variance)
    return MeanGain(gain.gain, error, MANY, gain.low, gain.high, gain.p, 1, 0.0, gain.variance)


class More(NamedTuple):
    """How much more data or clients would probably show a gain of the size that was seen.

    None if even much more would not.
    """

    data: float | None  # times as many test samples, or seeds
    clients: int | None  # in all, with as many test samples each


def more(found: MeanGain, tried: int = 1) -> More:
    """How much more data or clients would show the gain that was seen, with a power of 80 %."""

    def needed(K: int) -> float:
        """The largest variance of a client's gain at which K clients suffice."""
        freedom = K - 1.0 if K > 1 else MANY
        quantile = float(stdtrit(freedom, 1 - LEVEL / (2 * tried))) + float(ndtri(POWER))
        return K * (found.gain / quantile) ** 2

    if not math.isfinite(found.error) or found.gain == 0:
        return More(None, None)
    room = needed(found.clients) - found.between
    data = found.within / room if room > 0 else math.inf
    most = int(AT_MOST * found.clients)
    sizes = range(found.clients + 1, most)
    fits = (K for K in sizes if needed(K) >= found.between + found.within)
    return More(max(1.0, data) if data <= AT_MOST else None, next(fits, None))


def more_samples(gain: Gain, tests: float) -> int | None:
    """How many test samples would probably show one client's gain among ``tests`` tests."""
    if not math.isfinite(gain.variance) or gain.gain == 0:
        return None
    quantile = float(ndtri(1 - LEVEL / (2 * tests))) + float(ndtri(POWER))
    times = gain.variance * (quantile / gain.gain) ** 2
    return max(gain.samples + 1, math.ceil(times * gain.samples)) if times <= AT_MOST else None


def smallest_gain(samples: int, tests: float) -> float | None:
    """The smallest gain in accuracy that so many test samples can show among ``tests`` tests.

    In percentage points, for a method that is right wherever its reference is right. None if the
    samples cannot show any gain.
    """
    wins = next((w for w in range(1, samples + 1) if mcnemar(w, 0) < LEVEL / tests), None)
    return None if wins is None else 100.0 * wins / samples
