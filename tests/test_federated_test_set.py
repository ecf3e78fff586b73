"""P3's protocols: a federated test set that no client holds, and the first clients of the data."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import coterie
from coterie.adapt import Adapted, FineTune
from coterie.algorithms import FedAvg
from coterie.core.optim import Recipe
from coterie.data import PARTITIONS, federate, load, manifest
from coterie.data.federation import Dataset
from coterie.diagnosis import findings
from coterie.errors import ConfigError
from coterie.runs.config.loading import canonical
from coterie.runs.config.loading import load as read_config
from coterie.runs.run import Run
from support import METHODS, federation, last, normed, task

IID = PARTITIONS["iid"](clients=6)
SMALL = {
    "data": {"name": "digits", "federated": 0.2, "test": 0.1, "val": 0.1},
    "partition": {"name": "iid", "clients": 6},
    "model": {"name": "linear"},
    "run": {"rounds": 2, "evaluate_every": 2},
}


def written(sizes: tuple[int, ...], test: int = 0) -> Dataset:
    """So many samples of each writer, the last ``test`` of all in the source's own test part."""
    owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    x = torch.arange(len(owners)).float()[:, None]
    parts = torch.zeros(len(owners), dtype=torch.int8)
    parts[len(owners) - test :] = 2
    names = tuple(f"writer{i}" for i in range(len(sizes)))
    y = torch.arange(len(owners)) % 2
    fixed = parts if test else None
    return Dataset("letters", x, y, 2, owners=owners, owner_names=names, fixed=fixed)


# ---- the division


def test_every_client_is_divided_70_10_20_and_no_sample_is_in_two_sets():
    made = federate(written((100, 60, 20)), PARTITIONS["natural"](), val=0, test=0.1, federated=0.2)
    for i, size in enumerate((100, 60, 20)):
        parts = [made.train[i], made.test[i], made.federated[i]]
        assert [len(part) for part in parts] == [0.7 * size, 0.1 * size, 0.2 * size]
        assert len(torch.cat(parts).unique()) == size
        assert len(made.val[i]) == 0


def test_the_federated_test_set_is_part_of_the_fingerprint_and_only_if_there_is_one():
    data = load("digits")
    plain, apart = federate(data, IID), federate(data, IID, federated=0.2)
    assert plain.federated is None
    assert plain.fingerprint != apart.fingerprint
    fewer = replace(apart, federated=tuple(part[1:] for part in apart.federated))
    assert fewer.fingerprint != apart.fingerprint
    assert [row.get("federated") for row in manifest(plain)["clients"]] == [None] * 6
    held = [row["federated"] for row in manifest(apart)["clients"]]
    assert held == [len(part) for part in apart.federated]
    assert "federated" not in canonical(read_config({}))["data"]
    assert not {"above", "first", "common_test"} & canonical(read_config({}))["partition"].keys()


def test_with_times_the_federated_test_set_is_the_latest():
    data = replace(written((40, 30)), times=torch.arange(70, dtype=torch.float64))
    made = federate(data, PARTITIONS["natural"](), test=0.1, federated=0.2)
    for train, test, apart in zip(made.train, made.test, made.federated, strict=True):
        assert train.max() < test.min()
        assert test.max() < apart.min()


def test_the_servers_samples_come_from_the_federated_test_set():
    data = load("digits")
    plain = federate(data, IID, federated=0.2)
    made = federate(data, IID, federated=0.2, aux=0.25)
    assert all(torch.equal(a, b) for a, b in zip(plain.test, made.test, strict=True))
    both = torch.cat([*made.federated, *made.aux])
    assert torch.equal(both.sort().values, torch.cat(plain.federated).sort().values)
    assert len(torch.cat(made.aux)) == round(0.25 * len(both))


@pytest.mark.parametrize(
    ("name", "shares", "message"),
    [
        ("digits", {"federated": 1.0}, "below 1"),
        ("digits", {"federated": 0.6, "test": 0.4}, "left to train on"),
        ("sine", {"federated": 0.2}, "needs classes"),
    ],
)
def test_shares_that_cannot_be_are_refused(name, shares, message):
    partition = PARTITIONS["natural"]() if name == "sine" else IID
    with pytest.raises(ConfigError, match=message):
        federate(load(name), partition, **shares)


# ---- the first clients with enough samples


def test_the_first_clients_with_more_samples_than_that_are_kept():
    data = written((30, 10, 40, 11, 50), test=20)
    made = federate(data, PARTITIONS["natural"](), above=10, first=3)
    assert made.clients == ("writer0", "writer2", "writer3")
    assert made.note == "3 of 5 clients"
    for i, writer in enumerate((0, 2, 3)):
        held = torch.cat([made.train[i], made.val[i], made.test[i]])
        assert (data.owners[held] == writer).all()
    with pytest.raises(ConfigError, match=r"partition\.above.*largest client has 50"):
        federate(data, PARTITIONS["natural"](), above=50)


