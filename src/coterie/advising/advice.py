"""Which kind of collaboration suits a federation: stay local, average, cluster or personalise.

Each kind is represented by its method with the best mean, and tested against each simpler kind on
the test samples of all clients and seeds (question B of ``core.inference``). The best of several
methods is chosen on the same samples, so that p-values and intervals are corrected for their
number. A choice by validation data would favour methods that weigh models on it.

    a kind is beaten       if a less simple kind is shown to be better, and may be so by the margin
    a kind is a rival      of a simpler one if it may be better by the margin: the 95 % interval of
                           its gain does not end below the margin

The simplest kind that is not beaten is advised if it is itself shown to be better than each simpler
kind and has no rival. Otherwise the answer is that the runs cannot tell between these kinds. All
tests must agree for an advice, so that none needs a correction for the others: a wrong advice
passes at most as often as the one test that should stop it.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, final

import numpy as np

from ..api import Options, Source, compare_config, configure, listeners_of
from ..core.inference import MeanGain
from ..core.metrics import METRICS, higher_is_better
from ..core.paired_tests import LEVEL
from ..errors import ConfigError, printable_lines
from ..runs.assemble import assemble
from ..runs.config.schema import Config
from ..runs.estimate import timings
from ..runs.listeners import Watch
from ..runs.run import LOCAL, dense
from ..views import judgement, words
from ..views.comparison import Comparison
from ..views.table import Line, Table, to_text

if TYPE_CHECKING:
    from ..views.comparison import MethodRow


CIRCLE = "circle"  # the method whose circles an advice names

# The kinds, the simplest first, with the methods that try them.
KINDS: dict[str, tuple[str, ...]] = {
    "stay local": (LOCAL,),
    "average": ("fedavg", "fedprox", "scaffold"),
    "cluster": (CIRCLE, "ifca", "cfl"),
    "personalise": ("fedavg_ft", "fedamp", "fedfomo", "ditto"),
}
MOST_CIRCLES = 6  # that the answer names
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


def conclude(comparison: Comparison) -> Advice:
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
    alone = rows[LOCAL].mean.mean
    margin = MARGIN if METRICS[comparison.metric].percent else SHARE * abs(alone)
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
    return gain.corrected(min(1.0, tried * gain.p))


def method_gain(comparison: Comparison, method: str, other: str) -> MeanGain:
    """The mean gain over these clients of one method over another, on the answers of all seeds."""
    gains = judgement.site_gains(comparison, [method], other)
    found = gains and judgement.mean_gain(gains[method], judgement.one_deal(comparison))
    if not found:  # the metric is not defined on any client's test samples
        return MeanGain(0.0, math.inf, math.inf, -math.inf, math.inf, 1.0, 0)
    return found


class FoundCircle(NamedTuple):
    """Clients that Circle put together, and how sure that is."""

    clients: tuple[str, ...]
    seeds: int  # in which it is exactly this circle


def found_circles(comparison: Comparison) -> tuple[FoundCircle, ...]:
    """Each client's most frequent circle over the seeds, the largest first; () without Circle."""
    runs = [run for run in comparison.runs if run.method == CIRCLE and run.matrices]
    if not runs or not judgement.one_deal(comparison):
        return ()
    names = runs[0].roster.clients
    rows = [dense(run.matrices[-1]) > 0 for run in runs]
    count = Counter(
        tuple(names[j] for j in row.nonzero()[0]) for A in rows for row in np.unique(A, axis=0)
    )
    mine = {max((c for c in count if name in c), key=lambda c: count[c]) for name in names}
    ordered = sorted(mine, key=lambda circle: (-len(circle), circle))
    return tuple(FoundCircle(circle, count[circle]) for circle in ordered)


# ---- in words ------------------------------------------------------------------------------------

ANSWERS = {
    "stay local": "Stay local: train alone, nothing that was tried helps enough.",
    "average": "Average: one common model serves these clients.",
    "cluster": "Cluster: the clients fall into groups, each of which needs a model of its own.",
    "personalise": "Personalise: join, and let each client have a model of its own.",
}


