"""CoBo's coupling, its ring, and what agreeing gradients do."""

import pytest
import torch
from torch.func import grad

from coterie.algorithms.cobo import CoBo, agreed, coupling, ring
from support import assert_close, backend_of, one_client, task, whole_round


def test_the_coupling_pulls_towards_the_weighted_others():
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(6, generator=generator).double(), torch.randn(4, 6).double()
    W = torch.tensor([0.2, 1.0, 0.0, 0.7]).double()
    slow = sum(0.3 * W[j] * (w - x[j]) for j in range(4))
    assert_close(grad(coupling)(w, W @ x, W.sum(), 0.3), slow)


def test_weights_stay_between_0_and_1():
    W, products = torch.tensor([0.5, 0.99, 0.01]), torch.tensor([3.0, 9.0, -9.0])
    assert_close(agreed(W, products, 0.01), torch.tensor([0.53, 1.0, 0.0]), 1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_client_meets_both_neighbours_once(count):
    on = task(CoBo())
    round = whole_round(on, 3)._replace(clients=torch.arange(5).flip(0)[:count])
    pairs = ring(round)
    met = [
        {int(me), int(other)}
        for me, both in zip(round.clients, pairs, strict=True)
        for other in both
        if other >= 0
    ]
    assert len(met) == {1: 0, 2: 2, 3: 6, 5: 10}[count]
    assert all(len(pair) == 2 and met.count(pair) == 2 for pair in met)
    for me, (after, _) in zip(round.clients, pairs, strict=True):
        if after >= 0:
            (back,) = pairs[round.clients == after, 1]
            assert back == me


def test_a_round_equals_a_slow_double_loop():
    method = CoBo(rho=0.1, step=0.5)
    on = task(method)
    server, states = method.init(on.problem)
    x = server.x + torch.randn(5, server.x.shape[1], generator=torch.Generator().manual_seed(2))
    W = torch.rand(5, 5, generator=torch.Generator().manual_seed(3)).double()
    W = ((W + W.T) / 2).fill_diagonal_(0)
    server, round = server._replace(x=x.double(), W=W), whole_round(on, 1)
    received = method.download(server, round)
    uploads, _ = backend_of("loop", on).local(method, received, states, round)
    after = method.aggregate(server, uploads, round)
    expected, pairs = W.clone(), ring(round)
    for i in range(5):
        client, j = one_client(on, i, 1), int(pairs[i, 0])
        pull = sum(W[i, k] * x[k] for k in range(5))
        assert_close(received.pull[i], pull)
        z = (x[i] + x[j]) / 2
        product = client.gradient(z, "train") @ one_client(on, j, 1).gradient(z, "train")
        expected[i, j] = expected[j, i] = (W[i, j] + 0.5 * product).clamp(0, 1)

        def penalty(w, i=i):
            return 0.05 * sum(W[i, k] * ((w - x[k]) ** 2).sum() for k in range(5))

        assert_close(uploads.x[i], client.train(on.problem.start, penalty=penalty))
    assert_close(after.W, expected)
    assert torch.equal(after.x, uploads.x)


def test_a_pair_of_which_one_is_lost_keeps_its_weight():
    method = CoBo(step=5.0)
    on = task(method)
    server, states = method.init(on.problem)
    round = whole_round(on)
    uploads, _ = backend_of("loop", on).local(method, method.download(server, round), states, round)
    here = torch.tensor([0, 1, 3, 4])
    kept = uploads._replace(
        x=uploads.x[here], gradients=type(uploads.gradients)(*(p[here] for p in uploads.gradients))
    )
    replied = round._replace(clients=here, sent_to=round.clients)
    W, whole = method.aggregate(server, kept, replied).W, method.aggregate(server, uploads, round).W
    assert torch.equal(W[2], server.W[2])
    met = {frozenset((i, int(j))) for i, (j, _) in enumerate(ring(round)) if 2 not in (i, int(j))}
    for i, j in met:
        assert W[i, j] == whole[i, j]
    assert not torch.equal(whole, server.W)
