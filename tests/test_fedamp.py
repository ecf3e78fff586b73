"""FedAMP's and HeurFedAMP's attention."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from coterie.algorithms.attention import Cloud, Own, Upload, alike, likeness, safe, unlikeness
from coterie.algorithms.fedamp import (
    FedAMP,
    attention,
    median_width,
    penalty_of,
    slope,
    spread,
    step_size,
)
from coterie.algorithms.heurfedamp import HeurFedAMP, heuristic_attention
from coterie.algorithms.local import Local
from coterie.core import tree
from coterie.core.algorithm import round_of
from coterie.core.mixing import mix, squared_distances
from coterie.core.optim import Recipe
from coterie.core.rows import dense
from coterie.data.datasets import load
from coterie.data.partition import PARTITIONS, federate
from coterie.errors import ConfigError
from coterie.training.rounds import train
from support import (
    assert_close,
    backend_of,
    engine_of,
    federation,
    last,
    one_client,
    predictors,
    task,
    whole_round,
)

matrices = st.tuples(st.integers(2, 5), st.integers(1, 4)).flatmap(
    lambda shape: arrays(float, shape, elements=st.floats(-1e100, 1e100))
)

whole = st.tuples(st.integers(2, 5), st.integers(1, 4)).flatmap(
    lambda shape: arrays("int64", shape, elements=st.integers(-1000, 1000))
)


def wide(values):
    return torch.tensor(values, dtype=torch.float64)


def models(rows=5, columns=7):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).double()


def test_attention_equals_a_double_loop():
    W, alpha, sigma = models(), 0.3, 4.0
    slow = torch.zeros(5, 5).double()
    for i in range(5):
        for j in range(5):
            if i != j:
                slow[i, j] = alpha * torch.exp(-((W[i] - W[j]) ** 2).sum() / sigma) / sigma
        slow[i, i] = 1 - slow[i].sum()
    assert_close(attention(W, alpha, sigma), slow)


def test_the_pull_is_half_the_gradient_of_the_penalty():
    W, alpha, sigma = models().requires_grad_(), 0.3, 4.0
    pairs = torch.combinations(torch.arange(5))
    s = ((W[pairs[:, 0]] - W[pairs[:, 1]]) ** 2).sum(1)
    (1 - torch.exp(-s / sigma)).sum().backward()
    u = attention(W.detach(), alpha, sigma) @ W.detach()
    assert_close(W.detach() - u, alpha / 2 * W.grad)


def test_far_groups_do_not_see_each_other():
    W = torch.cat([models(3), models(3) + 50])
    A = attention(W, 0.1, median_width(W[:3], 1.0))
    assert A[:3, 3:].abs().max() < 1e-6
    assert A[0, 1] > 1e-6


@given(matrices)
def test_automatic_attention_is_a_symmetric_convex_combination(values):
    W = torch.from_numpy(values)
    sigma = median_width(W, 0.25)
    A = attention(W, step_size(W, sigma, 0.8), sigma)
    assert A.isfinite().all()
    assert_close(A.sum(1), torch.ones(len(W)).double())
    assert (A >= -1e-12).all()
    assert A.diagonal().min() >= 0.2 - 1e-9
    assert_close(A, A.T)


@given(whole)
def test_automatic_attention_does_not_depend_on_the_order_of_clients(values):
    """Of whole numbers: distances that are rounding alone would depend on it."""
    W = torch.from_numpy(values).double()
    sigma = median_width(W, 0.25)
    A = attention(W, step_size(W, sigma, 0.8), sigma)
    order = torch.arange(len(W) - 1, -1, -1)
    turned = attention(W[order], step_size(W[order], sigma, 0.8), sigma)
    assert_close(turned, A[order][:, order], 1e-6)


def test_automatic_attention_does_not_depend_on_the_scale_of_the_model():
    W = models()

    def automatic(W):
        sigma = median_width(W, 0.25)
        return attention(W, step_size(W, sigma, 0.8), sigma)

    assert_close(automatic(1000 * W), automatic(W), 1e-9)


def test_attention_that_underflows_stands_alone():
    W = wide([[0.0], [1e9]])
    sigma = 1.0
    assert step_size(W, sigma, 0.8) == 0
    assert_close(attention(W, step_size(W, sigma, 0.8), sigma), torch.eye(2).double())


def test_rows_share_the_mass_equally_between_rows():
    A = spread(attention(models(), 0.1, 3.0), 0.8)
    assert_close(A.diagonal(), torch.full((5,), 0.2, dtype=torch.float64))
    assert_close(spread(torch.eye(3).double(), 0.8), torch.eye(3).double())


def test_safe_attention_scales_only_what_exceeds_one():
    A = wide([[-1.0, 1.5, 0.5], [0.1, 0.8, 0.1], [0.0, 0.0, 1.0]])
    assert_close(safe(A), wide([[0.0, 0.75, 0.25], [0.1, 0.8, 0.1], [0.0, 0.0, 1.0]]))


def test_heuristic_attention_equals_a_double_loop():
    W, sigma, own = models(), 3.0, 0.3
    A = heuristic_attention(W, sigma, own)
    for i in range(5):
        cos = [torch.cosine_similarity(W[i], W[j], dim=0) for j in range(5)]
        total = sum(torch.exp(sigma * cos[h]) for h in range(5) if h != i)
        for j in range(5):
            expected = own if i == j else (1 - own) * torch.exp(sigma * cos[j]) / total
            assert float(A[i, j]) == pytest.approx(float(expected))


@given(matrices, st.floats(0, 500), st.floats(0, 1))
def test_heuristic_attention_is_a_simplex(values, sigma, own):
    A = heuristic_attention(torch.from_numpy(values), sigma, own)
    assert A.isfinite().all()
    assert (A >= 0).all()
    assert_close(A.sum(1), torch.ones(len(A)).double())
    assert (A.diagonal() == own).all()


def test_heuristic_attention_sees_only_directions():
    W = models()
    longer = W * wide([1.0, 2.0, 3.0, 0.5, 10.0])[:, None]
    assert_close(heuristic_attention(longer, 5.0, 0.2), heuristic_attention(W, 5.0, 0.2))
    level = heuristic_attention(W, 0.0, 0.2)
    assert_close(level, torch.full((5, 5), 0.2, dtype=torch.float64))


def test_one_participant_keeps_its_own_model():
    for method in (FedAMP(), HeurFedAMP()):
        on = task(method)
        server, _ = method.init(on.problem)
        server = server._replace(models=server.models + 1, seen=torch.ones(5, dtype=torch.bool))
        round = whole_round(on, 1)._replace(clients=torch.tensor([2]))
        assert_close(method.download(server, round).u, server.models[2:3])


def test_first_timers_get_the_common_start():
    method = FedAMP(sigma="median", mass=0.8, attention_mass="symmetric")
    on = task(method)
    server, _ = method.init(on.problem)
    seen = torch.tensor([True, True, False, True, False])
    noise = torch.randn(
        5, len(on.problem.start), generator=torch.Generator().manual_seed(0)
    ).double()
    server = server._replace(models=server.models + noise, seen=seen)
    u = method.download(server, whole_round(on, 1)).u
    assert torch.equal(u[~seen], on.problem.start.expand(2, -1))
    W = server.models[seen]
    sigma = median_width(W, 0.25)
    expected = mix(attention(W, step_size(W, sigma, 0.8), sigma), W)
    assert_close(u[seen], expected)


def test_the_proximal_pull_is_alive():
    """From u + δ the pull moves the model towards u; without it nothing of u is left."""
    on = task(FedAMP())
    client = one_client(on, 0)
    zero = on.problem.start.new_zeros(())
    away = Own(on.problem.start + 0.5, zero, zero)
    for strength, pulled in ((0.0, False), (5.0, True)):
        received = Cloud(on.problem.start, on.problem.start.new_tensor(strength))
        _, after = FedAMP(start="self").local(client, received, away)
        free = client.train(away.w)
        assert torch.equal(after.w, free) != pulled


def test_a_schedule_that_overshoots_is_refused():
    steep = FedAMP(sigma=1e6, alpha=1e4, lam=1.0, alpha_gamma=0.1)
    on = task(steep)
    server, _ = steep.init(on.problem)
    steep.download(server, whole_round(on, 0))
    with pytest.raises(ConfigError, match="must stay below 1"):
        steep.download(server, whole_round(on, 180))


def test_public_constants_give_uniform_attention():
    """Why the defaults are scale-free."""
    public = FedAMP(sigma=1e6, alpha=1e4, lam=1.0)
    record = last(public, task(public), rounds=3, participation=1.0)
    others = record.collaboration[0, 1:]
    assert others.max() / others.min() < 1.001


def test_sigma_can_be_frozen():
    W = models()
    frozen = FedAMP(sigma="median", sigma_freeze=True)
    on = task(frozen)
    server = frozen.init(on.problem)[0]._replace(sigma=torch.tensor(7.0).double())
    assert frozen._sigma(server, W) == 7.0
    assert FedAMP(sigma="median")._sigma(server, squared_distances(W)) == median_width(W, 0.25)
    assert slope(torch.zeros(2, 2).double(), 2.0).tolist() == [[0, 0.5], [0.5, 0]]


# ---- other penalties -----------------------------------------------------------------------


def scad(s, sigma):
    """The penalty itself, of which ``slope`` is the derivative: linear, bent, flat."""
    t, a = s / sigma, 3.7
    bent = (2 * a * t - t**2 - 1) / (2 * (a - 1))
    return torch.where(t <= 1, t, torch.where(t <= a, bent, wide((a + 1) / 2)))


def mcp(s, sigma):
    t = s / sigma
    return torch.where(t <= 3, t - t**2 / 6, wide(1.5))


PENALTIES = {"exponential": lambda s, sigma: 1 - torch.exp(-s / sigma), "scad": scad, "mcp": mcp}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_slopes_are_the_derivatives(penalty):
    s = torch.linspace(0, 12, 49, dtype=torch.float64).requires_grad_()
    PENALTIES[penalty](s, 2.0).sum().backward()
    table = torch.zeros(49, 49, dtype=torch.float64)
    table[0] = s.detach()
    found = slope(table, 2.0, penalty)[0]
    assert_close(found[1:], s.grad[1:])
    assert (found[1:].diff() <= 0).all()  # concave
    assert float(slope(torch.zeros(2, 2).double(), 2.0, penalty)[0, 1]) == 0.5


@pytest.mark.parametrize("penalty", PENALTIES)
def test_every_penalty_pulls_by_half_its_gradient(penalty):
    W, alpha, sigma = models().requires_grad_(), 0.3, 6.0
    pairs = torch.combinations(torch.arange(5))
    s = ((W[pairs[:, 0]] - W[pairs[:, 1]]) ** 2).sum(1)
    PENALTIES[penalty](s, sigma).sum().backward()
    fixed = W.detach()
    A = attention(fixed, alpha, sigma, penalty)
    assert_close(fixed - mix(A, fixed), alpha / 2 * W.grad)
    assert (W.grad.abs() > 1e-3).any()


@pytest.mark.parametrize("penalty", ["scad", "mcp"])
def test_far_clients_are_left_alone_entirely(penalty):
    W = wide([[0.0], [1.0], [100.0]])
    A = attention(W, step_size(W, 4.0, 0.8, penalty), 4.0, penalty)
    assert A[0, 2] == 0
    assert float(A[0, 1]) == pytest.approx(0.8)
    plain, method = FedAMP(sigma="median"), FedAMP(sigma="median", penalty=penalty)
    usual = last(plain, task(plain), participation=1.0)
    other = last(method, task(method), participation=1.0)
    assert (usual.states.w - other.states.w).abs().max() > 1e-4


# ---- who is alike --------------------------------------------------------------------------------


def amp_round(method, on, server, states, index, clients=None):
    clients = torch.arange(on.problem.population) if clients is None else torch.tensor(clients)
    round = round_of(on.problem, index, 10, clients)
    received = method.download(server, round)
    engine = backend_of("loop", on)
    uploads, after = engine.local(method, received, tree.take(states, clients), round)
    states = tree.map_leaves(lambda old, new: old.index_copy(0, clients, new), states, after)
    return method.aggregate(server, uploads, round), states, uploads


def test_a_client_s_noise_is_what_half_of_its_samples_change():
    method = FedAMP(prox=0.0)
    on = task(method)
    server, states = method.init(on.problem)
    _, states, first = amp_round(method, on, server, states, 0)
    for i in range(on.problem.population):
        half = one_client(on, i).halves()[1].train(on.problem.start)
        assert_close(first.noise[i], ((first.w[i] - half) ** 2).sum())
        assert first.noise[i] > 0
    received = method.download(server, whole_round(on, 1))
    second, kept = method.local(one_client(on, 0, 1), tree.row(received, 0), tree.row(states, 0))
    once = ((second.w - one_client(on, 0, 1).halves()[1].train(on.problem.start)) ** 2).sum()
    assert_close(second.noise, (first.noise[0] + once) / 2)  # the mean over its rounds
    assert_close(kept.noise, second.noise)


def test_half_a_client_takes_as_many_steps_on_every_second_sample():
    on = task(FedAMP())
    for i, size in enumerate(on.problem.sizes.tolist()):
        whole = one_client(on, i)
        half = whole.halves()[1]
        assert int(half.size) == size // 2
        assert 0 <= int(whole.steps - half.steps) <= on.problem.recipe.epochs  # a short last batch
        mine = [
            b.y[: int(b.mask.sum()) if b.mask is not None else None] for b in half.blocks("train")
        ]
        every = [
            b.y[: int(b.mask.sum()) if b.mask is not None else None] for b in whole.blocks("train")
        ]
        assert torch.equal(torch.cat(mine), torch.cat(every)[1::2])


def test_a_client_of_one_sample_is_not_sure_of_anything():
    method = FedAMP(prox=0.0)
    on = task(method, federated=federation((1, 20, 30)), merge=False)
    server, states = method.init(on.problem)
    _, _, uploads = amp_round(method, on, server, states, 0)
    assert_close(
        uploads.noise[0], ((uploads.w[0] - on.problem.start) ** 2).sum(), 1e-3
    )  # but for decay


@pytest.mark.parametrize("method", [FedAMP(), HeurFedAMP()], ids=["fedamp", "heurfedamp"])
def test_pairs_are_compared_where_they_can_be(method):
    """First uploads with each other, later ones with those of their round; against a slow loop."""
    on = task(method)
    server, states = method.init(on.problem)
    expected = torch.full((5, 5), -1.0).double()
    first: dict[int, tuple] = {}

    def z(a, b):
        (w, v), (x, _) = a, b
        p, q = w - on.problem.start, x - on.problem.start
        if isinstance(method, HeurFedAMP):
            v, p, q = v / (p @ p), p / p.norm(), q / q.norm()
        return ((p - q) ** 2).sum() / (2 * v)

    for index, clients in enumerate([[0, 1], [1, 2, 4], [0, 1, 2], [0, 1, 2, 3, 4]]):
        server, states, up = amp_round(method, on, server, states, index, clients)
        now = {i: (up.w[r], up.noise[r]) for r, i in enumerate(clients)}
        back = [i for i in clients if i in first]
        first |= {i: now[i] for i in clients if i not in first}
        for i in clients:
            for j in first:
                if i != j and (i in back) == (j in back and j in clients) == True:  # noqa: E712
                    expected[i, j], expected[j, i] = z(now[i], now[j]), z(now[j], now[i])
                elif i != j and i not in back:
                    expected[i, j], expected[j, i] = z(first[i], first[j]), z(first[j], first[i])
    members = torch.tensor([0, 1, 2, 3, 4])
    assert (expected + torch.eye(5) * 9 >= 0).all()
    assert_close(alike(server, members), likeness(expected).fill_diagonal_(0), 1e-6)


@pytest.mark.parametrize("apart", [0.0, 0.3, 0.7, 1.5, 2.0, 6.0])
@pytest.mark.parametrize("own", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("others", [0.2, 1.0, 5.0])
def test_the_mean_of_two_models_helps_a_client_exactly_where_the_other_is_alike(apart, own, others):
    """Whatever the noise of each: by own noise ``own`` and the other's ``others``."""
    generator, n = torch.Generator().manual_seed(0), 40_000

    def noisy(ideal, noise):
        return ideal + noise**0.5 * torch.randn(n, generator=generator).double()

    ideal = torch.zeros(n).double()
    a, b = noisy(ideal, own), noisy(ideal + (2 * apart) ** 0.5, others)
    z = unlikeness(((a - b) ** 2).sum()[None, None], wide([n * own]))
    assert float(z) == pytest.approx((own + others + 2 * apart) / (2 * own), rel=0.05)
    helps = (((a + b) / 2 - ideal) ** 2).sum() < ((a - ideal) ** 2).sum()
    if abs(float(z) - 2) > 0.1:
        assert bool(likeness(z) > 0) == bool(helps)


