"""A model is a vector; the papers' networks: their sizes, what they accept, stacked parameters."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from coterie.core.flat import FlatModel, build
from coterie.core.imports import Code
from coterie.data.federation import Dataset
from coterie.errors import ConfigError
from coterie.networks import registry
from support import assert_close


def dataset(shape: tuple[int, ...], classes: int, dtype: torch.dtype = torch.float32) -> Dataset:
    return Dataset("made", torch.zeros(4, *shape).to(dtype), torch.zeros(4).long(), classes)


# Counted by hand from the papers' descriptions; the known ones (61,706; 1,663,370; 6,603,710;
# 11,173,962) are the numbers those networks are quoted with.
SIZES = [
    ("linear", (64,), 10, {}, 650),
    ("mlp", (64,), 10, {}, 4810),
    ("mlp", (512,), 65, {"hidden": (1000, 200)}, 726_265),
    ("lenet5", (1, 28, 28), 10, {}, 61_706),
    ("fedavg_cnn", (1, 28, 28), 10, {}, 1_663_370),
    ("leaf_cnn", (1, 28, 28), 62, {}, 6_603_710),
    ("p2_cnn", (3, 32, 32), 10, {}, 319_242),
    ("resnet18", (3, 32, 32), 10, {}, 11_173_962),
    ("resnet18", (3, 32, 32), 10, {"norm": "batch"}, 11_173_962),
    ("char_lstm", (80,), 80, {}, 819_920),
    ("word_lstm", (64,), 5000, {}, 1_648_200),
    ("next_token_lstm", (64,), 5000, {}, 1_648_200),
]


@pytest.mark.parametrize(("name", "shape", "classes", "options", "size"), SIZES)
def test_parameter_counts_and_the_name_of_the_last_layer(name, shape, classes, options, size):
    with torch.device("meta"):  # shapes only: nothing is initialised
        model = FlatModel(registry.MODELS[name](shape, classes, **options))
    assert model.parameters == size
    assert model.layers()[-1] == "head"


def test_every_network_has_a_counted_size():
    assert {row[0] for row in SIZES} == set(registry.MODELS)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda s: registry.linear(s, 3), (5,)),
        (lambda s: registry.mlp(s, 3, hidden=(6, 4)), (1, 8, 8)),
        (lambda s: registry.lenet5(s, 3), (1, 8, 8)),
        (lambda s: registry.lenet5(s, 3), (1, 12, 12)),
        (lambda s: registry.fedavg_cnn(s, 3), (1, 8, 8)),
        (lambda s: registry.p2_cnn(s, 3), (3, 8, 8)),
        (lambda s: registry.Residual(32, 64, 2, "group"), (32, 4, 4)),  # all of ResNet takes 30 s
    ],
)
def test_a_stack_of_parameters_gives_each_its_own_gradient(make, shape):
    model = FlatModel(build(lambda: make(shape), "stack").double())
    start = model.flatten(model.module)
    stacked = torch.stack([start, start * 0.5])
    x = torch.randn(2, 2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(w, x):
        return model(w, x).square().mean()

    together = vmap(grad(loss))(stacked, x)
    alone = torch.stack([grad(loss)(stacked[i], x[i]) for i in range(2)])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(together[0], together[1])


@pytest.mark.parametrize("name", ["char_lstm", "word_lstm"])
def test_lstm_depends_on_its_vector_and_learns_from_all_of_it(name):
    model = FlatModel(build(lambda: registry.MODELS[name]((7,), 11), "text"))
    start = model.flatten(model.module)
    tokens = torch.arange(14).view(2, 7) % 11
    gradient = grad(lambda w: model(w, tokens).square().mean())(start)
    assert model(start, tokens).shape == (2, 11)
    for slot in model.slots:
        assert gradient[slot.start : slot.stop].abs().sum() > 0, slot.name
    assert not torch.equal(model(start, tokens), model(start * 0.9, tokens))


def test_word_lstm_ties_its_output_to_its_embedding():
    names = [slot.name for slot in FlatModel(registry.word_lstm((4,), 9)).slots]
    assert "embedding.weight" in names
    assert "head.weight" not in names


@pytest.mark.parametrize("side", [28, 12, 11, 8, 4])
def test_lenet5_fits_any_side(side):
    assert registry.lenet5((1, side, side), 10)(torch.zeros(2, 1, side, side)).shape == (2, 10)


def test_regression_has_one_output():
    assert registry.mlp((4,), 0)(torch.zeros(2, 4)).shape == (2, 1)


@pytest.mark.parametrize(
    ("shape", "dtype", "classes", "expected"),
    [
        ((5,), torch.float32, 2, "mlp"),
        ((1, 8, 8), torch.uint8, 10, "mlp"),
        ((1, 28, 28), torch.uint8, 10, "lenet5"),
        ((3, 32, 32), torch.uint8, 10, "fedavg_cnn"),
        ((80,), torch.int64, 80, "char_lstm"),
        ((64,), torch.int64, 5000, "word_lstm"),
    ],
)
def test_auto_picks_by_kind_of_data(shape, dtype, classes, expected):
    data = dataset(shape, classes, dtype)
    with torch.device("meta"):
        made, wanted = registry.factory("auto", data)(), registry.factory(expected, data)()
    assert str(made) == str(wanted)


class Own(nn.Module):
    def __init__(self, shape: tuple[int, ...], width: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], width)


def test_own_class_gets_the_shape_it_asks_for_and_the_options():
    own = registry.builder(f"{__name__}:Own", Code((Path(__file__).parent,)))
    made = registry.factory(own, dataset((5,), 2), width=7)()
    assert made.layer.weight.shape == (7, 5)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("lenet", (1, 28, 28), "did you mean 'lenet5'?"),
        ("lenet5", (64,), "needs images"),
        ("p2_cnn", (1, 4, 4), "at least 8x8"),
        ("char_lstm", (1, 8, 8), "needs sequences of tokens"),
        ("no.such:Net", (5,), "cannot be imported"),
    ],
)
def test_refusals_say_what_to_do(name, shape, message):
    with pytest.raises(ConfigError, match=message):
        registry.factory(name, dataset(shape, 10))()


def test_bfloat16_computes_coarsely_and_speaks_float32():
    def make():
        return build(lambda: registry.mlp((6,), 3), "half")

    plain, half = FlatModel(make()), FlatModel(registry.in_bfloat16(make, "cpu")())
    w, x = plain.flatten(plain.module), torch.linspace(-1, 1, 12).view(2, 6)
    exact, coarse = plain(w, x), half(w, x)
    assert coarse.dtype == torch.float32
    assert half.layers() == plain.layers()
    torch.testing.assert_close(coarse, exact, rtol=2e-2, atol=2e-2)
    assert not torch.equal(coarse, exact)
    assert not torch.equal(half(w * 0.5, x, training=True), half(w, x, training=True))


# ---- a model is a vector -------------------------------------------------------------------------


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
