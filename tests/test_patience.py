"""A run with patience ends where validation scores no longer rise."""

import pytest

import coterie
from coterie.core.metrics import mean_known, stalled
from coterie.errors import ConfigError

ASKED = {"rounds": 40, "method": "fedavg", "engine": "vmap", "lr": 0.5, "model": "linear"}


def patient(**more):
    return coterie.run(set={"run.patience": 2}, **{**ASKED, **more})


@pytest.fixture(scope="module")
def found():
    return patient()


def test_it_stops_after_so_many_evaluations_without_a_better_one(found):
    """It is the run of so many rounds; one round less would not have stopped."""
    means, rounds = mean_known(found.val).tolist(), len(found.lines)
    assert 2 < rounds < 40
    assert stalled(means, "accuracy") == 2
    assert max(stalled(means[:n], "accuracy") for n in range(1, rounds)) == 1
    plain = coterie.run(**{**ASKED, "rounds": rounds})
    assert found.summary["digest"] == plain.summary["digest"]


def test_a_killed_run_stops_in_the_same_round_and_says_so(found, tmp_path):
    """Its last step is the last of the run: trackers close it, the console prints its line."""
    steps = []

    def stop(step):
        steps.append(step)
        if len(steps) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        patient(out=tmp_path / "run", progress=stop)
    again = coterie.resume(tmp_path / "run", progress=steps.append)
    assert again.summary["digest"] == found.summary["digest"]
    assert len(again.lines) == len(found.lines)
    assert {step.rounds for step in steps[:-1]} == {40}
    assert steps[-1].rounds == steps[-1].done == len(found.lines)
    assert coterie.verify(tmp_path / "run") == {str(tmp_path / "run"): []}


def test_it_needs_validation_data():
    with pytest.raises(ConfigError, match="no patience"):
        coterie.run(set={"run.patience": 2, "train.merge_val": True}, **ASKED)
