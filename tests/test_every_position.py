"""Texts with a target at every position: windows, losses, scores, and all methods on them."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from coterie.adapt import ADAPTATIONS, Adapted
from coterie.algorithms import FedAvg, Local
from coterie.core import losses, metrics
from coterie.core.optim import Recipe
from coterie.data import PARTITIONS, federate, load
from coterie.data.data_schema import Schema
from coterie.data.manifest import class_counts
from coterie.data.sources.text import OTHER
from coterie.errors import ConfigError, DataError
from coterie.exporting.model_card import written_network
from coterie.networks import registry
from coterie.runs.assemble import assemble
from coterie.runs.config.loading import load as read_config
from support import METHODS, last, one_client, predictors, task

TEXTS = {"anna": "abcabcabd" * 12, "ben": "cbacbacba" * 5, "cleo": "aabbccd" * 15}


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return str(folder)


def cut(corpus, **options):
    return load(corpus, **{"length": 5, "stride": 5, "targets": "every", **options})


def federated(corpus, **shares):
    return federate(cut(corpus), PARTITIONS["natural"](), **{"val": 0.2, "test": 0.2, **shares})


def network() -> nn.Module:
    """Scores at every position from the token there."""
    return nn.Sequential(nn.Embedding(4, 6), nn.Tanh(), nn.Linear(6, 4))


RECIPE = Recipe(lr=0.5, batch=4)


# ---- windows


def test_targets_are_the_windows_shifted_by_one_and_cover_the_text_once(corpus):
    data = cut(corpus)
    assert torch.equal(data.y[:, :-1], data.x[:, 1:])
    for i, name in enumerate(data.owner_names):
        mine = data.owners == i
        said = "".join(data.class_names[c] for c in data.y[mine].flatten().tolist())
        assert TEXTS[name][1:].startswith(said)
        assert len(said) > len(TEXTS[name]) - 6
        assert data.times[mine].tolist() == list(range(0, 5 * int(mine.sum()), 5))


def test_each_client_is_tested_on_the_end_of_its_text(corpus):
    data = cut(corpus)
    made = federate(data, PARTITIONS["natural"](), val=0.0, test=0.1)
    for train, test in zip(made.train, made.test, strict=True):
        assert data.times[train].max() < data.times[test].min()
        assert len(test) == pytest.approx(0.1 * (len(train) + len(test)), abs=0.5)


def test_windows_that_overlap_are_refused(corpus):
    with pytest.raises(ConfigError, match=r"data\.stride: found 3"):
        cut(corpus, stride=3)
    cut(corpus, stride=3, targets="last")


def test_a_source_with_parts_keeps_them_unless_it_is_pooled(tmp_path):
    text = np.frombuffer(b"abcdefghij" * 20, np.uint8)
    arrays = {"text_train": text[:160], "text_test": text[160:]}
    offsets = {"offset_train": np.array([0, 100, 160]), "offset_test": np.array([0, 30, 40])}
    np.savez(tmp_path / "t.npz", client_names=np.array(["a", "b"]), **arrays, **offsets)
    options = {"length": 4, "stride": 4, "targets": "every"}
    own = load(str(tmp_path / "t.npz"), **options)
    assert sorted(own.fixed.unique().tolist()) == [0, 2]
    assert own.times[own.owners == 0].diff().min() > 0  # the test text follows
    pooled = load(str(tmp_path / "t.npz"), part="pooled", **options)
    assert pooled.fixed is None
    made = federate(pooled, PARTITIONS["natural"](), val=0.0, test=0.5)
    assert torch.isin(made.test[0], (pooled.times > 40).nonzero()[:, 0]).all()


def test_words_are_tokens_and_rare_ones_share_one(tmp_path):
    (tmp_path / "a.txt").write_text("the cat, the dog; the cat and the bird. " * 3)
    data = load(str(tmp_path), length=3, stride=3, targets="every", words=4)
    assert data.class_names == (OTHER, "the", "cat", ",", ".")
    assert [data.class_names[c] for c in data.x[0].tolist()] == ["the", "cat", ","]
    assert [data.class_names[c] for c in data.y[0].tolist()] == ["cat", ",", "the"]
    assert data.class_names[int(data.x[1, 1])] == OTHER  # dog


def test_the_bundled_plays_need_no_download(monkeypatch):
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    data = load("plays")
    assert len(data.owner_names) == 8
    assert data.y.shape == data.x.shape
    assert len(load("plays", targets="last").y.shape) == 1


def test_histograms_count_every_target(corpus):
    made = federated(corpus)
    counts = class_counts(made, made.train)
    assert counts.sum(1).tolist() == [5 * len(part) for part in made.train]


# ---- losses and scores


def test_the_loss_of_a_sample_is_the_mean_over_positions():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(2, 7, 5, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (7, 5), generator=generator)
    each = F.cross_entropy(h[0].flatten(0, 1), y.flatten(), reduction="none").view(7, 5)
    assert torch.allclose(losses.per_sample(h[0], y, regression=False), each.mean(1))
    weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
    mixed = (weights[:, None, None, None] * h.softmax(-1)).sum(0)
    expected = -mixed.gather(-1, y[..., None])[..., 0].log().mean(1)
    assert torch.allclose(losses.of_mixture(weights, h, y, regression=False), expected)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_accuracy_and_answers_count_positions(corpus, engine):
    made, method = federated(corpus), FedAvg()
    on = task(method, network, made, RECIPE)
    record = last(method, on, engine)
    data = made.dataset
    for i, (test, one) in enumerate(zip(made.test, record.outcomes.clients(), strict=True)):
        right, logs = [], []
        for sample in test.tolist():
            h = on.problem.model(record.server, data.x[sample : sample + 1])[0]
            for scores, y in zip(h, data.y[sample], strict=True):
                right.append(int(scores.argmax()) == int(y))
                logs.append(-float(scores.log_softmax(-1)[y]))
        assert record.evaluation.test[i] == pytest.approx(100 * np.mean(right))
        assert record.evaluation.test_loss[i] == pytest.approx(np.mean(logs))
        assert metrics.score("accuracy", one.values, one.targets) == pytest.approx(
            100 * np.mean(right)
        )
        assert one.units.tolist() == test.repeat_interleave(5).tolist()  # a window is one unit
        assert one.targets.tolist() == data.y[test].flatten().tolist()


@pytest.mark.parametrize("metric", metrics.metrics_for("classes"))
def test_every_metric_of_classes_scores_positions(corpus, metric):
    on = task(FedAvg(), network, federated(corpus), RECIPE, shares=True)
    record = last(FedAvg(), on, "loop", rounds=1, metric=metric)
    assert np.isfinite(record.evaluation.test).all()


def test_a_federated_test_set_counts_positions(corpus):
    made = federated(corpus, federated=0.2)
    on = task(FedAvg(), network, made, RECIPE)
    record = last(FedAvg(), on, "loop", rounds=1)
    held = torch.cat(made.federated)
    right = on.problem.model(record.server, made.dataset.x[held]).argmax(-1) == made.dataset.y[held]
    assert record.federated == pytest.approx(100 * float(right.double().mean()))


def test_the_error_of_padded_samples_is_that_of_the_samples(corpus):
    """Local chooses its model by ``Client.error`` on validation data, which vmap pads."""
    made = federated(corpus, val=0.4)
    assert len({len(part) for part in made.val}) > 1
    on = task(Local(), network, made, RECIPE, merge=False)
    found = [predictors(last(Local(), on, engine)).models for engine in ("loop", "vmap")]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    at = on.shards.splits["val"].of(0)
    wrong = on.problem.model(on.problem.start, on.shards.x[at]).argmax(-1) != on.shards.y[at]
    error = one_client(on, 0).error(on.problem.start, "val")
    assert float(error) == pytest.approx(float(wrong.double().mean()))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_from_all_positions(corpus, name):
    method = METHODS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = last(method, task(method, network, federated(corpus), RECIPE), "loop", rounds=1)
    assert predictors(record).models.isfinite().all()


@pytest.mark.parametrize("name", sorted({*ADAPTATIONS} - {"knn"}))
def test_every_adaptation_learns_from_all_positions(corpus, name):
    for fields in (
        [{"fisher_kind": kind} for kind in ("empirical", "true")] if name == "ewc" else [{}]
    ):
        method = Adapted(FedAvg(), ADAPTATIONS[name](epochs=1, **fields))
        on = task(method, network, federated(corpus), RECIPE)
        found = [predictors(last(method, on, e, rounds=1)).models for e in ("loop", "vmap")]
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


# ---- the network


def test_the_network_of_p3_has_tied_weights_and_an_output_at_every_position(corpus):
    data = cut(corpus)
    assert registry.default(data) == "next_token_lstm"
    module = registry.factory("auto", data)()
    assert module.head.weight is module.embedding.weight
    assert module.embedding.weight.shape == (4, 200)
    assert module(data.x[:3]).shape == (3, 5, 4)
    code = written_network(module.eval())
    names = {"torch": torch, "nn": nn, "Tensor": torch.Tensor}
    exec(code.definitions, names)
    again = eval(code.expression, names).eval()
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(data.x[:3]), module(data.x[:3]))


def test_a_token_that_is_only_a_target_leaves_the_weights_tied(tmp_path):
    (tmp_path / "a.txt").write_text("abababababab" + "c")
    data = load(str(tmp_path), length=4, stride=4, targets="every")
    assert int(data.x.max()) + 1 < data.classes
    module = registry.factory("next_token_lstm", data)()
    assert module.head.weight is module.embedding.weight


# ---- what does not fit


def test_what_needs_one_class_per_sample_is_refused(corpus):
    data = cut(corpus)
    with pytest.raises(DataError, match=r"target at every position.*label_groups"):
        federate(data, PARTITIONS["label_groups"](clients=2, groups=2))
    with pytest.raises(DataError, match=r"every position.*data\.targets = 'last'"):
        Schema.of(data)
    config = {"data": {"name": corpus, "length": 5, "stride": 5, "targets": "every"}}
    with pytest.raises(ConfigError, match=r"train\.class_weights"):
        assemble(read_config({**config, "train": {"class_weights": "balanced"}}))
    with pytest.raises(ConfigError, match=r"shape \[1, 4\].*expected \[1, 5, 4\]"):
        assemble(read_config({**config, "model": {"name": "word_lstm"}}))
