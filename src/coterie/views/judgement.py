"""Chooses the method that a comparison recommends, and answers four questions about it.

The questions and their tests are those of :mod:`coterie.core.inference`:

    A  my site                      the clients' claims, about the models of the first seed
    B  these sites, these models    the headline
    C  these sites, trained again   needs five seeds that train the same clients
    D  sites like these             said only when asked

The method with the best mean on validation data is recommended; without validation data that was
not trained on, the method with the best mean on test data. After a choice on validation data only
the recommended method is tested in A and B, and others have intervals; after one on test data all
methods are, and Holm's correction holds for all of them. C and D are corrected for all methods.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ..core import inference, metrics
from ..core.inference import MeanGain, holm
from ..core.metrics import METRICS, Floats, higher_is_better
from ..core.paired_tests import LEVEL, Gain, SiteGain, site_gain
from ..errors import ConfigError, did_you_mean
from ..runs.run import LOCAL, Run

if TYPE_CHECKING:
    from .comparison import Comparison

Claim = Literal["better", "worse", "unclear", "untested"]
Question = Literal["these_sites", "trained_again", "sites_like_these"]  # B, C and D
QUESTIONS: tuple[Question, ...] = ("these_sites", "trained_again", "sites_like_these")
CLAIMS: dict[int, Claim] = {1: "better", -1: "worse", 0: "unclear"}


class ClientGain(NamedTuple):
    """The gain of one client by one method over its own local model, with the first seed."""

    client: str
    method: str
    gain: Gain  # as the client's own test samples show it
    claim: Claim
    with_others: tuple[float, float, float] | None  # the gain with what all sites show; its ends
    sites: int  # that were told something about this method, or could have been


class Judgement(NamedTuple):
    """The answers about one method against training alone; None where there is none."""

    method: str
    tested: bool  # whether claims are made about it
    tried: int  # the number of methods that tests were corrected for
    clients: tuple[ClientGain, ...]  # A: the clients that can be judged
    these_sites: MeanGain | None  # B
    trained_again: MeanGain | None  # C
    sites_like_these: MeanGain | None  # D
    left_out: tuple[str, ...]  # clients with too few test samples to judge

    @property
    def claim(self) -> Claim:
        """Whether a gain or a loss of the mean of these sites is shown."""
        return claim(self.these_sites) if self.tested else "untested"

    def shown(self, wanted: Claim) -> list[str]:
        """The names of the clients for which this claim is shown."""
        return [client.client for client in self.clients if client.claim == wanted]


class Choice(NamedTuple):
    """The method that is recommended."""

    method: str
    on: Literal["validation", "test", "nothing"]  # the data that decided; nothing if only one
    tried: int  # number of methods it was chosen among


def claim(mean: MeanGain | None) -> Claim:
    """The claim that a mean gain shows."""
    if mean is None or mean.p >= LEVEL or mean.gain == 0:
        return "unclear"
    return "better" if mean.gain > 0 else "worse"


# ---- the choice ----------------------------------------------------------------------------------


def served(comparison: "Comparison", method: str) -> frozenset[int]:
    """The clients that have test data and, with any seed, a predictor of the method."""
    known = ~np.isnan(comparison.gains_by_seed(method)).all(0)
    return frozenset(np.flatnonzero(known).tolist())


def compared(comparison: "Comparison") -> list[str]:
    """The methods beside Local whose means can be compared: they serve the same clients.

    Of several sets of clients the largest is taken, and of equally large ones the first.
    """
    whom = {m: served(comparison, m) for m in comparison.methods if m != LOCAL}
    most = max(whom.values(), key=len, default=frozenset[int]())
    return [method for method, clients in whom.items() if clients == most and most]


def choose(comparison: "Comparison") -> Choice | None:
    """The method with the best mean in the last round, on validation data or else on test data.

    A method without validation scores is not chosen if another one has them.
    """
    rows, among = {row.method: row for row in comparison.rows}, compared(comparison)
    if len(among) < 2:
        return Choice(among[0], "nothing", 1) if among else None
    sign = 1.0 if higher_is_better(comparison.metric) else -1.0
    validated = {method: sign * rows[method].validation.mean for method in among}
    means = {method: value for method, value in validated.items() if not math.isnan(value)}
    on: Literal["validation", "test"] = "validation" if means else "test"
    means = means or {method: sign * rows[method].mean.mean for method in among}
    return Choice(max(means, key=means.__getitem__), on, len(means))


def best_on_test(comparison: "Comparison") -> str:
    """The method with the best mean on test data in the last round; on a tie, Local.

    Local's mean is taken over the clients that the other methods serve.
    """
    rows, among = {row.method: row for row in comparison.rows}, compared(comparison)
    alone = rows[among[0]].alone.mean if among else rows[LOCAL].mean.mean
    means = {LOCAL: alone, **{method: rows[method].mean.mean for method in among}}
    sign = 1.0 if higher_is_better(comparison.metric) else -1.0
    known = {method: sign * mean for method, mean in means.items() if not math.isnan(mean)}
    return max(known, key=known.__getitem__, default=LOCAL)


def validation_scores(history: Run, served: Floats) -> Floats:
    """The last validation scores ``[K]``, of clients whose own such data was not trained on."""
    unseen = (history.roster.n_val > 0) & (not history.merge_val) & ~np.isnan(served)
    return np.where(unseen, history.val[-1], np.nan)


def median_fold(comparison: "Comparison", method: str) -> Run:
    """The fold whose model is for use: that with the median mean score on validation data."""
    runs = comparison.of_method(method)
    scores = [float(metrics.mean_known(validation_scores(run, run.last))) for run in runs]
    return runs[int(np.argsort(scores, kind="stable")[(len(runs) - 1) // 2])]


# ---- the tests -----------------------------------------------------------------------------------


def judge(comparison: "Comparison") -> dict[str, Judgement] | None:
    """Judge every method beside Local; None if the clients' answers are not known."""
    tested = [method for method in comparison.methods if method != LOCAL]
    gains = comparison.site_gains or site_gains(comparison, tested, LOCAL)
    if gains is None:
        return None
    if comparison.folds is not None:
        gains = {method: [_of_folds(one) for one in each] for method, each in gains.items()}
    names, choice = comparison.runs[0].roster.clients, comparison.choice
    found = {
        method: _found(method, names, gains[method], one_deal(comparison)) for method in tested
    }
    if choice is not None and choice.on == "test":
        found = _all_tested(found)
    elif choice is not None:
        widest = inference.WIDEST if METRICS[comparison.metric].percent else None
        found[choice.method] = _told(found[choice.method], widest)
    return _corrected(found, "trained_again", "sites_like_these")


