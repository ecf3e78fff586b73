"""FedDBE and FedPAC: what they do with the features of clients."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.algorithms.features import average_of, entrance
from coterie.algorithms.feddbe import FedDBE, Own, Server, bias
from coterie.algorithms.fedpac import FedPAC, Sent, least_risk, risks
from coterie.core.optim import Recipe
from coterie.errors import ConfigError
from coterie.training.rounds import train
from support import assert_close, backend_of, engine_of, last, mlp, one_client, task, whole_round

BODY, HEAD, D = 36 * 8 + 8, 8 * 3 + 3, 8
PLAIN = Recipe(lr=0.1, epochs=2, batch=10)


def torch_network(vector):
    module = mlp().double()
    for p in module.parameters():
        p.data, vector = vector[: p.numel()].view(p.shape).clone(), vector[p.numel() :]
    return module


def flat(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def features_of(on, i, w, number=0):
    """Features and labels of a client, sample by sample through torch's own modules."""
    client, body = one_client(on, i, number), torch_network(w)[:3]
    x = torch.cat([b.x for b in client.blocks("train")])
    return body(x).detach(), torch.cat([b.y for b in client.blocks("train")])


# ---- where a head begins ---------------------------------------------------------------------


def test_a_shift_of_the_features_is_another_bias():
    on = task(FedDBE())
    at, client, w = entrance(on.problem.model, 1, "head"), one_client(on, 0), on.problem.start
    m = torch.randn(D, generator=torch.Generator().manual_seed(0)).double()
    batch = next(client.blocks("train"))
    features = at.features(client, w, batch)[1]
    assert_close(features, features_of(on, 0, w)[0])
    module = torch_network(w)
    assert_close(client.outputs(at.shifted(w, m), batch), module[3](features + m).detach())


@pytest.mark.parametrize(
    ("network", "head"),
    [
        (mlp, 0),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3, bias=False)), 1),
        (lambda: nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten()), 1),
        (mlp, ("9",)),
    ],
)
def test_a_head_that_does_not_begin_with_a_linear_layer_is_refused(network, head):
    on = task(FedDBE(), network)
    with pytest.raises(ConfigError, match=r"nn.Linear with a bias|no layer '9'"):
        FedDBE(head=head).check(on.problem, 3)


def test_a_head_may_begin_further_down():
    on = task(FedDBE())
    at = entrance(on.problem.model, 2, "head")
    assert (at.layer, at.width) == ("1", 36)
    assert entrance(on.problem.model, ("3",), "head").width == D


# ---- FedDBE ----------------------------------------------------------------------------------


def test_the_common_mean_is_that_of_all_samples_at_the_start_and_stays():
    method = FedDBE()
    on = task(method)
    records = list(train(method, on.problem, engine_of("loop", on), 3, participation=1.0))
    every = torch.cat([features_of(on, i, on.problem.start)[0] for i in range(5)])
    for record in records:
        assert_close(record.server.mean, every.mean(0))
    up = [record.traffic.up for record in records]
    assert up[0] - up[1] == 5 * 8 * D
    assert up[1] == up[2] == 5 * 8 * (BODY + HEAD + 1)


@pytest.mark.parametrize("momentum", [1.0, 0.3])
@pytest.mark.parametrize("index", [0, 1])
def test_a_round_of_feddbe_equals_torch(index, momentum):
    method = FedDBE(kappa=3.0, momentum=momentum)
    on = task(method, recipe=PLAIN)
    client, generator = one_client(on, 0, index), torch.Generator().manual_seed(1)
    g, begin = torch.randn(2, D, generator=generator).double()
    up, own = method.local(client, Server(on.problem.start, g), Own(begin))
    module, m, running = torch_network(on.problem.start), begin.clone().requires_grad_(), g
    rule = torch.optim.SGD([*module.parameters(), m], lr=0.1)
    for number in range(int(client.steps)):
        batch = client.batch(number)
        f = module[:3](batch.x)
        running = (1 - momentum) * running.detach() + momentum * f.mean(0)
        loss = nn.functional.cross_entropy(module[3](f + m), batch.y)
        if index:
            loss = loss + sum(3.0 / D * 0.5 * (running[k] - g[k]) ** 2 for k in range(D))
        rule.zero_grad()
        loss.backward()
        rule.step()
    assert_close(up.update.w, flat(module))
    assert_close(own.m, m.detach())


def test_the_bias_equals_a_slow_loop():
    running, common = torch.randn(2, 5, generator=torch.Generator().manual_seed(2)).double()
    slow = sum(0.5 * (running[k] - common[k]) ** 2 for k in range(5)) / 5
    assert_close(bias(running, common, 7.0), 7.0 * slow)


