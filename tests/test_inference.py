"""The four questions and the tests of one client: every formula against a slow computation."""

import itertools
import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core import inference, metrics, paired_tests
from coterie.core.answers import Answers
from coterie.core.inference import MeanGain, holm, my_site, pool, these_sites, told
from coterie.core.paired_tests import Gain, client_gain, mid_p, of_counts, sign_flip, tango


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


# ---- accuracy ------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(0, 60))
def test_mid_p_is_the_binomial_test_less_half_of_what_was_seen(wins, losses):
    if wins == losses:
        assert mid_p(wins, losses) == 1.0
        return
    few, thrown = min(wins, losses), wins + losses
    exact = scipy.stats.binomtest(few, thrown).pvalue
    assert mid_p(wins, losses) == pytest.approx(exact - scipy.stats.binom.pmf(few, thrown, 0.5))


@settings(max_examples=40)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_sign_flips_are_counted(sums):
    sums = np.array(sums, dtype=float)
    found = np.abs([np.dot(s, sums) for s in itertools.product((1, -1), repeat=len(sums))])
    seen = abs(sums.sum())
    expected = np.mean(np.where(found > seen, 1.0, np.where(found == seen, 0.5, 0.0)))
    assert sign_flip(sums) == pytest.approx(1.0 if seen == 0 else expected, rel=1e-9)


def test_many_units_are_flipped_approximately(monkeypatch):
    sums = np.array([1.0, 2, -1, 3, -3, 1, -2] * 60)
    exact = sign_flip(sums)
    monkeypatch.setattr(paired_tests, "EXACT_UNITS", 100)
    assert sign_flip(sums) == pytest.approx(exact, rel=0.02)


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


def test_a_clients_gain_in_accuracy_by_hand():
    found = client_gain("accuracy", [of_cells(70, 12, 2, 16)])
    assert found == of_counts(12, 2, 100)
    assert found.gain == pytest.approx(10.0)
    assert found.p == pytest.approx(mid_p(12, 2))
    assert (found.low, found.high) == pytest.approx([100 * end for end in tango(12, 2, 100)])
    assert found.counts == (12, 2, 100)


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
    assert thrice.counts == pytest.approx(once.counts, rel=0.1)
    apart = tuple(one._replace(units=np.arange(300)) for one in tripled)
    assert client_gain("accuracy", [apart]).p < once.p / 100


def test_a_training_that_is_tested_on_the_same_samples_is_no_new_evidence():
    pair = of_cells(70, 12, 2, 16)
    once, twice = client_gain("accuracy", [pair]), client_gain("accuracy", [pair, pair])
    assert twice.p == pytest.approx(once.p)
    assert twice.gain == once.gain
    assert twice.samples == once.samples == 100


# ---- other metrics -------------------------------------------------------------------------------

NUMBERS = metrics.metrics_for("numbers")
CHANCES = [name for name, row in metrics.METRICS.items() if row.probabilities]
OTHERS = [n for n, row in metrics.METRICS.items() if n != "accuracy" and not row.by_share]


def some_outcomes(metric, rng, n=80, better=0.0, classes=2):
    """Two predictors of one client, the first better."""
    if metric in NUMBERS:
        y = rng.normal(size=n)
        return answers(y + rng.normal(size=n) * (1 - better), y), answers(y + rng.normal(size=n), y)
    y = rng.integers(0, classes, n)
    raw = (
        rng.random((2, n, classes))
        + np.array([0.5 + better, 0.5])[:, None, None] * np.eye(classes)[y]
    )
    shown = raw / raw.sum(-1, keepdims=True)
    if metric not in CHANCES:
        shown = shown.argmax(-1)
    return answers(shown[0], y), answers(shown[1], y)


def redrawn(metric, a, b, rng, draws=600):
    """The variance of the gain over draws that keep each class (each: all, of numbers)."""
    groups = [np.arange(len(a.targets))]
    if metric not in NUMBERS:
        groups = [np.flatnonzero(a.targets == c) for c in np.unique(a.targets)]
    gains = []
    for _ in range(draws):
        at = np.concatenate([rng.choice(group, len(group)) for group in groups])
        ours, theirs = (metrics.score(metric, x.values[at], x.targets[at]) for x in (a, b))
        gains.append(ours - theirs)
    return np.var(gains)


