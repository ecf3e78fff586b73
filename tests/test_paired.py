"""Paired outcomes of one client: the tests and intervals against slow references."""

import itertools
import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core import metrics, paired
from coterie.core.answers import Answers, join, outcomes_of
from coterie.core.paired import (
    client_gain,
    holm,
    mcnemar,
    of_counts,
    sign_flip,
    tango,
)
from coterie.views.judgement import claim


def answers(values, targets=None, units=None):
    values = np.asarray(values)
    targets = np.ones(len(values), dtype=int) if targets is None else np.asarray(targets)
    units = np.arange(len(values)) if units is None else np.asarray(units)
    return Answers(values, targets, units)


def of_cells(both, wins, losses, neither, units=None):
    """Two models that are right (1) or wrong (0) so many times."""
    ours = [1] * both + [1] * wins + [0] * losses + [0] * neither
    theirs = [1] * both + [0] * wins + [1] * losses + [0] * neither
    return answers(ours, units=units), answers(theirs, units=units)


# ---- the exact test ------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_two_sided_binomial_test(wins, losses):
    if wins + losses:
        expected = scipy.stats.binomtest(wins, wins + losses, 0.5).pvalue
        assert mcnemar(wins, losses) == pytest.approx(min(1.0, expected), rel=1e-9)
    assert mcnemar(0, 0) == 1.0


@settings(max_examples=40)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_sign_flips_are_counted(sums):
    found = [abs(np.dot(s, sums)) for s in itertools.product((1, -1), repeat=len(sums))]
    expected = np.mean([value >= abs(sum(sums)) for value in found])
    assert sign_flip(np.array(sums)) == pytest.approx(expected, rel=1e-9)


def test_many_units_are_flipped_approximately(monkeypatch):
    sums = np.array([1, 2, -1, 3, -3, 1, -2] * 60)
    exact = sign_flip(sums)
    monkeypatch.setattr(paired, "EXACT_UNITS", 100)
    assert sign_flip(sums) == pytest.approx(exact, rel=0.05)


# ---- the score interval --------------------------------------------------------------------------


def slow_tango(wins, losses, n, level=0.05):
    """The ends of the score interval, the restricted likelihood maximised by search."""

    def score(delta):
        def minus_likelihood(loss):
            win, rest = loss + delta, 1 - 2 * loss - delta
            terms = ((wins, win), (losses, loss), (n - wins - losses, rest))
            return -sum(count * math.log(max(share, 1e-300)) for count, share in terms if count)

        low, high = max(0.0, -delta), (1 - delta) / 2
        best = scipy.optimize.minimize_scalar(
            minus_likelihood, bounds=(low, high), method="bounded", options={"xatol": 1e-12}
        ).x
        return (wins - losses - n * delta) / math.sqrt(n * (2 * best + delta * (1 - delta)))

    z, middle = scipy.stats.norm.ppf(1 - level / 2), (wins - losses) / n
    ends = []
    for wanted, edge in ((z, -1 + 1e-6), (-z, 1 - 1e-6)):
        ends.append(scipy.optimize.brentq(lambda d, w=wanted: score(d) - w, edge, middle))
    return tuple(ends)


@pytest.mark.parametrize("counts", [(10, 2, 100), (3, 8, 40), (1, 1, 9), (30, 20, 60), (7, 1, 500)])
def test_tangos_interval_equals_a_slow_one(counts):
    assert tango(*counts) == pytest.approx(slow_tango(*counts), abs=1e-5)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 50))
def test_laws_of_tangos_interval(wins, losses, rest):
    n = wins + losses + rest
    low, high = tango(wins, losses, n)
    assert -1 <= low <= (wins - losses) / n <= high <= 1
    assert tango(losses, wins, n) == pytest.approx((-high, -low), abs=1e-9)
    wide = tango(wins, losses, n, level=0.01)
    assert wide[0] <= low + 1e-9
    assert wide[1] >= high - 1e-9