def test_a_client_without_noise_has_strangers_only_and_the_other_judges_for_itself():
    method = FedAMP()
    on = task(method)
    server, _ = method.init(on.problem)
    W = on.problem.start + torch.arange(5.0).double()[:, None]
    for clients in ([0, 1], [2, 3], [4]):
        round = round_of(on.problem, 0, 9, torch.tensor(clients))
        noise = torch.tensor([0.0 if i in (1, 2) else 1e6 for i in clients]).double()
        uploads = Upload(W[clients], noise)
        server = method.aggregate(server, uploads, round)
    A = alike(server, torch.arange(5))
    assert A.isfinite().all()
    assert (A[[1, 2]] == 0).all()
    assert (A[[0, 3, 4]].sum(1) == 4).all()


KIND = [
    FedAMP(),
    HeurFedAMP(),
    FedAMP(attention_mass="symmetric"),
    FedAMP(mass=0.5),
    HeurFedAMP(self_weight=0.5),
]


def digits(relabel, seed=0):
    federated = federate(
        load("digits"), PARTITIONS["iid"](clients=len(relabel)), test=0.5, seed=seed
    )
    tables = torch.stack([torch.arange(10).roll(r) for r in relabel])
    return replace(federated, relabel=tables, groups=torch.tensor(relabel))


