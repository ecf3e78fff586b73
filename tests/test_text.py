"""Recurrent networks: a federation of texts from files to a score."""

import pytest
import torch

import coterie
from coterie.algorithms.local import Local
from coterie.core.optim import Recipe
from coterie.data.federation import Dataset, Federation
from coterie.data.simulation import Simulation, simulate
from coterie.errors import EngineError
from coterie.networks import registry
from support import assert_close, engine_of, last, predictors

TEXTS = {"anna": "abcabcabc" * 30, "ben": "cbacbacba" * 20, "cleo": "aabbcc" * 25}


def sentences(name: str = "word_lstm", dropout: float | None = None) -> Simulation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 9, (48, 5), generator=generator)
    data = Dataset("words", x, x[:, 0], 9)
    parts = torch.arange(48).split(16)
    splits = (tuple(p[a:b] for p in parts) for a, b in ((0, 9), (9, 12), (12, 16)))
    fed = Federation(data, "thirds", ("a", "b", "c"), *splits)
    recipe = Recipe(lr=0.5, batch=4, clip=0.25, dropout=dropout)
    return simulate(fed, lambda: registry.MODELS[name]((5,), 9), recipe)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_texts_a_client_run_end_to_end(corpus):
    config = {
        "data": {"name": str(corpus), "length": 6, "stride": 3},
        "train": {"lr": 0.01, "optimizer": "adam", "batch": 16},
    }
    result = coterie.run(config, method="fedavg", rounds=2, engine="auto")
    told = result.config
    assert told["model"]["name"] == "char_lstm"
    assert told["engine"]["name"] == "loop"
    assert len(result.roster) == 3


@pytest.mark.parametrize("name", ["char_lstm", "word_lstm"])
def test_vmap_refuses_recurrent_layers(name):
    with pytest.raises(EngineError, match=r"LSTM layers; use engine\.name = 'loop'"):
        engine_of("vmap", sentences(name))
    assert engine_of("auto", sentences(name), threads=1).choice["engine"] == "loop"


def test_an_operation_that_cannot_be_batched_says_what_to_do():
    class Odd(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1.0 if float(x.sum()) else 2.0)

    on = sentences()
    odd = simulate(
        Federation(
            Dataset("n", torch.randn(48, 5), on.shards.y, 9), "thirds", ("a", "b", "c"),
            on.federation.train, on.federation.val, on.federation.test,
        ),
        lambda: Odd(5, 9),
        Recipe(batch=4),
    )  # fmt: skip
    with pytest.raises(EngineError, match=r"cannot compute this.*use engine\.name = 'loop'"):
        last(Local(), odd, "vmap")
    assert predictors(last(Local(), odd, "loop")).models.isfinite().all()


def test_word_lstm_has_the_dropout_of_the_paper_in_training_only():
    on, dry = sentences(), sentences(dropout=0.0)
    assert on.problem.model.random
    assert not dry.problem.model.random
    assert not sentences("char_lstm").problem.model.random
    wet, plain, again = (predictors(last(Local(), t, "loop")).models for t in (on, dry, on))
    assert torch.equal(wet, again)
    assert (wet - plain).abs().max() > 1e-4
    x = on.shards.inputs(torch.arange(4))
    assert_close(on.problem.model(on.problem.start, x), dry.problem.model(dry.problem.start, x))


def test_engines_agree_on_recurrent_dropout():
    on = sentences()
    reference, wired = (predictors(last(Local(), on, e)).models for e in ("loop", "wire"))
    assert torch.equal(reference, wired)
