"""A network's start from a file, frozen parameters, and low-rank adapters."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import coterie
from coterie.algorithms import ALGORITHMS
from coterie.api import configure
from coterie.core.flat import FlatModel, build
from coterie.errors import ConfigError
from coterie.networks.changes import Changes, Lora, merged, unused_adapter
from coterie.runs.assemble import assemble

SMALL = {"rounds": 2, "engine": "loop", "methods": ["fedavg"]}
LORA = {"layers": ["body.*"], "rank": 2, "train": ["head.*"]}


class Net(nn.Module):
    """Two linear layers and a head."""

    def __init__(self, shape=(4,), classes=2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(shape[0], 20), nn.ReLU(), nn.Linear(20, 20))
        self.head = nn.Linear(20, classes)

    def forward(self, x):
        return self.head(self.body(x).relu())


class Encoder(nn.Module):
    """One layer of torch's transformer, which has a fast path past its linear layers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.layer(x.view(len(x), 2, 8))[:, 0])


def sites(count=3, rows=30, features=4):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, rows, features)).astype(np.float32)
    return {f"s{k}": (x[k], (x[k, :, 0] > 0).astype(np.int64)) for k in range(count)}


def changed(**changes):
    torch.manual_seed(0)
    return Changes(**changes).made(Net)()


def test_adapters_change_nothing_at_the_start_and_are_all_that_is_trained():
    module, plain = changed(lora=Lora(("body.*",), rank=2)), changed()
    x = torch.randn(5, 4)
    assert torch.equal(module(x), plain(x))
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    assert trained == [f"body.{layer}.lora_{which}" for layer in (0, 2) for which in "ab"]
    assert FlatModel(module).size == 2 * (4 + 20) + 2 * (20 + 20)


def test_merged_adapters_give_the_same_outputs():
    """The plain network with the merged weights computes what the adapted one does."""
    module, plain = changed(lora=Lora(rank=3, alpha=5.0)), Net()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    plain.load_state_dict(merged(module, module.state_dict()))
    x = torch.randn(6, 4)
    assert torch.allclose(plain(x), module(x), rtol=1e-4, atol=1e-4)


def test_a_layer_that_passes_its_adapter_by_is_refused():
    chosen = {"layers": ["layer.linear*"]}
    with pytest.raises(ConfigError, match=r"passes the adapter of its layer 'layer.linear1' by"):
        coterie.compare(data=sites(features=16), model=Encoder, set={"model.lora": chosen}, **SMALL)
    assert unused_adapter(changed(lora=Lora()), torch.randn(1, 4)) is None


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_traffic_is_that_of_the_adapters(engine):
    given = {**SMALL, "data": sites(), "model": Net, "engine": engine}
    full = coterie.run(**{**given, "methods": None, "method": "fedavg"})
    low = coterie.run(**{**given, "methods": None, "method": "fedavg"}, set={"model.lora": LORA})
    size = FlatModel(Changes(lora=Lora(("body.*",), 2, train=("head.*",))).made(Net)()).size
    ratio = low.summary["bytes_down"] / full.summary["bytes_down"]
    assert ratio == pytest.approx(size / FlatModel(Net()).size)


def test_every_method_trains_adapters():
    """No method but Local's relatives needs anything of a network but its trainable vector."""
    needs = {"fedavg_data", "pafl_ewc", "pafl_kd"}  # samples of the server or shared ones
    names = [name for name in ALGORITHMS if name not in needs]
    options = {**SMALL, "rounds": 1, "methods": names}
    result = coterie.compare(data=sites(), model=Net, set={"model.lora": LORA}, **options)
    assert all(np.isfinite(run.last).all() for run in result.runs)


def test_an_export_is_the_plain_network_with_merged_weights(tmp_path):
    """Loaded without adapters, it answers as the run's own model did."""
    lora = {"layers": ["body.*"], "train": ["head.*"]}
    options = {"data": "digits", "clients": 3, "rounds": 2, "method": "fedavg", "model": "mlp"}
    config = configure(set={"model.lora": lora}, out=tmp_path / "run", **options)
    run = coterie.run(config)
    coterie.export(tmp_path / "run", run.roster.clients[0], tmp_path / "model")
    found = coterie.load_export(tmp_path / "model")
    assert found.config.network.options == {"hidden": [64]}
    own = FlatModel(build(assemble(config).factory, run.seed, "start"))
    x = torch.rand(7, 1, 8, 8)
    expected, plain = (
        own(run.predictor(0).models[0], x),
        found.network(found.predictor.models[0], x),
    )
    assert torch.allclose(plain, expected, atol=1e-5)


def test_weights_start_the_network_and_frozen_parts_stay(tmp_path):
    torch.manual_seed(1)
    start = {k: v for k, v in Net().state_dict().items() if not k.startswith("head")}
    save_file(start, tmp_path / "start.safetensors")
    module = changed(weights=str(tmp_path / "start.safetensors"), freeze=("body.*",))
    assert all(torch.equal(module.state_dict()[name], value) for name, value in start.items())
    assert torch.equal(module.head.weight, changed().head.weight)
    assert [name for name, value in module.named_parameters() if value.requires_grad] == [
        "head.weight",
        "head.bias",
    ]
    settings = {"model.weights": str(tmp_path / "start.safetensors"), "train.freeze": ["body.*"]}
    result = coterie.compare(data=sites(), model=Net, set=settings, **SMALL)
    assert result.runs[1].predictor(0).models.shape[1] == 20 * 2 + 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze": ("bdy.*",)}, r"train.freeze: 'bdy.\*' matches none"),
        ({"lora": Lora(("bdy",))}, "model.lora.layers: 'bdy' matches none"),
        ({"lora": Lora(train=("hd",))}, "model.lora.train: 'hd' matches none"),
        ({"weights": "nowhere"}, "found no file 'nowhere'"),
        ({"weights": __file__}, "expected a file of safetensors"),
    ],
)
def test_what_fits_nothing_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        changed(**changes)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"body.9": torch.zeros(2)}, "'body.9', which the network lacks"),
        ({"head.bias": torch.zeros(3)}, r"'head.bias' has shape \[3\].*expected \[2\]"),
    ],
)
def test_weights_of_another_network_are_refused(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=message):
        changed(weights=str(tmp_path / "other.safetensors"))


def test_the_page_of_adapters_works_as_it_stands(tmp_path, monkeypatch):
    """Its transformer trains adapters only: less than a twentieth of the full model's traffic."""
    page = (Path(__file__).parents[1] / "docs" / "lora.md").read_text("utf-8")
    for kind, file in (("python", "tiny.py"), ("toml", "tiny.toml")):
        (found,) = re.findall(rf"^```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        (tmp_path / file).write_text(found)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    importlib.import_module("tiny").pretrain(steps=2)
    few = {"data.stride": 200, "run.rounds": 1}
    result = coterie.compare("tiny.toml", code=".", set=few)
    sys.modules.pop("tiny")
    full = 4 * sum(value.numel() for value in load_file("base.safetensors").values())
    assert 0 < result.runs[1].summary["bytes_up"] < full * 4 / 20
