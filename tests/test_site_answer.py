"""What a comparison says to one site, and how much sites relied on each other."""

import json

import numpy as np
import pytest

from coterie.runs.run import Log
from coterie.views.comparison import Comparison
from coterie.views.page import page
from coterie.views.reliance import FEWEST_ROUNDS, reliance
from synthetic import comparison_of, grouped, record, roster, run_of

SITES = ("North", "Lakeside", "County", "South", "Harbour", "Hill")


def history_of(matrices, took_part=None, swaps=False, who=None):
    K = len(matrices[0])
    log = Log("fedfomo", 0, "accuracy", who or roster(K, groups=None), swaps=swaps)
    for index, A in enumerate(matrices):
        made = record(index + 3, np.full(K, 50.0), A)  # record rejects a client in round 2
        log.append(made._replace(clients=took_part[index] if took_part else made.clients))
    return log.run()


def test_shares_are_means_over_the_rounds_in_which_a_client_took_part():
    A = np.array([[0.5, 0.5, 0.0], [0.2, 0.6, 0.2], [0.0, 0.0, 1.0]])
    B = np.array([[0.5, 0.0, 0.5], [0.2, 0.6, 0.2], [0.9, 0.0, 0.1]])
    found = reliance([history_of([A, A, B], [(0, 1, 2), (0, 1, 2), (1,)])])
    assert found.share[0].tolist() == [0.0, 1.0, 0.0]  # it was not there when B was made
    assert found.share[1].tolist() == [0.5, 0.0, 0.5]
    assert found.share[2].tolist() == [0.0, 0.0, 0.0]
    assert found.rounds.tolist() == [2, 3, 0]


def test_a_round_counts_by_how_much_a_client_relied_on_others():
    much = np.array([[0.0, 0.9, 0.0], [0, 1, 0], [0, 0, 1]])
    little = np.array([[0.9, 0.0, 0.1], [0, 1, 0], [0, 0, 1]])
    found = reliance([history_of([much, little])])
    assert found.share[0] == pytest.approx([0.0, 0.9, 0.1])


def test_only_steady_weight_above_uniform_is_clear():
    rng = np.random.default_rng(0)
    steady = [grouped(0.9) for _ in range(6)]
    found = reliance([history_of(steady)])
    same = np.arange(12)[:, None] % 3 == np.arange(12) % 3
    assert (found.clear == (same & ~np.eye(12, dtype=bool))).all()
    uniform = np.full((12, 12), 1 / 12)
    assert not reliance([history_of([uniform] * 6)]).clear.any()
    noise = [rng.dirichlet(np.full(12, 0.3), 12) for _ in range(20)]
    assert reliance([history_of(noise)]).clear.mean() < 0.02
    assert not reliance([history_of(steady[: FEWEST_ROUNDS - 1])]).clear.any()
    assert not reliance([history_of([np.full((2, 2), 0.5)] * 6)]).clear.any()


def test_where_models_change_hands_those_count_who_use_the_same_models():
    swapped = np.array([[0, 0, 1.0], [0, 0, 1.0], [1.0, 0, 0]])
    found = reliance([history_of([swapped] * 4, swaps=True)])
    assert found.share[0].tolist() == [0.0, 1.0, 0.0]
    assert found.helpers(0) == [1]
    assert found.helpers(2) == []


def test_seeds_count_together_only_where_the_groups_are_the_same():
    A, B = grouped(1.0), grouped(0.0)
    one, two = history_of([A] * 3, who=roster()), history_of([B] * 3, who=roster())
    other = history_of([B] * 3, who=roster(groups=np.zeros(12, dtype=int)))
    assert reliance([one, other]).share == pytest.approx(reliance([one]).share)
    assert reliance([one, two]).share != pytest.approx(reliance([one]).share)


def six(gains, methods=("local", "fedfomo"), **facts):
    """Six sites that rely on their own group of three, with these gains by the last method."""
    who = roster(6, names=SITES, **facts)
    alone = np.full((6, 6), 50.0)
    tests = [alone] * (len(methods) - 1) + [alone + np.array(gains)]
    return Comparison.of(
        run_of(m, who=who, test=test, rounds=6) for m, test in zip(methods, tests, strict=True)
    )


def test_a_site_reads_its_gain_its_helpers_and_how_sure_it_is():
    found = six([14.0, 0.5, -13.0, 14.0, 0.0, 0.0])
    said = {answer.client: answer.sentence for answer in found.answers}
    assert said["North"].startswith("North: joining gains you ")
    assert ", with what the other 5 sites show; your 200 rows alone " in said["North"]
    assert said["North"].endswith(
        "with FedFomo. Of sites told this at most 1 in 20 is wrong. You rely mostly on South."
    )
    assert said["County"].startswith("County: joining costs you ")
    assert said["Lakeside"].startswith("Lakeside: open: your 200 rows alone show +0.5 points (")


def test_a_site_that_the_others_gains_do_not_convince_is_told_so():
    found = six([40.0, 40.0, 40.0, 40.0, 40.0, 0.0])
    assert (
        "the sites gain on average, but your rows do not confirm it."
        in found.client("Hill").sentence
    )
    few = Comparison.of(
        run_of(m, who=roster(2), test=np.full((6, 2), t), rounds=6, samples=200)
        for m, t in (("local", 50.0), ("fedfomo", 60.0))
    )
    assert "site-0: joining gains you 10.0 points (your 200 rows alone " in repr(
        few.client("site-0")
    )


def test_the_sentence_is_the_same_everywhere(tmp_path):
    found = six([40.0, 1.0, -40.0, 0.0, 0.0, 0.0])
    shown, sites = page(found), found.to_dict()["sites"]
    json.dumps(sites)
    assert [one["client"] for one in sites] == list(SITES)
    for one in sites:
        assert one["sentence"] == repr(found.client(one["client"]))
        assert one["sentence"] in shown
    assert sites[0]["shown"] == "better"
    assert sites[0]["gain"]["gain"] == pytest.approx(40.0)


def test_a_method_without_a_matrix_thanks_nobody():
    for answer in six([14.0] * 6, ("local", "fedavg")).answers:
        assert answer.helpers == ()
        assert "rely" not in answer.sentence


def test_a_site_that_cannot_be_judged_is_told_so():
    old = [run_of(m, samples=None) for m in ("local", "fedavg")]
    assert {a.claim for a in Comparison.of(old).answers} == {"unclear"}
    assert "cannot tell, 20 test rows (answers were not kept)" in repr(
        Comparison.of(old).client("site-1")
    )
    assert comparison_of(("local",)).answers == ()
