"""What is said of a comparison: each claim is tested, and says no more than its test shows."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from coterie.core.answers import Answers, outcomes_of
from coterie.core.paired import of_counts
from coterie.errors import ConfigError
from coterie.runs.alarms import raise_alarms
from coterie.runs.run import Log
from coterie.runs.summary import finished
from coterie.views import page, table
from coterie.views.comparison import Comparison
from coterie.views.judgement import Choice, conclude
from coterie.views.mean_gain import mean_gain, more, of_one
from coterie.views.verdict import client_sentence
from synthetic import comparison_of, predictors, record, roster, run_of

SCRIPT = Path(__file__).parents[1] / "docs" / "results" / "verdict.py"


# ---- the mean over clients -----------------------------------------------------------------------


def test_the_mean_gain_of_one_seed_is_students_test_over_clients():
    gains = np.random.default_rng(0).normal(1.0, 2.0, (1, 7))
    found = mean_gain(gains, np.full((1, 7), 0.1))
    expected = scipy.stats.ttest_1samp(gains[0], 0.0)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))
    assert found.gain == pytest.approx(gains.mean())


def test_gains_that_agree_by_chance_are_not_taken_for_certain():
    found = mean_gain(np.full((1, 4), 5.0), np.full((1, 4), 16.0))
    assert found.error == pytest.approx(math.sqrt(16.0 / 4))  # as test samples alone make it
    assert found.p > 0.05
    alike = mean_gain(np.zeros((1, 4)), np.zeros((1, 4)))
    assert (alike.p, alike.low, alike.high) == (1.0, 0.0, 0.0)


def test_luck_that_all_clients_of_a_seed_share_widens_the_interval():
    rng = np.random.default_rng(0)
    apart = rng.normal(3.0, 1.0, (3, 12))
    shared = apart + np.array([-4.0, 0.0, 4.0])[:, None]
    noise = np.ones((3, 12))
    calm, lucky = mean_gain(apart, noise), mean_gain(shared, noise)
    assert lucky.gain == pytest.approx(calm.gain)
    assert lucky.error > 2 * calm.error
    assert lucky.p > 0.05 > calm.p


def test_a_client_that_diverged_is_a_loss_on_the_mean():
    gains = np.array([[5.0, 6.0, -math.inf, 7.0]])
    found = mean_gain(gains, np.ones((1, 4)))
    assert (found.gain, found.p) == (-math.inf, 0.0)


def test_clients_that_cannot_be_judged_are_left_out():
    gains = np.array([[1.0, math.nan, 3.0], [2.0, 5.0, 4.0]])
    found = mean_gain(gains, np.ones((2, 3)))
    assert found.clients == 2
    assert found.gain == pytest.approx(2.5)
    assert mean_gain(np.full((1, 2), math.nan), np.ones((1, 2))) is None


def test_so_many_more_test_samples_do_tell():
    """Of comparisons as large as advised, most find the gain."""
    rng, K, within = np.random.default_rng(1), 6, 9.0
    first = mean_gain(np.array([[0.0, 1.0, 2.0, 3.0, 4.0, 2.0]]) - 0.9, np.full((1, K), within))
    assert first.p > 0.05
    times = more(first).data
    assert times > 1
    found = 0
    for _ in range(400):
        gains = rng.normal(first.gain, math.sqrt(first.between + within / times), (1, K))
        found += mean_gain(gains, np.full((1, K), within / times)).p < 0.05
    assert 0.6 < found / 400 < 0.95
    assert more(first, tried=29).data is None or more(first, tried=29).data > times
    assert more(first._replace(gain=1e-3)) == (None, None)


def test_clients_that_differ_too_much_need_more_clients():
    found = mean_gain(np.array([[-10.0, 20.0, 4.0, 9.0, -3.0]]), np.full((1, 5), 0.1))
    assert more(found).data is None
    assert more(found).clients > 5


# ---- calibration ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("calibration", SCRIPT)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


RUNS = 250
LUCK = 3 * math.sqrt(0.05 * 0.95 / RUNS)


@pytest.mark.parametrize(("clients", "deviation"), [(5, 0.0), (5, 2.0), (20, 2.0)])
def test_without_an_effect_hardly_ever_one_is_claimed(script, clients, deviation):
    found = script.rates(script.Setting(clients, 1, deviation), RUNS, seed=1)
    assert found.worth + found.not_worth < 0.05 + LUCK
    assert found.wrong < 0.05 + LUCK


def test_no_client_is_told_of_a_difference_that_is_not_there(script):
    """Two models that err as often, on other samples, for eight clients and four methods."""
    found = script.rates(script.Setting(8, 4, training=0.0), 120, seed=1)
    assert found.client < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 120)
    assert found.client == found.wrong


def test_the_best_of_many_methods_is_no_effect(script):
    for merged in (False, True):
        found = script.rates(script.Setting(5, 29, 2.0, merged=merged), 60, seed=1)
        assert found.worth + found.not_worth < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 60)
        assert found.wrong < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 60)


def test_five_points_in_five_clients_are_found(script):
    gain, loss = (script.rates(script.Setting(5, 1, 0.0, g), RUNS, seed=1) for g in (5.0, -5.0))
    assert gain.worth > 0.8
    assert loss.not_worth > 0.8
    assert gain.covered > 0.95 - LUCK


# ---- corrections ---------------------------------------------------------------------------------


def test_every_claim_is_corrected_for_all_clients_and_methods():
    gains = {f"site-{i}": of_counts(9, 0, 100) for i in range(3)}
    mean = of_one(of_counts(9, 0, 100))
    one = conclude({"a": (gains, mean)}, Choice("a", "nothing", 1))["a"]
    assert one.p == mean.p
    assert [client.p for client in one.clients] == pytest.approx([3 * mean.p] * 3)
    found = dict.fromkeys("abcd", (gains, mean))
    plain = conclude(found, Choice("a", "test", 4))
    for judged in plain.values():
        assert judged.p == pytest.approx(4 * mean.p)
        assert judged.overall.high - judged.overall.low > mean.high - mean.low
        assert [client.p for client in judged.clients] == pytest.approx([12 * mean.p] * 3)
    ahead = conclude(found, Choice("a", "validation", 4))
    assert [client.p for client in ahead["a"].clients] == pytest.approx([6 * mean.p] * 3)
    assert ahead["b"].clients[0].p == pytest.approx(9 * mean.p)  # when those of "a" are rejected
    assert ahead["a"].p == plain["a"].p


# ---- sentences -----------------------------------------------------------------------------------


def verdict_of(ends, samples=200, method="fedfomo", **facts):
    """A comparison with one method whose clients gain ``ends`` over 50 %."""
    ends = np.asarray(ends, dtype=float)
    who = roster(len(ends), **facts)
    alone = np.where(np.isnan(ends), np.nan, 50.0)[None]
    runs = [
        run_of("local", who=who, test=alone, samples=samples),
        run_of(method, who=who, test=alone + ends, samples=samples),
    ]
    return Comparison.of(runs).verdict


def test_worth_it():
    assert verdict_of(range(1, 11)) == (
        "Joining is worth it: in this run FedFomo gives a mean accuracy of 55.5 % instead of "
        "50.0 % alone, a gain of 5.5 points (95 % interval 3.3 to 7.7), which is unlikely to be "
        "chance (p < 0.001). A gain of its own is shown for 7 of 10 clients, a loss for none."
    )


def test_not_worth_it_is_shown_and_not_the_lack_of_a_gain():
    found = verdict_of(-np.arange(1, 11))
    assert found.startswith("Joining is not worth it: in this run FedFomo")
    assert "a loss of 5.5 points" in found
    assert "unlikely to be chance" in found
    for ends in (np.zeros(5), [1, -1, 0, 2, -2]):
        found = verdict_of(ends)
        assert found.startswith("This does not tell whether joining is worth it")
        assert "unlikely" not in found
        assert "not worth it" not in found


def test_what_is_open_says_what_would_tell():
    found = verdict_of([5, -4, 3, -2.5, 2, 4, 1.5, 2.5, -0.5, 1], samples=40)
    assert "could be chance (p = " in found
    assert "would probably show with" in found
    assert "test samples for each client instead of 40, or with" in found
    apart = verdict_of([9, -6, 8, -5, 7, -4], samples=30)
    assert "clients like these probably would" in apart
    assert "Even 30 times as many" in verdict_of([1, -1, 1, -1])


def test_worth_it_for_some_is_shown_for_each_of_them():
    found = verdict_of([30, 25, *-np.arange(0.5, 7.5)])
    assert found.startswith(
        "Joining is worth it for some clients: a gain is shown for site-0 and site-1. On the mean"
    )
    assert "which shows nothing" in found
    by_chance = verdict_of([2.5, 2, *-np.arange(0.5, 7.5)])
    assert "for some" not in by_chance


def test_trying_many_methods_raises_the_bar():
    who, alone = roster(6), np.full((1, 6), 50.0)
    runs = [run_of("local", who=who, test=alone)]
    better = alone + np.array([1, 2, 3, 0.5, 0, 2.5])
    one = Comparison.of([*runs, run_of("fedfomo", who=who, test=better)])
    others = [run_of(m, who=who, test=alone - 1) for m in ("fedavg", "fedamp", "fedavg_ft")]
    many = Comparison.of([*one.runs, *others])
    assert one.verdict.startswith("Joining is worth it: ")
    assert many.verdict.startswith("This does not tell")
    assert "corrected for 4 methods" in many.verdict
    assert many.judgements["fedfomo"].p == pytest.approx(4 * one.judgements["fedfomo"].p)


def test_one_run_speaks_of_this_run_and_several_of_seeds():
    assert "in this run FedFomo" in verdict_of(range(1, 11))
    several = comparison_of(("local", "fedfomo"), seeds=(0, 1, 2))
    assert "over 3 seeds FedFomo" in several.verdict
    assert "in this run" not in several.verdict


def test_a_seed_that_repeats_another_shows_no_more_of_a_client():
    who = [roster(4, seed=s) for s in (0, 1)]
    alone, better = np.full((1, 4), 50.0), np.full((1, 4), 54.0)
    runs = [
        run
        for s in (0, 1)
        for run in (
            run_of("local", s, who=who[s], test=alone),
            run_of("fedfomo", s, who=who[s], test=better),
        )
    ]
    once, twice = Comparison.of(runs[:2]), Comparison.of(runs)
    for a, b in zip(once.client_gains("site-0"), twice.client_gains("site-0"), strict=True):
        assert a.gain.p == pytest.approx(b.gain.p)


def test_the_method_is_chosen_on_validation_data_and_judged_on_test_data():
    who, alone = roster(6), np.full((1, 6), 50.0)
    rng = np.random.default_rng(0)
    good, lucky = alone + 8 + rng.random((1, 6)), alone + 9 + rng.random((1, 6))
    runs = [
        run_of("local", who=who, test=alone),
        run_of("fedfomo", who=who, test=good, val=alone + 7),
        run_of("fedamp", who=who, test=lucky, val=alone + 3),
    ]
    found = Comparison.of(runs)
    assert found.choice == Choice("fedfomo", "validation", 2)
    assert "FedFomo was chosen among 2 methods on validation data" in found.verdict
    assert "FedAMP is best on test data (59.6 %)" in found.verdict
    assert [line.best for line in table.table(found).lines] == [False, False, True]


def test_without_honest_validation_data_the_choice_is_on_test_data_and_says_so():
    who, alone = roster(6), np.full((1, 6), 50.0)
    for facts, options in (({}, {"merge_val": True}), ({"n_val": np.zeros(6, dtype=int)}, {})):
        who = roster(6)
        if facts:
            who = type(who)(**{**vars(who), **facts})
        runs = [
            run_of("local", who=who, test=alone, **options),
            run_of("fedfomo", who=who, test=alone + 8, val=alone + 9, **options),
            run_of("fedamp", who=who, test=alone + 9, val=alone + 3, **options),
        ]
        found = Comparison.of(runs)
        assert found.choice == Choice("fedamp", "test", 2)
        assert "FedAMP is the best of 2 methods on test data, because there is no" in found.verdict


def test_warnings_come_last():
    found = verdict_of([math.nan, *range(1, 11)], weak={"site-0": "no test data"})
    assert found.endswith("Beware: not enough data to judge site-0 (no test data).")
    assert "for the 10 of 11 clients judged" in found
    copied = comparison_of(("local",)).runs[0]
    copy = run_of("fedprox", who=copied.roster, test=copied.test)
    assert Comparison.of([copied, copy]).verdict.endswith(
        "Beware: there is an alarm about FedProx (equals_local)."
    )


def test_nothing_to_say():
    assert comparison_of(("local",)).verdict.startswith("Only local training")
    assert verdict_of([math.nan] * 3).startswith("No client has test data")


def test_runs_without_their_answers_are_read_and_not_judged():
    found = verdict_of(range(1, 11), samples=None)
    assert found.startswith("Nothing is tested")
    who, test = roster(4), np.full((1, 4), 50.0)
    old = [run_of(m, who=who, test=test, samples=None) for m in ("local", "fedavg")]
    comparison = Comparison.of(old)
    assert comparison.judgements is None
    assert comparison.client("site-1").gains == ()
    assert comparison.to_dict()["clients"] == []
    assert "Nothing is tested" in page.page(comparison)


# ---- clients -------------------------------------------------------------------------------------


def test_every_client_gets_an_interval_and_a_sentence():
    who, alone = roster(3), np.array([[50.0, 50.0, 50.0]])
    runs = [
        run_of("local", who=who, test=alone),
        run_of("fedfomo", who=who, test=alone + np.array([12.0, -14.0, 1.0])),
    ]
    found = Comparison.of(runs)
    claims = {one.client: one for one in found.judgements["fedfomo"].clients}
    assert [claims[f"site-{i}"].claim for i in range(3)] == ["better", "worse", "unclear"]
    for name, one in claims.items():
        assert found.client(name).gains == (one,)
        assert one.gain.low < one.gain.gain < one.gain.high
    said = {row["client"]: row for row in found.to_dict()["clients"]}
    assert said["site-0"]["sentence"].startswith(
        "In this run FedFomo served site-0 better than its local model: a gain of 12.0 points"
    )
    assert "served site-1 worse" in said["site-1"]["sentence"]
    assert "is not shown to help or harm site-2" in said["site-2"]["sentence"]
    assert "might tell" in said["site-2"]["sentence"]
    shown = page.page(found)
    assert "<td>better</td>" in shown
    assert "<td>worse</td>" in shown
    with pytest.raises(ConfigError, match="no client 'site-9'"):
        found.client("site-9")


def test_a_gain_that_counts_alone_but_not_among_many_says_so():
    who, alone = roster(12), np.full((1, 12), 50.0)
    runs = [
        run_of("local", who=who, test=alone),
        run_of("fedfomo", who=who, test=alone + np.array([3.5] + [0.0] * 11)),
    ]
    one = Comparison.of(runs).client("site-0").gains[0]
    assert one.gain.low > 0
    assert one.claim == "unclear"
    sentence = client_sentence(Comparison.of(runs), one)
    assert "too little among so many clients and methods" in sentence


# ---- methods that serve some clients only --------------------------------------------------------


def served(gains_of_alice, others=None):
    """Ten agents; WAFFLE serves the first one, FedAMP all."""
    who = roster(10)
    alone = np.array([[96.0] + [80.0] * 9])
    alice = np.full((1, 10), math.nan)
    alice[0, 0] = 96.0 + gains_of_alice
    runs = [run_of("local", who=who, test=alone), run_of("waffle", who=who, test=alice)]
    if others is not None:
        runs.append(run_of("fedamp", who=who, test=alone + others))
    return Comparison.of(runs)


def test_a_method_is_compared_on_the_clients_it_serves():
    found = served(-3.0)
    local, waffle = table.table(found).lines
    assert local.best  # Alice alone has 96, WAFFLE gives her 93: more than the mean of all Locals
    assert not waffle.best
    heads = [column.head for column in table.table(found).columns]
    assert waffle.cells[heads.index("serves")] == "1"
    assert waffle.cells[heads.index("alone")] == "96.0"
    assert table.table(served(2.0)).lines[1].best
    assert "instead of 96.0 % alone for the 1 of 10 clients judged" in found.verdict
    assert found.judgements["waffle"].overall.clients == 1


def test_a_method_for_one_client_is_not_starred_above_those_for_all():
    found = served(2.0, others=np.full((1, 10), 4.0))
    assert [line.best for line in table.table(found).lines] == [False, False, True]
    assert found.choice.method == "fedamp"
    who, alone = roster(10), np.array([[96.0] + [80.0] * 9])
    apart = [np.where(np.arange(10) == i, 99.0, np.nan)[None] for i in (0, 3)]
    two = [run_of(m, who=who, test=t) for m, t in zip(("waffle", "erosion"), apart, strict=True)]
    other = Comparison.of([run_of("local", who=who, test=alone), *two])
    assert other.choice == Choice("waffle", "nothing", 1)  # Erosion serves somebody else
    plain = comparison_of(("local", "fedavg"))
    assert "serves" not in [column.head for column in table.table(plain).columns]


# ---- alarms --------------------------------------------------------------------------------------


def test_training_alone_is_known_although_local_stopped_early():
    rng = np.random.default_rng(0)
    trained = run_of("fedfomo", test=60 + rng.random((6, 12)), who=roster())
    local = run_of("local", test=trained.test.copy(), who=roster())
    stopped = local
    stopped.test[3:, :4] = stopped.test[2, :4]  # some clients go back to an earlier model
    stopped.test_loss[3:, :4] -= 0.2
    stopped.val_loss[3:, :4] -= 0.2
    references = {"local": stopped}
    codes = [alarm.code for alarm in raise_alarms(trained, references)]
    assert codes == ["equals_local"]
    stopped.val_loss[4, 0] += 1.0  # a model with a higher loss is no early-stopped one
    assert raise_alarms(trained, references) == ()
    honest = run_of("fedamp", test=60 + rng.random((6, 12)), who=roster())
    honest.val_loss[:] += 10  # worse everywhere, and nowhere the same
    assert "equals_local" not in [a.code for a in raise_alarms(honest, references)]


# ---- divergence ----------------------------------------------------------------------------------


def test_a_diverged_client_is_named():
    who, y = roster(4), np.arange(30.0)
    runs = []
    for method, error in (("local", 2.0), ("fedavg", 1.0)):
        log = Log(method, 0, "rmse", who)
        clients = [
            Answers(y + (np.nan if method == "fedavg" and i == 1 else error), y, np.arange(30))
            for i in range(4)
        ]
        scores = np.array([error, math.inf if method == "fedavg" else error, error, error])
        made = record(0, scores)._replace(outcomes=outcomes_of(clients))
        log.append(made)
        runs.append(finished(log, predictors(4), {}, {}))
    found = Comparison.of(runs)
    assert found.verdict.startswith("Joining is not worth it as it is: FedAvg diverged for site-1.")
    assert found.client("site-1").gains[0].claim == "worse"
    row = found.rows[1]
    assert row.mean.mean == math.inf
    assert row.relative_to_local.mean == -math.inf
    assert (row.better, row.worse) == (3, 1)
    assert "\N{INFINITY}" in repr(found)
    assert "site-1: \N{MINUS SIGN}\N{INFINITY}" in page.page(found)  # a dot at the edge
