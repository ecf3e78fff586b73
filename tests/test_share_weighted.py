"""Accuracy weighted by the class shares of a client's training data."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.algorithms import FedAvg, Local
from coterie.core import metrics
from coterie.core.answers import Answers
from coterie.core.paired_tests import client_gain
from coterie.data import PARTITIONS, federate, load
from coterie.data.simulation import class_shares
from support import METHODS, last, task

NAME = "share_weighted_accuracy"


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def digits(partition: str = "dirichlet", **options):
    """Digits whose last 297 samples are tested by every client."""
    data = load("digits")
    parts = torch.zeros(len(data.y), dtype=torch.int8)
    parts[1500:] = 2
    made = PARTITIONS[partition](clients=5, **options)
    return federate(replace(data, fixed=parts), made, common_test=True)


def slowly(made, i: int, vector, on) -> float:
    """Σ_c (share of class c in training) · (accuracy on class c), sample by sample."""
    data = made.dataset

    def label(sample: int) -> int:
        y = int(data.y[sample])
        return y if made.relabel is None else int(made.relabel[i, y])

    trained = [label(s) for s in torch.cat([made.train[i], made.val[i]]).tolist()]
    right = {c: [] for c in range(10)}
    x = (data.x[made.test[i]] * data.scale + data.shift).double()
    for sample, answer in zip(made.test[i].tolist(), on.problem.model(vector, x), strict=True):
        right[label(sample)].append(int(answer.argmax()) == label(sample))
    return 100 * sum(trained.count(c) / len(trained) * np.mean(right[c]) for c in range(10))


@pytest.mark.parametrize("engine", ["vmap", "wire"])
@pytest.mark.parametrize("partition", ["dirichlet", "concept_shift"])
def test_the_score_is_the_sum_over_classes(engine, partition):
    made, method = digits(partition), Local()
    on = task(method, network, made, merge=False, shares=True)
    record = last(method, on, engine, rounds=1, metric=NAME)
    models = record.mixture.models[:, 0]
    for i in range(5):
        expected = slowly(made, i, models[i].to(on.problem.dtype), on)
        assert record.evaluation.test[i] == pytest.approx(expected, abs=1e-9)
        if record.outcomes is not None:
            one = list(record.outcomes.clients())[i]
            assert metrics.score(NAME, one.values, one.targets) == pytest.approx(expected)


def test_clients_whose_data_is_like_the_test_set_have_their_accuracy():
    made = digits("iid")
    (same,) = np.histogram(made.dataset.y[made.test[0]].numpy(), bins=10)[:1]
    on = task(FedAvg(), network, made, merge=False, shares=True)
    shares = torch.from_numpy(same / same.sum()).expand(5, -1)
    on = on._replace(shards=replace(on.shards, shares=shares))
    scores = [last(FedAvg(), on, "loop", rounds=1, metric=m) for m in (NAME, "accuracy")]
    assert np.allclose(*(record.evaluation.test for record in scores))


def test_all_methods_are_judged_by_the_same_shares():
    """Merged validation data and a shared pool change what a method trains on, not its weights."""
    made = digits()
    shares = [
        task(METHODS[name](), network, made, merge=merge, shares=True).shards.shares
        for name, merge in (("fedavg", False), ("fedavg", True), ("fedavg_data", False))
    ]
    assert all(torch.equal(shares[0], other) for other in shares)
    assert torch.allclose(class_shares(made).sum(1), torch.ones(5).double())
    assert task(FedAvg(), network, made).shards.shares is None  # only where a metric needs them


# ---- paired gains


def pair(rng, n=400, better=0.1, weights=None):
    """Signed weights of two predictors' answers, of which the first is better."""
    weights = np.full(n, 1 / n) if weights is None else weights
    rates = (0.6 + better, 0.6)
    y, units = np.zeros(n, dtype=int), np.arange(n)
    return tuple(
        Answers(np.where(rng.random(n) < rate, weights, -weights), y, units) for rate in rates
    )


def test_with_equal_weights_the_gain_is_that_of_accuracy():
    a, b = pair(np.random.default_rng(0))
    plain = [x._replace(values=(x.values > 0).astype(int), targets=x.targets + 1) for x in (a, b)]
    found, expected = client_gain(NAME, [(a, b)]), client_gain("accuracy", [tuple(plain)])
    assert found.gain == pytest.approx(expected.gain)
    assert found.variance == pytest.approx(expected.variance, rel=0.05)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.5)


def test_the_variance_is_that_of_drawing_the_samples_again():
    rng = np.random.default_rng(1)
    weights = rng.choice([0.1, 1.0, 3.0, 0.0], 400)
    a, b = pair(rng, weights=weights)
    found, gains = client_gain(NAME, [(a, b)]), []
    for _ in range(2000):
        at = rng.integers(0, 400, 400)
        ours, theirs = (metrics.score(NAME, x.values[at], x.targets[at]) for x in (a, b))
        gains.append(ours - theirs)
    assert found.gain == pytest.approx(
        metrics.score(NAME, a.values, a.targets) - metrics.score(NAME, b.values, b.targets)
    )
    assert found.variance == pytest.approx(np.var(gains), rel=0.15)


def test_without_a_difference_it_seldom_claims_one():
    rng = np.random.default_rng(2)
    weights = rng.choice([0.1, 1.0, 3.0], 200)
    claims = [client_gain(NAME, [pair(rng, 200, 0.0, weights)]).p < 0.05 for _ in range(400)]
    assert np.mean(claims) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_a_sample_that_two_seeds_test_is_no_new_evidence():
    a, b = pair(np.random.default_rng(3))
    once, twice = client_gain(NAME, [(a, b)]), client_gain(NAME, [(a, b), (a, b)])
    assert (twice.gain, twice.variance) == pytest.approx((once.gain, once.variance))
    other = tuple(x._replace(units=x.units + 1000) for x in (a, b))
    assert client_gain(NAME, [(a, b), other]).variance < 0.6 * once.variance


def test_nothing_is_said_without_a_sample_that_counts():
    none = Answers(np.zeros(4), np.zeros(4, dtype=int), np.arange(4))
    assert client_gain(NAME, [(none, none)]) is None
    assert math.isnan(metrics.score(NAME, none.values, none.targets))


def test_a_comparison_has_the_metric_from_its_config_to_its_verdict(tmp_path):
    data = load("digits")
    cut = {"x_train": data.x[:1500, 0], "x_test": data.x[1500:, 0]}
    cut |= {"y_train": data.y[:1500], "y_test": data.y[1500:]}
    np.savez(tmp_path / "d.npz", **{name: part.numpy() for name, part in cut.items()})
    config = {
        "data": {"name": str(tmp_path / "d.npz")},
        "partition": {"name": "dirichlet", "clients": 5, "common_test": True},
        "model": {"name": "linear"},
        "run": {"rounds": 2, "methods": ["fedavg"], "metric": NAME},
    }
    found = coterie.compare(config, out=tmp_path / "out")
    again = coterie.read(tmp_path / "out")
    assert repr(found) == repr(again)
    assert "accuracy weighted by class shares" in repr(found)
    rows = {run.method: run.summary for run in again.runs}
    assert rows["fedavg"]["federated_accuracy"] is not None
    assert rows["fedavg"]["score_last"] != rows["fedavg"]["federated_accuracy"]