@pytest.mark.parametrize("metric", OTHERS)
def test_the_variance_is_that_of_a_slow_bootstrap(metric):
    rng = np.random.default_rng(2)
    a, b = some_outcomes(metric, rng, better=0.3, classes=3 if metric == "f1" else 2)
    found = client_gain(metric, [(a, b)])
    assert found.variance == pytest.approx(redrawn(metric, a, b, rng), rel=0.25)
    ours, theirs = (metrics.score(metric, x.values, x.targets) for x in (a, b))
    assert found.gain == pytest.approx(
        (ours - theirs) * (1 if metrics.higher_is_better(metric) else -1)
    )
    assert found.low < found.gain < found.high
    mirrored = client_gain(metric, [(b, a)])
    assert (mirrored.gain, mirrored.p) == pytest.approx((-found.gain, found.p))
    assert found.p < 0.05


@pytest.mark.parametrize("metric", OTHERS)
def test_without_a_difference_one_is_seldom_claimed(metric):
    rng = np.random.default_rng(3)
    claims = [client_gain(metric, [some_outcomes(metric, rng, n=60)]).p < 0.05 for _ in range(100)]
    assert np.mean(claims) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 100)


@pytest.mark.parametrize("metric", OTHERS)
def test_units_of_any_metric_are_one_piece_of_evidence(metric):
    a, b = some_outcomes(metric, np.random.default_rng(4), better=0.3)
    tripled = tuple(Answers(*(np.repeat(part, 3, axis=0) for part in one[:3])) for one in (a, b))
    once, thrice = (client_gain(metric, [pair]) for pair in ((a, b), tripled))
    assert thrice.gain == pytest.approx(once.gain, rel=0.05)
    assert thrice.variance == pytest.approx(once.variance, rel=0.25)
    assert thrice.p == pytest.approx(once.p, abs=0.02)
    assert thrice.freedom == once.freedom


def test_delong_by_all_pairs():
    """DeLong's covariances from the placement of every positive among the negatives."""
    a, b = some_outcomes("auc", np.random.default_rng(5), n=60, better=0.2)
    up, down = np.flatnonzero(a.targets == 1), np.flatnonzero(a.targets == 0)
    won = [
        np.array([[float(x[i] > x[j]) + 0.5 * (x[i] == x[j]) for j in down] for i in up])
        for x in (a.values[:, 1], b.values[:, 1])
    ]
    apart = 100 * (won[0] - won[1])
    variance = apart.mean(1).var(ddof=1) / len(up) + apart.mean(0).var(ddof=1) / len(down)
    found = client_gain("auc", [(a, b)])
    assert found.gain == pytest.approx(apart.mean())
    assert found.variance == pytest.approx(variance)
    assert found.freedom == min(len(up), len(down)) - 1
    t = found.gain / math.sqrt(variance)
    assert found.p == pytest.approx(2 * scipy.stats.t.sf(abs(t), found.freedom))


def test_nothing_is_claimed_of_an_auc_below_ten_of_a_class():
    y = np.array([1] * 9 + [0] * 60)
    good = np.stack([1.0 - y, y], 1) * 0.8 + 0.1
    bad = np.full((69, 2), 0.5)
    few = client_gain("auc", [(answers(good, y), answers(bad, y))])
    assert (few.p, few.judged) == (1.0, False)
    y[9] = 1
    assert client_gain("auc", [(answers(good, y), answers(bad, y))]).judged


def test_units_of_which_no_two_have_the_same_classes_do_not_tell_how_sure_a_gain_is():
    y, units = [0, 0, 1, 1], [0, 1, 1, 2]  # one unit of each class, and one of both
    found = client_gain("balanced_accuracy", [(answers(y, y, units), answers([0] * 4, y, units))])
    assert not found.judged


def test_a_class_whose_samples_agree_is_not_certain():
    y = np.repeat([0, 1], [4, 40])
    ours, theirs = y.copy(), np.where(np.arange(44) < 4, 1, y)  # all four of a class are won
    found = client_gain("balanced_accuracy", [(answers(ours, y), answers(theirs, y))])
    assert found.variance > 100.0
    assert found.freedom == 3


def test_a_model_that_diverged_is_infinitely_worse():
    y = np.arange(10.0)
    lost, fine = answers(np.full(10, np.nan), y), answers(y + 1, y)
    for metric in NUMBERS:
        found = client_gain(metric, [(lost, fine)])
        assert (found.gain, found.p, found.judged) == (-math.inf, 0.0, True)
        assert client_gain(metric, [(fine, lost)]).gain == math.inf
        assert client_gain(metric, [(lost, lost)]).gain == 0.0


