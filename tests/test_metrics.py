import math

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coterie.core import metrics
from coterie.errors import ConfigError
from coterie.runs import collaboration, statistics
from synthetic import run_of

NAN = float("nan")


@pytest.fixture
def predictions():
    rng = np.random.default_rng(3)
    raw = rng.random((200, 5))
    return raw / raw.sum(1, keepdims=True), rng.integers(0, 5, 200)


def test_scores_equal_scikit_learns(predictions):
    outputs, targets = predictions
    found, n = outputs.argmax(1), np.arange(len(targets)) % 3  # half of them hits
    targets = np.where(n == 0, found, targets)
    expected = {
        "accuracy": sklearn.metrics.accuracy_score(targets, found),
        "balanced_accuracy": sklearn.metrics.balanced_accuracy_score(targets, found),
        "f1": sklearn.metrics.f1_score(targets, found, average="macro"),
        "auc": sklearn.metrics.roc_auc_score(targets, outputs, multi_class="ovr"),
    }
    for metric, value in expected.items():
        assert metrics.score(metric, outputs, targets) == pytest.approx(100 * value, abs=1e-9)
    held = np.eye(outputs.shape[1])[targets]
    precision = sklearn.metrics.average_precision_score(held, outputs)
    assert metrics.score("auprc", outputs, targets) == pytest.approx(100 * precision)
    chances = outputs / outputs.sum(1, keepdims=True)
    lost = sklearn.metrics.log_loss(targets, chances, labels=range(outputs.shape[1]))
    assert metrics.score("log_loss", chances, targets) == pytest.approx(lost)


def test_the_scores_of_two_classes_equal_scikit_learns():
    rng = np.random.default_rng(0)
    p, truth = rng.random(60), rng.integers(0, 2, 60)
    both = np.stack([1 - p, p], 1)
    brier = sklearn.metrics.brier_score_loss(truth, p)
    assert metrics.score("brier", both, truth) == pytest.approx(brier)
    precision = sklearn.metrics.average_precision_score(truth, p)
    assert metrics.score("auprc", both, truth) == pytest.approx(100 * precision)


@pytest.mark.parametrize(
    ("share", "metric"), [(0.1, "auc"), (0.9, "auc"), (0.4, "accuracy"), (None, "accuracy")]
)
def test_the_automatic_metric_of_a_rare_class_is_auc(share, metric):
    assert metrics.automatic(share) == metric


def test_regression_scores_equal_scikit_learns():
    rng = np.random.default_rng(0)
    targets = rng.normal(size=50)
    found = targets + rng.normal(size=50)
    r2 = sklearn.metrics.r2_score(targets, found)
    assert metrics.score("r2", found[:, None], targets) == pytest.approx(r2)
    rmse = sklearn.metrics.root_mean_squared_error(targets, found)
    assert metrics.score("rmse", found, targets) == pytest.approx(rmse)
    mae = sklearn.metrics.mean_absolute_error(targets, found)
    assert metrics.score("mae", found, targets) == pytest.approx(mae)


@pytest.mark.parametrize("metric", metrics.METRICS)
def test_no_samples_have_no_score(metric):
    assert math.isnan(metrics.score(metric, np.zeros((0, 3)), np.zeros(0, dtype=int)))


def test_undefined_scores_are_nan_and_diverged_models_are_wrong():
    one_class = np.zeros(4, dtype=int)
    assert math.isnan(metrics.score("auc", np.random.default_rng(0).random((4, 3)), one_class))
    assert math.isnan(metrics.score("r2", np.arange(3.0), np.ones(3)))
    lost = np.full((4, 3), NAN)
    assert metrics.score("accuracy", lost, one_class) == 0.0
    assert metrics.score("balanced_accuracy", lost, one_class) == 0.0
    assert metrics.score("f1", lost, one_class) == 0.0
    assert metrics.score("auc", lost, np.array([0, 1, 0, 1])) == 50.0
    partly = np.array([0.2, 0.3, NAN])  # what is lost ranks last, also where it should win
    assert metrics.score("auc", partly, np.array([0, 1, 1])) == 50.0
    assert metrics.score("rmse", np.full(2, NAN), np.ones(2)) == math.inf
    assert metrics.score("r2", np.full(2, NAN), np.arange(2.0)) == -math.inf


