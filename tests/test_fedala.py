"""FedALA's weights of the global model's upper layers."""

import pytest
import torch
from torch.func import grad

from coterie.algorithms.fedala import FedALA, Own, Sent, Server, blended, learned
from coterie.algorithms.lgfedavg import parts
from support import assert_close, backend_of, last, one_client, task, whole_round

BODY, HEAD = 36 * 8 + 8, 8 * 3 + 3


def vectors(seed):
    generator = torch.Generator().manual_seed(seed)
    own, common, g = torch.randn(3, 7, generator=generator).double()
    return own, common, g, torch.rand(7, generator=generator).double()


def test_the_blend_and_its_step_equal_slow_loops():
    own, common, g, W = vectors(0)
    for k, (blend, step) in enumerate(
        zip(blended(own, common, W), learned(W, g, own, common, 2.0), strict=True)
    ):
        assert_close(blend, own[k] * (1 - W[k]) + common[k] * W[k])
        expected = float(W[k] - 2.0 * g[k] * (common[k] - own[k]))
        assert float(step) == pytest.approx(min(1.0, max(0.0, expected)))


def test_the_step_descends_the_loss_of_the_blend():
    own, common, _, W = vectors(1)
    target = vectors(2)[0]

    def loss(W):
        return ((blended(own, common, W) - target) ** 2).sum()

    g = grad(lambda top: ((top - target) ** 2).sum())(blended(own, common, W))
    assert_close(learned(W, g, own, common, 1e-3), (W - 1e-3 * grad(loss)(W)).clamp(0, 1))


def a_round(method, passes, W=None):
    """A client's second round, one pass after the other; its state and the slow result."""
    on = task(method)
    client, at = one_client(on, 0, 1), parts(on.problem.model, method.layers)
    generator = torch.Generator().manual_seed(4)
    theta, own = on.problem.start, torch.randn(HEAD, generator=generator).double()
    W = torch.ones(HEAD).double() if W is None else W
    state = method.local(client, Sent(theta, passes), Own(own, W))[1]
    again = client.tuned(epochs=len(passes), batches="ala")
    losses, made = [], 0
    for number in range(int(again.steps)):
        batch = again.batch(number)

        def loss(top, batch=batch):
            return client.loss(at.join(top, theta[:BODY]), batch)

        top = blended(own, theta[BODY:], W)
        losses.append(float(loss(top)))
        W = learned(W, grad(loss)(top), own, theta[BODY:], method.eta)
        per_pass = int(again.steps) // len(passes)
        if (number + 1) % per_pass == 0:
            made += 1
            means = torch.tensor(losses).view(made, per_pass).mean(1)
            if made >= 10 and means[-10:].std(correction=0) < 0.1:
                break
    return state, W, made


def test_a_second_round_learns_until_the_losses_are_steady():
    state, W, made = a_round(FedALA(share=1.0, eta=0.1), torch.ones(20, dtype=torch.bool))
    assert 10 <= made < 20
    assert_close(state.W, W)
    assert (state.W < 1).any()
    assert ((state.W >= 0) & (state.W <= 1)).all()


def test_a_later_round_makes_one_pass():
    state, W, made = a_round(FedALA(share=1.0, eta=0.1), torch.ones(1, dtype=torch.bool))
    assert made == 1
    assert_close(state.W, W)


def test_a_client_learns_from_its_second_round_on():
    method = FedALA(start_passes=3)
    on = task(method)
    server = Server(on.problem.start, torch.tensor([0, 1, 2, 5, 0]))
    passes = method.download(server, whole_round(on)).passes.tolist()
    assert passes == [[0, 0, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0], [0, 0, 0]]
    others = whole_round(on)._replace(clients=torch.tensor([0, 2]))
    assert method.download(server, others).passes.tolist() == [[False], [True]]
    assert method.download(server, others._replace(clients=torch.tensor([4]))).passes.shape == (
        1,
        0,
    )


def test_who_makes_no_pass_is_not_changed_by_those_of_others():
    method = FedALA(start_passes=3)
    on = task(method)
    _, states = method.init(on.problem)
    passes = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    theta = on.problem.start.expand(5, -1) + 0.1
    found = {
        name: backend_of(name, on).local(method, Sent(theta, passes), states, whole_round(on, 1))[1]
        for name in ("loop", "vmap")
    }
    assert_close(found["loop"].W, found["vmap"].W)
    changed = (found["loop"].W != 1).any(1)
    assert changed.tolist() == [True, True, False, True, False]


def test_lower_layers_are_everybodys():
    record = last(FedALA(), task(FedALA()), participation=1.0)
    models = record.mixture.models[:, 0]
    assert_close(models[:, :BODY], record.server.theta[:BODY].expand(5, -1), 0)
    assert (models[0, BODY:] - models[1, BODY:]).abs().max() > 1e-3