def weights_on_digits(method, relabel, rounds=4):
    net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))  # noqa: E731
    on = task(method, net, digits(relabel), Recipe(lr=0.2, epochs=2, batch=10), merge=False)
    record = last(method, on, rounds=rounds, participation=1.0, evaluate_every=rounds)
    return torch.from_numpy(record.collaboration)


@pytest.mark.parametrize("method", KIND, ids=str)
def test_where_all_contradict_everybody_stands_alone(method):
    assert torch.equal(weights_on_digits(method, list(range(8))), torch.eye(8).double())


@pytest.mark.parametrize("method", KIND, ids=str)
def test_who_is_alone_in_its_group_stands_alone(method):
    A = weights_on_digits(method, [0] * 7 + [3])
    assert torch.equal(A[7], torch.eye(8)[7].double())
    assert (A[:7, 7] == 0).all()
    assert (A[:7, :7] > 0).all()


@pytest.mark.parametrize("method", KIND, ids=str)
def test_where_all_are_alike_all_are_averaged(method):
    A = weights_on_digits(method, [0] * 8)
    capped = method in (FedAMP(mass=0.5), HeurFedAMP(self_weight=0.5))
    own = 0.5 if capped else 1 / 8
    assert_close(A.diagonal(), torch.full((8,), own).double(), 0.02)
    assert_close(A[~torch.eye(8).bool()], torch.full((56,), (1 - own) / 7).double(), 0.02)