def test_auc_of_a_client_that_holds_two_of_ten_classes():
    outputs = np.zeros((4, 10))
    outputs[:, 3], outputs[:, 7] = [0.9, 0.6, 0.7, 0.1], [0.1, 0.2, 0.3, 0.9]
    # class 3 against 7: pairs (.9,.6) vs (.7,.1): 3 of 4 won; class 7: (.3,.9) vs (.1,.2): 4 of 4
    assert metrics.score("auc", outputs, np.array([3, 3, 7, 7])) == pytest.approx(87.5)


def test_an_unknown_metric_is_refused_with_a_guess():
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        metrics.score("acuracy", np.ones(1), np.ones(1))
    with pytest.raises(ConfigError, match="no metric"):
        metrics.higher_is_better("mse")


def test_spread_by_hand():
    values = np.array([10.0, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, NAN])
    found = statistics.over_clients(values, np.arange(12))
    assert found.scored == 11
    assert found.unscored == 1
    assert found.mean == 60
    assert found.worst_tenth == 15  # ceil(1.1) = 2 clients
    assert found.best_tenth == 105
    assert found.variance == pytest.approx(1000)
    assert (found.variance_worst, found.variance_best) == (25, 25)
    assert found.weighted_mean == pytest.approx(sum(i * 10 * (i + 1) for i in range(11)) / 55)


def test_a_tenth_of_seventy_is_seven():
    assert statistics.over_clients(np.arange(70.0), np.ones(70)).worst_tenth == 3.0


def test_where_lower_is_better_the_worst_are_the_largest():
    found = statistics.over_clients(np.arange(20.0), np.ones(20), "rmse")
    assert (found.worst_tenth, found.best_tenth) == (18.5, 0.5)
    scores = np.array([[3.0, 1.0], [1.0, 1.0], [2.0, 5.0]])
    assert statistics.best_round(scores, "rmse") == 1
    assert statistics.best_round(scores, "r2") == 2
    gained = metrics.gains(np.array([1.0, 2.0]), np.array([2.0, 1.0]), "rmse")
    assert gained.tolist() == [1.0, -1.0]
    assert statistics.count_worse(gained) == 1


def test_nobody_scored():
    found = statistics.over_clients(np.full(3, NAN), np.zeros(3))
    assert math.isnan(found.mean)
    assert found.unscored == 3
    assert statistics.best_round(np.full((2, 3), NAN), "accuracy") is None


def test_the_weighted_mean_is_the_pooled_score():
    rng = np.random.default_rng(0)
    targets = [rng.integers(0, 2, n) for n in (3, 10, 50)]
    outputs = [rng.random((len(y), 2)) for y in targets]
    each = np.array(
        [metrics.score("accuracy", o, y) for o, y in zip(outputs, targets, strict=True)]
    )
    pooled = metrics.score("accuracy", np.concatenate(outputs), np.concatenate(targets))
    assert statistics.over_clients(each, [3, 10, 50]).weighted_mean == pytest.approx(pooled)


@given(hnp.arrays(float, st.integers(1, 40), elements=st.floats(0, 100)))
def test_laws_of_a_spread(values):
    found = statistics.over_clients(values, np.ones(len(values)))
    assert found.worst_tenth <= found.mean + 1e-9 <= found.best_tenth + 2e-9
    assert found.variance >= 0
    mirrored = statistics.over_clients(-values, np.ones(len(values)), "rmse")
    assert mirrored.worst_tenth == -found.worst_tenth


def test_best_round_takes_the_earliest_of_equals_and_ignores_the_unscored():
    scores = np.array([[1.0, NAN], [5.0, NAN], [5.0, NAN]])
    assert statistics.best_round(scores, "accuracy") == 1


def test_wilcoxon_by_hand():
    # ranks 1, 2, 3, the smallest negative: W = 1; 2 of 8 sign patterns reach it; two-sided 4/8
    assert statistics.wilcoxon(np.array([-1.0, 2.0, 3.0])) == statistics.Paired(3, 1.0, 0.5)
    # zeros are dropped, NaN is nobody; all positive: 2 / 2**5
    assert statistics.wilcoxon(np.array([0.0, NAN, 1, 2, 3, 4, 5])) == statistics.Paired(
        5, 0.0, 2 / 32
    )
    assert statistics.wilcoxon(np.zeros(4)) == statistics.Paired(0, 0.0, 1.0)
    # ties share a rank: |d| = 1, 1 -> 1.5 each; of 4 patterns 3 have a sum of at most 1.5
    assert statistics.wilcoxon(np.array([1.0, -1.0])) == statistics.Paired(2, 1.5, 1.0)


