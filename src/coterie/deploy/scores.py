"""What a site tells of its test rows: the scores of final models with noise, and only so many.

The operator chooses the models. A score is a number of rows, so exact scores of models that differ
by one comparison tell where a row's value stands; twenty of them, to four digits. Whatever follows
from the rows alone (roundings, noise that is the same for the same rows) still changes exactly
where the value stands. So every answer has normal noise of its own, in multiples of what one
patient can change, and a division of rows has so many answers: together they tell as little of any
patient as Σ 1/(2 noise²) says (zero-concentrated differential privacy).

An answer is written down before it leaves, and is the same whenever it is asked for.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.answers import Answers
from ..core.metrics import METRICS, Array, gains, score
from ..core.paired_tests import Gain, SiteGain, of_variance, site_gain
from ..core.shards import Shards
from ..engines.site import stored_answers
from ..storage import files
from .approval import ForbiddenError
from .division import FOLDER
from .documents import ScoresTable
from .site_folder import SiteFolder

SCORES = "scores.json"  # in the folder of the division
LARGEST_ERROR = 2.0  # of a prediction of numbers, in standard deviations of the target
DRAWS = secrets.SystemRandom()


def one_row(metric: str, targets: Array, units: Array, deviation: float) -> float:
    """The most that one patient's rows can change a score; NaN where there are none."""
    if len(targets) == 0:
        return math.nan
    counts = np.unique(units, return_counts=True)[1]
    of = METRICS[metric].one_row
    whole = {"rows": 100.0, "classes": 100.0, "errors": LARGEST_ERROR * deviation}[str(of)]
    smallest = np.unique(targets, return_counts=True)[1].min() if of == "classes" else len(targets)
    return whole * float(counts.max()) / float(smallest)


def bounded(metric: str, answers: Answers, deviation: float) -> Answers:
    """The answers; of predictions of numbers the errors, moved to within the largest.

    They are those of targets of 0: the operator's mean and deviation may have made a target
    infinite, or so large that sums with it are rounded.
    """
    if METRICS[metric].one_row != "errors":
        return answers
    most, targets = LARGEST_ERROR * deviation, answers.targets.astype(np.float64)
    errors = np.nan_to_num(answers.values - targets, nan=most).clip(-most, most)
    return answers._replace(values=errors, targets=np.zeros_like(targets))


def squares(exact: Gain) -> float:
    """The sum of the squares from which a gain's variance is computed."""
    return exact.variance + exact.gain**2 / exact.samples


def most_squares(units: Array) -> float:
    """The most that one patient changes :func:`squares`, in squares of :func:`one_row`.

    Once a patient's own square, and once what it changes in the others' parts; these are more where
    patients have several rows.
    """
    return 2.0 if len(np.unique(units)) == len(units) else 4.0


def validation_rows(shards: Shards, client: int) -> tuple[Array, Array]:
    """The targets of a client's validation samples, and the unit of each."""
    samples = shards.splits["val"].of(client)
    units = samples if shards.units is None else shards.units[samples]
    y = shards.y[samples]
    if y.dim() > 1:  # at every position
        units = units.repeat_interleave(y.shape[1])
    return y.flatten().numpy(), units.numpy()


