"""FedEM against a slow loop, and what its shares must be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.algorithms.fedem import FedEM, Own, responsibilities
from coterie.core.optim import Recipe
from support import assert_close, backend_of, last, one_client, predictors, task, whole_round


def slow_responsibilities(pi, losses):
    """One sample and one component at a time."""
    M, n = losses.shape
    q = torch.zeros(M, n, dtype=torch.float64)
    for s in range(n):
        parts = [float(pi[m]) * torch.exp(-losses[m, s].double()) for m in range(M)]
        for m in range(M):
            q[m, s] = parts[m] / sum(parts)
    return q


def test_the_e_step_equals_a_slow_loop():
    generator = torch.Generator().manual_seed(0)
    losses = 5 * torch.rand(4, 30, generator=generator, dtype=torch.float64)
    pi = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    assert_close(responsibilities(pi, losses), slow_responsibilities(pi, losses), 1e-12)


finite = st.floats(0, 1e4, allow_nan=False, width=32)


@given(st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=5), st.data())
def test_responsibilities_are_simplex_columns(columns, data):
    raw = data.draw(st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda p: sum(p) > 0))
    pi = torch.tensor(raw, dtype=torch.float64) / sum(raw)
    q = responsibilities(pi, torch.tensor(columns, dtype=torch.float64).T)
    assert (q >= 0).all()
    assert q.isfinite().all()
    assert_close(q.sum(0), torch.ones(q.shape[1]).double(), 1e-12)
    order = torch.tensor([2, 0, 1])
    permuted = responsibilities(pi[order], torch.tensor(columns, dtype=torch.float64).T[order])
    assert_close(permuted, q[order], 1e-12)


@pytest.mark.parametrize("rate", ["split", "scaled"])
def test_a_round_equals_a_slow_loop(rate):
    method = FedEM(components=2, rate=rate)
    on = task(method, recipe=Recipe(lr=0.1, batch=10, epochs=1))
    client, models = one_client(on, 0), on.problem.starts(2)
    pi = torch.tensor([0.3, 0.7], dtype=torch.float64)
    sent, kept = method.local(client, models, Own(pi))

    (block,) = client.blocks("train")
    losses = torch.stack([client.losses(w, block) for w in models])
    q = slow_responsibilities(pi, losses)
    assert_close(kept.pi, q.mean(1), 1e-12)
    for m in range(2):
        w = models[m]
        for number in range(int(client.steps)):
            batch = client.batch(number)
            shares = torch.stack([q[m, s] for s in batch.position.tolist()])

            def loss(w, batch=batch, shares=shares):
                return (shares * client.losses(w, batch)).sum() / len(batch.y)

            w = w - (0.2 if rate == "scaled" else 0.1) * torch.func.grad(loss)(w)
        assert_close(sent.models[m], w, 1e-11)


def test_scaling_by_m_is_the_rate_that_fedavg_has():
    """Components whose shares are equal learn as fast as one model would; split, M times slower."""
    plain = Recipe(lr=0.1, batch=10, epochs=1)
    method = FedEM(components=3)
    on = task(method, recipe=plain)
    client, models = one_client(on, 0), on.problem.start.expand(3, -1)
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    sent, _ = method.local(client, models, Own(third))
    assert_close(sent.models, client.train(on.problem.start).expand(3, -1), 1e-11)
    slow = task(method, recipe=Recipe(lr=0.1 / 3, batch=10, epochs=1))
    sent, _ = FedEM(components=3, rate="split").local(client, models, Own(third))
    assert_close(sent.models, one_client(slow, 0).train(on.problem.start).expand(3, -1), 1e-11)


def test_identical_components_leave_the_shares_alone():
    method = FedEM(components=3)
    on = task(method)
    pi = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q, new = method.expect(one_client(on, 0), on.problem.start.expand(3, -1), pi)
    assert_close(new, pi, 1e-12)
    assert_close(q, pi[:, None].expand_as(q), 1e-12)


def test_components_start_different_and_the_first_is_the_common_start():
    on = task(FedEM())
    server, _ = FedEM().init(on.problem)
    assert torch.equal(server[0], on.problem.start)
    apart = torch.cdist(server, server) + torch.eye(3).double()
    assert apart.min() > 0.1


def test_shares_are_kept_and_predict():
    method = FedEM(new_client_steps=0)
    record = last(method, task(method), participation=1.0)
    pi = record.states.pi
    assert_close(pi.sum(1), torch.ones(5).double(), 1e-12)
    assert (pi - 1 / 3).abs().max() > 0.01
    assert torch.equal(predictors(record).weights, pi)
    assert_close(record.server.expand(5, -1, -1), predictors(record).models, 0)


def test_a_new_client_finds_its_shares_with_fixed_components():
    method = FedEM(components=2, new_client_steps=1)
    on = task(method)
    pi = torch.full((2,), 0.5, dtype=torch.float64)
    client, models = one_client(on, 0), on.problem.starts(2)
    found = method.predictor(client, models, Own(pi)).weights
    assert_close(found, method.expect(client, models, pi)[1], 0)
    assert (found - 0.5).abs().max() > 1e-6


def test_components_are_averaged_one_by_one_by_size():
    method = FedEM(components=2)
    on = task(method)
    server, states = method.init(on.problem)
    round = whole_round(on)
    uploads, _ = backend_of("loop", on).local(method, method.download(server, round), states, round)
    p = uploads.size.double() / uploads.size.sum()
    for m in range(2):
        slow = sum(p[i] * uploads.models[i, m] for i in range(5))
        assert_close(method.aggregate(server, uploads, round)[m], slow, 1e-10)


def test_the_matrix_follows_the_shares():
    method = FedEM(components=2)
    pi = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    A = method.collaboration(torch.zeros(2, 1), method.shown(Own(pi)), None)
    expected = torch.tensor([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]])
    assert_close(A, expected.double(), 1e-12)
