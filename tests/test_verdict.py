"""What is said of a comparison: each claim is tested, and says no more than its test shows."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from coterie.core.answers import Answers, outcomes_of
from coterie.core.inference import holm, these_sites
from coterie.core.paired_tests import SiteGain, site_gain
from coterie.errors import ConfigError
from coterie.runs.alarms import raise_alarms
from coterie.runs.run import Log
from coterie.runs.summary import finished
from coterie.views import page, table
from coterie.views.comparison import Comparison
from coterie.views.judgement import Choice, checked_contrast, contrast, median_fold, site_gains
from coterie.views.site_page import site_page
from coterie.views.verdict import contrasted, like_these
from synthetic import comparison_of, predictors, record, roster, run_of

# ---- who is tested -------------------------------------------------------------------------------


def test_only_the_chosen_method_is_told_and_needs_no_correction():
    who, alone = roster(6), np.full((1, 6), 50.0)
    better = alone + np.array([20.0, 19, 18, 17, 18, 20])
    runs = [run_of(m, who=who, test=better, val=better) for m in ("fedavg", "fedamp")]
    runs.append(run_of("fedfomo", who=who, test=better, val=better + 1))
    one = Comparison.of([run_of("local", who=who, test=alone), runs[-1]])
    many = Comparison.of([run_of("local", who=who, test=alone), *runs])
    assert many.judgements["fedfomo"] == one.judgements["fedfomo"]._replace(
        sites_like_these=many.judgements["fedfomo"].sites_like_these
    )
    assert len(many.judgements["fedfomo"].shown("better")) == 6
    for other in ("fedavg", "fedamp"):
        judged = many.judgements[other]
        assert (judged.tested, judged.claim) == (False, "untested")
        assert {client.claim for client in judged.clients} == {"untested"}
        assert judged.these_sites.low > 0  # intervals, and no claims


def test_a_choice_on_test_data_is_corrected_for_all_methods_and_sites():
    who, alone = roster(6), np.full((1, 6), 50.0)
    tests = [alone + 4 * gain for gain in (np.arange(6) + 2.0, np.arange(6) + 1.0)]
    runs = [run_of("local", who=who, test=alone, merge_val=True)]
    runs += [
        run_of(m, who=who, test=t, merge_val=True)
        for m, t in zip(("fedavg", "fedamp"), tests, strict=True)
    ]
    found = Comparison.of(runs)
    assert found.choice == Choice("fedavg", "test", 2)
    every = [one for judged in found.judgements.values() for one in judged.clients]
    for one, p in zip(every, holm([one.gain.p for one in every]), strict=True):
        assert one.claim == ("better" if p < 0.05 else "unclear")
        assert one.with_others is None
    means = [these_sites([one.gain for one in j.clients]).p for j in found.judgements.values()]
    assert [j.these_sites.p for j in found.judgements.values()] == pytest.approx(holm(means))
    assert "corrected for 2 methods" in found.verdict


def test_a_method_without_validation_scores_does_not_move_the_choice_to_test_data():
    who, alone = roster(6), np.full((1, 6), 50.0)
    runs = [
        run_of("local", who=who, test=alone),
        run_of("fedfomo", who=who, test=alone + 4, val=alone + 4),
        run_of("fedamp", who=who, test=alone + 5, merge_val=True),
    ]
    assert Comparison.of(runs).choice == Choice("fedfomo", "validation", 1)


# ---- several seeds -------------------------------------------------------------------------------


def seeds_of(gains, same=True, methods=("fedfomo",)):
    """One run per seed whose clients gain a row of ``gains`` over 50 %."""
    runs = []
    for s, row in enumerate(np.asarray(gains, dtype=float)):
        who = roster(len(row), seed=0 if same else s)
        alone = np.full((1, len(row)), 50.0)
        runs.append(run_of("local", s, who=who, test=alone, samples=200))
        runs += [run_of(m, s, who=who, test=alone + row, samples=200) for m in methods]
    return Comparison.of(runs)


FIVE = np.array([5.0, 4, 6, 5.5, 4.5])[:, None] + np.array([3.0, -3, 1, -1])


def test_five_trainings_of_the_same_clients_answer_for_training_again():
    found = seeds_of(FIVE)
    again = found.judgements["fedfomo"].trained_again
    assert again.gain == pytest.approx(5.0)
    assert again.freedom == 4
    assert "Trained again (5 seeds), joining gains 5.0 points on average" in found.verdict
    several = seeds_of(FIVE, methods=("fedfomo", "fedavg"))
    assert several.judgements["fedfomo"].trained_again.p == pytest.approx(2 * again.p)


def test_fewer_trainings_or_other_clients_claim_nothing_of_training_again():
    assert seeds_of(FIVE[:4]).verdict.endswith("Training again is not covered: run 5 seeds.")
    dealt = seeds_of(FIVE, same=False)
    assert dealt.judgements["fedfomo"].trained_again is None
    assert 'train the same clients (run.deal = "fixed")' in dealt.verdict


def test_a_pair_that_was_named_beforehand_needs_no_correction():
    found = seeds_of(FIVE, methods=("fedfomo", "fedavg"))
    again = found.judgements["fedfomo"].trained_again
    mean = contrast(found, "fedfomo", "local")
    assert mean.p == pytest.approx(again.p / 2)
    assert contrast(found, "fedfomo", "fedavg").gain == 0.0
    said = contrasted(found, "fedfomo", "local")
    assert said.startswith("Trained again (5 seeds), FedFomo in place of Local gains 5.0 points")
    few = seeds_of(FIVE[:3])
    assert contrasted(few, "fedfomo", "local").endswith("cannot tell: run 5 seeds.")
    for wrong in ("fedfomo", "fedfomo,fedamp", ""):
        with pytest.raises(ConfigError, match="expected two methods"):
            checked_contrast(wrong, found.methods)


def test_gains_computed_at_the_sites_say_the_same():
    found = seeds_of(FIVE)
    sent = {
        method: [SiteGain.from_json(json.loads(json.dumps(one.to_json()))) for one in gains]
        for method, gains in site_gains(found, ["fedfomo"], "local").items()
    }
    without = [replace(run, outcomes=None) for run in found.runs]
    at_sites = Comparison.of(without, gains=sent)
    assert at_sites.verdict == found.verdict
    assert at_sites.judgements == found.judgements
    assert contrast(at_sites, "fedfomo", "local") == contrast(found, "fedfomo", "local")
    with pytest.raises(ConfigError, match="expected those of a simulation"):
        contrast(at_sites, "local", "fedfomo")


def test_folds_test_every_row_once_and_count_as_one_run():
    """Two folds of 100 rows say what one run on 200 rows says."""
    who, alone = roster(4), np.full((1, 4), 50.0)
    gains = np.array([9.0, 8.0, 2.0, 10.0])
    whole = [run_of(m, who=who, test=alone + g) for m, g in (("local", 0), ("fedfomo", gains))]
    halves = []
    for s in (0, 1):
        for method, gain in (("local", 0.0), ("fedfomo", gains)):
            run = run_of(method, s, who=roster(4, seed=s), test=alone + gain, samples=100)
            outcomes = run.outcomes._replace(units=run.outcomes.units + 100 * s)
            halves.append(replace(run, outcomes=outcomes, config={"run": {"folds": 2}}))
    one, two = (Comparison.of(runs) for runs in (whole, halves))
    a, b = (found.judgements["fedfomo"] for found in (one, two))
    assert b.these_sites == pytest.approx(a.these_sites)
    assert [x.gain for x in b.clients] == [x.gain for x in a.clients]
    assert "the models of 2 folds, joining gains" in two.verdict
    assert "your 200 rows alone" in repr(two.client("site-0"))
    assert "mean of the models of 2 folds" in repr(two)
    assert "The model for use is that of fedfomo/seed-0: its validation score is" in repr(two)
    assert b.trained_again is None


@pytest.mark.parametrize("folds", [None, 2])
def test_a_sites_scores_differ_by_its_gain(folds):
    """Everywhere on the page: the models of the first seed, or the rows of all folds."""
    runs, gains = [], np.array([[9.0, 8.0, -2.0, 10.0], [3.0, 12.0, 0.0, 5.0]])
    for s, rows in ((0, 200), (1, 100)):
        who = replace(roster(4, seed=s), n_test=np.full(4, rows))
        for method, gained in (("local", 0.0), ("fedfomo", gains[s])):
            run = run_of(method, s, who=who, test=np.full((1, 4), 50.0) + gained, samples=rows)
            outcomes = run.outcomes._replace(units=run.outcomes.units + 1000 * s)
            runs.append(replace(run, outcomes=outcomes, config={"run": {"folds": folds}}))
    found = Comparison.of(runs)
    judged = [one.gain.gain for one in found.judgements["fedfomo"].clients]
    assert found.site_gain("fedfomo") == pytest.approx(judged)
    for name, gain in zip(found.runs[0].roster.clients, judged, strict=True):
        line = re.findall(rf'scope="row">{name}</th>(.*)</tr>', page.page(found))[-1]
        alone, joined, shown = (cell(line, k) for k in (1, 2, 3))
        assert float(joined) - float(alone) == pytest.approx(float(shown.split()[0]), abs=0.11)
        assert float(shown.split()[0]) == pytest.approx(gain, abs=0.06)
        own = re.search(r'scope="row">FedFomo</th>(.*)</tr>', site_page(found, name))[1]
        assert cell(own, 0) == joined
    where = "mean of 2 folds" if folds else "seed 0"
    assert f"4 clients, {where}, last round" in page.page(found)
    assert f"test rows alone ({where})" in site_page(found, "site-0")


def cell(line, k):
    """A cell of a row of an HTML table, with a minus sign that float understands."""
    return re.findall(r"<td[^>]*>([^<]*)</td>", line)[k].replace("\N{MINUS SIGN}", "-")


def test_the_model_for_use_is_of_the_fold_with_the_median_validation_score():
    runs = []
    for seed, value in enumerate((70.0, 52.0, 60.0)):
        for method in ("local", "fedfomo"):
            scores = np.full((1, 4), value)
            run = run_of(method, seed, who=roster(4, seed=seed), test=scores[:, ::-1], val=scores)
            runs.append(replace(run, config={"run": {"folds": 3}}))
    assert median_fold(Comparison.of(runs), "fedfomo").seed == 2


def test_deals_of_the_data_are_not_averaged_as_the_same_clients():
    gains = np.array([[9.0, -9, 9, -9], [-9.0, 9, -9, 9]]) + 3.0
    dealt = seeds_of(gains, same=False)
    each = [
        these_sites([one.gain for one in seeds_of(row[None]).judgements["fedfomo"].clients])
        for row in gains
    ]
    found = dealt.judgements["fedfomo"].these_sites
    assert found.error == pytest.approx(np.mean([one.error for one in each]))
    assert "2 deals of the data" in dealt.verdict


# ---- clients with too few rows -------------------------------------------------------------------


def test_a_site_with_one_unit_is_left_out_by_name():
    """One patient's rows say nothing of others: the federation is judged without them."""
    who, runs = roster(4), {}
    for method, hits in (("local", 50), ("fedfomo", 65)):
        made = Log(method, 0, "accuracy", who)
        right = (np.arange(100) < hits).astype(int)
        clients = [Answers(right, np.ones(100, dtype=int), np.arange(100)) for _ in range(4)]
        clients[2] = clients[2]._replace(units=np.zeros(100, dtype=int))
        outcomes = outcomes_of(clients)
        made.append(record(0, np.full(4, float(hits)))._replace(outcomes=outcomes))
        runs[method] = finished(made, predictors(4), {}, {})
    found = Comparison.of(runs.values())
    judged = found.judgements["fedfomo"]
    assert judged.left_out == ("site-2",)
    assert judged.these_sites.sites == 3
    assert math.isfinite(judged.these_sites.high)
    assert "For 3 of 4 sites and the models of this run, joining gains 15.0" in found.verdict
    assert "too few test rows to judge site-2, left out" in found.verdict
    answers = [list(runs[m].outcomes.clients())[2] for m in ("fedfomo", "local")]
    alone = site_gain("accuracy", [tuple(answers)])
    assert SiteGain.from_json(json.loads(json.dumps(alone.to_json()))) == alone


