"""One client's gain over training alone, as a site computes it from answers that stay with it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .paired import Gain, Pair, client_gain


class SiteGain(NamedTuple):
    """One client's gain of a method over Local: what leaves the place that holds the answers."""

    each: tuple[tuple[float, float] | None, ...]  # gain and variance with each seed
    together: Gain | None  # over all seeds

    def to_json(self) -> dict[str, Any]:
        """The gain as values of JSON."""
        together = None if self.together is None else self.together._asdict()
        return {"each": [None if pair is None else list(pair) for pair in self.each]} | {
            "together": together
        }

    @classmethod
    def from_json(cls, value: Any) -> "SiteGain":
        """The gain that was sent or stored as JSON; ValueError if it is none."""
        try:
            each = tuple(None if pair is None else _pair(*pair) for pair in value["each"])
            found = value["together"]
            together = None if found is None else _gain(**found)
        except (TypeError, KeyError) as error:
            raise ValueError(f"is no gain of a client ({error})") from error
        return cls(each, together)


def _pair(gain: Any, variance: Any) -> tuple[float, float]:
    return _finite(gain), _finite(variance)


def _gain(gain: Any, variance: Any, low: Any, high: Any, p: Any, samples: Any) -> Gain:
    numbers = map(_finite, (gain, variance, low, high, p))
    return Gain(*numbers, samples=int(_finite(samples)))  # type: ignore[misc, arg-type]


def _finite(value: Any) -> float:
    """A finite number of JSON; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"found {str(value)[:20]!r}; expected a finite number")
    return value


def site_gain(metric: str, pairs: Sequence[Pair | None]) -> SiteGain:
    """One client's gain, with one pair per seed; None where the method does not serve it."""
    known = [pair for pair in pairs if pair is not None]
    found = [None if pair is None else client_gain(metric, [pair]) for pair in pairs]
    each = tuple(None if gain is None else (gain.gain, gain.variance) for gain in found)
    return SiteGain(each, client_gain(metric, known) if known else None)
