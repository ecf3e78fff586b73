import hashlib
import json
import pickle
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from coterie.core.algorithm import Mixture, mixture_digest
from coterie.data.federation import Dataset, Federation
from coterie.errors import StoreError
from coterie.runs import run, run_folder
from coterie.runs import stored as stored_files
from coterie.runs.environment import environment
from coterie.runs.run import SCORES, Log, Roster
from coterie.runs.run_folder import RunFolder
from coterie.runs.summary import finished, summarise
from coterie.storage import files
from coterie.training.rounds import Rejection
from synthetic import CLIENTS, GROUPS, grouped, mixture, predictors, record, roster, scores

CONFIG = {"algorithm": {"name": "fedfomo"}, "run": {"rounds": 4}}


def log_of(**facts):
    return Log("fedfomo", 7, "accuracy", roster(seed=7, **facts))


def records(count=4):
    test = scores("fedfomo", 7, count)
    test[:, 3] = np.nan  # a client without test data
    return [record(i, row, grouped(0.9)) for i, row in enumerate(test)]


@pytest.fixture
def made(tmp_path):
    """A finished run's folder and what it was made from."""
    folder = RunFolder.create(tmp_path / "run", log_of(), CONFIG, environment())
    for each in records():
        folder.append(each)
    return folder.path, folder.finish(predictors())


def test_the_folder_holds_exactly_these_files(made):
    path, _ = made
    assert sorted(entry.name for entry in path.iterdir()) == [
        "MANIFEST.json",
        "clients.csv",
        "collaboration.npz",
        "config.json",
        "environment.json",
        "models.safetensors",
        "report.html",
        "rounds.jsonl",
        "summary.json",
    ]
    assert json.loads((path / "config.json").read_text()) == {"format": 1, **CONFIG}
    where = json.loads((path / "environment.json").read_text())
    assert where["argv"] == sys.argv
    assert where["versions"]["torch"] == torch.__version__
    assert where["threads"] == torch.get_num_threads()


def test_the_summary_counts_what_the_rounds_hold(made):
    path, _ = made
    summary = json.loads((path / "summary.json").read_text())
    assert summary["method"] == "fedfomo"
    assert summary["rounds"] == 4
    assert summary["bytes_up"] == 4 * CLIENTS * 1000
    assert summary["seconds"] == 1.0
    assert summary["rejected"] == {"not_finite": 1}
    assert summary["clients_without_test"] == 1
    assert summary["relative_to_local"] is None
    assert summary["in_group_weight"] == pytest.approx(0.9, abs=1e-6)


def test_reading_gives_back_what_was_written(made):
    path, data = made
    again = run_folder.read(path)
    for name in (*SCORES, "rounds"):
        np.testing.assert_array_equal(getattr(again, name), getattr(data, name))
    np.testing.assert_array_equal(again.matrices, data.matrices)
    assert again.matrix_rounds == (0, 1, 2, 3)
    assert again.weights.dtype == np.float32
    assert again.roster.clients == data.roster.clients
    np.testing.assert_array_equal(again.roster.groups, GROUPS)
    assert again.summary == data.summary
    recomputed = summarise(again, again.summary["digest"])
    later = {name: data.summary[name] for name in ("ran", "privacy")}
    assert files.plain(recomputed) | later == data.summary
    assert torch.equal(again.mixture().models, mixture().models)
    assert torch.equal(again.mixture().weights, mixture().weights)


def test_other_metrics_are_scores_not_accuracies():
    log = Log("fedavg", 0, "rmse", roster())
    for index, mean in enumerate((3.0, 1.0, 2.0)):
        log.append(record(index, np.full(CLIENTS, mean)))
    summary = summarise(log.run())
    assert "accuracy_last" not in summary
    assert summary["score_last"] == 2.0
    assert summary["score_best_by_validation"] == 1.0
    assert (summary["bmta"], summary["round_best_on_test"]) == (1.0, 1)


