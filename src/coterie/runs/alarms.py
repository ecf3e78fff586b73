"""Alarms about runs whose numbers mislead: the method had no effect, or it diverged.

Published implementations of three methods have silently been local training for years. An alarm is
a short code and one plain sentence; it changes no number and stops no run.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.metrics import METRICS
from .run import Run

TOLERANCE = 1e-6  # relative difference of scores and losses up to which two trainings are the same
STILL_SAME = 0.1  # share of later scores that must be the same, because Local may stop early
EXPLODED = 100.0
NOT_FINITE = ("not_finite", "copies")  # reasons of rejections: the client's own training diverged


class Alarm(NamedTuple):
    """Something a reader must know before believing a row of the table."""

    code: str
    text: str
    beside: str = ""  # a few words that the table shows beside the number


def same_run(a: Run, b: Run) -> bool:
    """Whether two runs gave every client the same scores and losses in all rounds both evaluated.

    Accuracies alone can agree by chance on small test sets; losses do not. Where Local predicts
    with an earlier model, whose validation loss is lower, its scores are not those of its training
    and are not compared.
    """
    if len(a.roster) != len(b.roster):
        return False
    if _silent(a).any():  # accuracies alone may agree by chance
        return False
    common = np.intersect1d(a.rounds, b.rounds)
    in_a, in_b = np.isin(a.rounds, common), np.isin(b.rounds, common)
    pairs = ((a.test, b.test), (a.test_loss, b.test_loss), (a.val_loss, b.val_loss))
    close = [
        np.isclose(x[in_a], y[in_b], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        for x, y in pairs
    ]
    same = np.logical_and.reduce(close)  # [rounds, clients]
    earlier = (b.method == "local") & (b.val_loss[in_b] < a.val_loss[in_a])
    later = same[1:] if len(same) > 1 else same  # methods may begin by training alone
    return len(common) > 0 and bool((same | earlier).all() and later.mean() >= STILL_SAME)


def _silent(history: Run) -> NDArray[np.bool_]:
    """Which clients are sites of a federation that tell no losses ``[K]``."""
    if history.config.get("run", {}).get("federation") is None:
        return np.zeros(len(history.roster), bool)
    silent: NDArray[np.bool_] = np.logical_and.reduce(np.isnan(history.test_loss))
    return silent


def of_divergence(history: Run) -> list[Alarm]:
    """The alarm that a run diverged, with the first round that shows it."""
    signs = [*_wild_scores(history), *_wild_uploads(history)]
    if not signs:
        return []
    index, what = min(signs)
    beside = f"diverged in round {index + 1}"
    text = f"{history.method} {beside}: {what}. Lower train.lr, or set train.clip or data.scale."
    return [Alarm("diverged", text, beside)]


def _wild_scores(history: Run) -> list[tuple[int, str]]:
    """The first evaluated round in which a client predicts no finite numbers or its loss explodes.

    A loss has exploded above 100 for classes, where guessing has at most about 10, and above 10,000
    times the first one (or 1) for a regression, whose loss is half the squared error.
    """
    most, silent = np.full(len(history.roster), EXPLODED), _silent(history)
    if METRICS[history.metric].targets == "numbers":
        most = EXPLODED**2 * np.fmax(1.0, history.test_loss[0])
    for index, scores, losses in zip(history.rounds, history.test, history.test_loss, strict=True):
        judged = ~np.isnan(scores)  # the others have no test data, or no model
        fine = np.isfinite(scores) & ((losses <= most) | silent)
        wild = int((judged & ~fine).sum())
        if wild:
            whose = f"the models of {wild} of {judged.sum()} clients"
            return [(int(index), f"{whose} predict no finite numbers, or with an exploding loss")]
    return []


def _wild_uploads(history: Run) -> list[tuple[int, str]]:
    """The first round by which half of the clients have sent numbers that are not finite."""
    seen: set[str] = set()
    for line in history.lines:
        seen |= {r["client"] for r in line["rejected"] if r["reason"] in NOT_FINITE}
        if 2 * len(seen) >= len(history.roster):
            return [(line["round"], f"{len(seen)} clients have sent NaN or infinite numbers")]
    return []


def of_weights(history: Run) -> list[Alarm]:
    """The alarm that collaboration weights were zero, or uniform, in every round that has any."""
    seen = {line["off_diagonal"] for line in history.lines if "off_diagonal" in line}
    name = history.method
    if seen == {"zero"}:
        text = f"{name} gave no weight to any other client in any round: it is training alone."
        return [Alarm("no_collaboration", text)]
    if seen == {"uniform"}:
        text = f"{name} weighed all other clients alike in every round: it is plain averaging."
        return [Alarm("uniform_weights", text)]
    return []


def of_copies(history: Run, references: Sequence[tuple[str, Run]]) -> list[Alarm]:
    """The alarm that a run gave the same scores as Local or FedAvg."""
    return [
        Alarm(
            f"equals_{name}",
            f"{history.method} gave every client the same scores and losses as {name} in every "
            "round: its own part had no effect.",
        )
        for name, reference in references
        if history.method != name and same_run(history, reference)
    ]


CYCLE_ROUNDS = 10  # a two-cycle is looked for in this many last evaluated rounds, at least 8
CYCLE_SHARE = 0.5  # least share of the scores' variance about their trend; noise has about 1 / 8
CYCLE_POINTS = 3.0  # mean distance of a client's score from its trend, in points


def two_cycle(history: Run) -> tuple[float, float]:
    """How much clients' scores alternate from round to round in the last rounds.

    Returns the share of their variance about a straight line that has period two, and the mean
    amplitude of that part. Returns (0, 0) if it cannot be measured: too few evaluated rounds, or an
    even number of rounds between them.
    """
    rounds, scores = history.rounds[-CYCLE_ROUNDS:], history.test[-CYCLE_ROUNDS:]
    scores = scores[:, np.isfinite(scores).all(0)]
    gaps = set(np.diff(rounds).tolist())
    if len(rounds) < 8 or len(gaps) != 1 or gaps.pop() % 2 == 0 or not scores.size:
        return 0.0, 0.0
    time = np.arange(len(rounds))
    line = np.stack([np.ones(len(time)), time], 1)
    rest = scores - line @ np.linalg.lstsq(line, scores, rcond=None)[0]
    amplitude = (-1.0) ** time @ rest / len(time)
    variance = float((rest**2).mean())
    share = float((amplitude**2).mean()) / variance if variance > 0 else 0.0
    return share, float(np.abs(amplitude).mean())


def of_cycles(history: Run) -> list[Alarm]:
    """The alarm that clients' scores swing with period two."""
    share, amplitude = two_cycle(history)
    if not METRICS[history.metric].percent or share < CYCLE_SHARE or amplitude < CYCLE_POINTS:
        return []
    text = (
        f"{history.method} swings between clients with period two: in the last rounds a client's "
        f"score was {amplitude:.0f} points above and below its trend in turn. The last round shows "
        "one side of the swing; use a smaller learning rate, server_lr or tilt."
    )
    return [Alarm("two_cycle", text)]


