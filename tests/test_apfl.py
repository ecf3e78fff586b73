"""APFL's two models and their mixing weight."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.algorithms.apfl import APFL, Own, slopes
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local import Local
from coterie.core.client import mean
from coterie.core.optim import Recipe
from coterie.training.rounds import train
from support import RECIPE, assert_close, engine_of, last, one_client, predictors, task

PLAIN = Recipe(lr=0.1, epochs=1, batch=10)


def drawn(on, seed):
    generator = torch.Generator().manual_seed(seed)
    return on.problem.start + 0.3 * torch.randn(len(on.problem.start), generator=generator).double()


def test_slopes_match_autograd():
    on = task(APFL())
    client = one_client(on, 0)
    batch, v, w = client.batch(0), drawn(on, 1).requires_grad_(), drawn(on, 2)
    alpha = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(client.loss(alpha * v + (1 - alpha) * w, batch), (v, alpha))
    found = slopes(lambda m: client.gradient(m, batch), alpha.detach(), v.detach(), w)
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])
    assert found[1].abs() > 1e-3


def test_mixing_outputs_matches_autograd():
    on, method = task(APFL()), APFL(mix="outputs")
    client = one_client(on, 0)
    batch, v, w = client.batch(0), drawn(on, 1).requires_grad_(), drawn(on, 2)
    alpha = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    p = alpha * client.outputs(v, batch).softmax(-1) + (1 - alpha) * client.outputs(
        w, batch
    ).softmax(-1)
    loss = -p.gather(1, batch.y[:, None]).log().mean()
    expected = torch.autograd.grad(loss, (v, alpha))
    found = method._slopes(client, batch, alpha.detach(), v.detach(), w)
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


@given(st.floats(0, 1), st.floats(-300, 300))
def test_the_loss_of_a_mixture_is_finite(alpha, scale):
    on = task(APFL())
    client = one_client(on, 0)
    batch, weights = client.batch(0), torch.tensor([alpha, 1 - alpha]).double()
    models = torch.stack([scale * drawn(on, 1), drawn(on, 2)])
    losses = client.mixture_losses(weights, models, batch)
    assert mean(losses, batch.mask).isfinite()


def test_a_round_equals_its_equations():
    """Plain SGD, step by step, everything on the right from before the step."""
    on = task(APFL(), recipe=PLAIN)
    client, received, v = one_client(on, 0), drawn(on, 1), drawn(on, 2)
    alpha = torch.tensor(0.4).double()
    reply, kept = APFL().local(client, received, Own(v, alpha))
    w = received
    for k in range(int(client.steps)):
        batch = client.batch(k)
        g = client.gradient(alpha * v + (1 - alpha) * w, batch)
        next_alpha = (alpha - 0.1 * ((v - w) @ g)).clamp(0, 1) if k == 0 else alpha
        v, w, alpha = (v - 0.1 * alpha * g, w - 0.1 * client.gradient(w, batch), next_alpha)
    assert int(client.steps) > 2
    assert_close(reply.w, w)
    assert_close(kept.v, v)
    assert_close(kept.alpha, alpha)


@pytest.mark.parametrize("mix", ["parameters", "outputs"])
def test_the_shared_model_is_fedavgs_bit_for_bit(mix):
    method = APFL(mix=mix)
    for found, other in zip(
        train(method, (on := task(method)).problem, engine_of("loop", on), 3, participation=0.5),
        train(
            FedAvg(), (on := task(FedAvg())).problem, engine_of("loop", on), 3, participation=0.5
        ),
        strict=True,
    ):
        assert torch.equal(found.server, other.server)


@pytest.mark.parametrize("mix", ["parameters", "outputs"])
def test_alpha_moves_and_stays_between_0_and_1(mix):
    method = APFL(mix=mix)
    on = task(method, recipe=replace(RECIPE, lr=1.5))
    alphas = [
        record.states.alpha.clone()
        for record in train(method, on.problem, engine_of("vmap", on), 6)
    ]
    values = torch.stack(alphas)
    assert ((values >= 0) & (values <= 1)).all()
    assert (values[0] == 0.5).all()  # both models start at the same point
    assert (values[1:] != 0.5).all()
    assert ((values == 0) | (values == 1)).any()  # clipped somewhere
    fixed = APFL(adaptive=False)
    assert (last(fixed, task(fixed)).states.alpha == 0.5).all()


@pytest.mark.parametrize(
    ("alpha", "plain"), [(0.0, FedAvg()), (1.0, Local("matched", keep="last"))]
)
def test_outputs_at_the_ends_are_one_models(alpha, plain):
    method = APFL(alpha=alpha, adaptive=False, mix="outputs")
    found = predictors(last(method, task(method), rounds=4))
    other = predictors(last(plain, task(plain), rounds=4))
    assert found.weights[0].tolist() == [alpha, 1 - alpha]
    assert_close(found.models[:, 0 if alpha else 1], other.models[:, 0], 1e-6)


def test_private_parts_never_leave():
    on = task(APFL(), recipe=RECIPE)
    client, w = one_client(on, 0), drawn(on, 1)
    replies = [
        APFL().local(client, w, Own(drawn(on, seed), torch.tensor(0.4).double()))[0]
        for seed in (2, 3)
    ]
    assert torch.equal(replies[0].w, replies[1].w)