# ---- fields without effect are refused -----------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"lam": 1.0},
        {"alpha_gamma": 0.1},
        {"mass": 0.5, "alpha": 1.0},
        {"penalty": "mcp"},
        {"sigma_freeze": True},
        {"sigma_freeze": True, "sigma": 3.0},
    ],
)
def test_a_field_without_effect_is_refused(fields):
    with pytest.raises(ConfigError, match=f"{next(iter(fields))} = .* has no effect .*it needs"):
        FedAMP(**fields)


# ---- which model predicts ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedAMP, HeurFedAMP])
def test_what_predicts(kind):
    """The newest u_i, over all who have uploaded; training is the same whatever predicts."""
    found = {}
    for way in ("own", "cloud", "both", "validation"):
        method = kind(predict_with=way)
        assert method.traits.uses_validation == (way == "validation")
        found[way] = last(method, task(method, merge=False))
    record = found["own"]
    w, K = record.states.w, len(record.states.w)
    assert_close(found["validation"].states.w, w, 0)
    method = kind(predict_with="cloud")
    everybody = torch.arange(K)
    after = whole_round(task(method, merge=False), len(everybody))
    A = method._weigh(record.server, after)(everybody[record.server.seen])
    u = record.server.start.repeat(K, 1)
    u[record.server.seen] = A @ dense(record.server.models)[record.server.seen]
    assert record.server.seen.sum() > len(record.clients)  # some of them were absent
    assert (u - w).abs().max() > 1e-3
    assert_close(found["own"].mixture.models[:, 0], w)
    assert_close(found["cloud"].mixture.models[:, 0], u)
    assert_close(found["both"].mixture.models, torch.stack([w, u], 1))
    assert (found["both"].mixture.weights == 0.5).all()
    on = task(method, merge=False)
    for i in range(K):
        client = one_client(on, i)
        better = u[i] if client.loss(u[i], "val") < client.loss(w[i], "val") else w[i]
        assert_close(found["validation"].mixture.models[i, 0], better)


