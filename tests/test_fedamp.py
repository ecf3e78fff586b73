"""FedAMP's and HeurFedAMP's attention."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.algorithms.attention import Cloud, Own, median_of
from coterie.algorithms.fedamp import FedAMP, safe, slope, step_size, weights
from coterie.algorithms.heurfedamp import HeurFedAMP, heuristic_attention
from coterie.core.mixing import cosines, mix, squared_distances
from coterie.core.optim import Recipe
from coterie.core.rows import dense
from coterie.errors import ConfigError
from support import assert_close, last, one_client, predictors, task, whole_round

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


def attention(W, alpha, sigma):
    return weights(slope(squared_distances(W), sigma), alpha)


def automatic(W):
    """The default weights: a width from the median distance, and the largest fair step."""
    distances = squared_distances(W)
    sigma = 0.1 * median_of(distances)
    slopes = slope(distances, sigma)
    return weights(slopes, step_size(slopes, sigma))


def test_the_pull_is_half_the_gradient_of_the_penalty():
    W, alpha, sigma = models().requires_grad_(), 0.3, 4.0
    pairs = torch.combinations(torch.arange(5))
    s = ((W[pairs[:, 0]] - W[pairs[:, 1]]) ** 2).sum(1)
    (1 - torch.exp(-s / sigma)).sum().backward()
    u = attention(W.detach(), alpha, sigma) @ W.detach()
    assert_close(W.detach() - u, alpha / 2 * W.grad)


def test_far_groups_do_not_see_each_other():
    W = torch.cat([models(3), models(3) + 50])
    A = attention(W, 0.1, median_of(squared_distances(W[:3])))
    assert A[:3, 3:].abs().max() < 1e-6
    assert A[0, 1] > 1e-6


@given(matrices)
def test_automatic_attention_is_a_symmetric_convex_combination(values):
    A = automatic(torch.from_numpy(values))
    assert A.isfinite().all()
    assert_close(A.sum(1), torch.ones(len(A)).double())
    assert (A >= -1e-12).all()
    assert (A.diagonal() >= A.clone().fill_diagonal_(0).max(1).values - 1e-9).all()
    assert_close(A, A.T)


@given(whole)
def test_automatic_attention_does_not_depend_on_the_order_of_clients(values):
    """Of whole numbers: distances that are rounding alone would depend on it."""
    W = torch.from_numpy(values).double()
    order = torch.arange(len(W) - 1, -1, -1)
    assert_close(automatic(W[order]), automatic(W)[order][:, order], 1e-6)


def test_automatic_attention_does_not_depend_on_the_scale_of_the_model():
    assert_close(automatic(1000 * models()), automatic(models()), 1e-9)


def test_equal_models_share_alike_and_far_ones_stand_alone():
    assert_close(automatic(models(1).repeat(4, 1)), torch.full((4, 4), 0.25).double())
    assert_close(attention(wide([[0.0], [1e9]]), 1.0, 1.0), torch.eye(2).double())


def test_safe_attention_scales_only_what_exceeds_one():
    A = wide([[-1.0, 1.5, 0.5], [0.1, 0.8, 0.1], [0.0, 0.0, 1.0]])
    assert_close(safe(A), wide([[0.0, 0.75, 0.25], [0.1, 0.8, 0.1], [0.0, 0.0, 1.0]]))


@given(matrices, st.floats(0, 500), st.floats(0, 1))
def test_heuristic_attention_is_a_simplex(values, sigma, own):
    A = heuristic_attention(cosines(torch.from_numpy(values)), sigma, own)
    assert A.isfinite().all()
    assert (A >= 0).all()
    assert_close(A.sum(1), torch.ones(len(A)).double())
    assert (A.diagonal() == own).all()


def test_heuristic_attention_sees_only_directions():
    W = models()
    longer = W * wide([1.0, 2.0, 3.0, 0.5, 10.0])[:, None]
    found = [heuristic_attention(cosines(V), 5.0, 0.2) for V in (longer, W)]
    assert_close(*found)
    level = heuristic_attention(cosines(W), 0.0, 0.2)
    assert_close(level, torch.full((5, 5), 0.2, dtype=torch.float64))


def test_one_participant_keeps_its_own_model():
    for method in (FedAMP(), HeurFedAMP()):
        on = task(method)
        server, _ = method.init(on.problem)
        server = server._replace(models=server.models + 1, seen=torch.ones(5, dtype=torch.bool))
        round = whole_round(on, 1)._replace(clients=torch.tensor([2]))
        assert_close(method.download(server, round).u, server.models[2:3])


def test_first_timers_get_the_common_start():
    method = FedAMP()
    on = task(method)
    server, _ = method.init(on.problem)
    seen = torch.tensor([True, True, False, True, False])
    noise = torch.randn(
        5, len(on.problem.start), generator=torch.Generator().manual_seed(0)
    ).double()
    server = server._replace(models=server.models + noise, seen=seen)
    u = method.download(server, whole_round(on, 1)).u
    assert torch.equal(u[~seen], on.problem.start.expand(2, -1))
    assert_close(u[seen], mix(automatic(server.models[seen]), server.models[seen]))


def test_the_proximal_pull_is_alive():
    """From u + δ the pull moves the model towards u; without it nothing of u is left."""
    on = task(FedAMP())
    client = one_client(on, 0)
    away = Own(on.problem.start + 0.5)
    for strength, pulled in ((0.0, False), (5.0, True)):
        received = Cloud(on.problem.start, on.problem.start.new_tensor(strength))
        _, after = FedAMP(start="self").local(client, received, away)
        free = client.train(away.w)
        assert torch.equal(after.w, free) != pulled


def test_public_constants_give_uniform_attention():
    """Why the defaults are scale-free."""
    public = FedAMP(sigma=1e6, alpha=1e4, lam=1.0)
    record = last(public, task(public), rounds=3, participation=1.0)
    others = record.collaboration[0, 1:]
    assert others.max() / others.min() < 1.001


# ---- which model predicts ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedAMP, HeurFedAMP])
def test_what_predicts(kind):
    """The newest u_i, over all who have uploaded; training is the same whatever predicts."""
    method = kind(predict_with="cloud")
    own, cloud = (last(m, task(m)) for m in (kind(), method))
    w, K = own.states.w, len(own.states.w)
    assert_close(cloud.states.w, w, 0)
    uploads = dense(own.server.models)[own.server.seen]
    u = own.server.start.repeat(K, 1)
    u[own.server.seen] = method.attention(uploads, whole_round(task(method), K)) @ uploads
    assert own.server.seen.sum() > len(own.clients)  # some of them were absent
    assert (u - w).abs().max() > 1e-3
    assert_close(predictors(own).models[:, 0], w)
    assert_close(predictors(cloud).models[:, 0], u)


# ---- the step size of the theorem ----------------------------------------------------------------

PRINTED = FedAMP(sigma=2.0, alpha=0.5, lam=0.5, predict_with="own")


def test_the_step_size_of_the_theorem():
    on = task(PRINTED, recipe=Recipe(lr=0.1, batch=10))
    theory, number = (replace(PRINTED, alpha=alpha) for alpha in ("theory", 0.5 / 4**0.5))
    found, expected = (predictors(last(m, on, rounds=4)).models for m in (theory, number))
    assert torch.equal(found, expected)
    assert not torch.equal(found, predictors(last(theory, on, rounds=3)).models)
    with pytest.raises(ConfigError, match=r"lr \* lam / alpha is 1 in round 0"):
        last(theory, on, rounds=100)


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"alpha": "theory"}, "alpha = 'theory' needs λ"), ({"lam": 1.0}, "lam = 1.0 has no effect")],
)
def test_what_lacks_its_condition_is_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        FedAMP(**fields)
