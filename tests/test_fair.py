"""q-FedAvg and TERM."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.qfedavg import QFedAvg, normalised_weights, q_step, q_weights
from coterie.algorithms.term import TERM, tilted_shares
from coterie.core.optim import Recipe
from coterie.training.rounds import train
from support import assert_close, engine_of, last, one_client, predictors, task

LOSSES = torch.tensor([0.5, 1.2, 2.0], dtype=torch.float64)
SHARES = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def as_printed(w, models, losses, shares, q, lr, server_lr=1.0):
    """The original's step entry by entry, with F^q as printed."""
    L, P = 1 / lr, len(w)
    total, down = [0.0] * P, 0.0
    for theta, loss, p in zip(models.tolist(), losses.tolist(), shares.tolist(), strict=True):
        F = loss + 1e-10
        g = [L * (a - b) for a, b in zip(w.tolist(), theta, strict=True)]
        square = sum(entry**2 for entry in g)
        total = [have + p * F**q * entry for have, entry in zip(total, g, strict=True)]
        down += p * (q * F ** (q - 1) * square + L * F**q)
    moved = [a - server_lr * b / down for a, b in zip(w.tolist(), total, strict=True)]
    return torch.tensor(moved, dtype=torch.float64)


def some_models(count=3, size=4):
    generator = torch.Generator().manual_seed(3)
    draw = torch.randn(count + 1, size, generator=generator, dtype=torch.float64)
    return draw[0], draw[1:]


@pytest.mark.parametrize("q", [0.0, 0.1, 1.0, 5.0, 15.0])
def test_scaled_and_printed_forms_of_q_fedavg_agree(q):
    w, models = some_models()
    found = q_step(w, models, LOSSES, SHARES, q, 0.1)
    assert_close(found, as_printed(w, models, LOSSES, SHARES, q, 0.1), 1e-9)


@pytest.mark.parametrize("q", [0.0, 0.1, 1.0, 5.0, 15.0])
def test_normalised_weights_as_printed(q):
    raw = [p * F**q for p, F in zip(SHARES.tolist(), LOSSES.tolist(), strict=True)]
    expected = torch.tensor([r / sum(raw) for r in raw], dtype=torch.float64)
    assert_close(normalised_weights(LOSSES, SHARES, q), expected, 1e-12)


def test_a_normalised_round_equals_a_slow_double_loop():
    method = QFedAvg(q=2.0, server_lr=0.7, step="normalised")
    on = task(method)
    uploads = [method.local(one_client(on, i), on.problem.start, ())[0] for i in range(5)]
    total = sum(float(u.size) * float(u.loss) ** 2 for u in uploads)
    expected = on.problem.start.tolist()
    for u in uploads:
        weight = float(u.size) * float(u.loss) ** 2 / total
        for k, (new, old) in enumerate(zip(u.w.tolist(), on.problem.start.tolist(), strict=True)):
            expected[k] += 0.7 * weight * (new - old)
    found = last(method, on, rounds=1, participation=1.0).server
    assert_close(found, torch.tensor(expected, dtype=torch.float64), 1e-9)


def test_the_normalised_step_does_not_shrink_with_q():
    """Clients that agree move the model as far as FedAvg, however large q is."""
    w = torch.zeros(4, dtype=torch.float64)
    same = torch.ones(4, dtype=torch.float64)
    for q in (0.0, 1.0, 10.0):
        omega = normalised_weights(LOSSES, SHARES, q)
        assert_close(w + omega @ same.expand(3, -1), same, 1e-12)
    assert float(q_step(w, same.expand(3, -1), LOSSES, SHARES, 10.0, 0.1).norm()) < 0.1


def test_q_zero_weighs_by_shares_exactly():
    assert torch.equal(q_weights(torch.rand(3), LOSSES, SHARES, 0.0, 0.1), SHARES / SHARES.sum())


def test_equal_losses_and_norms_only_shorten_the_step():
    w = torch.zeros(2, dtype=torch.float64)
    models = torch.tensor([[3.0, 4.0], [5.0, 0.0]], dtype=torch.float64)
    p, F, lr, q = torch.tensor([0.3, 0.7]).double(), 1.7, 0.1, 2.0
    found = q_step(w, models, torch.full((2,), F).double(), p, q, lr)
    square = 25 / lr**2  # ‖g‖²
    assert_close(found, (p @ models) / (1 + q * square * lr / F), 1e-9)


def test_a_large_q_follows_the_worse_client():
    w, models = some_models(2)
    step = q_step(w, models, torch.tensor([1.0, 1.1]).double(), SHARES[:2], 600.0, 0.1) - w
    assert torch.cosine_similarity(step, models[1] - w, dim=0) > 1 - 1e-9


def test_losses_of_zero_skip_the_round():
    w, models = some_models()
    assert torch.equal(q_step(w, models, torch.zeros(3), SHARES, 1.0, 0.1), w)


def test_norms_leave_buffers_out():
    w, models = some_models()
    noisy = models.clone()
    noisy[:, 3] += 100.0
    plain = q_step(w[:3], models[:, :3], LOSSES, SHARES, 1.0, 0.1)
    assert_close(q_step(w, noisy, LOSSES, SHARES, 1.0, 0.1, parameters=3)[:3], plain, 1e-12)