def _of_folds(gain: SiteGain) -> SiteGain:
    """The gain over all folds as that of one run: together they test each sample once."""
    if gain.together is None:
        return SiteGain((None,), None)
    rows = sum(one.samples for one in gain.each if one is not None)
    whole = gain.together._replace(samples=rows)
    return SiteGain((whole,), whole)


def one_deal(comparison: "Comparison") -> bool:
    """Whether all seeds train the same clients, on the same data or on folds of it."""
    return (
        comparison.folds is not None
        or len({run.roster.fingerprint for run in comparison.runs}) == 1
    )


def models_of(comparison: "Comparison") -> str:
    """The models that the answers to single sites are about."""
    if comparison.folds is not None:
        return f"mean of {comparison.folds} folds"
    return f"seed {comparison.seeds[0]}"


def site_gains(
    comparison: "Comparison", methods: Sequence[str], reference: str
) -> dict[str, tuple[SiteGain, ...]] | None:
    """Each client's gain by each method over another, from the answers in the runs' histories."""
    if any(run.outcomes is None for run in comparison.runs):
        return None
    answers = {
        (run.method, run.seed): list(run.outcomes.clients())
        for run in comparison.runs
        if run.outcomes is not None
    }
    found = {}
    for method in methods:
        known = ~np.isnan(
            comparison.gains_by_seed(method) + comparison.gains_by_seed(reference)
        )  # [S, K]
        seeds = [run.seed for run in comparison.of_method(method)]
        pairs = [
            [
                (answers[method, seed][k], answers[reference, seed][k]) if known[s, k] else None
                for s, seed in enumerate(seeds)
            ]
            for k in range(known.shape[1])
        ]
        found[method] = tuple(site_gain(comparison.metric, one) for one in pairs)
    return found


def _found(method: str, names: Sequence[str], gains: Sequence[SiteGain], fixed: bool) -> Judgement:
    """The gains by one method, nothing claimed of them yet."""
    first = {name: one.each[0] for name, one in zip(names, gains, strict=True)}
    known = {name: gain for name, gain in first.items() if gain is not None}
    judged = {name: gain for name, gain in known.items() if gain.judged}
    clients = [
        ClientGain(name, method, g, "untested", None, len(judged)) for name, g in judged.items()
    ]
    return Judgement(
        method,
        False,
        1,
        tuple(clients),
        mean_gain(gains, fixed),
        again(gains) if fixed else None,
        inference.sites_like_these(_whole_gains(gains) if fixed else list(judged.values())),
        tuple(name for name in known if name not in judged),
    )


