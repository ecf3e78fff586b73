"""One client's gain over training alone, as a site computes it from answers that stay with it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .paired import Gain, Pair, client_gain


class SiteGain(NamedTuple):
    """One client's gain of a method over Local: what leaves the place that holds the answers."""

    each: tuple[tuple[float, float] | None, ...]  # gain and variance with each seed
    together: Gain | None  # over all seeds

    @classmethod
    def from_json(cls, value: Any) -> "SiteGain":
        """The gain that was sent or stored as JSON; ValueError if it is none."""
        try:
            each, together = value
            pairs = tuple(None if pair is None else tuple(map(_finite, pair)) for pair in each)
            gain = None if together is None else _gain(*map(_finite, together))
            if any(pair is not None and len(pair) != 2 for pair in pairs):
                raise ValueError("a gain with a seed is two numbers")
        except TypeError as error:
            raise ValueError(f"is no gain of a client ({error})") from error
        return cls(pairs, gain)  # type: ignore[arg-type]


def _gain(*numbers: float) -> Gain:
    gain, variance, low, high, p, samples = numbers
    return Gain(gain, variance, low, high, p, int(samples))


def _finite(value: Any) -> float:
    """A finite number of JSON; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"found {str(value)[:20]}; expected a finite number")
    return value


def site_gain(metric: str, pairs: Sequence[Pair | None]) -> SiteGain:
    """One client's gain, with one pair per seed; None where the method does not serve it."""
    known = [pair for pair in pairs if pair is not None]
    found = [None if pair is None else client_gain(metric, [pair]) for pair in pairs]
    each = tuple(None if gain is None else (gain.gain, gain.variance) for gain in found)
    return SiteGain(each, client_gain(metric, known) if known else None)