def test_wilcoxon_equals_scipys_without_and_with_ties():
    rng = np.random.default_rng(1)
    for n in (8, 30, 50):
        differences = rng.normal(0.3, 1, n)
        expected = scipy.stats.wilcoxon(differences, method="exact")
        found = statistics.wilcoxon(differences)
        assert (found.n, found.statistic) == (n, expected.statistic)
        assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    tied = rng.integers(-3, 6, 120).astype(float)
    expected = scipy.stats.wilcoxon(tied, zero_method="wilcox", method="asymptotic")
    assert statistics.wilcoxon(tied).p == pytest.approx(expected.pvalue, rel=1e-9)


def test_rounding_does_not_break_ties():
    """0.3 - 0.2 and 0.2 - 0.1 are the same step, though not the same float."""
    assert statistics.wilcoxon(np.array([0.3 - 0.2, 0.1 - 0.2])).statistic == 1.5


@given(hnp.arrays(float, st.integers(1, 25), elements=st.integers(-4, 4).map(float)))
def test_wilcoxon_does_not_mind_who_is_first(differences):
    found = statistics.wilcoxon(differences)
    assert 0 < found.p <= 1
    assert found == statistics.wilcoxon(-differences)


def test_over_seeds_uses_the_sample_deviation():
    assert statistics.over_seeds([1.0, 3.0, None, NAN]) == (2.0, pytest.approx(math.sqrt(2)))
    assert math.isnan(statistics.over_seeds([1.0]).deviation)
    assert math.isnan(statistics.over_seeds([None]).mean)


def test_in_group_weight_leaves_out_the_diagonal():
    groups = np.array([0, 0, 1])
    A = np.array([[9.0, 0.3, 0.1], [0.2, 9.0, 0.2], [0.0, 0.2, 9.0]])
    assert collaboration.in_group_weight(A, groups) == pytest.approx(0.5)
    assert collaboration.in_group_weight(np.eye(3), groups) is None
    assert collaboration.in_group_weight(A, None) is None


def test_weight_recovery_is_the_auc_of_pairs():
    groups = np.array([0, 0, 1, 1])
    same = (groups[:, None] == groups).astype(float)
    assert collaboration.weight_recovery(same, groups) == 1.0
    assert collaboration.weight_recovery(same - np.eye(4), groups) == 1.0
    assert collaboration.weight_recovery(1 - same, groups) == 0.0
    assert collaboration.weight_recovery(np.ones((4, 4)), groups) == 0.5
    assert collaboration.weight_recovery(same, np.zeros(4)) is None


def test_off_diagonal_weight_that_says_nothing():
    everybody = range(4)
    uniform = np.full((4, 4), 0.2) + 0.2 * np.eye(4)
    assert collaboration.off_diagonal(np.eye(4), everybody) == "zero"
    assert collaboration.off_diagonal(uniform, everybody) == "uniform"
    slightly = uniform + np.array([0, 1e-5, 0, 0])
    assert collaboration.off_diagonal(slightly, everybody) == "uniform"
    assert collaboration.off_diagonal(uniform + np.array([0, 0.1, 0, 0]), everybody) == "varied"


def test_uniform_among_those_who_took_part():
    A = np.eye(5)
    A[:3, :3] = 1 / 3
    assert collaboration.off_diagonal(A, range(3)) == "uniform"
    assert collaboration.off_diagonal(A, range(5)) == "varied"  # two took part and got nothing
    assert collaboration.off_diagonal(np.full((2, 2), 0.5), range(2)) == "varied"


def test_models_that_change_hands_are_judged_by_who_shares_them():
    """FedeRiCo's clients may all use each other's models: the pairs are right, the indices not."""
    A = np.array([[0.0, 0, 1, 0], [0, 0, 1, 0], [1.0, 0, 0, 0], [1.0, 0, 0, 0]])
    groups = np.array([0, 0, 1, 1])
    assert collaboration.in_group_weight(collaboration.kinship(A, False), groups) == 0
    assert collaboration.in_group_weight(collaboration.kinship(A, True), groups) == 1


def blocks(inside: float, mass: float) -> np.ndarray:
    """Four clients in two groups: so much weight on others, so much of it inside the group."""
    same = np.array([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])
    other = (1 - same - np.eye(4)) / 2
    return (1 - mass) * np.eye(4) + mass * (inside * same + (1 - inside) * other)