@pytest.mark.parametrize(("name", "value"), [("p", 2.0), ("variance", -1.0), ("gain", "nan")])
def test_what_is_no_gain_is_refused(name, value):
    told = site_gain("accuracy", [(right(9), right(5))]).to_json()
    assert SiteGain.from_json(told).each[0].counts == (4, 0, 10)
    with pytest.raises(ValueError, match="found"):
        SiteGain.from_json({**told, "together": {**told["together"], name: value}})


def right(hits, rows=10):
    values = (np.arange(rows) < hits).astype(int)
    return Answers(values, np.ones(rows, dtype=int), np.arange(rows))


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


def test_the_headline_is_about_these_sites_and_models():
    assert verdict_of(range(1, 11)) == (
        "For these 10 sites and the models of this run, joining gains 5.5 points on average (95 % "
        "interval 4.5 to 6.5). FedFomo has a mean accuracy of 55.5 %, training alone 50.0 %. A "
        "gain of its own is shown for 9 of 10 sites, a loss for none. Training again is not "
        "covered: run 5 seeds."
    )


def test_a_loss_is_shown_and_is_not_the_lack_of_a_gain():
    found = verdict_of(-np.arange(1, 11))
    assert "joining costs 5.5 points on average (95 % interval 4.5 to 6.5)" in found
    for ends in (np.zeros(5), [1, -1, 0, 2, -2]):
        found = verdict_of(ends)
        assert "it is open whether joining gains: " in found
        assert "joining costs" not in found