def test_the_interval_covers_what_it_says():
    rng, win, lose, n = np.random.default_rng(0), 0.09, 0.04, 120
    drawn = rng.multinomial(n, [win, lose, 1 - win - lose], size=1500)
    ends = np.array([tango(w, c, n) for w, c, _ in drawn.tolist()])
    covered = ((ends[:, 0] <= win - lose) & (win - lose <= ends[:, 1])).mean()
    assert 0.93 < covered < 0.98


# ---- a client ------------------------------------------------------------------------------------


def test_a_clients_gain_in_accuracy_by_hand():
    found = client_gain("accuracy", [of_cells(70, 12, 2, 16)])
    assert found == of_counts(12, 2, 100)
    assert found.gain == pytest.approx(10.0)
    assert found.p == pytest.approx(scipy.stats.binomtest(2, 14).pvalue)
    assert (found.low, found.high) == pytest.approx([100 * end for end in tango(12, 2, 100)])


def test_a_prediction_that_is_not_a_number_is_a_wrong_one():
    lost, fine = answers(np.full(20, -1)), answers(np.ones(20, dtype=int))
    assert client_gain("accuracy", [(lost, fine)]).gain == -100.0


def test_samples_of_one_unit_are_one_piece_of_evidence():
    """Every sample three times, as one unit, shows what one sample shows."""
    plain = of_cells(70, 12, 2, 16)
    tripled = tuple(Answers(*(np.repeat(part, 3) for part in one[:3])) for one in plain)
    once, thrice = (client_gain("accuracy", [pair]) for pair in (plain, tripled))
    assert thrice.gain == pytest.approx(once.gain)
    assert thrice.p == pytest.approx(once.p)
    assert thrice.variance == pytest.approx(once.variance, rel=0.1)
    assert (thrice.low, thrice.high) == pytest.approx((once.low, once.high), abs=0.5)
    apart = tuple(one._replace(units=np.arange(300)) for one in tripled)
    assert client_gain("accuracy", [apart]).p < once.p / 100


def test_a_seed_that_judges_the_same_samples_is_no_new_evidence():
    pair = of_cells(70, 12, 2, 16)
    once, twice = client_gain("accuracy", [pair]), client_gain("accuracy", [pair, pair])
    assert twice.p == pytest.approx(once.p)
    assert twice.gain == once.gain
    assert twice.samples == once.samples == 100
    other = tuple(one._replace(units=one.units + 100) for one in pair)
    assert client_gain("accuracy", [pair, other]).p < once.p


METRICS = ("balanced_accuracy", "auc", "f1", "rmse", "r2")


def some_outcomes(metric, rng, n=80, better=0.0):
    """Two predictors of one client, the first better."""
    if metric in ("rmse", "r2"):
        y = rng.normal(size=n)
        return answers(y + rng.normal(size=n) * (1 - better), y), answers(y + rng.normal(size=n), y)
    y = rng.integers(0, 3, n)
    raw = rng.random((2, n, 3)) + np.array([0.5 + better, 0.5])[:, None, None] * np.eye(3)[y]
    if metric == "auc":
        return answers(raw[0], y), answers(raw[1], y)
    return answers(raw[0].argmax(1), y), answers(raw[1].argmax(1), y)


@pytest.mark.parametrize("metric", metrics.METRICS)
def test_weights_are_repetitions(metric):
    """A score with weights is the score of samples that are there so many times."""
    rng = np.random.default_rng(1)
    one, _ = some_outcomes(metric, rng)
    counts = rng.integers(0, 4, (5, 80))
    found = metrics.scores(metric, one.values, one.targets, counts.astype(float))
    for row, times in zip(found, counts, strict=True):
        at = np.repeat(np.arange(80), times)
        expected = metrics.score(metric, one.values[at], one.targets[at])
        assert row == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("metric", METRICS)
