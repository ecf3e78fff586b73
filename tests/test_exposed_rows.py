"""What models tell of their rows: the attacks against laws, and that noise ends them."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from coterie import cli
from coterie.algorithms.fedavg import FedAvg
from coterie.api import configure
from coterie.attacking import exposed_rows as module
from coterie.attacking.exposed_rows import (
    _simulated,
    exposed_rows,
    halved,
    likelihood_ratios,
    margins,
    shadow_run,
    true_positives,
)
from coterie.attacking.inversion import (
    between,
    crafted,
    first_layer,
    imprinted,
    inverted,
    quotients,
    recovered,
)
from coterie.core.flat import FlatModel, build
from coterie.engines import EngineSettings
from coterie.errors import ConfigError
from coterie.runs.assemble import assemble
from support import cnn, task

SMALL = {
    "data": {"name": "digits", "test": 0.4},
    "partition": {"name": "label_groups", "clients": 4, "groups": 2, "fraction": 0.3},
    "model": {"name": "mlp", "hidden": [32]},
    "train": {"lr": 0.1, "batch": 10},
    "run": {"rounds": 1},
}
LOOP = EngineSettings("loop")


@pytest.fixture(scope="module")
def inner():
    return assemble(configure(SMALL))


# ---- membership ----------------------------------------------------------------------------------


def test_shadow_runs_hold_other_halves_of_the_same_rows(inner):
    on = _simulated(inner, "fedavg", 0, 1.0)
    (one, first), (two, second) = halved(on, 0), halved(on, 1)
    own = on.shards.splits["train"]
    assert first.sum() == second.sum() == sum(size // 2 for size in own.sizes)
    assert not torch.equal(first, second)
    rows = torch.cat([own.of(i) for i in range(4)])
    for half, member in ((one, first), (two, second)):
        lists = half.shards.splits["train"]
        assert tuple(lists.sizes) == half.problem.counts.train
        assert torch.equal(torch.cat([lists.of(i) for i in range(4)]), rows[member])
    assert torch.equal(one.problem.start, two.problem.start)  # which an attacker knows
    assert one.problem.privacy == two.problem.privacy == on.problem.privacy


def test_the_noise_of_shadow_runs_is_independent(inner, monkeypatch):
    """Two runs differ by √2 times the noise of one; a shared seed would cancel it."""
    sigma, seen = 100.0, []
    on = _simulated(inner, "fedavg", 0, sigma)
    look = module.SEEN["fedavg"][1]
    spied = lambda server, clients: seen.append(server) or look(server, clients)  # noqa: E731
    monkeypatch.setitem(module.SEEN, "fedavg", ("", spied))
    for number in (0, 1, 1):
        shadow_run(inner, "fedavg", on, number)
    half = halved(on, 0)[0].problem
    steps = torch.tensor([half.recipe.count(size) for size in half.counts.train])
    shares = half.sizes / half.sizes.sum()
    one = half.recipe.lr * sigma * half.privacy.clip / half.recipe.batch
    expected = one * math.sqrt(half.model.size * float((shares**2 * steps).sum()))
    assert float((seen[0] - half.start).norm()) == pytest.approx(expected, rel=0.05)
    assert float((seen[0] - seen[1]).norm()) == pytest.approx(math.sqrt(2) * expected, rel=0.05)
    assert torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_the_likelihood_ratio_finds_the_members_that_the_normal_distribution_allows(shift):
    drawn = torch.Generator().manual_seed(0)
    member = torch.rand(65, 400, generator=drawn) < 0.5
    hardness = 5 * torch.randn(400, generator=drawn)  # of a row: a common threshold fails
    margin = hardness + shift * member + torch.randn(65, 400, generator=drawn)
    found = true_positives(likelihood_ratios(margin, member), member)
    normal = torch.distributions.Normal(0.0, 1.0)
    allowed = float(normal.cdf(shift - normal.icdf(torch.tensor(0.99))))
    assert allowed - 0.04 < found < allowed + 0.01


def test_a_margin_is_the_log_odds_of_the_label_as_the_client_reads_it():
    on = task(FedAvg())
    model, client = on.problem.model, 1
    found = margins(model, on.problem.start, on.shards, client)
    index = on.shards.splits["train"].of(client)
    y = on.shards.relabel[client][on.shards.y[index]]
    p = model(on.problem.start, on.shards.inputs(index)).softmax(-1)[torch.arange(len(y)), y]
    assert torch.allclose(found, (p / (1 - p)).log(), atol=1e-9)


# ---- rows ----------------------------------------------------------------------------------------


def test_one_row_is_the_quotient_of_the_gradients_and_a_mixture_of_rows_is_not():
    drawn = torch.Generator().manual_seed(0)
    x, delta = torch.rand(2, 7, generator=drawn), torch.rand(2, 5, generator=drawn) + 0.1
    alone = quotients(delta[:1].T @ x[:1], delta[0])
    assert recovered(alone, x) == 1
    assert recovered(quotients(delta.T @ x, delta.sum(0)), x) == 0
    assert recovered(quotients(torch.zeros(5, 7), torch.zeros(5)), x) == 0
    assert recovered(torch.full((3, 7), torch.nan), x) == 0


def test_a_crafted_layer_separates_rows_by_their_mean():
    module = build(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), 0
    ).double()
    model, drawn = FlatModel(module), torch.Generator().manual_seed(0)
    x = torch.arange(8)[:, None] + torch.rand(8, 6, generator=drawn, dtype=torch.float64) / 10
    w = crafted(model, model.flatten(module), "1", x)
    y = torch.arange(8) % 3

    def loss(w):
        return nn.functional.cross_entropy(model(w, x), y)

    g = model.own(torch.func.grad(loss)(w))["1"]
    assert recovered(quotients(g["weight"], g["bias"]), x) < 4  # those above most thresholds
    assert recovered(quotients(between(g["weight"]), between(g["bias"])), x) >= 7


def test_rows_come_out_of_exact_changes_and_none_out_of_private_ones(inner):
    exact, private = (_simulated(inner, "fedavg", 0, noise) for noise in (0.0, 0.5))
    assert inverted(exact.problem, exact.shards, LOOP, 1) == 1.0
    assert inverted(exact.problem, exact.shards, LOOP, 4) > 0.6
    assert imprinted(exact.problem, exact.shards, LOOP, "gradient") > 0.1
    assert inverted(private.problem, private.shards, LOOP, 1) == 0.0
    assert imprinted(private.problem, private.shards, LOOP, "local_epochs") == 0.0
    with pytest.raises(ConfigError, match="exact gradients"):
        imprinted(private.problem, private.shards, LOOP, "gradient")


def test_a_convolution_is_not_inverted():
    on = task(FedAvg(), cnn)
    assert first_layer(on.problem.model, 36) is None
    assert inverted(on.problem, on.shards, LOOP, 1) is None
    assert imprinted(on.problem, on.shards, LOOP, "gradient") is None


# ---- the table -----------------------------------------------------------------------------------


def test_the_table_has_a_column_for_each_noise_and_is_written(tmp_path, monkeypatch, capsys):
    pytest.importorskip("opacus", reason="pip install 'coterie[dp]'")
    monkeypatch.setattr(module, "NOISES", (0.0, 1.0))
    monkeypatch.setattr(module, "SHADOWS", 3)
    config = tmp_path / "small.toml"
    config.write_text(
        "[data]\nname = 'digits'\n[partition]\nname = 'label_groups'\nclients = 4\n"
        "fraction = 0.3\n[model]\nname = 'mlp'\n[run]\nrounds = 1\n"
    )
    with pytest.raises(SystemExit):
        cli.main(["attack", str(config), "--exposure", "--json", "--out", str(tmp_path / "out")])
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "out" / "exposure.json").read_text())
    told = {(row["what"], row["noise"]): row["value"] for row in found["rows"]}
    assert told["ε of a client", 0.0] == "inf"
    assert 0 < told["ε of a client", 1.0] < 1000
    what = "rows recovered from a step on 1, %"
    assert [told[what, noise] for noise in (0.0, 1.0)] == [100.0, 0.0]
    shown = str(module.ExposedRows({what: {0.0: 100.0, 1.0: None}}, (0,)))
    assert "| σ = 0 | σ = 1 |" in shown
    assert f"| {what} | 100.0 | — |" in shown


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"data": {"name": "sine"}}, "expected classes"),
        ({**SMALL, "model": {"name": "support:NormedDigits"}}, "norm = 'group'"),
    ],
)
def test_what_could_not_be_attacked_is_refused_before_training(asked, word):
    told = []
    with pytest.raises(ConfigError, match=word):
        exposed_rows(configure(asked, code=Path(__file__).parent), [told.append])
    assert not told
