"""MOCHA: its penalty, its gradient and its relationship matrices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.algorithms.mocha import Columns, Mocha, Ties, learned_omega, mean_omega, tied
from coterie.core.mixing import gram
from coterie.core.optim import Recipe
from coterie.errors import ConfigError
from support import assert_close, last, one_client, predictors, task, whole_round

GENERATOR = torch.Generator().manual_seed(0)
W = torch.randn(4, 7, generator=GENERATOR, dtype=torch.float64)  # a row a client


def trace(W, omega):
    """tr(W Ω Wᵀ) with clients in columns, entry by entry."""
    total = 0.0
    for i in range(len(W)):
        for j in range(len(W)):
            total = total + omega[i, j] * (W[i] * W[j]).sum()
    return total


def test_the_mean_penalty_is_the_distance_from_the_mean():
    assert_close(trace(W, mean_omega(4)), ((W - W.mean(0)) ** 2).sum(), 1e-12)


@pytest.mark.parametrize("kind", ["mean", "learned"])
def test_what_a_client_receives_gives_the_gradient_of_the_whole_penalty(kind):
    omega = {"mean": mean_omega(4), "learned": learned_omega(gram(W), 1e-7)}[kind]
    lam1, lam2 = 1e-3, 0.05
    live = W.clone().requires_grad_()
    (lam1 * trace(live, omega) + lam2 * (live**2).sum()).backward()
    for i in range(4):
        others = sum(omega[i, j] * W[j] for j in range(4) if j != i)
        w = W[i].clone().requires_grad_()
        tied(w, Ties(others, omega[i, i]), lam1, lam2).backward()
        assert_close(w.grad, live.grad[i], 1e-10)
        assert w.grad.norm() > 1e-3


def test_the_server_sends_the_needed_combination():
    method = Mocha()
    on = task(method)
    models = torch.randn(5, on.problem.model.size, generator=GENERATOR, dtype=torch.float64)
    round = whole_round(on)._replace(clients=torch.tensor([1, 4]))
    sent = method.download(Columns(models, mean_omega(5), torch.ones(5).bool()), round)
    for row, i in enumerate((1, 4)):
        rest = sum(models[j] for j in range(5) if j != i)
        assert_close(sent.others[row], -rest / 5, 1e-12)
        gradient = sent.own[row] * models[i] + sent.others[row]
        assert_close(gradient, models[i] - models.mean(0), 1e-12)


def test_a_round_equals_the_closed_form_gradient():
    method = Mocha(lam1=0.1, lam2=0.01)
    on = task(method, recipe=Recipe(lr=0.05, batch=10, steps=3))
    models = (
        on.problem.start + 0.1 * torch.randn(5, on.problem.model.size, generator=GENERATOR).double()
    )
    server = Columns(models, mean_omega(5), torch.ones(5).bool())
    client, w = one_client(on, 2), models[2]
    sent = method.download(server, whole_round(on))
    found, _ = method.local(
        client, Ties(*(leaf[2] for leaf in sent)), type(method.init(on.problem)[1])(w)
    )
    for number in range(3):
        live = models.clone()
        live[2] = w
        g = client.gradient(w, client.batch(number))
        w = w - 0.05 * (g + 2 * 0.1 * (w - live.mean(0)) + 2 * 0.01 * w)
    assert_close(found, w, 1e-11)


def test_learned_omega_is_the_printed_formula():
    products = W @ W.T
    values, vectors = torch.linalg.eigh(products)
    root = vectors @ torch.diag(values.sqrt()) @ vectors.T  # (WᵀW)^½
    assert_close(root @ root, products, 1e-10)
    assert_close(learned_omega(products, 1e-7), torch.linalg.inv(root / root.trace()), 1e-8)


@given(st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=2, max_size=6))
def test_learned_omega_is_finite_symmetric_and_positive(rows):
    products = gram(torch.tensor(rows, dtype=torch.float64))
    omega = learned_omega(products, 1e-3)
    assert omega.isfinite().all()
    assert_close(omega, omega.T, 1e-6)
    assert torch.linalg.eigvalsh(omega).min() > 0.9  # Σ has trace one, its inverse is above one
    order = torch.arange(len(rows)).flip(0)
    assert_close(learned_omega(products[order][:, order], 1e-3), omega[order][:, order], 1e-4)


def test_identical_and_zero_models_do_not_break_it():
    assert learned_omega(torch.ones(3, 3).double(), 1e-7).isfinite().all()
    assert_close(learned_omega(torch.zeros(3, 3).double(), 1e-7), 3 * torch.eye(3).double(), 1e-9)


def test_a_learned_omega_starts_neutral_and_is_renewed_every_so_many_rounds():
    method = Mocha(omega="learned", lam1=1e-4, omega_every=2)
    on = task(method)
    assert_close(method.init(on.problem)[0].omega, 5 * torch.eye(5).double(), 0)
    one = last(method, on, rounds=1, participation=1.0).server
    two = last(method, on, rounds=2, participation=1.0).server
    assert_close(one.omega, 5 * torch.eye(5).double(), 0)
    assert_close(two.omega, learned_omega(gram(two.W), 2 * 0.1 * 1e-4), 1e-9)


def test_a_learned_omega_leaves_strangers_out_and_stays_stable():
    method = Mocha(omega="learned", lam1=0.1)
    record = last(method, task(method), rounds=2)
    omega, seen = record.server.omega, record.server.seen
    assert 2 <= int(seen.sum()) < 5
    assert not omega[seen][:, ~seen].any()
    assert_close(
        omega[~seen][:, ~seen].diagonal(), torch.full((5 - int(seen.sum()),), 5.0).double()
    )
    assert 0.1 * 2 * 0.1 * omega.diagonal().max() <= 1 + 1e-9
    assert predictors(record).models.isfinite().all()


def test_steps_that_would_overshoot_are_refused():
    method = Mocha(lam1=30.0)
    on = task(method)
    with pytest.raises(ConfigError, match="lower lr, lam1"):
        method.download(method.init(on.problem)[0], whole_round(on))