@pytest.mark.parametrize("t", [-3.0, 0.1, 1.0, 5.0])
def test_tilt_as_printed(t):
    raw = [p * math.exp(t * F) for p, F in zip(SHARES.tolist(), LOSSES.tolist(), strict=True)]
    expected = torch.tensor([r / sum(raw) for r in raw], dtype=torch.float64)
    assert_close(tilted_shares(LOSSES, SHARES, t), expected, 1e-12)


def test_limits_of_the_tilt():
    assert torch.equal(tilted_shares(LOSSES, SHARES, 1e-13), SHARES)
    assert_close(tilted_shares(LOSSES, SHARES, 1e-10), SHARES, 1e-9)
    assert_close(tilted_shares(LOSSES, SHARES, 1e4), torch.tensor([0.0, 0.0, 1.0]).double())
    assert_close(tilted_shares(LOSSES, SHARES, -1e4), torch.tensor([1.0, 0.0, 0.0]).double())


finite = st.floats(0, 1e6, allow_nan=False)
clients = st.lists(st.tuples(finite, st.integers(1, 10_000), st.floats(0, 1e6)), min_size=1)


@given(clients, st.floats(-50, 50))
def test_tilted_shares_are_shares(rows, t):
    losses, sizes, _ = (torch.tensor(column).double() for column in zip(*rows, strict=True))
    omega = tilted_shares(losses, sizes / sizes.sum(), t)
    assert bool((omega >= 0).all())
    assert float(omega.sum()) == pytest.approx(1)
    assert_close(tilted_shares(losses + 7.5, sizes / sizes.sum(), t), omega, 1e-6)
    back = torch.arange(len(losses)).flip(0)
    assert_close(tilted_shares(losses[back], sizes[back] / sizes.sum(), t), omega[back], 1e-9)


@given(clients, st.floats(0, 30), st.floats(1e-6, 1e6))
def test_normalised_weights_are_shares_without_a_scale(rows, q, scale):
    losses, sizes, _ = (torch.tensor(column).double() for column in zip(*rows, strict=True))
    shares = sizes / sizes.sum()
    found = normalised_weights(losses, shares, q)
    assert bool((found >= 0).all())
    nothing = q > 0 and not bool((losses > 0).any())
    assert float(found.sum()) == pytest.approx(0 if nothing else 1)
    if float(losses.max()) == 0 or float(losses.max()) > 1e-100:
        assert_close(normalised_weights(losses * scale, shares, q), found, 1e-6)
    assert_close(normalised_weights(losses, shares, 0.0), shares, 1e-12)


@given(clients, st.floats(0, 30))
def test_q_weights_never_step_beyond_fedavg(rows, q):
    losses, sizes, squares = (torch.tensor(column).double() for column in zip(*rows, strict=True))
    found = q_weights(squares, losses, sizes / sizes.sum(), q, 0.1)
    assert bool(found.isfinite().all())
    assert bool((found >= 0).all())
    assert float(found.sum()) <= 1 + 1e-9
    back = torch.arange(len(losses)).flip(0)
    turned = q_weights(squares[back], losses[back], sizes[back] / sizes.sum(), q, 0.1)
    assert_close(turned, found[back], 1e-9)


@pytest.mark.parametrize("method", [QFedAvg(), TERM()])
def test_the_loss_is_of_the_received_model_on_all_training_data(method):
    on = task(method)
    client = one_client(on, 4)
    upload, _ = method.local(client, on.problem.start, ())
    x, y = next(iter(client.blocks("train")))[:2]
    by_hand = torch.nn.functional.cross_entropy(on.problem.model(on.problem.start, x), y)
    assert_close(upload.loss, by_hand, 1e-12)
    assert not torch.equal(upload.w, on.problem.start)


@pytest.mark.parametrize("method", [QFedAvg(q=5.0, step="normalised"), TERM(t=2.0)])
def test_the_client_that_suffers_is_heard(method):
    """Fairness is the point: the worst client's loss falls below FedAvg's."""
    recipe = Recipe(lr=0.05, epochs=1, batch=10)

    def worst(algorithm):
        on = task(algorithm, recipe=recipe, merge=False)
        record = last(algorithm, on, rounds=8, participation=1.0)
        return record.evaluation.val_loss.max()

    assert worst(method) < worst(FedAvg())


@pytest.mark.parametrize("method", [QFedAvg, TERM])
def test_a_tiny_server_rate_moves_nothing(method):
    still = method(server_lr=1e-30)
    on = task(still)
    assert torch.equal(predictors(last(still, on)).models[0, 0], on.problem.start)


# ---- period two ----------------------------------------------------------------------------------


def alternation(algorithm):
    """The share of period two in the clients' losses, and its amplitude, between two groups."""
    on = task(algorithm, recipe=Recipe(lr=0.2, epochs=4, batch=10), merge=False)
    rows = train(algorithm, on.problem, engine_of("vmap", on), 24, participation=1.0)
    losses = np.stack([record.evaluation.val_loss for record in rows])[-10:]
    swing = (-1.0) ** np.arange(10) @ (losses - losses.mean(0)) / 10
    return float((swing**2).mean() / losses.var(0).mean()), float(np.abs(swing).mean())


def test_the_default_tilt_does_not_swing_between_conflicting_groups():
    plain, mild, strong = (alternation(m) for m in (FedAvg(), TERM(), TERM(t=4.0)))
    assert strong[0] > 0.5
    assert strong[1] > 0.1
    assert mild[1] < 0.2 * strong[1]
    assert mild[1] < 2 * plain[1] + 0.01