def test_the_round_of_a_summary_is_chosen_by_validation_not_by_test():
    log = log_of()
    for index, (test, val) in enumerate([(50.0, 90.0), (80.0, 70.0), (60.0, 60.0)]):
        made = record(index, np.full(CLIENTS, test))
        log.append(made._replace(evaluation=made.evaluation._replace(val=np.full(CLIENTS, val))))
    summary = summarise(log.run())
    assert summary["accuracy_last"] == 60.0
    assert (summary["accuracy_best_by_validation"], summary["bmta"]) == (50.0, 80.0)
    assert (summary["round_best_by_validation"], summary["round_best_on_test"]) == (0, 1)


def test_a_method_that_ends_alone_is_judged_by_the_rounds_before():
    log = log_of()
    test = np.full((4, CLIENTS), 50.0)
    weights = [grouped(0.9), grouped(0.8), grouped(0.0), np.eye(CLIENTS)]
    weights[2] = 1e-3 * weights[2] + (1 - 1e-3) * np.eye(CLIENTS)
    for i, A in enumerate(weights):
        log.append(record(i, test[i], A))
    found = summarise(log.run())
    assert found["in_group_weight"] == pytest.approx(1.7 / 2.001, rel=1e-6)
    assert found["weight_recovery_auc"] == 1.0


def test_relative_to_local_counts_who_is_worse_off():
    runs = {}
    for method, ends in (("local", [50.0, 60.0, 70.0]), ("fedavg", [55.0, 60.0, 40.0])):
        log = Log(method, 0, "accuracy", roster(3))
        log.append(record(0, np.array(ends)))
        runs[method] = log.run()
    summary = summarise(runs["fedavg"], local=runs["local"])
    assert summary["relative_to_local"] == pytest.approx(-25 / 3)
    assert summary["worse_than_local"] == 1


def test_identical_models_are_stored_once(made):
    path, _ = made
    stored = load_file(path / "models.safetensors")
    assert stored["models"].shape == (2, 5)
    assert stored["index"].shape == stored["weights"].shape == (CLIENTS, 2)


def test_the_digest_is_the_sha256_over_the_clients_own_of_weights_then_models():
    given = mixture(3)
    own = []
    for weights, models in zip(given.weights.numpy(), given.models.numpy(), strict=True):
        total = hashlib.sha256(b"f4[2]" + weights.tobytes())
        total.update(b"f4[2, 5]" + models.tobytes())
        own.append(total.hexdigest())
    expected = hashlib.sha256("\n".join(own).encode()).hexdigest()
    assert mixture_digest(given) == expected
    strided = Mixture(given.weights, given.models.transpose(1, 2).contiguous().transpose(1, 2))
    assert mixture_digest(strided) == expected
    swapped = Mixture(given.weights.flip(0), given.models.flip(0))
    assert mixture_digest(swapped) != expected


def test_a_model_of_weight_zero_is_no_part_of_the_digest():
    given = mixture(3)
    padded = Mixture(
        torch.cat([given.weights, torch.zeros(3, 1)], 1),
        torch.cat([given.models, torch.full((3, 1, 5), -7.0)], 1),
    )
    other = Mixture(padded.weights, padded.models.where(padded.models != -7, -1.0))
    assert mixture_digest(padded) == mixture_digest(other) == mixture_digest(given)