def test_a_run_counts_its_rounds_by_the_weight_on_others():
    groups = np.array([0, 0, 1, 1])
    annealing = [blocks(0.9, 0.6), blocks(0.9, 0.3), blocks(0.0, 0.001), blocks(1.0, 0.0)]
    total = collaboration.add_up(annealing, False)
    expected = (0.9 * 0.6 + 0.9 * 0.3) / (0.6 + 0.3 + 0.001)
    assert collaboration.in_group_weight(total, groups) == pytest.approx(expected)
    assert collaboration.weight_recovery(total, groups) == 1.0
    steady = collaboration.add_up([blocks(0.7, 0.5)] * 3, False)
    assert collaboration.in_group_weight(steady, groups) == pytest.approx(0.7)
    assert collaboration.add_up([], False) is None
    negative = blocks(0.9, 0.6) - 2 * blocks(0.0, 0.6)
    assert collaboration.in_group_weight(collaboration.add_up([negative], False), groups) == 1.0


def test_a_run_of_many_clients_is_summed_sparse():
    from scipy.sparse import csr_array

    groups = np.array([0, 0, 1, 1])
    rounds = [blocks(0.9, 0.6), blocks(0.2, 0.1), -blocks(0.5, 0.5)]
    for swaps in (False, True):
        dense, sparse = (
            collaboration.add_up([kind(A) for A in rounds], swaps) for kind in (np.array, csr_array)
        )
        assert sparse.toarray() == pytest.approx(dense)
        assert collaboration.in_group_weight(sparse, groups) == pytest.approx(
            collaboration.in_group_weight(dense, groups)
        )


# A model that diverged counts as worse in every statistic


INF = math.inf


def test_an_infinite_loss_is_the_strongest_evidence():
    some = np.array([1.0, 2.0, 3.0, 4.0])
    worst = statistics.wilcoxon(np.array([*some, -INF]))
    assert worst.n == 5
    assert worst == statistics.wilcoxon(np.array([*some, -1e9]))
    assert statistics.wilcoxon(np.full(5, -INF)).p == 2 / 32


def test_who_diverged_is_worse_off_and_who_diverged_with_both_is_not():
    gained = metrics.gains(np.array([INF, 1.0, INF, NAN]), np.array([1.0, INF, INF, 1.0]), "rmse")
    np.testing.assert_array_equal(gained, [-INF, INF, 0.0, NAN])
    assert statistics.count_worse(gained) == 1
    np.testing.assert_array_equal(
        metrics.gains(np.array([-INF, 0.5]), np.array([0.5, -INF]), "r2"), [-INF, INF]
    )


def test_an_infinite_value_makes_means_and_deviations_infinite():
    assert metrics.mean_known(np.array([1.0, NAN, -INF])) == -INF
    assert metrics.mean_known(np.array([1.0, INF])) == INF
    assert metrics.mean_known(np.array([INF, -INF])) == -INF  # the loss counts
    assert statistics.over_seeds([1.0, INF, 2.0]) == (INF, INF)
    assert statistics.over_seeds([-INF, INF]).mean == -INF
    found = statistics.over_clients(np.array([1.0, INF, 2.0]), np.ones(3), "rmse")
    assert (found.mean, found.worst_tenth, found.best_tenth) == (INF, INF, 1.0)
    assert (found.variance, found.variance_best) == (INF, 0.0)
    assert statistics.best_round(np.array([[1.0, INF], [3.0, 4.0]]), "rmse") == 1


def test_the_best_of_rounds_is_each_clients_own():
    """P4's metric: a slow loop over clients; who never has a score has none."""
    scores = np.array([[10.0, 90.0, np.nan], [40.0, np.nan, np.nan], [30.0, 70.0, np.nan]])
    assert statistics.best_of_rounds(scores, "accuracy")[:2].tolist() == [40.0, 90.0]
    assert statistics.best_of_rounds(scores, "rmse")[:2].tolist() == [10.0, 70.0]
    assert np.isnan(statistics.best_of_rounds(scores, "accuracy")[2])
    run = run_of("fedfomo")
    mean = run.test.max(0).mean()
    assert run.summary["best_of_rounds"] == pytest.approx(mean)
    assert mean > run.summary["accuracy_last"]