def advice_words(advice: Advice, comparison: Comparison) -> str:
    """The answer, what it rests on, and how sure it is."""
    seeds, rounds = len(comparison.seeds), len(comparison.runs[0].lines)
    probe = f"This is a probe of {rounds} rounds and {seeds} {'seeds' if seeds > 1 else 'seed'}"
    if circles := found_circles(comparison):
        probe = f"{_circles(circles, seeds)} {probe}"
    sites = {one.gain.sites for one in advice.contests if math.isfinite(one.gain.error)}
    scored = max(row.served for row in comparison.rows)
    if sites and max(sites) < scored:
        probe = (
            f"Means are over the {scored} sites with a score, gains over the {max(sites)} with "
            f"enough test rows. {probe}"
        )
    if advice.kind is None:
        return f"{_cannot_tell(advice, comparison)} {probe}."
    mine = [one for one in advice.contests if advice.kind in (one.kind, one.simpler)]
    evidence = " ".join(_sentence(one, advice, comparison.metric) for one in mine)
    return f"{ANSWERS[advice.kind]} {evidence} {probe}; 'coterie compare' runs the whole length."


def _circles(circles: Sequence[FoundCircle], seeds: int) -> str:
    """Who is in whose circle, and in how many seeds."""
    told = [
        f"{words.listing(list(one.clients), most=6)}{'' if len(one.clients) > 1 else ' alone'} "
        f"({one.seeds} of {seeds} seeds)"
        for one in circles[:MOST_CIRCLES]
    ]
    more = len(circles) - len(told)
    return f"Your circle: {'; '.join(told)}{f'; and {more} more' if more else ''}."


def _sentence(one: Contest, advice: Advice, metric: str) -> str:
    gain = one.gain
    if one.kind == advice.kind:
        size = words.interval(gain.gain, gain.low, gain.high, metric)
        return f"Over '{one.simpler}' it has {size}, {words.chance(gain.p)}."
    size, most = (words.number(value, metric, sign=True) for value in (gain.gain, gain.high))
    name = words.label(advice.methods[one.kind])
    return f"'{one.kind}' ({name}) gives {size}{words.points(metric)} and at most {most}."


def _cannot_tell(advice: Advice, comparison: Comparison) -> str:
    names = [f"'{kind}'" for kind in advice.between]
    among = " and ".join(names) if len(names) < 3 else ", ".join(names)
    evidence = [
        f"'{one.kind}' over '{one.simpler}': "
        f"{words.interval(one.gain.gain, one.gain.low, one.gain.high, comparison.metric)}."
        for one in advice.contests
        if {one.kind, one.simpler} <= {*advice.between} and math.isfinite(one.gain.error)
    ]
    told = f"This probe cannot tell: {among} are not ruled out."
    more = "More test rows (--folds 5) or more rounds (--rounds) may tell."
    return " ".join([told, *evidence, more])


def _table(advice: Advice, comparison: Comparison) -> Table:
    unit = words.unit(comparison.metric).strip()
    rows = {row.method: row for row in comparison.rows}
    over_local = {one.kind: one.gain for one in advice.contests if one.simpler == "stay local"}
    heads = ("kind", "method", f"mean {unit}".strip(), "gain over staying local (95 % interval)")
    lines = []
    for kind, method in advice.methods.items():
        gain = over_local.get(kind)
        numbers = (gain.gain, gain.low, gain.high) if gain is not None else (math.nan,) * 3
        cells = (
            kind,
            words.label(method),
            words.number(rows[method].mean.mean, comparison.metric),
            words.gain_cell(*numbers, comparison.metric),
        )
        lines.append(Line(cells, best=kind == advice.kind))
    return Table.of(heads, lines)


# ---- the probe -----------------------------------------------------------------------------------

# import coterie
# found = coterie.advise("my-federation.toml")
# print(found)           # the answer and its evidence
# print(found.kind)      # "personalise", or None if the probe cannot tell