def test_the_bootstrap_equals_a_slow_one(metric):
    rng = np.random.default_rng(2)
    a, b = some_outcomes(metric, rng, better=0.3)
    found = client_gain(metric, [(a, b)])
    gains = []
    for _ in range(600):
        at = rng.integers(0, 80, 80)
        ours, theirs = (metrics.score(metric, x.values[at], x.targets[at]) for x in (a, b))
        gains.append((ours - theirs) * (1 if metrics.higher_is_better(metric) else -1))
    assert found.variance == pytest.approx(np.var(gains), rel=0.25)
    ours, theirs = (metrics.score(metric, x.values, x.targets) for x in (a, b))
    sign = 1 if metrics.higher_is_better(metric) else -1
    assert found.gain == pytest.approx(sign * (ours - theirs))
    assert found.low < found.gain < found.high
    assert (found.p < 0.05) == (found.low > 0 or found.high < 0)
    mirrored = client_gain(metric, [(b, a)])
    assert (mirrored.gain, mirrored.p) == pytest.approx((-found.gain, found.p))


@pytest.mark.parametrize("metric", METRICS)
def test_without_a_difference_a_bootstrap_seldom_claims_one(metric, monkeypatch):
    monkeypatch.setattr(paired, "REPLICATES", 150)
    rng = np.random.default_rng(3)
    claims = [client_gain(metric, [some_outcomes(metric, rng)]).p < 0.05 for _ in range(200)]
    assert np.mean(claims) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


def test_units_are_drawn_together_in_a_bootstrap():
    a, b = some_outcomes("auc", np.random.default_rng(4), better=0.3)
    tripled = tuple(Answers(*(np.repeat(part, 3, axis=0) for part in one[:3])) for one in (a, b))
    once, thrice = (client_gain("auc", [pair]) for pair in ((a, b), tripled))
    assert thrice.gain == pytest.approx(once.gain)
    assert thrice.variance == pytest.approx(once.variance, rel=0.2)


def test_a_model_that_diverged_is_infinitely_worse():
    y = np.arange(10.0)
    lost, fine = answers(np.full(10, np.nan), y), answers(y + 1, y)
    for metric in ("rmse", "r2"):
        found = client_gain(metric, [(lost, fine)])
        assert (found.gain, found.p) == (-math.inf, 0.0)
        assert claim(found.gain, found.p) == "worse"
        assert client_gain(metric, [(fine, lost)]).gain == math.inf
        assert client_gain(metric, [(lost, lost)]).gain == 0.0


def test_nothing_is_said_where_nothing_is_defined():
    one_class = answers(np.random.default_rng(0).random((9, 3)), np.zeros(9, dtype=int))
    assert client_gain("auc", [(one_class, one_class)]) is None
    empty = answers(np.zeros(0), np.zeros(0))
    assert client_gain("accuracy", [(empty, empty)]) is None
    single = answers(np.array([1.0]), np.array([2.0]))
    assert client_gain("rmse", [(single, answers([5.0], [2.0]))]).p == 1.0


# ---- several tests -------------------------------------------------------------------------------


def closed(p, weights):
    """Holm's procedure as closed testing: every subset by the weighted Bonferroni test."""
    adjusted = []
    for i in range(len(p)):
        worst = 0.0
        for mask in itertools.product((False, True), repeat=len(p)):
            if mask[i]:
                inside = [j for j, m in enumerate(mask) if m]
                total = sum(weights[j] for j in inside)
                worst = max(worst, min(p[j] * total / weights[j] for j in inside))
        adjusted.append(min(1.0, worst))
    return adjusted


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 5)), min_size=1, max_size=6))
def test_holm_is_closed_testing(tests):
    p, weights = zip(*tests, strict=True)
    assert holm(p, weights) == pytest.approx(closed(p, weights), abs=1e-9)
    assert holm(p) == pytest.approx(closed(p, [1.0] * len(p)), abs=1e-9)


# ---- what is kept --------------------------------------------------------------------------------


def test_outcomes_are_small_and_whole():
    clients = [
        Answers(np.array([0, 2, -1]), np.array([0, 1, 2]), np.array([5, 9, 70_000])),
        Answers(np.zeros(0, dtype=int), np.zeros(0, dtype=int), np.zeros(0, dtype=int)),
        Answers(np.array([1]), np.array([1]), np.array([3])),
    ]
    kept = outcomes_of(clients)
    assert kept.values.dtype == np.int16
    assert kept.sizes.tolist() == [3, 0, 1]
    for found, expected in zip(kept.clients(), clients, strict=True):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    again = join([kept, kept])
    assert again.sizes.tolist() == [3, 0, 1] * 2