def test_a_client_with_one_unit_is_not_judged():
    single = answers(np.array([1.0]), np.array([2.0]))
    one_patient = of_cells(3, 4, 0, 3, units=np.zeros(10))
    found = [
        client_gain("rmse", [(single, answers([5.0], [2.0]))]),
        client_gain("accuracy", [one_patient]),
    ]
    assert [(one.p, one.judged) for one in found] == [(1.0, False)] * 2


@pytest.mark.parametrize(
    ("rows", "discordant"),
    [((3, 200), 0.1), ((10, 200), 0.3), ((5, 5), 0.1), ((10, 10), 0.3), ((20, 20, 20), 0.3)],
)
def test_few_rows_that_agree_by_chance_are_no_claim_about_the_sites(rows, discordant):
    rng, made = np.random.default_rng(0), {}
    share = [discordant / 2, discordant / 2, 1 - discordant]
    drawn = [rng.multinomial(n, share, size=1200) for n in rows]
    claims = []
    for cells in zip(*(one.tolist() for one in drawn), strict=True):
        key = tuple((b, c) for b, c, _ in cells)
        if key not in made:
            counts = zip(key, rows, strict=True)
            made[key] = these_sites([of_counts(b, c, n) for (b, c), n in counts]).p < 0.05
        claims.append(made[key])
    assert np.mean(claims) < 0.065


def test_of_one_site_the_mean_is_the_sites_own_answer():
    for b, c, n in ((6, 0, 40), (5, 0, 5), (9, 2, 60)):
        own = of_counts(b, c, n)
        mean = these_sites([own])
        assert (mean.gain, mean.low, mean.high, mean.p) == (own.gain, own.low, own.high, own.p)


def test_nothing_is_said_where_nothing_is_defined():
    one_class = answers(np.random.default_rng(0).random((9, 3)), np.zeros(9, dtype=int))
    assert client_gain("auc", [(one_class, one_class)]) is None
    empty = answers(np.zeros(0), np.zeros(0))
    assert client_gain("accuracy", [(empty, empty)]) is None


# ---- A: my site ----------------------------------------------------------------------------------


def gains_of(wins, losses, n=100):
    return [of_counts(b, c, n) for b, c in zip(wins, losses, strict=True)]


def slow_pool(g, v):
    """The posterior by a sum over a fine grid of both deviation and mean."""
    taus, mus = np.linspace(0.0, 40.0, 501), np.linspace(-60.0, 60.0, 801)
    total = np.zeros(len(g))
    weight = 0.0
    for tau in taus:
        s = v + tau**2
        joint = np.exp(scipy.stats.norm.logpdf(g[:, None], mus, np.sqrt(s)[:, None]).sum(0))
        shrunk = v / s
        means = shrunk[:, None] * mus + (1 - shrunk)[:, None] * g[:, None]
        spread = np.sqrt(v * (1 - shrunk) + 1e-300)[:, None]
        total += (joint * scipy.stats.norm.cdf(means / spread)).sum(1)
        weight += joint.sum()
    return total / weight


def test_pooling_is_the_posterior_of_a_normal_hierarchy():
    g, v = np.array([6.0, 1.0, 3.0, -2.0, 9.0]), np.array([5.0, 8.0, 4.0, 20.0, 10.0])
    found = pool(g, v).above()
    np.testing.assert_allclose(found, slow_pool(g, v), atol=0.002)
    np.testing.assert_allclose(pool(np.stack([g, -g]), np.stack([v, v])).above()[1], 1 - found)


def test_sites_that_cannot_differ_have_the_mean_of_all():
    g, v = np.array([6.0, 1.0, 3.0]), np.array([5.0, 8.0, 4.0])
    same = pool(g, v, widest=1e-6)
    mean, deviation = (g / v).sum() / (1 / v).sum(), (1 / v).sum() ** -0.5
    np.testing.assert_allclose(same.above(1.0), scipy.stats.norm.sf(1.0, mean, deviation))
    low, high = same.interval()
    np.testing.assert_allclose(low, mean - 1.95996 * deviation, atol=1e-3)
    np.testing.assert_allclose(high, mean + 1.95996 * deviation, atol=1e-3)


