"""Every answer to a test sample is kept: in memory, in a run's folder, through every engine."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

import coterie
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local import Local
from coterie.core import metrics
from coterie.core.paired_tests import site_gain
from coterie.errors import StoreError
from coterie.runs import comparison_folder, run_folder
from coterie.runs.config.loading import merge
from coterie.storage import files
from coterie.training.rounds import train
from coterie.views.comparison import Comparison
from support import engine_of, federation, last, task

SMALL = {
    "data": {"name": "digits"},
    "partition": {"name": "concept_shift", "clients": 5, "groups": 2},
    "model": {"name": "linear"},
    "train": {"batch": 50},
    "engine": {"name": "vmap", "chunk": 3},
    "run": {"rounds": 2, "methods": ["fedavg", "fedamp"]},
}
TOY = {
    "data": {"name": "sine"},
    "model": {"name": "linear"},
    "train": {"lr": 0.05, "batch": 20},
    "engine": {"name": "loop"},
    "run": {"rounds": 2},
}


def rescored(history):
    """Each client's score, computed again from its answers."""
    return [
        metrics.score(history.metric, client.values, client.targets)
        for client in history.outcomes.clients()
    ]


@pytest.mark.parametrize("metric", ["accuracy", "auc"])
def test_the_answers_give_the_score_of_classes(metric):
    found = coterie.run(SMALL, method="fedavg", set={"run.metric": metric})
    np.testing.assert_allclose(rescored(found), found.last, rtol=1e-6)
    assert found.outcomes.sizes.tolist() == found.roster.n_test.tolist()


@pytest.mark.parametrize("metric", ["rmse", "r2"])
def test_the_answers_give_the_score_of_values(metric):
    found = coterie.run(TOY, method="local", set={"run.metric": metric})
    np.testing.assert_allclose(rescored(found), found.last, rtol=1e-9)


@pytest.mark.parametrize("metric", ["accuracy", "auc"])
def test_engines_keep_the_same_answers_in_the_last_round_only(metric):
    method, kept = FedAvg(), []
    for engine, chunk in (("loop", None), ("vmap", 2)):
        on = task(method)
        record = last(method, on, engine, rounds=2, chunk=chunk, metric=metric)
        kept.append(record.outcomes)
        first = next(iter(_run(method, on, engine)))
        assert first.outcomes is None
    for other in kept[1:]:
        for a, b in zip(kept[0][:4], other[:4], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    beside = [found.probabilities for found in kept]  # where the answers are classes
    assert [part is None for part in beside] == [metric == "auc"] * 2
    if metric == "accuracy":
        np.testing.assert_allclose(*beside, rtol=1e-4, atol=1e-6)
    expected = [i for part in federation().test for i in part.tolist()]
    assert kept[0].units.tolist() == expected  # the sample itself, where no units are known


def _run(method, on, engine):
    return train(method, on.problem, engine_of(engine, on), 2)


def test_units_of_the_data_are_kept_with_the_answers():
    made = federation()
    units = torch.arange(len(made.dataset.y)) // 3
    known = replace(made, dataset=replace(made.dataset, units=units))
    found = last(Local(), task(Local(), federated=known), rounds=1).outcomes
    expected = [int(units[i]) for part in known.test for i in part.tolist()]
    assert found.units.tolist() == expected


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "out"
    return coterie.compare(SMALL, out=str(out))


def test_a_comparison_from_disk_is_the_one_in_memory(compared):
    again = coterie.read(compared.path)
    assert again.verdict == compared.verdict
    assert again.judgements == compared.judgements
    assert again.to_dict() == compared.to_dict()
    stored = files.read_json(compared.path / "comparison.json")
    assert stored == files.plain(compared.to_dict())
    assert {row["method"] for row in stored["clients"]} == {"fedavg", "fedamp"}
    assert len(stored["clients"]) == 2 * 5
    assert stored["recommended"]["on"] == "validation"


def test_the_file_is_listed_checked_and_no_pickle(compared, tmp_path, monkeypatch):
    path = compared.of_method("fedavg")[0].path
    assert "predictions.npz" in files.read_json(path / files.MANIFEST)["files"]
    whole = (path / "predictions.npz").read_bytes()
    try:
        (path / "predictions.npz").write_bytes(whole[:-1])
        assert run_folder.verify(path) == ["predictions.npz has changed since it was finished"]
        np.savez(path / "predictions.npz", values=np.array([Bomb()], dtype=object))
        monkeypatch.chdir(tmp_path)
        with pytest.raises(StoreError, match="cannot be read"):
            run_folder.read(path)
        (path / "predictions.npz").write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(StoreError, match="cannot be read"):
            run_folder.read(path)
        assert not (tmp_path / "canary").exists()
    finally:
        (path / "predictions.npz").write_bytes(whole)


class Bomb:
    def __reduce__(self):
        return (open, ("canary", "w"))


def test_who_is_not_served_is_not_judged():
    config = {**SMALL, "algorithm": {"waffle": {"requesters": [0]}}}
    found = coterie.compare(config, set={"run.methods": ["waffle"]})
    row = found.rows[1]
    assert row.served == 1
    first = found.runs[0].roster.clients[0]
    assert [one.client for one in found.judgements["waffle"].clients] == [first]
    assert row.alone.mean == pytest.approx(found.runs[0].last[0])


def test_clients_that_keep_their_answers_get_the_same_verdict(tmp_path):
    """The gains that sites compute, written and read, stand in for their answers."""
    here = coterie.compare(merge(SMALL, {"run.methods": ["fedamp"], "partition.clients": 3}))
    local, ours = ([*run.outcomes.clients()] for run in here.runs)
    gains = [site_gain(here.metric, [pair]) for pair in zip(ours, local, strict=True)]
    comparison_folder.write_gains(tmp_path, {"fedamp": gains})
    read = comparison_folder.read_gains(tmp_path)
    there = Comparison.of([replace(run, outcomes=None) for run in here.runs], None, read)
    assert there.judgements == here.judgements
    assert there.verdict == here.verdict
    (tmp_path / "gains.json").write_text('{"fedamp": [{"each": [[1, "x"]], "together": null}]}')
    with pytest.raises(StoreError, match="is no gain of a client"):
        comparison_folder.read_gains(tmp_path)