def _whole_gains(gains: Sequence[SiteGain]) -> list[Gain]:
    """The gains over all trainings of the clients that can be judged."""
    whole = (one.together for one in gains)
    return [gain for gain in whole if gain is not None and gain.judged]


def mean_gain(gains: Sequence[SiteGain], fixed: bool) -> MeanGain | None:
    """B: the mean over these sites; over trainings too, if there are several.

    Where each seed deals the data anew, a sample may be tested by several clients, so that the
    errors of the seeds count as one.
    """
    if fixed:
        return inference.these_sites(_whole_gains(gains))
    seeds = zip(*(one.each for one in gains), strict=True)
    each = [
        inference.these_sites([g for g in seed if g is not None and g.judged]) for seed in seeds
    ]
    return inference.over_deals([one for one in each if one is not None])


def again(gains: Sequence[SiteGain]) -> MeanGain | None:
    """C: the mean over trainings of the same clients, of those that all trainings serve."""
    served = [one for one in gains if all(g is not None and g.judged for g in one.each)]
    whole = inference.these_sites([one.together for one in served if one.together is not None])
    if whole is None or not math.isfinite(whole.gain):
        return None
    by_training = np.array([[g.gain for g in one.each if g is not None] for one in served]).mean(0)
    return inference.trained_again(by_training, whole.error, len(served))


def contrast(comparison: "Comparison", first: str, second: str) -> MeanGain | None:
    """C for one pair of methods that was named before the runs: without a correction.

    None with fewer than five seeds that train the same clients.
    """
    known = comparison.site_gains
    gains = known.get(first) if known and second == LOCAL else None
    if known is None:
        gains = (site_gains(comparison, [first], second) or {}).get(first)
    if gains is None:
        raise ConfigError(
            f"--contrast {first},{second}: the answers to test samples are not in these runs; "
            "expected those of a simulation, or a method and 'local'"
        )
    return again(gains) if one_deal(comparison) and comparison.folds is None else None


def checked_contrast(text: str, methods: Sequence[str]) -> tuple[str, str]:
    """The two methods of ``--contrast a,b``; refuses what is no pair of the compared methods."""
    first, _, second = (part.strip() for part in text.partition(","))
    for name in (first, second):
        if name not in methods:
            known = did_you_mean(name, methods)
            raise ConfigError(f"--contrast: found '{text}'; expected two methods as a,b; {known}")
    return first, second


def _told(found: Judgement, widest: float | None) -> Judgement:
    """The claims about the one method that test data did not choose."""
    said = inference.my_site([one.gain for one in found.clients], widest)
    clients = [
        one._replace(
            claim=CLAIMS[says.claim],
            with_others=None if math.isnan(says.gain) else (says.gain, says.low, says.high),
        )
        for one, says in zip(found.clients, said, strict=True)
    ]
    return found._replace(clients=tuple(clients), tested=True)


def _corrected(found: Mapping[str, Judgement], *questions: Question) -> dict[str, Judgement]:
    """The answers to some questions, corrected for the number of methods."""
    made = dict(found)
    for name in questions:
        known: dict[str, MeanGain] = {
            method: mean for method, one in made.items() if (mean := getattr(one, name)) is not None
        }
        p = holm([mean.p for mean in known.values()])
        for (method, mean), one in zip(known.items(), p, strict=True):
            changed: dict[str, Any] = {name: mean.corrected(one)}
            made[method] = made[method]._replace(**changed)
    return made


def _all_tested(found: Mapping[str, Judgement]) -> dict[str, Judgement]:
    """The claims about all methods, corrected for one another."""
    p = iter(holm([one.gain.p for judged in found.values() for one in judged.clients]))
    made = {}
    for method, judged in found.items():
        shown = [int(np.sign(one.gain.gain)) if next(p) < LEVEL else 0 for one in judged.clients]
        clients = (
            one._replace(claim=CLAIMS[sign])
            for one, sign in zip(judged.clients, shown, strict=True)
        )
        made[method] = judged._replace(tested=True, tried=len(found), clients=tuple(clients))
    return _corrected(made, "these_sites")