# ---- the objective, the step size of the theorem, independent starts ----------------------------

PRINTED = FedAMP(sigma=2.0, alpha=0.5, lam=0.5, predict_with="own")


@pytest.mark.parametrize("penalty", PENALTIES)
def test_penalties_are_those_whose_slopes_weigh(penalty):
    s = torch.linspace(0, 12, 49, dtype=torch.float64)
    assert_close(penalty_of(s, 2.0, penalty), PENALTIES[penalty](s, 2.0))


@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_objective_is_that_of_a_double_loop(penalty):
    method = replace(PRINTED, penalty=penalty, objective=True)
    on, seen = task(method), set()
    for record in train(method, on.problem, engine_of("loop", on), 3, participation=0.5):
        seen |= set(record.clients)
        W = record.states.w
        expected = sum(float(one_client(on, i).loss(W[i], "train")) for i in seen)
        for i in seen:
            for j in seen:
                if i < j:
                    s = ((W[i] - W[j]) ** 2).sum()
                    expected += method.lam * float(PENALTIES[penalty](s, method.sigma))
        assert record.observed["objective"] == pytest.approx(expected, rel=1e-9)
    assert len(seen) > 2


def test_the_objective_changes_nothing_and_costs_one_number():
    on = task(PRINTED)
    logged, plain = (last(replace(PRINTED, objective=o), on, "loop") for o in (True, False))
    assert torch.equal(predictors(logged).models, predictors(plain).models)
    assert logged.traffic.up == plain.traffic.up + 8 * len(plain.clients)
    assert "objective" not in plain.observed


