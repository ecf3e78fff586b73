"""What is said of a comparison: one sentence for each question, none without its test.

The four questions are those of :mod:`coterie.core.inference`: the headline is about these sites and
the models of this run; each site has an answer of its own; what is said of training again needs
five seeds; what is said of sites like these is said when it is asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from ..core.inference import TRAININGS, MeanGain, more_rows, smallest_gain
from ..core.metrics import METRICS
from ..core.paired_tests import FEWEST_OF_A_CLASS, Gain
from ..errors import printable_lines
from ..runs.run import LOCAL
from . import words
from .judgement import Claim, ClientGain, Judgement, claim, contrast, models_of, one_deal
from .page import client_index

if TYPE_CHECKING:
    from .comparison import Comparison, MethodRow

AT_MOST = 30.0  # times as many test rows as there were: more than that is not advised


def verdict(comparison: "Comparison") -> str:
    """The verdict about the recommended method, as a few sentences."""
    choice = comparison.choice
    if comparison.methods == (LOCAL,):
        answer = ["Only local training was run, so there is nothing to compare it with."]
    elif choice is None:
        answer = ["No client has test data, so nothing can be said about joining."]
    else:
        row = next(row for row in comparison.rows if row.method == choice.method)
        found = (comparison.judgements or {}).get(choice.method)
        if found is None:
            answer = [_untested(row, comparison.metric), *_chosen(comparison, row)]
        else:
            answer = _answer(comparison, row, found)
    return " ".join([*answer, *_warnings(comparison)])


def _answer(comparison: "Comparison", row: "MethodRow", found: Judgement) -> list[str]:
    lost = [one.client for one in found.clients if one.gain.gain == -math.inf]
    if lost:
        name = words.label(row.method)
        return [
            f"Joining is not worth it as it is: {name} diverged for {words.listing(lost)}.",
            *_chosen(comparison, row),
        ]
    if found.these_sites is None:
        more = "" if comparison.folds is not None else "; --folds 5 tests all rows"
        return [
            f"No site has enough test rows{_kind(comparison.metric)} to judge "
            f"{words.label(row.method)}{more}.",
            _scores(row, comparison.metric),
            *_chosen(comparison, row),
        ]
    return [
        _headline(comparison, found, found.these_sites),
        _scores(row, comparison.metric, found.these_sites.sites),
        *_heads(comparison, found),
        *_chosen(comparison, row),
        _again(comparison, found),
    ]


def _kind(metric: str) -> str:
    """What rows a site lacks that cannot be judged."""
    few = f" (a class needs {FEWEST_OF_A_CLASS} units)"
    return few if METRICS[metric].test == "ranks" else ""


def _headline(comparison: "Comparison", found: Judgement, mean: MeanGain) -> str:
    """B: the mean gain of these sites by the models of this run."""
    where = f"For {_sites(comparison, mean.sites)} and the models of {_runs(comparison)}"
    corrected = f", corrected for {found.tried} methods" if found.tried > 1 else ""
    advice = _advice(comparison, found, mean) if found.claim == "unclear" else ""
    return f"{where}, {_said(mean, comparison.metric, 'joining')}{corrected}.{advice}"


def _sites(comparison: "Comparison", count: int) -> str:
    everybody = len(comparison.runs[0].roster)
    if count == everybody:
        return "this site" if count == 1 else f"these {count} sites"
    return f"{count} of {everybody} sites"


def _runs(comparison: "Comparison") -> str:
    seeds = len(comparison.seeds)
    if comparison.folds is not None:
        return f"{comparison.folds} folds"
    if seeds == 1:
        return "this run"
    return f"these {seeds} runs" if one_deal(comparison) else f"{seeds} deals of the data"


def _size(mean: MeanGain, metric: str, sign: int = 1) -> str:
    """``7.3 points on average (95 % interval 5.1 to 9.4)``; with a sign of -1, of a loss."""
    value, low, high = _turned((mean.gain, mean.low, mean.high), sign, metric)
    average = " on average" if mean.sites > 1 else ""
    return f"{value}{words.points(metric)}{average} (95 % interval {low} to {high})"


def _scores(row: "MethodRow", metric: str, judged: int | None = None) -> str:
    """The mean scores of the method and of training alone; over whom, if not all can be judged."""
    every = f"Over all {row.served} sites with a score, "
    every = every if judged is not None and judged < row.served else ""
    mean, alone = words.number(row.mean.mean, metric), words.number(row.alone.mean, metric)
    unit = words.unit(metric)
    return (
        f"{every}{words.label(row.method)} has a mean {METRICS[metric].title} of {mean}{unit}, "
        f"training alone {alone}{unit}."
    )


def _heads(comparison: "Comparison", found: Judgement) -> list[str]:
    """A: how many sites are told of a gain and of a loss."""
    count = len(found.clients)
    if count < 2:
        return []
    gain, lose = len(found.shown("better")), found.shown("worse")
    losers = f" ({words.listing(lose)})" if lose else ""
    several = len(comparison.seeds) > 1 and comparison.folds is None
    which = f"With the models of {models_of(comparison)}, a" if several else "A"
    return [
        f"{which} gain of its own is shown for {gain or 'none'} of {count} sites, a loss for "
        f"{len(lose) or 'none'}{losers}."
    ]


def _advice(comparison: "Comparison", found: Judgement, mean: MeanGain) -> str:
    """A sentence on how many test rows would show the gain."""
    times = more_rows(mean.gain, mean.error)
    if times is None:
        return ""
    if times > AT_MOST:
        return f" Even {AT_MOST:.0f} times as many test rows would hardly tell."
    now = sum(one.gain.samples for one in found.clients) / max(1, len(found.clients))
    return f" About {_about(times * now):,} test rows per site instead of {now:.0f} might tell."


def _about(rows: float) -> int:
    """So many rows, rounded up to two digits."""
    unit = 10 ** max(0, math.floor(math.log10(rows)) - 1)
    return int(math.ceil(rows / unit) * unit)


def _chosen(comparison: "Comparison", row: "MethodRow") -> list[str]:
    """A sentence on how the method was chosen among several, and which is best on test data."""
    choice, metric = comparison.choice, comparison.metric
    if choice is None or choice.on == "nothing":
        return []
    name = words.label(row.method)
    if choice.on == "test":
        return [
            f"{name} is the best of {choice.tried} methods on test data, because there is no "
            "validation score to choose by, of rows that were not trained on."
        ]
    best = next(r for r in comparison.rows if r.method == comparison.best_on_test)
    top = f"{words.number(best.mean.mean, metric)}{words.unit(metric)}"
    mine = f"{words.number(row.mean.mean, metric)}{words.unit(metric)}"
    rival = "" if mine == top else f"; {words.label(best.method)} is best on test data ({top})"
    among = f" among {choice.tried} methods" if choice.tried > 1 else ""
    return [f"{name} was chosen{among} on validation data{rival}."]


def _again(comparison: "Comparison", found: Judgement) -> str:
    """C: what training again would show, or what it needs."""
    if found.trained_again is None:
        return f"Training again is not covered{_needed(comparison)}."
    said = _said(found.trained_again, comparison.metric, "joining")
    return f"Trained again ({len(comparison.seeds)} seeds), {said}{_for_all(comparison)}."


def _needed(comparison: "Comparison") -> str:
    """What C needs that these runs lack."""
    if comparison.folds is not None:
        return ""
    anew = "" if one_deal(comparison) else ' that train the same clients (run.deal = "fixed")'
    return f": run {TRAININGS} seeds{anew}"


def _said(mean: MeanGain, metric: str, subject: str) -> str:
    """``joining gains 7.3 points on average (...)``, or that it is open."""
    sign = -1 if (shown := claim(mean)) == "worse" else 1
    what, size = words.gains(metric, sign < 0), _size(mean, metric, sign)
    if shown == "unclear":
        return f"it is open whether {subject} {what.removesuffix(' by')}: {size}"
    return f"{subject} {what} {size}"


def _for_all(comparison: "Comparison") -> str:
    methods = len(comparison.methods) - 1
    return f", corrected for {methods} methods" if methods > 1 else ""


def like_these(comparison: "Comparison") -> str:
    """D: a sentence about all sites like these, of which these are a sample."""
    choice = comparison.choice
    found = None if choice is None else (comparison.judgements or {}).get(choice.method)
    mean = None if found is None else found.sites_like_these
    if mean is None:
        return "Of sites like these nothing can be said: that takes two sites with test rows."
    said = _said(mean, comparison.metric, "joining")
    return f"For sites like these, {said}{_for_all(comparison)}."


def contrasted(comparison: "Comparison", first: str, second: str) -> str:
    """C for one pair of methods that was named before the runs."""
    mean, names = contrast(comparison, first, second), (words.label(first), words.label(second))
    if mean is None:
        return f"{names[0]} against {names[1]}: cannot tell{_needed(comparison)}."
    said = _said(mean, comparison.metric, f"{names[0]} in place of {names[1]}")
    return f"Trained again ({len(comparison.seeds)} seeds), {said}; the pair was named beforehand."


def _untested(row: "MethodRow", metric: str) -> str:
    return (
        "Nothing is tested, because these runs were written without their test predictions. "
        f"{_scores(row, metric)} Run them again with this version for a verdict."
    )


def _warnings(comparison: "Comparison") -> list[str]:
    """A last sentence that names alarms and clients that cannot be judged, if there are any."""
    parts = []
    for row in comparison.rows:
        if row.alarms:
            codes = ", ".join(alarm.code for alarm in row.alarms)
            parts.append(f"there is an alarm about {words.label(row.method)} ({codes})")
    short = {name for one in (comparison.judgements or {}).values() for name in one.left_out}
    if short:
        rows = f"test rows{_kind(comparison.metric)}"
        parts.append(f"too few {rows} to judge {words.listing(sorted(short))}, left out")
    scores = comparison.site_scores(LOCAL)
    roster = comparison.runs[0].roster
    no_score = [
        name
        for i, name in enumerate(roster.clients)
        if math.isnan(scores[i]) and comparison.test_rows(i) and name not in roster.weak
    ]
    if no_score and comparison.runs[0].outcomes is not None:  # else a site may not have answered
        title = METRICS[comparison.metric].title
        parts.append(f"the test rows of {words.listing(no_score)} have no {title}")
    weak = {c: lack for run in comparison.runs for c, lack in run.roster.weak.items()}
    if weak:
        named = [f"{client} ({lack})" for client, lack in weak.items()]
        parts.append(f"too little data at {words.listing(named)}")
    return [f"Beware: {'; '.join(parts)}."] if parts else []


# ---- the answer to one site: does joining gain it anything, is that sure, and on whom it relies -

# The page, ``comparison.json``, ``Comparison.client`` and the page of a single site all show the
# sentence that is made here.


@final
@dataclass(frozen=True, repr=False)
class SiteAnswer:
    """What a comparison says to one client, about the recommended method."""

    client: str
    method: str | None  # the recommended method; None if there is none
    claim: Claim
    gain: Gain | None  # by that method over training alone; None if it could not be judged
    test_rows: int
    helpers: tuple[str, ...]  # the clients that it clearly relied on, the largest weight first
    mostly: bool  # whether these have more than half of its weight on others
    gains: tuple[ClientGain, ...]  # by every method
    sentence: str

    def __repr__(self) -> str:
        return self.sentence

    def to_dict(self) -> dict[str, Any]:
        """The answer as values of JSON, without the gains by other methods."""
        gain = None if self.gain is None else self.gain._asdict()
        return {
            **{"client": self.client, "method": self.method, "shown": self.claim, "gain": gain},
            **{"test_rows": self.test_rows, "helpers": list(self.helpers), "mostly": self.mostly},
            "sentence": self.sentence,
        }


def site_answer(comparison: "Comparison", name: str, called: Sequence[str] = ()) -> SiteAnswer:
    """The answer to one client; ``called`` are names to use for the clients instead of theirs."""
    roster = comparison.runs[0].roster
    i, called = client_index(roster, name), called or roster.clients
    gains = comparison.gains_by_client[name]
    method = None if comparison.choice is None else comparison.choice.method
    one = next((gain for gain in gains if gain.method == method), None)
    relied = comparison.reliances.get(method) if method is not None else None
    helpers = [] if relied is None else [called[j] for j in relied.helpers(i)]
    mostly = relied is not None and relied.mostly(i)
    rows = comparison.test_rows(i) if one is None else one.gain.samples
    seldom = "" if relied is None else relied.seldom(i)
    text = f"{_sentence(comparison, one, rows)}{_relied(helpers, mostly, seldom)}"
    return SiteAnswer(
        name,
        method,
        "unclear" if one is None else one.claim,
        None if one is None else one.gain,
        rows,
        tuple(helpers),
        mostly,
        gains,
        printable_lines(f"{called[i]}: {text}"),
    )


def _sentence(comparison: "Comparison", one: ClientGain | None, rows: int) -> str:
    """What follows the name of the client."""
    tested = f"{rows or 'no'} test row{'' if rows == 1 else 's'}"
    if one is None:
        lack = _kind(comparison.metric) if rows else ""
        lack = " (answers were not kept)" if comparison.judgements is None else lack
        return f"cannot tell, {tested}{lack}."
    gain, metric, method = one.gain, comparison.metric, words.label(one.method)
    if gain.gain == -math.inf:
        return f"joining with {method} costs you your model: it diverged; {tested}."
    own = f"your {rows} rows alone"
    if one.claim not in ("better", "worse"):
        _, *ends = words.numbers((gain.gain, gain.low, gain.high), metric)
        size = f"{words.number(gain.gain, metric, sign=True)}{words.points(metric)} "
        size += f"({' to '.join(ends)})"
        lead = "" if METRICS[metric].percent else f"a gain in {METRICS[metric].title} of "
        return f"open: {own} show {lead}{size}{_why_open(comparison, one)}."
    sign = 1 if one.claim == "better" else -1
    what, points = words.gains(metric, sign < 0, you=True), words.points(metric)
    seen, low, high = _turned((gain.gain, gain.low, gain.high), sign, metric)
    shown = f"{seen}{points} ({own} {low} to {high})"
    if one.with_others is not None:
        value, *ends = _turned(one.with_others, sign, metric)
        others = f"with what the other {one.sites - 1} sites show"
        shown = f"{value}{points} ({ends[0]} to {ends[1]}, {others}; {own} {seen}, {low} to {high})"
    return f"joining {what} {shown} with {method}. Of sites told this at most 1 in 20 is wrong."


def _turned(ends: tuple[float, float, float], sign: int, metric: str) -> list[str]:
    """A gain and its interval as text; with a sign of -1, as a loss."""
    value, low, high = ends if sign > 0 else (-ends[0], -ends[2], -ends[1])
    return words.numbers((value, low, high), metric)


def _why_open(comparison: "Comparison", one: ClientGain) -> str:
    """Why nothing is said to a site, and what might tell."""
    gain = one.gain
    judged = (comparison.judgements or {})[one.method]
    if gain.low > 0 or gain.high < 0:
        return f"; among {one.sites} sites, one may show this by chance" if one.sites > 1 else ""
    if few := _little_to_gain(comparison, one):
        return few
    if judged.claim == "better" and len(judged.clients) > 1:
        return "; the sites gain on average, but your rows do not confirm it"
    times = more_rows(gain.gain, math.sqrt(gain.variance))
    if times is None or times > AT_MOST:
        return ""
    return f"; about {max(gain.samples + 1, _about(times * gain.samples)):,} test rows might tell"


def _little_to_gain(comparison: "Comparison", one: ClientGain) -> str:
    """That training alone is wrong in too few rows for any gain to be shown; empty otherwise."""
    if METRICS[comparison.metric].test != "counts":
        return ""
    rows, site = one.gain.samples, comparison.runs[0].roster.clients.index(one.client)
    wrong = round((1 - float(comparison.site_scores(LOCAL)[site]) / 100) * rows)
    least = smallest_gain(rows, one.sites)
    if least is None or 100 * wrong / rows >= least:
        return ""
    some = f"in only {wrong}" if wrong else "in none"
    return f"; training alone is wrong {some} of them, too few to show a gain"


def _relied(helpers: list[str], mostly: bool, seldom: str) -> str:
    """Which clients' models are in the site's model; that is no claim about what they gain it."""
    if not helpers:
        return ""
    who = " ".join(filter(None, [words.listing(helpers), seldom]))
    return f" You rely {'mostly' if mostly else 'partly'} on {who}."