def test_what_is_open_says_what_would_tell():
    found = verdict_of([5, -5, 2.5, -2.5, 2.5, 5, -2.5, 2.5, 0, 2.5], samples=40)
    assert "test rows per site instead of 40 might tell." in found
    assert "Even 30 times as many" in verdict_of([5, -5, 5, -5, 0.5, 0, 0, 0, 0, 0])


def test_sites_like_these_are_spoken_of_when_asked():
    who, alone = roster(10), np.full((1, 10), 50.0)
    runs = [run_of("local", who=who, test=alone)]
    found = Comparison.of([*runs, run_of("fedfomo", who=who, test=alone + np.arange(1, 11))])
    assert "like these" not in found.verdict
    said = like_these(found)
    assert said.startswith("For sites like these, joining gains 5.5 points on average")
    mean = found.judgements["fedfomo"].sites_like_these
    assert mean.p == pytest.approx(scipy.stats.ttest_1samp(np.arange(1.0, 11), 0).pvalue, rel=0.01)


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
    assert [line.best for line in table.methods_table(found).lines] == [False, False, True]


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
    assert found.endswith("Beware: too little data at site-0 (no test data).")
    assert found.startswith("For 10 of 11 sites")
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


def test_every_client_gets_an_interval_and_a_claim():
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
    assert [said[name]["shown"] for name in claims] == ["better", "worse", "unclear"]
    shown = page.page(found)
    assert "<td>better</td>" in shown
    assert "<td>worse</td>" in shown
    with pytest.raises(ConfigError, match="no client 'site-9'"):
        found.client("site-9")


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
    local, waffle = table.methods_table(found).lines
    assert local.best  # Alice alone has 96, WAFFLE gives her 93: more than the mean of all Locals
    assert not waffle.best
    heads = [column.head for column in table.methods_table(found).columns]
    assert waffle.cells[heads.index("serves")] == "1"
    assert waffle.cells[heads.index("alone")] == "96.0"
    assert table.methods_table(served(2.0)).lines[1].best
    assert found.verdict.startswith("For 1 of 10 sites")
    assert "training alone 96.0 %" in found.verdict
    assert found.judgements["waffle"].these_sites.sites == 1


def test_a_method_for_one_client_is_not_starred_above_those_for_all():
    found = served(2.0, others=np.full((1, 10), 4.0))
    assert [line.best for line in table.methods_table(found).lines] == [False, False, True]
    assert found.choice.method == "fedamp"
    who, alone = roster(10), np.array([[96.0] + [80.0] * 9])
    apart = [np.where(np.arange(10) == i, 99.0, np.nan)[None] for i in (0, 3)]
    two = [run_of(m, who=who, test=t) for m, t in zip(("waffle", "erosion"), apart, strict=True)]
    other = Comparison.of([run_of("local", who=who, test=alone), *two])
    assert other.choice == Choice("waffle", "nothing", 1)  # Erosion serves somebody else
    plain = comparison_of(("local", "fedavg"))
    assert "serves" not in [column.head for column in table.methods_table(plain).columns]


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
