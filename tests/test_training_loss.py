"""``run.training_loss``: the mean loss of the predictors on the clients' training data."""

from dataclasses import replace

import pytest
import torch

import coterie
from coterie.algorithms.fedem import FedEM
from coterie.errors import ConfigError
from coterie.runs import run_folder
from coterie.runs.setting import Prepared, with_training_loss
from coterie.training.rounds import train
from support import METHODS, assert_close, engine_of, last, one_client, predictors, task


def measuring(on, wanted=True):
    return on._replace(problem=replace(on.problem, training_loss=wanted))


def test_it_is_the_mean_of_the_clients_own_losses():
    method = METHODS["fedavg"]()
    on = measuring(task(method, merge=False))
    record = last(method, on, "loop")
    models = predictors(record).models[:, 0]
    own = [one_client(on, i).loss(models[i], "train") for i in range(5)]
    assert record.observed["train_loss"] == pytest.approx(float(torch.stack(own).mean()), rel=1e-9)


@pytest.mark.parametrize("method", [METHODS["local"](), FedEM()])
def test_engines_agree_and_nothing_else_changes(method):
    on = task(method, merge=False)
    plain = last(method, on, "loop")
    assert "train_loss" not in plain.observed
    losses = []
    for engine in ("loop", "vmap", "wire"):
        found = last(method, measuring(on), engine)
        losses.append(found.observed["train_loss"])
        assert found.traffic == plain.traffic
        for one, other in zip(found.evaluation, plain.evaluation, strict=True):
            assert_close(torch.from_numpy(one), torch.from_numpy(other))
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-9)
    kept, usual = (predictors(last(method, o, "loop")).models for o in (measuring(on), on))
    assert torch.equal(kept, usual)


def test_it_is_measured_where_a_round_is_evaluated():
    on = measuring(task(METHODS["fedavg"]()))
    records = train(METHODS["fedavg"](), on.problem, engine_of("vmap", on), 3, evaluate_every=2)
    assert ["train_loss" in record.observed for record in records] == [False, True, True]


def test_a_runs_folder_has_it(tmp_path):
    config = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "clients": 3},
        "model": {"name": "linear"},
        "train": {"batch": 100},
        "engine": {"name": "loop"},
        "run": {"rounds": 3, "training_loss": True},
    }
    coterie.run(config, method="local", out=str(tmp_path / "run"))
    lines = run_folder.read(tmp_path / "run").lines
    losses = [line["train_loss"] for line in lines]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1] > 0


def test_sites_do_not_report_it():
    on = task(METHODS["fedavg"]())
    with pytest.raises(ConfigError, match=r"run\.training_loss.*data is at sites"):
        with_training_loss(Prepared(on.problem, None, None))