def test_groups_and_labels_stay_with_the_clients_that_are_kept():
    shift = PARTITIONS["concept_shift"](clients=6, groups=3)
    whole, made = federate(load("digits"), shift), federate(load("digits"), shift, first=4)
    assert torch.equal(made.groups, whole.groups[:4])
    assert torch.equal(made.relabel, whole.relabel[:4])


# ---- the score


def accuracy(made, vector, on) -> float:
    """A slow count over the federated test set."""
    right = 0
    for i, own in enumerate(made.federated):
        for sample in own.tolist():
            x = made.dataset.x[sample : sample + 1].to(torch.float64)
            label = int(made.dataset.y[sample])
            label = label if made.relabel is None else int(made.relabel[i, label])
            right += int(on.problem.model(vector, x).argmax()) == label
    return 100 * right / sum(map(len, made.federated))


@pytest.fixture
def apart():
    """The ragged federation, with some of the test samples in the federated test set."""
    whole = federation()
    held, left = (tuple(part[at] for part in whole.test) for at in (slice(4), slice(4, None)))
    return replace(whole, test=left, federated=held)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_federated_accuracy_is_that_of_the_global_model(apart, engine):
    method = FedAvg()
    on = task(method, federated=apart)
    record = last(method, on, engine)
    assert record.federated == pytest.approx(accuracy(apart, record.server, on))


@pytest.mark.parametrize("policy", ["server", "local"])
def test_batch_norm_statistics_of_the_server_are_part_of_the_global_model(apart, policy):
    method, recipe = FedAvg(), Recipe(lr=0.1, batch=10, buffers=policy)
    on = task(method, normed, apart, recipe)
    record = last(method, on, "loop")
    if policy == "local":
        assert record.federated is None
    else:
        vector = torch.cat([record.server.method, record.server.buffers])
        assert record.federated == pytest.approx(accuracy(apart, vector, on))


def test_adapting_the_clients_models_leaves_the_global_models_score(apart):
    """Adaptation follows training: the global model is that of the method alone."""
    plain, adapted = FedAvg(), Adapted(FedAvg(), FineTune(epochs=3))
    scores = [last(one, task(one, federated=apart), "loop").federated for one in (plain, adapted)]
    assert scores[0] == scores[1] is not None


def test_only_methods_with_one_global_model_have_a_federated_accuracy(apart):
    found = {
        name: last(method(), task(method(), federated=apart), "loop", rounds=1).federated
        for name, method in METHODS.items()
        if name in ("fedavg", "fedprox", "qfedavg", "scaffold", "fedavg_ft", "local", "fedfomo")
    }
    assert {name for name, score in found.items() if score is None} == {"local", "fedfomo"}


def test_clients_elsewhere_do_not_get_the_federated_test_set(apart):
    problem = task(FedAvg(), federated=apart).problem
    assert problem.federated is not None
    assert pickle.loads(pickle.dumps(problem)).federated is None


def test_the_summary_of_a_folder_has_the_federated_accuracy(tmp_path):
    run = coterie.run(SMALL, method="fedavg", out=tmp_path / "run")
    stored = Run.read(tmp_path / "run")
    score = run.summary["federated_accuracy"]
    assert 0 < score <= 100
    assert stored.summary["federated_accuracy"] == score
    without = {**SMALL, "data": {"name": "digits"}}
    assert coterie.run(without, method="fedavg").summary["federated_accuracy"] is None


# ---- one test set for all clients


def split_digits() -> Dataset:
    """Digits whose last 297 samples are the source's own test part."""
    digits = load("digits")
    parts = torch.zeros(len(digits.y), dtype=torch.int8)
    parts[1500:] = 2
    return replace(digits, fixed=parts)


def test_a_common_test_set_is_all_of_the_sources_test_part():
    data = split_digits()
    made = federate(data, IID, common_test=True)
    assert all(part.tolist() == list(range(1500, 1797)) for part in made.test)
    assert len({part.data_ptr() for part in made.test}) == 1  # one list of indices for all
    own = federate(data, IID)
    assert all(torch.equal(a, b) for a, b in zip(own.train, made.train, strict=True))
    assert made.fingerprint != own.fingerprint
    other = replace(made, test=tuple(part[1:] for part in made.test))
    assert other.fingerprint != made.fingerprint
    assert findings.duplicates(made).across_clients == 0
    with pytest.raises(ConfigError, match=r"partition\.common_test"):
        federate(load("digits"), IID, common_test=True)


def test_the_servers_samples_are_in_nobodys_common_test_set():
    made = federate(split_digits(), IID, common_test=True, aux=0.1)
    assert all(len(part) == 297 - 30 for part in made.test)
    assert not torch.isin(made.aux[0], made.test[0]).any()


def test_a_global_model_is_scored_on_the_common_test_set():
    method = FedAvg()
    made = federate(split_digits(), IID, common_test=True)
    on = task(method, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), made)
    record = last(method, on, "loop")
    assert record.federated == pytest.approx(float(record.evaluation.test[0]))
    assert (record.evaluation.test == record.evaluation.test[0]).all()
