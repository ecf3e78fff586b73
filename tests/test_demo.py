"""The demo's promise, on two seeds: who finds the hidden groups is better off than alone."""

import pytest

import coterie

FINDERS = {"fedfomo": 0.9, "fedamp": 0.8, "circle": 0.8}  # and the weight inside the group


@pytest.fixture(scope="module")
def comparison():
    methods = ["local", "fedavg", *FINDERS]
    settings = {"engine.name": "vmap", "run.evaluate_every": 20}
    return coterie.compare(seeds=2, methods=methods, set=settings)


def scores(comparison, method):
    summaries = [run.summary for run in comparison.runs if run.summary["method"] == method]
    return {summary["seed"]: summary for summary in summaries}


@pytest.mark.parametrize("method", FINDERS)
def test_who_finds_the_groups_beats_local_and_fedavg(comparison, method):
    mine = scores(comparison, method)
    assert sorted(mine) == [0, 1]
    for seed, summary in mine.items():
        for other in ("local", "fedavg"):
            assert summary["accuracy_last"] > scores(comparison, other)[seed]["accuracy_last"] + 1
        assert summary["in_group_weight"] >= FINDERS[method]
        assert summary["alarms"] == []


def test_one_model_for_all_is_worse_than_none(comparison):
    for summary in scores(comparison, "fedavg").values():
        assert summary["worse_than_local"] == 12


def test_the_verdict_says_so(comparison):
    assert "joining gains" in comparison.verdict
    chosen = comparison.judgements[comparison.choice.method]
    assert len(chosen.shown("better")) >= 8
    assert chosen.shown("worse") == []