@dataclass(frozen=True)
class ToldScores:
    """The answers about a site's test and validation rows that left it; kept in one file."""

    path: Path
    rule: ScoresTable

    @classmethod
    def of(cls, folder: SiteFolder) -> "ToldScores":
        """Those of a site."""
        return cls(folder.path / FOLDER / SCORES, folder.scores)

    @property
    def left(self) -> int:
        """How many answers may still leave."""
        told: list[int] = [one["answers"] for one in self._stored().values()]
        return self.rule.most - sum(told)

    def refuse_spent(self, question: str, answers: int = 1) -> None:
        """Refuse a new question for which there are no answers left."""
        if question not in self._stored() and self.left < answers:
            raise ForbiddenError(
                "policy",
                f"scores: {max(0, self.left)} of {self.rule.most} answers about test rows may "
                f"still leave, and {answers} are asked for; the owner may allow more by [scores] "
                "most in site.toml",
            )

    def once(self, question: str, answers: int, make: Callable[[], Any]) -> Any:
        """The answer to a question: made when it is asked first, and the same for ever."""
        stored = self._stored()
        if question not in stored:
            self.refuse_spent(question, answers)
            stored[question] = {"answers": answers, "told": make()}
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            files.write_json(self.path, stored)
        return stored[question]["told"]

    def _stored(self) -> dict[str, Any]:
        return dict(files.read_json(self.path)) if self.path.exists() else {}

    def _noisy(self, value: float, one: float) -> float:
        """With noise in multiples of ``one``, and none of its last bits, which would show both."""
        return round(value / one + DRAWS.normalvariate(0.0, self.rule.noise), 3) * one

    # ---- scores ----------------------------------------------------------------------------------

    def score(
        self,
        experiment: str,
        metric: str,
        answers: Answers,
        val: tuple[float, Array, Array],
        deviation: float,
    ) -> list[float]:
        """The score on test rows and that on validation rows (``val``, with targets and units).

        There are no losses, and no score of numbers on validation rows: one row may decide it.
        """

        def make() -> list[float | None]:
            own, row = bounded(metric, answers, deviation), METRICS[metric]
            test = score(metric, own.values, own.targets)
            parts = [(test, own.targets, own.units)]
            parts += [val] if row.targets == "classes" else [(math.nan, val[1], val[2])]
            told = [self._noisy(s, one_row(metric, y, u, deviation)) for s, y, u in parts]
            return [None if math.isnan(s) else min(max(s, row.lowest), row.highest) for s in told]

        told = self.once(experiment, 1, make)
        return [*(math.nan if one is None else float(one) for one in told), math.nan, math.nan]

    # ---- gains -----------------------------------------------------------------------------------

    def gain(self, metric: str, pairs: Sequence[tuple[Path, Path]], deviation: float) -> SiteGain:
        """The gain of a method over Local, of finished runs' folders: one pair per training.

        The gains are those of the scores that left before; new are their variances.
        """
        question = " ".join([metric, *(folder.name for pair in pairs for folder in pair)])

        def make() -> Any:
            return self._gain(metric, pairs, deviation).to_json()

        return SiteGain.from_json(self.once(question, len(pairs) + (len(pairs) > 1), make))

    def _gain(self, metric: str, pairs: Sequence[tuple[Path, Path]], deviation: float) -> SiteGain:
        told = np.array([[self._told(folder.name) for folder in pair] for pair in pairs])
        apart = gains(told[:, 0], told[:, 1], metric)
        both = [
            None if math.isnan(gain) else tuple(self._answers(f, metric, deviation) for f in pair)
            for gain, pair in zip(apart, pairs, strict=True)
        ]
        exact = site_gain(metric, both)  # type: ignore[arg-type]
        ones = np.array(
            [math.nan if p is None else one_row(metric, *p[0][1:3], deviation) for p in both]
        )
        mosts = [math.nan if p is None else most_squares(p[0].units) for p in both]
        each = tuple(
            self._noisy_gain(*one, 1) for one in zip(exact.each, apart, ones, mosts, strict=True)
        )
        if len(each) == 1:
            return SiteGain(each, each[0])
        known = ~np.isnan(apart)
        if not known.any():
            return SiteGain(each, None)
        means = apart[known].mean(), ones[known].mean(), np.nanmax(mosts)
        return SiteGain(each, self._noisy_gain(exact.together, *means, int(known.sum())))

    def _noisy_gain(
        self, exact: Gain | None, gain: float, one: float, most: float, trainings: int
    ) -> Gain | None:
        """A gain of noisy scores, with a noisy variance of its rows and that of the scores' noise.

        ``one`` is what a patient can change a score, ``most * one**2`` what it can change a sum of
        squares.
        """
        if exact is None or not math.isfinite(exact.variance):
            return None if exact is None else exact._replace(gain=float(gain), counts=None)
        found = self._noisy(squares(exact), most * one**2)
        variance = max(0.0, found - gain**2 / exact.samples)
        variance += 2.0 * (self.rule.noise * one) ** 2 / trainings
        return of_variance(float(gain), float(variance), exact.freedom, exact.samples)

    def _answers(self, folder: Path, metric: str, deviation: float) -> Answers:
        return bounded(metric, stored_answers(folder)[0], deviation)

    def _told(self, experiment: str) -> float:
        score = self._stored().get(experiment, {"told": [None]})["told"][0]
        return math.nan if score is None else float(score)