def test_a_site_is_told_by_its_own_test_or_with_the_others():
    g = np.array([8.0, 4.0, 4.0, 4.0, -1.0])
    p = np.array([0.004, 0.09, 0.11, 0.09, 0.6])
    above = np.array([0.9, 0.995, 0.995, 0.98, 0.995])
    assert told(g, p, above).tolist() == [1, 1, 0, 0, 0]
    idle = p.copy()
    idle[2:] = 0.8
    assert told(g, idle, above).tolist() == [1, 0, 0, 0, 0]  # most sites show nothing
    for own, says in (
        ([0.001, 0.001, 0.09, 0.7, 0.7], [1, 1, 0, 0, 0]),  # two gain, of three it is open
        ([0.001, 0.001, 0.09, 0.09, 0.09], [1, 1, 1, 1, 1]),  # none of them shows nothing
        ([0.001, 0.001, 0.001, 0.001, 0.11], [1, 1, 1, 1, 0]),  # its own samples do not agree
    ):
        assert told(np.ones(5), np.array(own), np.full(5, 0.5)).tolist() == says
    assert told(-g, p, 1 - above).tolist() == [-1, -1, 0, 0, 0]
    assert told(g[:2], p[:2], above[:2]).tolist() == [1, 0]  # two sites show nothing of each other


@given(st.lists(st.floats(0, 1), min_size=1, max_size=2))
def test_few_sites_are_told_by_benjamini_and_hochberg(p):
    p = np.array(p)
    ranked = np.sort(p)
    passed = [i for i in range(len(p)) if ranked[i] < 0.05 * (i + 1) / len(p)]
    bar = ranked[passed[-1]] if passed else -1.0
    np.testing.assert_array_equal(told(np.ones(len(p)), p, np.full(len(p), 0.5)) > 0, p <= bar)


def test_others_who_gain_help_a_site_that_agrees():
    alone = my_site(gains_of([9], [3]))[0]
    assert (alone.claim, math.isnan(alone.low)) == (0, True)
    found = my_site(gains_of([9] * 8 + [3], [3] * 8 + [5]))
    assert [one.claim for one in found] == [1] * 8 + [0]
    assert all(0 < one.low < one.high for one in found[:8])


def test_a_site_that_diverged_is_told_so_and_not_pooled():
    found = my_site(
        [Gain(-math.inf, math.inf, -math.inf, -math.inf, 0.0, 9), *gains_of([9] * 4, [1] * 4)]
    )
    assert [one.claim for one in found] == [-1, 1, 1, 1, 1]
    assert math.isnan(found[0].low)


@pytest.mark.parametrize(
    ("sites", "rows", "idle", "gain"),
    [(12, 200, 1.0, 0.05), (12, 200, 0.5, 0.05), (50, 1000, 0.95, 0.2)],
)
def test_of_sites_told_few_are_wrong(sites, rows, idle, gain):
    """Without an effect; with one at half of the sites; with a large one at few of many sites."""
    rng, shape = np.random.default_rng(1), (600, sites)
    truth = np.where(rng.random(shape) < idle, 0.0, gain)
    share = np.maximum(0.1, truth * 1.2)
    wins = rng.binomial(rows, (share + truth) / 2)
    losses = rng.binomial(rows - wins, (share - truth) / (2 - share - truth))
    g = 100.0 * (wins - losses) / rows
    v = np.array(
        [
            inference.pooled_variances(np.stack([w, c, np.full(sites, rows)], 1))
            for w, c in zip(wins, losses, strict=True)
        ]
    )
    said = told(g, mid_p(wins, losses), pool(g, v).above())
    wrong = ((said != 0) & (said * truth <= 0)).sum(1) / np.maximum(1, (said != 0).sum(1))
    assert wrong.mean() < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 600)


# ---- B, C, D -------------------------------------------------------------------------------------


def gain(value, variance, freedom=math.inf):
    return Gain(value, variance, value, value, 1.0, 100, freedom)


def test_these_sites_by_hand():
    found = these_sites([gain(4.0, 4.0), gain(1.0, 9.0), gain(7.0, 3.0)])
    assert found.gain == pytest.approx(4.0)
    assert found.error == pytest.approx(4.0 / 3)
    assert found.p == pytest.approx(2 * scipy.stats.norm.sf(3.0))
    assert (found.low, found.high) == pytest.approx((4 - 1.96 * 4 / 3, 4 + 1.96 * 4 / 3), abs=1e-3)
    assert these_sites([]) is None


def test_two_sites_of_unknown_variance_are_welchs_test():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, 8), rng.normal(-0.4, 3, 12)
    made = [gain(x.mean() * s, x.var(ddof=1) / len(x), len(x) - 1) for x, s in ((a, 1), (b, -1))]
    assert these_sites(made).p == pytest.approx(scipy.stats.ttest_ind(a, b, equal_var=False).pvalue)