# ---- FedPAC ----------------------------------------------------------------------------------


def test_statistics_of_a_client_equal_slow_loops():
    method = FedPAC()
    on = task(method)
    server, states = method.init(on.problem)
    round = whole_round(on)
    up, _ = backend_of("vmap", on).local(method, method.download(server, round), states, round)
    for i in range(5):
        f, y = features_of(on, i, on.problem.start)
        h = torch.stack([f[y == c].sum(0) / len(y) for c in range(3)])
        assert_close(up.shares[i], torch.stack([(y == c).double().mean() for c in range(3)]))
        assert_close(up.moments[i], h)
        spread = sum(float(row @ row) for row in f) / len(y) - sum(float(row @ row) for row in h)
        assert_close(up.variance[i], torch.tensor(spread / len(y)).double(), 1e-6)
    after = method.aggregate(server, up, round)
    f, y = (
        torch.cat(parts)
        for parts in zip(*(features_of(on, i, on.problem.start) for i in range(5)), strict=True)
    )
    for c in range(3):
        assert_close(after.means[c], f[y == c].mean(0))
    assert after.known.all()


def test_risks_equal_a_slow_double_loop():
    h = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(3)).double()
    V = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    Q = risks(h, V)
    for i, j, k in itertools.product(range(4), repeat=3):
        slow = sum((h[i, c] - h[j, c]) @ (h[i, c] - h[k, c]) for c in range(3))
        assert_close(Q[i, j, k], slow + (V[j] if j == k else 0.0), 1e-9)


def test_the_least_risk_is_that_of_a_search_over_all_supports():
    """At the minimum Q a is the same on the support and larger outside."""
    h = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(4)).double()
    Q = risks(h, torch.tensor([0.5, 0.2, 0.1, 0.3, 0.2]).double())
    A = least_risk(Q)
    for i in range(5):
        best = None
        for size in range(1, 6):
            for at in map(list, itertools.combinations(range(5), size)):
                x = torch.linalg.solve(Q[i][at][:, at], torch.ones(size).double())
                a = torch.zeros(5).double()
                a[at] = x / x.sum()
                if (a >= 0).all() and (best is None or a @ Q[i] @ a < best @ Q[i] @ best):
                    best = a
        assert_close(A[i], best, 1e-6)


def test_clients_with_other_features_keep_their_heads_to_themselves():
    apart = 10 * torch.eye(3).double()[:, None]
    assert_close(
        least_risk(risks(apart, torch.full((3,), 0.01).double())), torch.eye(3).double(), 1e-3
    )
    equal = torch.ones(3, 1, 3).double()
    alike = least_risk(risks(equal, torch.tensor([1.0, 1.0, 2.0]).double()))
    assert_close(alike, torch.tensor([0.4, 0.4, 0.2]).double().expand(3, -1), 1e-6)


def test_a_round_of_fedpac_equals_torch():
    method, recipe = FedPAC(lam=2.0), replace(PLAIN, momentum=0.5)
    on = task(method, recipe=recipe)
    client, start = one_client(on, 0, 1), on.problem.start
    means = torch.randn(3, D, generator=torch.Generator().manual_seed(5)).double()
    known = torch.tensor([True, False, True])
    up, _ = method.local(client, Sent(start[:BODY], start[BODY:], means, known), ())
    module = torch_network(start)
    for layer, clock, pull in (
        (module[3], client.tuned(epochs=1, batches="head"), 0.0),
        (module[1], client, 2.0),
    ):
        rule = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.5)
        for number in range(int(clock.steps)):
            batch = clock.batch(number)
            f = module[:3](batch.x)
            apart = sum(
                ((f[s] - means[y]) ** 2).mean() for s, y in enumerate(batch.y.tolist()) if known[y]
            )
            loss = nn.functional.cross_entropy(module[3](f), batch.y) + pull * apart / len(batch.y)
            module.zero_grad()
            loss.backward()
            rule.step()
    assert_close(torch.cat([up.update.w, up.head]), flat(module))


def test_a_client_predicts_with_its_own_mixture_of_heads():
    record = last(FedPAC(), task(FedPAC()), participation=1.0)
    models = record.mixture.models[:, 0]
    assert_close(models[:, :BODY], record.server.body.expand(5, -1), 0)
    assert_close(models[:, BODY:], record.server.heads[:], 0)
    assert (models[0, BODY:] - models[1, BODY:]).abs().max() > 1e-4


def test_an_average_over_samples_leaves_padding_out():
    on = task(FedPAC())
    found = average_of(one_client(on, 1), lambda batch: batch.x.flatten(1))
    x = torch.cat([b.x for b in one_client(on, 1).blocks("train")]).flatten(1)
    assert_close(found, x.mean(0))
