"""Ditto, pFedMe and Per-FedAvg against closed forms and slow loops."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.algorithms.ditto import Ditto
from coterie.algorithms.ditto import Own as DittoOwn
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.perfedavg import PerFedAvg, descend, hessian_product
from coterie.algorithms.pfedme import Own as PFedMeOwn
from coterie.algorithms.pfedme import PFedMe, envelope_step
from coterie.core.optim import Recipe
from coterie.data.federation import Dataset, Federation
from coterie.data.simulation import Simulation, simulate
from coterie.errors import ConfigError
from support import RECIPE, assert_close, last, one_client, task

H = torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)  # curvature of the quadratic
B = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)  # and its minimum
W = torch.tensor([0.5, 0.5, -1.0], dtype=torch.float64)


def quadratic(**recipe) -> Simulation:
    """F(w) = ½ Σ h_j (w_j − b_j)²: three samples, each along one axis, loss ½ squared error."""
    x = (3 * H).sqrt().diag()
    data = Dataset("quadratic", x, (x @ B), classes=0)
    every = torch.arange(3)
    federated = Federation(data, "one", ("site",), (every,), (every,), (every,))
    chosen = Recipe(**{"lr": 0.1, "batch": 3, "steps": 1, **recipe})
    return simulate(federated, lambda: nn.Linear(3, 1, bias=False), chosen, dtype=torch.float64)


def test_the_quadratic_is_one():
    client = one_client(quadratic(), 0)
    assert_close(client.gradient(W, "train"), H * (W - B), 1e-5)  # x is stored in float32


# ---- Ditto -----------------------------------------------------------------------------------


def test_ditto_s_global_model_is_fedavg_bit_for_bit():
    ditto, fedavg = (last(method, task(method)) for method in (Ditto(), FedAvg()))
    assert torch.equal(ditto.server, fedavg.server)


def test_a_ditto_step_is_the_printed_one():
    on = task(Ditto(), recipe=Recipe(lr=0.1, batch=10, steps=3))
    client, v = one_client(on, 1), on.problem.start + 0.1
    _, new = Ditto(lam=0.7).local(client, on.problem.start, DittoOwn(v))
    for number in range(3):
        g = client.gradient(v, client.batch(number))
        v = v - 0.1 * (g + 0.7 * (v - on.problem.start))
    assert_close(new.v, v, 1e-12)


@pytest.mark.parametrize("lam", [0.0, 1.0, 1e4])
def test_ditto_reaches_the_exact_minimiser(lam):
    on = quadratic(lr=1.0 / (4 + lam), steps=300)
    _, new = Ditto(lam=lam).local(one_client(on, 0), W, DittoOwn(torch.zeros(3).double()))
    exact = (H * B + lam * W) / (H + lam)
    assert_close(new.v, exact, 1e-4)
    if lam == 1e4:  # λ → ∞ pins v to w
        assert (new.v - W).abs().max() < 1e-2


# ---- pFedMe ----------------------------------------------------------------------------------


def test_the_inner_problem_is_solved_exactly():
    lam = 2.0
    on = quadratic()
    method = PFedMe(lam=lam, inner_steps=400, inner_lr=0.2, lr=0.05)
    up, new = method.local(one_client(on, 0), W, PFedMeOwn(W))
    theta = (H * B + lam * W) / (H + lam)
    assert_close(new.theta, theta, 1e-5)
    assert_close(up.w, W - 0.05 * lam * (W - theta), 1e-5)


def test_the_outer_step_descends_the_moreau_envelope():
    lam, w = 2.0, W.clone().requires_grad_()
    theta = (H * B + lam * w) / (H + lam)
    envelope = 0.5 * (H * (theta - B) ** 2).sum() + 0.5 * lam * ((theta - w) ** 2).sum()
    envelope.backward()
    assert_close(envelope_step(W, theta.detach(), 0.3, lam), W - 0.3 * w.grad, 1e-12)


def test_pfedme_equals_a_slow_loop():
    method = PFedMe(lam=3.0, inner_steps=2, inner_lr=0.1, lr=0.05)
    on = task(method, recipe=Recipe(lr=0.1, batch=10, steps=4))
    client = one_client(on, 2)
    up, new = method.local(client, on.problem.start, PFedMeOwn(on.problem.start + 9))
    w = theta = on.problem.start
    for number in range(4):
        batch = client.batch(number)
        for _ in range(2):
            theta = theta - 0.1 * (client.gradient(theta, batch) + 3.0 * (theta - w))
        w = w - 0.05 * 3.0 * (w - theta)
    assert_close(new.theta, theta, 1e-12)
    assert_close(up.w, w, 1e-12)


def test_where_theta_starts_matters():
    on = task(PFedMe())
    client, kept = one_client(on, 0), PFedMeOwn(on.problem.start + 1)
    fresh = PFedMe().local(client, on.problem.start, kept)[1].theta
    warm = PFedMe(start="kept").local(client, on.problem.start, kept)[1].theta
    assert (fresh - warm).abs().max() > 1e-6


def test_no_tie_keeps_the_shared_model():
    method = PFedMe(lam=1e-30)
    record = last(method, task(method))
    assert_close(record.server, task(method).problem.start, 0)


def test_beta_steps_between_old_and_average():
    def server(beta):
        method = PFedMe(beta=beta)
        on = task(method)
        return last(method, on, rounds=1, participation=1.0).server, on.problem.start

    (one, start), (two, _) = server(1.0), server(2.0)
    assert_close(two - start, 2 * (one - start), 1e-12)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"lr": 0.1}, "must not exceed 1"),
        ({"inner_lr": 0.2}, "must be below 2"),
        ({"lam": 4.0, "inner_lr": 0.5}, "must be below 2"),  # θ would jump over w for ever
    ],
)
def test_rates_that_overshoot_are_refused(fields, limit):
    with pytest.raises(ConfigError, match=limit):
        PFedMe(**fields)


def test_w_may_move_all_the_way_to_theta():
    assert PFedMe(lam=4.0, lr=0.25).lr == 0.25


@pytest.mark.parametrize("lr", [0.01, 0.5, 100.0])
def test_auto_rates_respect_the_limits(lr):
    method = PFedMe()
    rate = method._rate("auto", torch.tensor(lr))
    assert 0 < rate * method.lam < 1


# ---- Per-FedAvg ------------------------------------------------------------------------------


def test_hessian_free_equals_the_exact_meta_gradient_on_a_quadratic():
    a, b = 0.2, 0.1
    on = quadratic(lr=b)
    up, _ = PerFedAvg(form="hf", inner_lr=a).local(one_client(on, 0), W, ())
    adapted = W - a * H * (W - B)
    exact = (1 - a * H) * (H * (adapted - B))  # (I − aH) ∇F(w̃)
    assert_close(up.w, W - b * exact, 1e-5)
    first, _ = PerFedAvg(form="fo", inner_lr=a).local(one_client(on, 0), W, ())
    assert_close(first.w, W - b * H * (adapted - B), 1e-5)
    assert (first.w - up.w).abs().max() > 1e-3


def test_the_difference_is_exact_to_second_order():
    on = task(PerFedAvg())
    client = one_client(on, 0)
    batch = client.batch(0)
    g = client.gradient(on.problem.start, batch)
    exact = torch.func.grad(lambda w: client.gradient(w, batch) @ g)(on.problem.start)

    def error(delta):
        return (hessian_product(client, on.problem.start, g, batch, delta) - exact).norm()

    assert 3.9 < error(0.02) / error(0.01) < 4.1
    assert error(1e-3) < 1e-5 * exact.norm()


@pytest.mark.parametrize("form", ["fo", "hf"])
def test_a_perfedavg_round_equals_a_slow_loop(form):
    method = PerFedAvg(form=form, inner_lr=0.3)
    on = task(method, recipe=Recipe(lr=0.05, batch=10, steps=3))
    client = one_client(on, 3)
    w = on.problem.start
    streams = client.tuned(batches="adapt"), client, client.tuned(batches="hessian")
    for number in range(3):
        d, d1, d2 = (stream.batch(number) for stream in streams)
        assert not torch.equal(d.position, d1.position)
        g = client.gradient(w - 0.3 * client.gradient(w, d), d1)
        if form == "hf":
            ahead, behind = (client.gradient(w + s * g, d2) for s in (1e-3, -1e-3))
            g = g - 0.3 * (ahead - behind) / 2e-3
        w = w - 0.05 * g
    assert_close(method.local(client, on.problem.start, ())[0].w, w, 1e-11)


def test_the_personal_step_is_taken_on_training_data():
    method = PerFedAvg(inner_lr=0.3, predict_steps=2)
    on = task(method)
    client, w = one_client(on, 0), on.problem.start
    for _ in range(2):
        w = w - 0.3 * client.gradient(w, "train")
    assert_close(method.predictor(client, on.problem.start, ()).models[0], w, 1e-12)


def test_auto_follows_the_rate_of_the_round():
    method = PerFedAvg(predict_steps=1)
    on = task(method, recipe=replace(RECIPE, decay=0.5))
    client = one_client(on, 0, round_index=2)
    expected = on.problem.start - 0.1 * 0.25 * client.gradient(on.problem.start, "train")
    assert_close(method.predictor(client, on.problem.start, ()).models[0], expected, 1e-12)


def test_batch_norm_statistics_are_not_descended():
    def normed():
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    method = PerFedAvg(inner_lr=0.3)
    on = task(method, normed)
    client, trained = one_client(on, 0), on.problem.model.parameters
    w = descend(client, on.problem.start, torch.ones_like(on.problem.start), 0.1)
    assert torch.equal(w[trained:], on.problem.start[trained:])
    assert_close(w[:trained], on.problem.start[:trained] - 0.1, 1e-12)
    personal = method.predictor(client, on.problem.start, ()).models[0]
    assert torch.equal(personal[trained:], on.problem.start[trained:])
    assert (personal - on.problem.start).abs().max() > 1e-3


@pytest.mark.parametrize("lr", [0.05, 1.0, 20.0])
def test_the_hessian_term_never_turns_an_automatic_step_around(lr):
    """By default the meta-gradient keeps at least half of g: the loss after adapting falls."""
    on = quadratic(lr=lr)
    client, g = one_client(on, 0), torch.randn(len(W), dtype=W.dtype)
    for scale in (0.01, 1.0, 100.0):
        term = PerFedAvg("hf")._correction(client, g, scale * H * g)
        assert float(term.norm()) <= 0.5 * float(g.norm()) * (1 + 1e-6)
        assert float(g @ (g - term)) >= 0.5 * float(g @ g) * (1 - 1e-6)
    small = PerFedAvg("hf")._correction(client, g, 1e-3 * g / lr)
    assert_close(small, 1e-3 * g, 1e-6)
    fixed = PerFedAvg("hf", inner_lr=7.0)._correction(client, g, H * g)
    assert_close(fixed, 7.0 * H * g, 1e-6)
    assert float(PerFedAvg("hf")._correction(client, 0 * g, 0 * g).norm()) == 0.0