def of_teachers(history: Run) -> list[Alarm]:
    """The alarm that the clients' distillation loss rose during training in most rounds."""
    seen = [line["distillation"] for line in history.lines if "distillation" in line]
    rose = [(before, after) for before, after in seen if not after <= before]
    if 2 * len(rose) <= len(seen):
        return []
    before, after = rose[-1]
    text = (
        f"{history.method} moved away from its teacher: in {len(rose)} of {len(seen)} rounds with "
        f"distillation the clients' loss rose during training (from {before:.3g} to {after:.3g} in "
        "the last of them). Its steps are too long; use pafl_kd_bounded or a smaller rate."
    )
    return [Alarm("left_teacher", text)]


def raise_alarms(history: Run, references: Mapping[str, Run]) -> tuple[Alarm, ...]:
    """Every alarm of a run; ``references`` are the runs of other methods with the same seed.

    Other methods are compared with Local and FedAvg. These two raise no alarms of their own, except
    that FedAvg may equal Local, its scores may swing, and either may diverge.
    """
    known = [(name, references[name]) for name in ("local", "fedavg") if name in references]
    diverged = of_divergence(history)
    if history.method == "local":
        return tuple(diverged)
    weights = [] if history.method == "fedavg" else of_weights(history)
    copies = of_copies(history, known)
    return (*diverged, *weights, *copies, *of_cycles(history), *of_teachers(history))
