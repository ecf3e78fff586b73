"""The answer to one site: does joining gain it anything, thanks to whom, and is that sure?

The page, ``comparison.json``, ``Comparison.client`` and the page of a single site all show the
sentence that is made here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from ..core.metrics import METRICS
from ..core.paired import Gain
from ..errors import printable_lines
from ..results.judgement import Claim, ClientGain
from ..results.mean_gain import more_samples
from . import words
from .pieces import client_index

if TYPE_CHECKING:
    from .outcomes import Comparison


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
    roster = comparison.runs[0].history.roster
    return _answer(comparison, client_index(roster, name), called or roster.clients)


def answers(comparison: "Comparison") -> tuple[SiteAnswer, ...]:
    """The answers to all clients; none if there is no method beside Local."""
    if comparison.choice is None:
        return ()
    names = comparison.runs[0].history.roster.clients
    return tuple(_answer(comparison, i, names) for i in range(len(names)))


def _answer(comparison: "Comparison", i: int, called: Sequence[str]) -> SiteAnswer:
    roster = comparison.runs[0].history.roster
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
