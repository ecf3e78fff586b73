"""The answer to a client that joins a finished run: with whom, how good, from how many samples.

import coterie
found = coterie.onboard("runs/one", "new-site.csv", out="new-site-model")
print(found)                  # the table and the answer in words
print(found.collaborators)    # {"Lakeside": 0.61, "County": 0.27}
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from scipy.special import stdtrit

from ..core import metrics
from ..core.imports import Code, Given
from ..core.metrics import METRICS
from ..core.paired_tests import LEVEL, Pair, client_gain
from ..errors import ConfigError, printable_lines
from ..exporting.new_samples import Source
from ..exporting.writing import refuse_filled, write_export
from ..runs.statistics import OverSeeds, over_seeds
from ..storage import files
from ..views import words
from ..views.table import Heading, Line, Table, to_html, to_text
from .labelled import read_labelled
from .newcomer import (
    DRAWS,
    SIZES,
    JoinableRun,
    JoinOutcome,
    Tried,
    collaborators,
    draws_of,
    join,
    newcomer,
    open_joinable,
    personal_model,
    warn_of_copies,
)

# ---- score against the number of labelled samples, for two ways to a model from the same samples


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
        of_draws = float(each.var(ddof=1)) / len(each)
        variance = found.variance + of_draws
        spread = of_draws**2 / (len(each) - 1)  # the variance by test samples counts as known
        freedom = variance**2 / spread if spread > 0 else math.inf  # Satterthwaite's
        reach = float(stdtrit(freedom, 1 - LEVEL / 2)) * math.sqrt(variance)
        low, high = found.gain - reach, found.gain + reach
    return CurvePoint(samples, len(pairs), alone, joined, found.gain, low, high)


# ---- the table and the sentences -----------------------------------------------------------------

MOST_NAMED = 3  # collaborators in a row of the table


def table_of(found: "Onboarded") -> Table:
    """One line per number of labelled samples."""
    unit = words.unit(found.metric).strip()
    score = f"{METRICS[found.metric].title}{f' {unit}' if unit else ''}"
    joined = words.label(found.method)
    columns = [
        Heading("labelled samples", "numbers of labelled samples of the newcomer"),
        Heading(f"alone, {score}", "trained alone from the run's start, mean ± over draws"),
        Heading("average", "the run's plain average"),
        Heading(f"joined ({joined})", "by the method's rule, then trained on the same samples"),
        Heading("gain (95 % interval)", "of joined over alone"),
        Heading("collaborators", "the clients with the most weight"),
    ]
    lines = [_cells(found, at) for at in range(len(found.points))]
    if found.average is None:
        columns, lines = [*columns[:2], *columns[3:]], [[*one[:2], *one[3:]] for one in lines]
    return Table(tuple(columns), tuple(Line(tuple(cells)) for cells in lines))


def _cells(found: "Onboarded", at: int) -> list[str]:
    point, metric = found.points[at], found.metric
    every = at == len(found.points) - 1
    return [
        f"{point.samples} (all)" if every else str(point.samples),
        words.spread(point.alone, metric),
        words.NONE if found.average is None else words.number(found.average, metric),
        words.spread(point.joined, metric),
        words.gain_cell(point.gain, point.low, point.high, metric),
        _named(found.weights[at]),
    ]


def _named(weights: Mapping[str, float | None]) -> str:
    if any(weight is None for weight in weights.values()):
        return "everybody"
    shown = [f"{name} {weight:.2f}" for name, weight in list(weights.items())[:MOST_NAMED]]
    more = len(weights) - MOST_NAMED
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "") or "nobody"


def _with_whom(found: "Onboarded") -> str:
    weights = found.weights[-1]
    if any(weight is None for weight in weights.values()):
        name = words.label(found.method)
        return f"Your collaborators: all {found.clients} clients; {name} has one model for all."
    if not weights:
        return "You have no collaborators here: no model of the run helps on your samples."
    return f"Your collaborators: {_named(weights)}."


def _how_good(found: "Onboarded") -> str:
    point, metric = found.points[-1], found.metric
    unit, title = words.unit(metric), METRICS[metric].title
    joined, alone = (words.number(v.mean, metric) for v in (point.joined, point.alone))
    size = words.interval(point.gain, point.low, point.high, metric)
    return (
        f"With all {point.samples} labelled samples joining gives {found.client} {joined}{unit} "
        f"{title} instead of {alone}{unit} alone on {found.test} test samples, {size}."
    )


def _how_long(found: "Onboarded") -> str:
    """Up to how many samples a gain over training alone is shown."""
    if len(found.points) < 2:
        return ""
    shown = [point.samples for point in found.points if point.shown]
    if not shown:
        return "A gain over training alone is shown for no number of samples."
    if len(shown) == len(found.points):
        return "A gain over training alone is shown for every number of samples tried."
    listed = words.listing([str(n) for n in shown], most=len(shown))
    return f"A gain over training alone is shown with {listed} samples, and not with the others."


def _which(found: "Onboarded") -> str:
    """The better of the two models, which ``--out`` writes."""
    point, sign = found.points[-1], 1 if metrics.higher_is_better(found.metric) else -1
    best = point.alone if found.recommended == "alone" else point.joined
    more = ""
    if found.average is not None and sign * (found.average - best.mean) > 0:
        more = " The plain average scores higher here: to take that, onboard to a run of FedAvg."
    if found.recommended == "alone":
        said = "your model trained alone; joining was not better on the test samples"
    else:
        said = f"the joined model{'' if point.shown else ', although its gain is not shown'}"
    return f"Recommended: {said}.{more}"


# ---- the answer ----------------------------------------------------------------------------------

Weights = Mapping[str, float | None]  # by client; None where all clients have one model


@final
@dataclass(frozen=True, eq=False, repr=False)
class Onboarded:
    """What a newcomer gets from a finished run."""

    client: str
    method: str
    metric: str
    clients: int  # of the run
    test: int  # the newcomer's samples that test
    average: float | None  # score of the run's plain average, if there is one
    points: tuple[CurvePoint, ...]  # by the number of labelled samples; the last has all
    weights: tuple[Weights, ...]  # of the run's clients, mean over the draws of each point
    recommended: str  # "joined" or "alone": the better one on the test samples
    path: Path | None  # folder of the recommended model, if it was written

    @property
    def collaborators(self) -> dict[str, float | None]:
        """The run's clients whose models helped, with their weights, from all samples."""
        return dict(self.weights[-1])

    @property
    def words(self) -> str:
        """With whom, how good, and from how few samples, in a few sentences."""
        parts = (_with_whom(self), _how_good(self), _how_long(self), _which(self))
        return " ".join(filter(None, parts))

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; the keys are documented in docs/json.md."""
        return {
            "client": self.client,
            "method": self.method,
            "metric": self.metric,
            "answer": self.words,
            "better": self.recommended,
            "collaborators": self.collaborators,
            "test_samples": self.test,
            "average": self.average,
            "curve": [
                {**point._asdict(), "collaborators": dict(weights)}
                for point, weights in zip(self.points, self.weights, strict=True)
            ],
            "folder": self.path and str(self.path),
        }

    def __repr__(self) -> str:
        return printable_lines("\n\n".join([to_text(table_of(self)), self.words]))

    def _repr_html_(self) -> str:
        return str(to_html(table_of(self)))


def onboard(
    run: str | Path,
    data: Source,
    *,
    name: str | None = None,
    sizes: Sequence[int] = SIZES,
    draws: int = DRAWS,
    epochs: int | None = None,
    codes: str | Path | None = None,
    strict: bool = False,
    out: str | Path | None = None,
    code: Given = None,
) -> Onboarded:
    """Let a client that was not in a finished run join it with its own labelled samples.

    Args:
        run: folder of the finished run.
        data: file of labelled samples in any format that a config can name, or a table in memory.
        name: the newcomer's name; by default that of the file.
        sizes: numbers of labelled samples to try; all samples are always tried.
        draws: random draws of each number.
        epochs: passes of local training after joining; by default as many as in one round.
        codes: CSV file with the columns column, code, means: what the newcomer's own codes are.
        strict: refuse unknown categories and missing columns.
        out: new folder for the better model, joined or alone, as ``coterie.export`` writes it.
        code: folders from which code that the run's config names may be imported.
    """
    _check(sizes, draws, epochs)
    place = None if out is None else refuse_filled(files.folder_of(out, "--out"))
    host = open_joinable(files.folder_of(run, "RUN"), Code.of(code, installed=False))
    asked = host.config.data.options
    dataset = read_labelled(data, host.schema, asked, codes, strict=strict)
    warn_of_copies(host, dataset)
    new = newcomer(host, dataset, _name(name, data))
    plan = draws_of(new.pool, sizes, draws, host.run.seed)
    found = join(host, new, plan, epochs)
    if place is not None:
        write_export(personal_model(host, new, found), place)
    return _collected(host, new.name, len(new.test), found, place)


def _check(sizes: Sequence[int], draws: int, epochs: int | None) -> None:
    if draws < 1 or min(sizes, default=1) < 1 or (epochs is not None and epochs < 0):
        raise ConfigError(
            f"found the sizes {list(sizes)}, {draws} draws and {epochs} epochs; expected sizes of "
            "1 or more, one draw or more, and no negative epochs"
        )


def _name(given: str | None, data: Source) -> str:
    if given is not None:
        return given
    return Path(data).stem if isinstance(data, str | Path) else "newcomer"


def _collected(
    host: JoinableRun, client: str, test: int, found: JoinOutcome, path: Path | None
) -> Onboarded:
    metric, by_size = host.run.metric, dict[int, list[Tried]]()
    for one in found.tries:
        by_size.setdefault(len(one.samples), []).append(one)
    points = tuple(
        curve_point(metric, size, [(one.joined, one.alone) for one in tries])
        for size, tries in by_size.items()
    )
    weights = tuple(_mean_weights(host, tries) for tries in by_size.values())
    return Onboarded(
        client=client,
        method=host.run.method,
        metric=metric,
        clients=len(host.run.roster),
        test=test,
        average=found.average,
        points=points,
        weights=weights,
        recommended="joined" if found.joins(metric) else "alone",
        path=path,
    )


def _mean_weights(host: JoinableRun, tries: Sequence[Tried]) -> Weights:
    known = [one.weights for one in tries if one.weights is not None]
    return collaborators(host.run, torch.stack(known).mean(0) if known else None)