def test_a_model_that_diverged_is_a_loss_on_the_mean():
    found = these_sites([gain(5.0, 1.0), gain(-math.inf, math.inf), gain(7.0, 1.0)])
    assert (found.gain, found.p) == (-math.inf, 0.0)


def test_trainings_that_differ_and_trainings_that_agree():
    means = np.array([2.0, 5.0, 3.0, 6.0, 4.0])
    found = inference.trained_again(means, error=0.01, sites=4)
    expected = scipy.stats.ttest_1samp(means, 0.0)
    assert found.p == pytest.approx(expected.pvalue, rel=0.01)
    ends = tuple(expected.confidence_interval())
    assert (found.low, found.high) == pytest.approx(ends, rel=0.01)
    agreeing = inference.trained_again(np.full(5, 4.0), error=3.0, sites=4)
    assert agreeing.error == 3.0
    assert agreeing.p == pytest.approx(2 * scipy.stats.norm.sf(4.0 / 3.0))
    assert inference.trained_again(means[:4], error=0.1, sites=4) is None


@pytest.mark.parametrize("trainings", [5, 10, 20])
def test_errors_of_rows_and_of_training_add(trainings):
    """Without an effect, few of the trainings on the same rows claim one, whatever weighs more."""
    rng, runs = np.random.default_rng(trainings), 3000
    for luck in (0.0, 1.0, 2.0, 8.0):
        rows = rng.standard_normal((runs, 1))
        means = rows + luck * rng.standard_normal((runs, trainings))
        drawn = means.std(1, ddof=1) / math.sqrt(trainings)
        p = inference.p_of_two(means.mean(1), 1.0, drawn, trainings - 1)
        one = inference.trained_again(means[0], 1.0, 3)
        assert one.p == pytest.approx(p[0])
        assert (p < 0.05).mean() < 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


@given(st.floats(0.1, 9), st.floats(0.0, 9), st.integers(4, 30), st.floats(0.01, 1))
def test_an_interval_of_two_errors_ends_where_the_test_rejects(known, drawn, freedom, level):
    made = MeanGain.of(1.0, math.hypot(known, drawn), freedom, 3, known)
    found = made.corrected(min(1.0, made.p / level))
    reach = (found.high - found.low) / 2
    p = inference.p_of_two(reach, known, math.sqrt(max(0, made.error**2 - known**2)), freedom)
    assert p == pytest.approx(0.05 * made.p / found.p, rel=1e-3)


def test_sites_like_these_is_students_test_over_sites():
    values = np.random.default_rng(0).normal(1.0, 2.0, 7)
    found = inference.sites_like_these([gain(value, 0.1) for value in values])
    expected = scipy.stats.ttest_1samp(values, 0.0)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))
    alike = inference.sites_like_these([gain(5.0, 16.0)] * 4)  # gains agree by chance
    assert alike.error == pytest.approx(2.0)
    assert inference.sites_like_these([gain(5.0, 16.0)]) is None


# ---- several tests, and plans --------------------------------------------------------------------


def closed(p):
    """Holm's procedure as closed testing: every subset by the Bonferroni test."""
    adjusted = []
    for i in range(len(p)):
        masks = (m for m in itertools.product((False, True), repeat=len(p)) if m[i])
        inside = [[p[j] for j, m in enumerate(mask) if m] for mask in masks]
        adjusted.append(max(min(1.0, min(some) * len(some)) for some in inside))
    return adjusted


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_closed_testing(p):
    assert holm(p) == pytest.approx(closed(p), abs=1e-9)


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(0.5, 4)), min_size=1, max_size=6))
def test_a_corrected_interval_agrees_with_its_p_value(tests):
    made = [MeanGain.of(value, error, 7.0, 3) for value, error in tests]
    for one, p in zip(made, holm([one.p for one in made]), strict=True):
        found = one.corrected(p)
        outside = found.low > 0 or found.high < 0
        assert outside == (found.p < 0.05) or abs(found.p - 0.05) < 1e-9
        assert found.low <= one.low + 1e-9


def test_so_many_more_rows_do_tell():
    """Of comparisons as large as advised, four in five show the gain."""
    times = inference.more_rows(2.0, 1.5)
    z = np.random.default_rng(0).normal(2.0 / (1.5 / math.sqrt(times)), 1.0, 4000)
    assert (z > 1.96).mean() == pytest.approx(0.8, abs=0.02)
    assert inference.more_rows(0.0, 1.0) is None
    assert inference.more_rows(9.0, 1.0) == 1.0
