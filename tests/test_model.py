"""A model is a vector."""

import pytest
import torch
from torch import nn
from torch.func import vmap

from coterie.core.flat import FlatModel, build
from coterie.errors import ConfigError
from support import assert_close


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_the_vector_gives_the_modules_output():
    module = net()
    model, x = FlatModel(module), torch.randn(5, 3)
    assert model.size == sum(p.numel() for p in module.parameters())
    assert_close(model(model.flatten(module), x), module(x))


def test_the_vector_and_not_the_module_decides():
    module = net()
    model, x = FlatModel(module), torch.randn(5, 3)
    before = [p.clone() for p in module.parameters()]
    out = model(torch.zeros(model.size), x)
    assert_close(out, torch.zeros(5, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_flatten_is_a_copy():
    module = net()
    w = FlatModel(module).flatten(module)
    w.zero_()
    assert any(p.abs().sum() > 0 for p in module.parameters())


def test_tied_weights_have_one_slot():
    module = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    module["b"].weight = module["a"].weight
    assert FlatModel(module).size == 9


def test_frozen_parameters_stay_outside():
    module = net()
    module[0].requires_grad_(False)
    model = FlatModel(module)
    assert model.size == 10
    assert model(torch.zeros(10), torch.randn(4, 3)).abs().max() == 0


def test_a_model_that_cannot_be_trained_is_refused():
    with pytest.raises(ConfigError, match="no trainable parameter"):
        FlatModel(net().requires_grad_(False))


def test_positions_find_layers_by_name():
    model = FlatModel(net())
    assert model.layers() == ["0", "2"]
    assert torch.equal(model.positions(["2"]), torch.arange(16, 26))
    assert torch.equal(model.positions(["0.bias"]), torch.arange(12, 16))
    with pytest.raises(ConfigError, match="no layer '7'"):
        model.positions(["7"])


def test_buffers_follow_the_parameters_and_are_refreshed_like_torch_does():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model, x = FlatModel(module), torch.randn(9, 3, dtype=torch.float64)
    w = model.flatten(module)
    assert model.size == model.parameters + 8
    new = model.refreshed(w, x)
    reference = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    reference.load_state_dict(module.state_dict())
    reference.train()(x)
    assert_close(new, model.flatten(reference))
    assert torch.equal(w, model.flatten(module))  # nothing was written in place
    assert_close(model(new, x), reference.eval()(x))
    assert (model(new, x, training=True) - model(new, x)).abs().max() > 1e-3


def test_a_build_is_derived_and_leaves_the_callers_randomness_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = build(net, 1, "start")
    assert torch.equal(torch.rand(1), expected)
    second, other = build(net, 1, "start"), build(net, 2, "start")
    assert torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)


def test_many_models_at_once():
    model, x = FlatModel(net()), torch.randn(5, 3)
    W = torch.randn(7, model.size)
    assert_close(vmap(lambda w: model(w, x))(W), torch.stack([model(w, x) for w in W]), 1e-5)


def test_batch_norm_trains_without_touching_its_argument():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model = FlatModel(module)
    w, x = model.flatten(module), torch.randn(3, 5, 3).double()
    before = w.clone()

    def loss(w, x):
        return model(w, x, training=True).square().sum()

    apart = torch.stack([torch.func.grad(loss)(w, batch) for batch in x])
    together = vmap(torch.func.grad(loss))(w.expand(3, -1), x)
    assert torch.equal(w, before)
    torch.testing.assert_close(together, apart)
    assert (apart[:, : model.parameters].abs() > 0).any()
    assert (apart[:, model.parameters :] == 0).all()