PROBE = ("local", "fedavg", CIRCLE, "ifca", "fedavg_ft", "fedamp")
ROUNDS = 10  # at most, unless the caller says otherwise
SEEDS = 3
TIMED = ("fedavg", "fedamp")  # a cheap and a dear method, for the estimate of time


@final
@dataclass(frozen=True, eq=False, repr=False)
class Advised:
    """The answer of a probe, and the comparison that it rests on."""

    advice: Advice
    comparison: Comparison

    @property
    def kind(self) -> str | None:
        """What is advised; None if the probe cannot tell."""
        return self.advice.kind

    @property
    def words(self) -> str:
        """The answer and its evidence in a few sentences."""
        return advice_words(self.advice, self.comparison)

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; the keys are documented in docs/json.md."""
        found, path = self.advice, self.comparison.path
        return {
            "advice": found.kind,
            "between": list(found.between),
            "answer": self.words,
            "margin": found.margin,
            "metric": self.comparison.metric,
            "methods": found.methods,
            "circles": [one._asdict() for one in found_circles(self.comparison)],
            "contests": [
                {"kind": one.kind, "simpler": one.simpler, "won": one.won, **one.gain._asdict()}
                for one in found.contests
            ],
            "rounds": len(self.comparison.runs[0].lines),
            "seeds": list(self.comparison.seeds),
            "folder": path and str(path),
        }

    def __repr__(self) -> str:
        table = to_text(_table(self.advice, self.comparison))
        return printable_lines(f"{table}\n\n{self.words}")


def advise(
    source: Source = None, *, progress: Watch | None = None, **options: Unpack[Options]
) -> Advised:
    """Probe a federation with a few rounds of methods of every kind, and say which kind suits it.

    Rounds and seeds can be given; the methods are the probe's own. With ``out`` a probe that was
    interrupted is continued.
    """
    return advise_config(probe_config(source, **options), listeners_of(progress))


def probe_config(source: Source = None, **options: Unpack[Options]) -> Config:
    """The config of a probe: the federation of a config, with the probe's methods."""
    if options.get("methods") is not None or options.get("method") is not None:
        raise ConfigError(
            f"--methods, --method: a probe has its own methods ({', '.join(PROBE)}); leave them "
            "out, or compare others with 'coterie compare'"
        )
    asked = configure(source, **options)
    if asked.adapt.name != "none":
        raise ConfigError(
            f"adapt.name: found '{asked.adapt.name}'; a probe compares methods with and without "
            "fine-tuning itself; leave it out"
        )
    if asked.run.federation is not None:
        raise ConfigError(
            "run.federation: a probe compares answers on test samples, and these stay "
            "at the sites; ask 'coterie compare', whose gains the sites compute themselves"
        )
    rounds, seed = asked.run.rounds, asked.run.seed
    out = None if options.get("out") is None else asked.run.out  # the config's is for comparisons
    update: dict[str, Any] = {"methods": PROBE, "out": out}
    if options.get("rounds") is None:
        update["rounds"] = min(rounds, ROUNDS)
    if options.get("seeds") is None and asked.run.folds is None:
        update["seeds"] = tuple(range(seed, seed + SEEDS))
    return asked.model_copy(update={"run": asked.run.model_copy(update=update)})


def advise_config(config: Config, listeners: Sequence[Watch] = ()) -> Advised:
    """Run the probe of a config made by :func:`probe_config`."""
    made = compare_config(config, listeners)
    return Advised(conclude(made), made)


def expected_seconds(config: Config) -> float | None:
    """The time that a probe will take, from the first rounds of a few of its methods.

    None where it is not measured: the clients are in processes of their own.
    """
    with contextlib.closing(assemble(config)) as assembly:
        methods = assembly.config.methods()
        some = [method for method in methods if method.label in TIMED]
        timed = timings(assembly, some, 0.0)
    if not timed:
        return None
    mean = sum(timed) / len(timed)
    return mean * len(methods) * len(config.seeds)
