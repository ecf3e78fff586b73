"""Is joining worth it? One plain sentence, and a second only where a reader must be warned."""

import math
from typing import TYPE_CHECKING

from ..results import LOCAL
from . import words

if TYPE_CHECKING:
    from ..results import Comparison, Row

SIGNIFICANT = 0.05


def verdict(comparison: "Comparison") -> str:
    """The answer for whoever has to decide.

    The method named is the one with the largest mean gain over Local in the last round. Picking the
    best of several makes its p-value too small, so it is multiplied by their number (Bonferroni).
    """
    rows = [row for row in comparison.rows if row.method != LOCAL]
    judged = [row for row in rows if not math.isnan(row.relative_to_local.mean)]
    if not rows:
        answer = "Only local training was run, so there is nothing to compare it with."
    elif not judged:
        answer = "No client has test data, so nothing can be said about joining."
    else:
        best = max(judged, key=lambda row: row.relative_to_local.mean)
        answer = _answer(comparison, best, len(rows))
    return " ".join([answer, *_warnings(comparison)])


def corrected(row: "Row", tried: int) -> float:
    """The p-value of the paired test, corrected for having tried several methods."""
    return 1.0 if row.paired is None else min(1.0, row.paired.p * tried)


def _answer(comparison: "Comparison", best: "Row", tried: int) -> str:
    metric = comparison.metric
    local = next(row for row in comparison.rows if row.method == LOCAL)
    p, unit = corrected(best, tried), words.unit(metric)
    mean, alone = words.number(best.mean.mean, metric), words.number(local.mean.mean, metric)
    outcome = (
        f"{words.label(best.method)} gives a mean {words.METRIC_NAMES[metric]} of {mean}{unit} "
        f"instead of {alone}{unit} alone, with {_heads(comparison, best)}"
    )
    test = f"(paired test, {words.chance(p)})"
    if best.relative_to_local.mean <= 0:
        return f"Joining is not worth it here: at best, {outcome}."
    if best.better <= best.worse:
        return f"Joining pays for some clients only: {outcome}."
    if p >= SIGNIFICANT:
        few = best.paired is not None and tried * 2.0 ** (1 - best.paired.n) >= SIGNIFICANT
        why = "for so few clients that it could be chance" if few else "which could be chance"
        return f"Joining may help, but this does not show it: {outcome}, {why} {test}."
    return f"Joining is worth it: {outcome}, which is unlikely to be chance {test}."


def _heads(comparison: "Comparison", row: "Row") -> str:
    """How many are better and worse off, over all seeds."""
    runs = len(comparison.of_method(row.method))
    who = "clients" if runs == 1 else f"clients (over {runs} seeds)"
    return f"{row.better} of {row.compared} {who} better off and {row.worse or 'none'} worse off"


def _warnings(comparison: "Comparison") -> list[str]:
    """A second sentence for alarms and for clients that cannot be judged, where there are any."""
    parts = []
    for row in comparison.rows:
        if row.alarms:
            codes = ", ".join(alarm.code for alarm in row.alarms)
            parts.append(f"{words.label(row.method)} did not do what its name says ({codes})")
    weak = {c: lack for run in comparison.runs for c, lack in run.history.roster.weak.items()}
    if weak:
        named = [f"{client} ({lack})" for client, lack in weak.items()]
        parts.append(f"not enough data to judge {words.listing(named)}")
    return [f"Beware: {'; '.join(parts)}."] if parts else []
