"""A run with patience ends where validation scores no longer rise."""

import pytest

import coterie
from coterie.core.metrics import mean_known, stalled
from coterie.errors import ConfigError

ASKED = {"rounds": 40, "method": "fedavg", "engine": "vmap", "lr": 0.5, "model": "linear"}


def patient(count=2, **more):
    return coterie.run(set={"run.patience": count}, **{**ASKED, **more})


def test_it_stops_after_so_many_evaluations_without_a_better_one():
    """It is the run of so many rounds; one round less would not have stopped."""
    found = patient()
    means, rounds = mean_known(found.val).tolist(), len(found.lines)
    assert 2 < rounds < 40
    assert stalled(means, "accuracy") == 2
    assert max(stalled(means[:n], "accuracy") for n in range(1, rounds)) == 1
    plain = coterie.run(**{**ASKED, "rounds": rounds})
    assert found.summary["digest"] == plain.summary["digest"]


def test_a_killed_run_stops_in_the_same_round(tmp_path):
    def stop(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    place = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        patient(out=place, progress=stop)
    found, expected = coterie.resume(place), patient()
    assert found.summary["digest"] == expected.summary["digest"]
    assert len(found.lines) == len(expected.lines)
    assert coterie.verify(place) == {str(place): []}


def test_methods_of_a_comparison_stop_by_themselves():
    asked = {**ASKED, "methods": ["fedavg", "fedfomo"]}
    del asked["method"]
    found = coterie.compare(set={"run.patience": 1}, **asked)
    assert len({len(run.lines) for run in found.runs}) > 1
    assert found.verdict


def test_it_needs_validation_data():
    with pytest.raises(ConfigError, match="no patience"):
        coterie.run(set={"run.patience": 2, "train.merge_val": True}, **ASKED)
