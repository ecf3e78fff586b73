"""The verdict of a comparison: is joining worth it, for the federation and for each client?

Every claim rests on a test (``views.judgement``): "worth it", "worth it for these clients" and
"not worth it" are said only if they are shown. Otherwise the verdict says that the question is open
and how much more data would probably answer it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from ..core.metrics import METRICS
from ..core.paired import Gain
from ..errors import printable_lines
from ..runs.run import LOCAL
from . import words
from .judgement import Claim, ClientGain, Judgement
from .mean_gain import AT_MOST, more, more_samples
from .page import client_index

if TYPE_CHECKING:
    from .comparison import Comparison, MethodRow


def verdict(comparison: "Comparison") -> str:
    """The verdict about the recommended method, as a few sentences."""
    choice = comparison.choice
    if comparison.methods == (LOCAL,):
        answer = ["Only local training was run, so there is nothing to compare it with."]
    elif choice is None:
        answer = ["No client has test data, so nothing can be said about joining."]
    else:
        row = next(row for row in comparison.rows if row.method == choice.method)
        judged = (comparison.judgements or {}).get(choice.method)
        found = _untested(comparison, row) if judged is None else _answer(comparison, row, judged)
        answer = [found, *_chosen(comparison, row)]
    return " ".join([*answer, *_warnings(comparison)])


def _answer(comparison: "Comparison", row: "MethodRow", found: Judgement) -> str:
    outcome, metric = _outcome(comparison, row), comparison.metric
    lost = [one.client for one in found.clients if one.gain.gain == -math.inf]
    if lost:
        name = words.label(row.method)
        return f"Joining is not worth it as it is: {name} diverged for {words.listing(lost)}."
    mean = found.overall
    size = words.interval(mean.gain, mean.low, mean.high, metric)
    p = words.chance(found.p)
    p += f", corrected for {found.tried} methods" if found.tried > 1 else ""
    shown = f"{size}, which is unlikely to be chance ({p})"
    gain, lose = found.shown("better"), found.shown("worse")
    if found.claim == "better":
        return f"Joining is worth it: {outcome}, {shown}.{_heads(found)}"
    if gain and len(found.clients) > 1:
        whole = shown if found.claim == "worse" else f"{size}, which shows nothing"
        others = f" A loss is shown for {words.listing(lose)}." if lose else ""
        return (
            f"Joining is worth it for some clients: a gain is shown for {words.listing(gain)}. On "
            f"the mean over clients {outcome}, {whole}.{others}"
        )
    if found.claim == "worse":
        return f"Joining is not worth it: {outcome}, {shown}.{_heads(found)}"
    return (
        f"This does not tell whether joining is worth it: {outcome}, {size}, which could be chance "
        f"({p}). {_advice(comparison, found)}{_heads(found)}"
    )


def _outcome(comparison: "Comparison", row: "MethodRow") -> str:
    metric, unit = comparison.metric, words.unit(comparison.metric)
    mean, alone = words.number(row.mean.mean, metric), words.number(row.alone.mean, metric)
    everybody = len(comparison.runs[0].roster)
    who = "" if row.served == everybody else f" for the {row.served} of {everybody} clients judged"
    return (
        f"{_when(comparison)} {words.label(row.method)} gives a mean {METRICS[metric].title} "
        f"of {mean}{unit} instead of {alone}{unit} alone{who}"
    )


def _when(comparison: "Comparison") -> str:
    seeds = len(comparison.seeds)
    return "in this run" if seeds == 1 else f"over {seeds} seeds"


def _heads(found: Judgement) -> str:
    """A sentence on how many clients are shown to gain and to lose."""
    count = len(found.clients)
    if count < 2:
        return ""
    gain, lose = len(found.shown("better")), found.shown("worse")
    losers = f" ({words.listing(lose)})" if lose else ""
    return (
        f" A gain of its own is shown for {gain or 'none'} of {count} clients, a loss for "
        f"{len(lose) or 'none'}{losers}."
    )


def _advice(comparison: "Comparison", found: Judgement) -> str:
    """A sentence on how many test samples, seeds or clients would show the gain."""
    wanted = more(found.overall, found.tried)
    now = sum(one.gain.samples for one in found.clients) / max(1, len(found.clients))
    if wanted.data is not None:
        samples, seeds = (
            math.ceil(wanted.data * now),
            math.ceil(wanted.data * len(comparison.seeds)),
        )
        seeds = max(seeds, len(comparison.seeds) + 1)
        return (
            f"A gain of this size would probably show with {samples} test samples for each client "
            f"instead of {now:.0f}, or with {seeds} seeds."
        )
    if wanted.clients is not None:
        return (
            "The clients differ too much for more test samples to tell; "
            f"{wanted.clients} clients like these probably would."
        )
    return f"Even {AT_MOST:.0f} times as many test samples would not show a gain of this size."


def _chosen(comparison: "Comparison", row: "MethodRow") -> list[str]:
    """A sentence on how the method was chosen among several, and which is best on test data."""
    choice, metric = comparison.choice, comparison.metric
    if choice is None or choice.on == "nothing":
        return []
    name = words.label(row.method)
    if choice.on == "test":
        return [
            f"{name} is the best of {choice.tried} methods on test data, because there is no "
            "validation data to choose by that was not trained on."
        ]
    best = next(r for r in comparison.rows if r.method == comparison.best_on_test)
    top = f"{words.number(best.mean.mean, metric)}{words.unit(metric)}"
    rival = (
        "" if best.method == row.method else f"; {words.label(best.method)} is best on test data"
    )
    rival += f" ({top})" if rival else ""
    return [f"{name} was chosen among {choice.tried} methods on validation data{rival}."]


def _untested(comparison: "Comparison", row: "MethodRow") -> str:
    return (
        f"Nothing is tested, because these runs were written without their test predictions: "
        f"{_outcome(comparison, row)}. Run them again with this version for a verdict."
    )


def client_sentence(comparison: "Comparison", one: ClientGain) -> str:
    """One sentence on what a method gains or loses for one client."""
    metric, name, when = comparison.metric, words.label(one.method), _when(comparison)
    gain = one.gain
    if gain.gain == -math.inf:
        return f"{when.capitalize()} {name} diverged for {one.client}."
    size = words.interval(gain.gain, gain.low, gain.high, metric)
    if one.claim != "unclear":
        return (
            f"{when.capitalize()} {name} served {one.client} {one.claim} than its local model: "
            f"{size}, unlikely to be chance ({words.chance(one.p)} after correction)."
        )
    wanted = more_samples(gain, one.tests)
    alone = ", too little among so many clients and methods" if gain.low * gain.high > 0 else ""
    tell = "" if wanted is None else f"; {wanted} test samples instead of {gain.samples} might tell"
    start = f"{when.capitalize()} {name} is not shown to help or harm {one.client}"
    return f"{start}: {size}{alone}{tell}."


def _warnings(comparison: "Comparison") -> list[str]:
    """A last sentence that names alarms and clients that cannot be judged, if there are any."""
    parts = []
    for row in comparison.rows:
        if row.alarms:
            codes = ", ".join(alarm.code for alarm in row.alarms)
            parts.append(f"there is an alarm about {words.label(row.method)} ({codes})")
    weak = {c: lack for run in comparison.runs for c, lack in run.roster.weak.items()}
    if weak:
        named = [f"{client} ({lack})" for client, lack in weak.items()]
        parts.append(f"not enough data to judge {words.listing(named)}")
    return [f"Beware: {'; '.join(parts)}."] if parts else []


# ---- the answer to one site: does joining gain it anything, thanks to whom, and is that sure? ---

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
    return _answer_of(comparison, client_index(roster, name), called or roster.clients)


def answers(comparison: "Comparison") -> tuple[SiteAnswer, ...]:
    """The answers to all clients; none if there is no method beside Local."""
    if comparison.choice is None:
        return ()
    names = comparison.runs[0].roster.clients
    return tuple(_answer_of(comparison, i, names) for i in range(len(names)))


def _answer_of(comparison: "Comparison", i: int, called: Sequence[str]) -> SiteAnswer:
    roster = comparison.runs[0].roster
    name = roster.clients[i]
    gains = comparison.client_gains(name)
    method = None if comparison.choice is None else comparison.choice.method
    one = next((gain for gain in gains if gain.method == method), None)
    relied = comparison.reliances.get(method) if method is not None else None
    helpers = [] if relied is None else [called[j] for j in relied.helpers(i)]
    mostly = relied is not None and relied.mostly(i)
    rows = int(roster.n_test[i])
    text = _sentence(comparison, one, rows, _thanks(helpers, mostly, one))
    return SiteAnswer(
        name,
        method,
        "unclear" if one is None else one.claim,
        None if one is None else one.gain,
        rows,
        tuple(helpers),
        mostly,
        gains,
        printable_lines(f"{called[i]}: {text}."),
    )


def _sentence(comparison: "Comparison", one: ClientGain | None, rows: int, thanks: str) -> str:
    """What follows the name of the client."""
    tested = f"{rows or 'no'} test row{'' if rows == 1 else 's'}"
    if one is None:
        lack = "" if comparison.judgements is not None else " (answers were not kept)"
        return f"cannot tell, {tested}{lack}{thanks}"
    gain, method = one.gain, words.label(one.method)
    if gain.gain == -math.inf:
        return f"joining with {method} costs you your model: it diverged; sure; {tested}"
    size = size_of(gain, comparison.metric)
    if one.claim == "better":
        return f"joining gains you {size} with {method}{thanks}; sure; {tested}"
    if one.claim == "worse":
        return f"joining costs you: {size} with {method}{thanks}; sure; {tested}"
    wanted = more_samples(gain, one.tests)
    tell = "" if wanted is None else f"; {wanted} test rows might tell"
    many = ", too little among so many sites and methods" if gain.low * gain.high > 0 else ""
    return f"cannot tell, {tested}: {size} with {method}{many}{thanks}{tell}"


def size_of(gain: Gain, metric: str) -> str:
    """A gain with its interval: ``+7.1 points (3.2 to 11.0)``."""
    unit = " points" if METRICS[metric].percent else f" {METRICS[metric].title}"
    low, high = (words.number(end, metric) for end in (gain.low, gain.high))
    return f"{words.number(gain.gain, metric, sign=True)}{unit} ({low} to {high})"


def _thanks(helpers: list[str], mostly: bool, one: ClientGain | None) -> str:
    if not helpers:
        return ""
    part, who = "mostly" if mostly else "partly", words.listing(helpers)
    if one is not None and one.claim == "better":
        return f", {part} thanks to {who}"
    return f"; you rely {part} on {who}"