def test_many_clients_have_sparse_matrices(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SPARSE_FROM", 10)
    monkeypatch.setattr(stored_files, "DENSE_UP_TO", 3 * CLIENTS**2 - 1)
    folder = RunFolder.create(tmp_path / "run", log_of(), {}, {})
    wanted = [grouped(share) for share in (0.5, 0.7, 1.0)]
    for index, A in enumerate(wanted):
        folder.append(record(index, np.ones(CLIENTS), A))
    folder.finish(predictors())
    with np.load(folder.path / "collaboration.npz", allow_pickle=False) as stored:
        assert "A" not in stored
        assert stored["indptr"].shape == (3 * CLIENTS + 1,)
    again = run_folder.read(folder.path)
    for found, A in zip(again.matrices, wanted, strict=True):
        np.testing.assert_allclose(run.dense(found), A, atol=1e-7)


def test_an_unfinished_run_is_not_read_as_a_result(tmp_path):
    folder = RunFolder.create(tmp_path, log_of(), CONFIG, {})
    folder.append(records()[0])
    with pytest.raises(StoreError, match="no finished run"):
        run_folder.read(tmp_path)


def test_a_run_cannot_continue_from_logs_with_gaps(tmp_path):
    for name in ("clients.csv", "collaboration.parts"):
        folder = RunFolder.create(tmp_path / name, log_of(), CONFIG, {})
        for each in records():
            folder.append(each)
        if name == "clients.csv":  # the last client of round 1 is lost
            text = (folder.path / name).read_text().splitlines(keepends=True)
            (folder.path / name).write_text("".join(text[: 2 * CLIENTS]))
        else:
            (folder.path / name / "00000001.npz").unlink()
        with pytest.raises(StoreError, match=f"{name}: found rounds \\[0.*expected \\[0, 1"):
            RunFolder.reopen(folder.path, log_of(), 2)


def test_a_run_cannot_continue_from_a_round_it_never_reached(tmp_path):
    folder = RunFolder.create(tmp_path, log_of(), CONFIG, {})
    folder.append(records()[0])
    with pytest.raises(StoreError, match="found 1 whole rounds; expected 2"):
        RunFolder.reopen(tmp_path, log_of(), 2)


def test_the_torn_start_of_a_line_is_not_a_line(tmp_path):
    folder = RunFolder.create(tmp_path, log_of(), CONFIG, {})
    folder.append(records()[0])
    with (tmp_path / "clients.csv").open("a") as file:
        file.write("0")  # of round 10
    assert [index for index, _ in stored_files.read_clients(tmp_path / "clients.csv")[0]] == [0]


def test_verify_recomputes_the_digest(made):
    path, _ = made
    summary = json.loads((path / "summary.json").read_text())
    files.write_json(path / "summary.json", {**summary, "digest": "0" * 64})
    files.seal(path, run_folder.listed(path))
    assert run_folder.verify(path) == [
        "models.safetensors does not give the digest in summary.json"
    ]


class Bomb:
    def __reduce__(self):
        return (open, ("canary", "w"))


@pytest.mark.parametrize("name", ["collaboration.npz", "models.safetensors", "rounds.jsonl"])
def test_a_pickle_is_never_run(made, name, tmp_path, monkeypatch):
    path, _ = made
    monkeypatch.chdir(tmp_path)
    if name.endswith("npz"):
        np.savez(path / name, A=np.array([Bomb()], dtype=object), rounds=np.array([0]))
    else:
        (path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(StoreError, match="cannot be read"):
        run_folder.read(path).mixture()
    assert not (tmp_path / "canary").exists()


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    target = tmp_path / "file"
    files.write_text(target, "old")

    def fail():
        with files.whole(target) as temporary:
            temporary.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="No space left on device"):
        fail()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_json_is_strict():
    value = {"a": float("nan"), "b": float("inf"), "c": (1, Rejection(1, "x"))}
    assert files.to_json(value) == '{"a": null, "b": "inf", "c": [1, {"client": 1, "reason": "x"}]}'


def test_references_of_other_clients_are_refused():
    local = Log("local", 0, "accuracy", roster(seed=1))
    local.append(record(0, np.ones(CLIENTS)))
    log = log_of()
    log.append(record(0, np.ones(CLIENTS)))
    with pytest.raises(StoreError, match="different data"):
        finished(log, predictors(), {}, {}, {"local": local.run()})


def test_weak_clients_are_named_for_what_they_lack():
    x, y = torch.arange(40.0).view(20, 2), torch.arange(20) % 2
    x[12:14] = 1.0
    parts = {  # train, validation, test
        "fine": ([0, 1], [2], [3]),
        "empty": ([], [4], [5]),
        "single": ([6], [4], [5]),
        "unjudged": ([0, 1], [2], []),
        "no validation": ([0, 1], [], [3]),
        "one-sided": ([0, 2], [4], [5]),
        "constant": ([12, 13], [4], [5]),
    }
    splits = [
        tuple(torch.tensor(p[k], dtype=torch.int64) for p in parts.values()) for k in range(3)
    ]
    found = Roster.of(Federation(Dataset("toy", x, y, 2), "by hand", tuple(parts), *splits))
    assert found.weak == {
        "empty": "no training samples",
        "single": "one training sample",
        "unjudged": "no test data",
        "no validation": "no validation data",
        "one-sided": "one class only",
        "constant": "constant features",
    }
    assert found.n_train.tolist() == [2, 0, 1, 2, 2, 2, 2]