def test_the_step_size_of_the_theorem():
    on = task(PRINTED, recipe=Recipe(lr=0.1, batch=10))
    theory, number = (replace(PRINTED, alpha=alpha) for alpha in ("theory", 0.5 / 4**0.5))
    found, expected = (predictors(last(m, on, rounds=4)).models for m in (theory, number))
    assert torch.equal(found, expected)
    assert not torch.equal(found, predictors(last(theory, on, rounds=3)).models)
    with pytest.raises(ConfigError, match=r"lr \* lam / alpha is 1 in round 0"):
        last(theory, on, rounds=100)


def test_independent_starts_without_attention_are_training_alone():
    far = FedAMP(sigma=1e-9, prox=0.0, start="self", predict_with="own", initial="independent")
    alone = Local(start="independent", keep="last")
    on = task(alone, merge=False)
    found, expected = (last(m, on, "loop", participation=1.0) for m in (far, alone))
    assert_close(predictors(found).models, predictors(expected).models)


@pytest.mark.parametrize(
    "method",
    [
        replace(PRINTED, initial="independent"),
        HeurFedAMP(sigma=10.0, cos_on="weights", predict_with="cloud", initial="independent"),
    ],
)
def test_a_client_begins_with_its_own_start_on_every_engine(method):
    on = task(method)
    fresh = on.problem.fresh(torch.arange(5))
    server, own = method.init(on.problem)
    assert torch.equal(own.w, fresh)
    assert_close(method.download(server, whole_round(on)).u, fresh)
    loop, wire, vmap = (predictors(last(method, on, e)).models for e in ("loop", "wire", "vmap"))
    assert torch.equal(wire, loop)
    assert_close(vmap, loop)


@pytest.mark.parametrize(
    ("method", "fields", "said"),
    [
        (FedAMP, {"initial": "independent"}, "sigma = 'auto', which compares"),
        (HeurFedAMP, {"initial": "independent"}, "sigma = 'auto', which compares"),
        (HeurFedAMP, {"initial": "independent", "sigma": 1.0}, "cos_on = 'delta', which compares"),
        (FedAMP, {"alpha": "theory"}, "alpha = 'theory' needs λ"),
        (FedAMP, {"objective": True, "sigma": 1.0}, "objective = true needs λ"),
        (FedAMP, {"objective": True, "lam": 1.0, "alpha": 1.0}, "it needs a numeric sigma"),
        (FedAMP, {"alpha": "theory", "lam": 1.0, "alpha_gamma": 0.5}, "alpha_gamma = 0.5 has no"),
    ],
)
def test_what_lacks_its_condition_is_refused(method, fields, said):
    with pytest.raises(ConfigError, match=said):
        method(**fields)
