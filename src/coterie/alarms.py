"""Runs that look like results and are not: a method that did nothing its name says, or blew up.

Published implementations of three methods have silently been local training for years. An alarm is
a short code and one plain sentence; it changes no number and stops no run.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .history import History

TOLERANCE = 1e-6  # relative, on scores and losses: the same training, up to rounding
EXPLODED = 100.0
REGRESSION = ("rmse", "r2")
NOT_FINITE = ("not_finite", "copies")  # reasons of rejections: the client's own training blew up


class Alarm(NamedTuple):
    """Something a reader must know before believing a row of the table."""

    code: str
    text: str
    beside: str = ""  # a few words that stand beside the number in the table


def same_run(a: History, b: History) -> bool:
    """Whether two runs gave every client the same scores and losses in all rounds both evaluated.

    Accuracies alone can agree by chance on small test sets; losses do not.
    """
    if len(a.roster) != len(b.roster):
        return False
    common = np.intersect1d(a.rounds, b.rounds)
    in_a, in_b = np.isin(a.rounds, common), np.isin(b.rounds, common)
    pairs = ((a.test, b.test), (a.test_loss, b.test_loss), (a.val_loss, b.val_loss))
    return len(common) > 0 and all(
        np.allclose(x[in_a], y[in_b], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        for x, y in pairs
    )


def of_divergence(history: History) -> list[Alarm]:
    """A run that blew up, and the first round that shows it."""
    signs = [*_wild_scores(history), *_wild_uploads(history)]
    if not signs:
        return []
    index, what = min(signs)
    beside = f"diverged in round {index + 1}"
    text = f"{history.method} {beside}: {what}. Lower train.lr, or set train.clip or data.scale."
    return [Alarm("diverged", text, beside)]


def _wild_scores(history: History) -> list[tuple[int, str]]:
    """The first evaluated round with a client whose predictions are not finite or loss explodes.

    A loss has exploded above 100 for classes, where guessing has at most about 10, and above 10,000
    times the first one (or 1) for a regression, whose loss is half the squared error.
    """
    most = np.full(len(history.roster), EXPLODED)
    if history.metric in REGRESSION:
        most = EXPLODED**2 * np.fmax(1.0, history.test_loss[0])
    for index, scores, losses in zip(history.rounds, history.test, history.test_loss, strict=True):
        judged = ~np.isnan(scores)  # the others have no test data, or no model
        fine = np.isfinite(scores) & (losses <= most)
        wild = int((judged & ~fine).sum())
        if wild:
            whose = f"the models of {wild} of {judged.sum()} clients"
            return [(int(index), f"{whose} predict no finite numbers, or with an exploding loss")]
    return []


def _wild_uploads(history: History) -> list[tuple[int, str]]:
    """The first round by which half of the clients have sent numbers that are not finite."""
    seen: set[str] = set()
    for line in history.lines:
        seen |= {r["client"] for r in line["rejected"] if r["reason"] in NOT_FINITE}
        if 2 * len(seen) >= len(history.roster):
            return [(line["round"], f"{len(seen)} clients have sent NaN or infinite numbers")]
    return []


def of_weights(history: History) -> list[Alarm]:
    """Collaboration weights that say nothing, in every round that has any."""
    seen = {line["off_diagonal"] for line in history.lines if "off_diagonal" in line}
    name = history.method
    if seen == {"zero"}:
        text = f"{name} gave no weight to any other client in any round: it is training alone."
        return [Alarm("no_collaboration", text)]
    if seen == {"uniform"}:
        text = f"{name} weighed all other clients alike in every round: it is plain averaging."
        return [Alarm("uniform_weights", text)]
    return []


def of_copies(history: History, references: Sequence[tuple[str, History]]) -> list[Alarm]:
    """A run that equals Local's or FedAvg's."""
    return [
        Alarm(
            f"equals_{name}",
            f"{history.method} gave every client the same scores and losses as {name} in every "
            "round: its own part had no effect.",
        )
        for name, reference in references
        if history.method != name and same_run(history, reference)
    ]


def raise_alarms(history: History, references: Mapping[str, History]) -> tuple[Alarm, ...]:
    """Every alarm of a run; ``references`` are other methods' runs of the same seed.

    Local and FedAvg are what the alarms compare with and raise none about themselves, except that
    FedAvg may equal Local and that either may diverge.
    """
    known = [(name, references[name]) for name in ("local", "fedavg") if name in references]
    diverged = of_divergence(history)
    if history.method == "local":
        return tuple(diverged)
    weights = [] if history.method == "fedavg" else of_weights(history)
    copies = of_copies(history, known)
    return (*diverged, *weights, *copies)
