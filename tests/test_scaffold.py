"""SCAFFOLD's control variates."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.scaffold import Kept, Scaffold, Shared, displacement_divisor
from coterie.core.optim import Recipe
from coterie.data.federation import Dataset, Federation
from coterie.data.simulation import simulate
from coterie.errors import ConfigError
from coterie.training.rounds import train
from support import RECIPE, assert_close, engine_of, last, one_client, task, whole_round

PLAIN = replace(RECIPE, momentum=0.0, weight_decay=0.0)


def noisy(on):
    generator = torch.Generator().manual_seed(4)
    return [
        0.1 * torch.randn(len(on.problem.start), generator=generator).double() for _ in range(2)
    ]


def test_the_servers_control_is_the_mean_of_the_clients():
    method = Scaffold()
    on = task(method)
    for record in train(method, on.problem, engine_of("vmap", on), 4, participation=0.5):
        assert_close(record.server.c, record.states.c.mean(0))
        assert record.server.c.abs().max() > 1e-4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_displacement_measures_the_mean_gradient(momentum):
    """Option II is the mean gradient under SGD; with momentum only after the correction."""
    on = task(Scaffold(), recipe=replace(PLAIN, momentum=momentum))
    server_c, own_c = noisy(on)
    client, received = one_client(on, 0), None
    changes = {}
    for control in ("mean_gradient", "displacement"):
        received = Shared(on.problem.start, server_c)
        state = Kept(own_c, on.problem.start)
        changes[control], _ = Scaffold(control=control).local(client, received, state)
    assert_close(changes["mean_gradient"].dy, changes["displacement"].dy)
    if momentum == 0:
        assert_close(changes["mean_gradient"].dc, changes["displacement"].dc, 1e-10)
    else:
        ratio = changes["displacement"].dc.norm() / changes["mean_gradient"].dc.norm()
        assert 0.7 < ratio < 1.3  # uncorrected it is several times too large


def test_the_divisor_counts_the_gradients_in_a_displacement():
    for steps, momentum in ((1, 0.9), (12, 0.9), (5, 0.5), (7, 0.0)):
        velocity = total = 0.0
        for _ in range(steps):
            velocity = momentum * velocity + 1.0
            total += velocity
        found = displacement_divisor(torch.tensor(float(steps)).double(), momentum)
        assert float(found) == pytest.approx(total)


def test_option_one_is_the_gradient_at_the_received_model():
    on = task(Scaffold())
    client = one_client(on, 1)
    zero = torch.zeros_like(on.problem.start)
    _, kept = Scaffold(control="full_gradient").local(
        client, Shared(on.problem.start, zero), Kept(zero, on.problem.start)
    )
    assert_close(kept.c, client.gradient(on.problem.start, "train"))


def test_displacement_refuses_adam():
    method = Scaffold(control="displacement")
    with pytest.raises(ConfigError, match="mean_gradient"):
        method.init(task(method, recipe=replace(RECIPE, optimizer="adam")).problem)


def test_one_full_step_is_gradient_descent_on_the_mean_objective():
    full = Recipe(lr=0.3, epochs=1, batch=1000)
    method = Scaffold()
    on = task(method, recipe=full)
    *_, record = train(method, on.problem, engine_of("vmap", on), 3)
    w = on.problem.start
    for _ in range(3):
        gradients = [one_client(on, i).gradient(w, "train") for i in range(5)]
        w = w - 0.3 * torch.stack(gradients).mean(0)
    assert_close(record.server.x, w)


def quadratics():
    """Two clients on one axis: ½(w·x − y)² with minimisers 1 and −1 and curvatures 1 and 4."""
    x = torch.tensor([[1.0], [2.0]])
    data = Dataset("two quadratics", x, torch.tensor([1.0, -2.0]), 0)
    one, two, none = torch.tensor([0]), torch.tensor([1]), torch.arange(0)
    return Federation(data, "by hand", ("a", "b"), (one, two), (none, none), (one, two))


def test_scaffold_finds_the_common_minimum_and_fedavg_does_not():
    # ½(w − 1)² + ½(2w + 2)²: the sum is least at w = −3/5
    found = {}
    for method in (Scaffold(), FedAvg(weighting="uniform")):
        on = simulate(
            quadratics(), lambda: nn.Linear(1, 1, bias=False), Recipe(lr=0.1, steps=20, batch=1),
            dtype=torch.float64,
        )  # fmt: skip
        record = last(method, on, "loop", rounds=200, participation=1.0, metric="rmse")
        found[type(method)] = float(record.mixture.models.flatten()[0])
    assert found[Scaffold] == pytest.approx(-0.6, abs=1e-3)
    assert abs(found[FedAvg] + 0.6) > 0.1


def test_predicting_with_the_own_model():
    method = Scaffold(predict_with="local")
    on = task(method)
    record = last(method, on, participation=1.0)
    assert record.traffic.serve == 0
    assert torch.equal(record.mixture.models[:, 0], record.states.y)
    assert method.serve(record.server, whole_round(on)) == ()
