"""The page for one site alone: its own rows and curves; other sites are only "peer 1", "peer 2".

The page is made from the values of this site and from nothing of the others: no name, count,
score or hash of theirs, and no mean or digest that theirs enter.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .. import __version__
from ..core.metrics import METRICS
from ..runs.run import LOCAL, Run
from . import figures, page, words
from .clinical import ClinicalChoice
from .clinical_page import clinical_view
from .comparison import Comparison
from .judgement import models_of
from .reliance import MOST_CLIENTS, Reliance, on_others, reliance
from .verdict import site_answer


def site_page(found: Comparison | Run, name: str, choice: ClinicalChoice | None = None) -> str:
    """The page for one site, of a comparison or of one run, as HTML text."""
    compared = found if isinstance(found, Comparison) else None
    runs = found.runs if isinstance(found, Comparison) else (found,)
    roster = runs[0].roster
    i = page.client_index(roster, name)
    chosen = _chosen(found)
    order = [] if chosen is None else _peer_order(chosen, i)
    called = [f"peer {order.index(j) + 1}" if j in order else "a peer" for j in range(len(roster))]
    called[i] = name
    relied = None if chosen is None else reliance(list(chosen))
    said = page.ONE_RUN if compared is None else site_answer(compared, name, called).sentence
    return page.rendered(
        "site.html",
        {
            "eyebrow": "coterie, for one site",
            "title": name,
            "verdict": page.unbroken(said),
            "facts": _facts(found, i),
            "alarms": [],
            "rejected": _rejected(runs, name),
            "curves": figures.site_curves(_by_method(runs), i),
            "metric": METRICS[runs[0].metric].title,
            "lines": _method_lines(found, i),
            "peers": [] if relied is None else _peer_lines(relied, i, order),
            "seldom": "" if relied is None else relied.seldom(i),
            "by": words.NONE if chosen is None else words.label(chosen[0].method),
            "own": True,
            "models": f"seed {runs[0].seed}" if compared is None else models_of(compared),
            "clinical": clinical_view(_shown(found), choice, i),
            "exposed": page.exposed(_by_method(runs), i),
            "warned": _warned(found),
            "methods": list(dict.fromkeys(words.label(run.method) for run in runs)),
            "version": __version__,
        },
    )


def _chosen(found: Comparison | Run) -> tuple[Run, ...] | None:
    """The runs of the recommended method, or the one run."""
    if isinstance(found, Run):
        return (found,)
    return None if found.choice is None else found.of_method(found.choice.method)


def _shown(found: Comparison | Run) -> dict[str, Sequence[Run]]:
    """The runs of the recommended method and of Local that the site is told of."""
    if isinstance(found, Run):
        return {found.method: [found]}
    methods = [LOCAL] if found.choice is None else [found.choice.method, LOCAL]
    return {method: found.told(method) for method in methods}


def _peer_order(runs: tuple[Run, ...], i: int) -> list[int]:
    """The other clients, by this site's weight on them, over all rounds and then in each round.

    So the order depends on nothing but numbers that this site knows: clients with equal numbers are
    exchangeable.
    """
    weights = [
        on_others(packed, run.swaps)[i]
        for run in runs
        for packed in (run.matrices if len(run.roster) <= MOST_CLIENTS else ())
    ]
    if not weights:
        return []
    rows = np.array(weights)
    others = [j for j in range(rows.shape[1]) if j != i]
    return sorted(others, key=lambda j: (-rows[:, j].sum(), *(-rows[:, j])))


def _by_method(runs: tuple[Run, ...]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.method, []).append(run)
    return found


def _facts(found: Comparison | Run, i: int) -> list[tuple[str, str]]:
    runs = found.runs if isinstance(found, Comparison) else (found,)
    roster = runs[0].roster
    train, val, test = (int(n[i]) for n in (roster.n_train, roster.n_val, roster.n_test))
    rows = [("training rows", train), ("validation rows", val), ("test rows", test)]
    several = [("seeds", len({run.seed for run in runs}))]
    if isinstance(found, Comparison) and found.folds is not None:
        rows = [("rows of this site, each tested in one fold", train + val + test)]
        several = [("folds", found.folds)]
    facts = [("sites", len(roster)), *rows, ("rounds", len(runs[0].lines)), *several]
    return [(name, str(number)) for name, number in facts]


def _rejected(runs: tuple[Run, ...], name: str) -> list[str]:
    """One sentence for each method and reason why uploads of this site were rejected."""
    found = Counter(
        (run.method, one["reason"])
        for run in runs
        for line in run.lines
        for one in line["rejected"]
        if one["client"] == name
    )
    return [
        f"{words.label(method)}: {count} uploads of this site were left out as "
        f"{reason.replace('_', ' ')}."
        for (method, reason), count in found.items()
    ]


def _warned(found: Comparison | Run) -> list[str]:
    """The methods about which an alarm was raised; its text may tell about other sites."""
    if isinstance(found, Run):
        codes = {found.method: [alarm["code"] for alarm in found.summary["alarms"]]}
    else:
        codes = {row.method: [alarm.code for alarm in row.alarms] for row in found.rows}
    return [f"{words.label(m)}: {', '.join(some)}" for m, some in codes.items() if some]


def _method_lines(found: Comparison | Run, i: int) -> list[tuple[str, ...]]:
    if isinstance(found, Run):
        score = words.number(float(found.last[i]), found.metric)
        return [(words.label(found.method), score, words.NONE, words.NONE)]
    name = found.runs[0].roster.clients[i]
    judged = {one.method: one for one in found.gains_by_client[name]}
    lines: list[tuple[str, ...]] = []
    for method in found.methods:
        score = words.number(float(found.site_scores(method)[i]), found.metric)
        one, gain, shown = judged.get(method), words.NONE, words.NONE
        if one is not None:
            of = one.gain
            gain, shown = words.gain_cell(of.gain, of.low, of.high, found.metric), one.claim
        lines.append((words.label(method), score, gain, shown if method != LOCAL else ""))
    return lines


def _peer_lines(relied: Reliance, i: int, order: list[int]) -> list[tuple[str, ...]]:
    shown = {True: "yes", False: "not shown"}
    parts = ((words.part(relied.share[i, j]), shown[bool(relied.clear[i, j])]) for j in order)
    return [(f"peer {k}", *part) for k, part in enumerate(parts, start=1)]
