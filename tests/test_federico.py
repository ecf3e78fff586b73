"""FedeRiCo's weights and what moves its models."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from coterie.algorithms.federico import FedeRiCo, Sight, posterior
from coterie.algorithms.local import Local
from coterie.core.optim import Recipe
from coterie.core.tree import Bank, Parcels, row
from coterie.training.rounds import train
from support import (
    RAGGED,
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

PLAIN = Recipe(lr=0.1, epochs=1, batch=10)
WHOLE = Recipe(lr=0.1, epochs=1, batch=100)  # one full-batch step
K = len(RAGGED)


def wide(values):
    return torch.tensor(values, dtype=torch.float64)


def rounds_of(method, recipe=PLAIN, rounds=3, participation=1.0, **options):
    on = task(method, recipe=recipe, **options)
    return on, list(
        train(method, on.problem, engine_of("vmap", on), rounds, participation=participation)
    )


def one_round(method, on, server=None, states=None, index=0):
    """Everybody's round: what was sent, what came back, what it became."""
    if server is None:
        server, states = method.init(on.problem)
    round = whole_round(on, index)
    received = method.download(server, round)
    replies, after = backend_of("loop", on).local(method, received, states, round)
    return received, replies, after, method.aggregate(server, replies, round)


# ---- weights -------------------------------------------------------------------------------


losses = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        arrays(float, n, elements=st.floats(-1e300, 1e300)), arrays(bool, n, elements=st.booleans())
    )
)


@given(losses)
def test_weights_are_a_simplex_over_the_seen(pair):
    tracked, seen = map(torch.from_numpy, pair)
    weights = posterior(tracked, seen)
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert (weights[~seen] == 0).all()
    assert float(weights.sum()) == pytest.approx(1.0 if seen.any() else 0.0)
    order = torch.arange(len(seen)).flip(0)
    assert_close(posterior(tracked[order], seen[order]), weights[order], 1e-12)


@given(arrays(float, 4, elements=st.floats(-50, 50)), st.floats(-1e3, 1e3))
def test_a_constant_on_all_losses_changes_nothing(tracked, constant):
    tracked, seen = torch.from_numpy(tracked), torch.tensor([True, True, False, True])
    assert_close(posterior(tracked + constant, seen), posterior(tracked, seen))


def sum_of_losses(on, i, model):
    client = one_client(on, i)
    return float(client.loss(model, "train") * client.size)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("step", ["local_epochs", "gradient"])
def test_a_round_equals_a_double_loop(step, normalise):
    method = FedeRiCo(downloads=2, step=step, normalise_columns=normalise, scale="mean")
    on = task(method, recipe=PLAIN)
    received, _, after, new = one_round(method, on)
    phi = method.init(on.problem)[0].models
    moves, column = torch.zeros_like(phi), torch.zeros(K).double()
    for i in range(K):
        sight = [i, *received.peers.owner[i].tolist()]
        assert len(set(sight)) == 3
        loss = {b: sum_of_losses(on, i, phi[b]) for b in sight}
        total = sum(torch.exp(-wide(loss[b] - loss[i])) for b in sight)
        for b in sight:
            w = torch.exp(-wide(loss[b] - loss[i])) / total
            assert_close(after.weights[i, b], w)
            client = one_client(on, i)
            if step == "gradient":
                moves[b] += w * client.gradient(phi[b], "train") * client.size / on.problem.sizes[b]
            else:
                moves[b] += w * (phi[b] - client.train(phi[b]))
            column[b] += w
    assert (column > 1).any()  # otherwise normalising is not tested
    if normalise:
        moves = moves / column.clamp(min=1)[:, None]
    rate = PLAIN.lr if step == "gradient" else 1.0
    expected = torch.where((column > 1e-6)[:, None], phi - rate * moves, phi)
    assert_close(new.models, expected)


def tracked_by_hand(method, rounds):
    """The losses that everybody saw in each round, and the records."""
    on, records = rounds_of(method, rounds=rounds)
    models = [method.init(on.problem)[0].models] + [record.server.models for record in records]
    seen = [
        torch.stack([wide([sum_of_losses(on, i, phi) for phi in models[t]]) for i in range(K)])
        for t in range(rounds)
    ]
    return seen, records


def test_accumulating_over_everybody_is_the_exact_recursion():
    method = FedeRiCo(downloads=K, tracking="accumulate")
    losses, records = tracked_by_hand(method, 3)
    prior = torch.full((K, K), 1 / K).double()
    for loss in losses:
        prior = prior * torch.exp(-(loss - loss.min(1, keepdim=True).values))
        prior = prior / prior.sum(1, keepdim=True)
    assert_close(records[-1].states.weights, prior)


def test_the_centralised_form_accumulates_too():
    given = FedeRiCo(form="centralised", step="gradient", normalise_columns=False)
    losses, records = tracked_by_hand(given, 2)
    assert_close(records[-1].states.tracked, losses[0] + losses[1])


def test_the_moving_average_follows_its_formula():
    losses, records = tracked_by_hand(FedeRiCo(downloads=K, beta=0.3), 2)
    assert_close(records[-1].states.tracked, 0.7 * losses[0] + 0.3 * losses[1])
    losses, records = tracked_by_hand(FedeRiCo(downloads=K, beta=0.3, ema_init="zero"), 2)
    assert_close(records[-1].states.tracked, 0.7 * 0.3 * losses[0] + 0.3 * losses[1])


def test_beta_one_forgets():
    losses, records = tracked_by_hand(FedeRiCo(downloads=K, beta=1.0), 2)
    assert_close(records[-1].states.tracked, losses[1])


def test_the_unvisited_keep_their_last_loss():
    method = FedeRiCo(downloads=1, epsilon=1.0)
    on = task(method, recipe=PLAIN)
    server, before = method.init(on.problem)
    for index in range(4):
        received, _, after, server = one_round(method, on, server, before, index)
        in_sight = torch.eye(K, dtype=torch.bool).scatter(1, received.peers.owner, True)
        away = before.seen & ~in_sight
        assert torch.equal(after.last[away], before.last[away])
        expected = 0.4 * before.tracked + 0.6 * before.last
        assert_close(after.tracked[away], expected[away])
        assert (after.last[in_sight] != before.last[in_sight]).all()
        before = after
    assert away.any()


def test_late_seen_peers_count_as_if_seen_from_the_start():
    method = FedeRiCo(downloads=1, epsilon=0.0, tracking="accumulate")
    on = task(method, recipe=PLAIN)
    server, states = method.init(on.problem)
    _, _, states, server = one_round(method, on, server, states)
    known = states.seen.clone()
    received, _, after, _ = one_round(method, on, server, states, index=1)
    for i in range(K):
        peer = int(received.peers.owner[i, 0])
        if not known[i, peer]:  # unseen clients come first
            expected = 2 * sum_of_losses(on, i, server.models[peer])
            assert float(after.tracked[i, peer]) == pytest.approx(expected)
    assert (after.seen.sum(1) == 3).all()


def test_identical_data_and_models_are_weighed_alike():
    federated = federation(sizes=(20, 20, 20), groups=1)
    same = replace(federated, train=(federated.train[0],) * 3, val=(federated.val[0],) * 3)
    method = FedeRiCo(downloads=2, start="common")
    on = task(method, federated=same, recipe=PLAIN)
    _, _, after, _ = one_round(method, on)
    assert_close(after.weights, torch.full((3, 3), 1 / 3, dtype=torch.float64))


def test_a_mean_loss_is_a_sum_at_a_temperature_in_samples():
    alike = {"federated": federation(sizes=(20, 20, 20)), "merge": False}
    found, hot, plain = (
        rounds_of(FedeRiCo(downloads=2, **fields), **alike)[1][-1].states.weights
        for fields in ({"loss_reduction": "mean"}, {"temperature": 20.0}, {})
    )
    assert_close(found, hot)
    assert (plain - found).abs().max() > 1e-3


def test_a_broken_model_counts_as_not_received():
    method = FedeRiCo(downloads=K)
    on = task(method, recipe=PLAIN)
    server, states = method.init(on.problem)
    broken = server.models.clone()
    broken[2] = torch.nan
    _, replies, after, _ = one_round(method, on, server._replace(models=broken), states)
    others = [0, 1, 3, 4]
    assert not after.seen[others][:, 2].any()
    assert after.weights.isfinite().all()
    assert replies.change.vectors[others].isfinite().all()
    assert (after.weights[2, 2], after.seen[2, 2]) == (0, False)


# ---- selection -----------------------------------------------------------------------------


def chosen(method, ranks, index=0):
    on = task(method)
    server, _ = method.init(on.problem)
    round = whole_round(on, index)
    return method.download(server._replace(ranks=ranks), round).peers.owner


def test_without_exploration_the_best_are_chosen():
    ranks = torch.stack([torch.arange(K).roll(i) for i in range(K)]).to(torch.int32)
    found = chosen(FedeRiCo(downloads=2, epsilon=0.0), ranks)
    for i in range(K):
        order = [j for j in ranks[i].argsort().tolist() if j != i]
        assert found[i].tolist() == order[:2]


@pytest.mark.parametrize("explore", ["per_slot", "per_round"])
def test_full_exploration_is_uniform(explore):
    method = FedeRiCo(downloads=1, epsilon=1.0, explore=explore)
    ranks = torch.arange(K).expand(K, K).to(torch.int32)
    on = task(method)
    server = method.init(on.problem)[0]._replace(ranks=ranks)
    picks = [method.download(server, whole_round(on, t, 400)).peers.owner[0, 0] for t in range(400)]
    counts = torch.bincount(torch.stack(picks), minlength=K)
    assert counts[0] == 0
    assert (counts[1:] - 100).abs().max() < 40


def test_one_coin_a_round_is_all_or_nothing():
    method = FedeRiCo(downloads=3, epsilon=0.5, explore="per_round")
    on = task(method)
    ranks = torch.arange(K).expand(K, K).to(torch.int32)
    server = method.init(on.problem)[0]._replace(ranks=ranks)
    draws = [tuple(method.download(server, whole_round(on, t)).peers.owner[0].tolist())
             for t in range(60)]  # fmt: skip
    greedy = sum(pick == (1, 2, 3) for pick in draws)
    assert 15 < greedy < 50


def test_strangers_come_first():
    method = FedeRiCo(downloads=2, epsilon=0.0)
    _, records = rounds_of(method, rounds=2)
    assert records[-1].states.seen.all()  # 2 rounds of 2 strangers each


def test_only_clients_of_the_round_are_chosen():
    method = FedeRiCo(downloads=3)
    on = task(method)
    server, _ = method.init(on.problem)
    round = whole_round(on)._replace(clients=torch.tensor([1, 4]))
    assert method.download(server, round).peers.owner.tolist() == [[4], [1]]


# ---- reductions ----------------------------------------------------------------------------


def test_the_literal_start_is_not_local():
    literal = FedeRiCo(downloads=0, unseen="zero_loss")
    found = last(literal, task(literal), rounds=2, participation=1.0)
    alone = Local(start="independent", keep="last")
    other = last(alone, task(alone), rounds=2, participation=1.0)
    assert (predictors(found).models[:, 0] - predictors(other).models[:, 0]).abs().max() > 1e-3
    assert (found.states.weights.diagonal() < 0.01).all()


def test_full_gradients_without_peers_are_local_full_batch_steps():
    method = FedeRiCo(downloads=0, step="gradient", scale="mean")
    found = last(method, task(method, recipe=WHOLE), rounds=3, participation=1.0)
    alone = Local(start="independent", keep="last")
    other = last(alone, task(alone, recipe=WHOLE), rounds=3, participation=1.0)
    assert_close(predictors(found).models, predictors(other).models, 1e-6)


def test_both_forms_agree_after_one_round():
    printed = {"step": "gradient", "normalise_columns": False}
    central = FedeRiCo(form="centralised", **printed)
    total = int(task(central).problem.sizes.sum())
    found = last(central, task(central, recipe=WHOLE), rounds=1, participation=1.0)
    peers = FedeRiCo(downloads=K - 1, scale="sum", **printed)
    slower = replace(WHOLE, lr=WHOLE.lr / total)
    other = last(peers, task(peers, recipe=slower), rounds=1, participation=1.0)
    start = central.init(task(central).problem)[0].models
    assert_close(found.server.models, other.server.models, 1e-12)
    assert (found.server.models - start).abs().max() > 1e-3


# ---- owners --------------------------------------------------------------------------------


def test_the_owners_optimiser_lives_on():
    method = FedeRiCo(downloads=0, step="gradient")
    recipe = Recipe(optimizer="adam", lr=0.01, batch=100)
    _, records = rounds_of(method, recipe, rounds=3)
    assert (records[-1].server.optimizer.steps == 3).all()
    fresh = torch.optim.Adam
    on = task(method, recipe=recipe)
    client, start = one_client(on, 0), method.init(on.problem)[0].models[0]
    w = start.clone().requires_grad_()
    rule = fresh([w], lr=0.01)
    for _ in range(3):
        w.grad = client.gradient(w.detach(), "train") * client.size
        rule.step()
    assert_close(records[-1].server.models[0], w.detach(), 1e-7)


def test_a_model_that_nobody_uses_stays():
    method = FedeRiCo(downloads=1, step="gradient")
    recipe = Recipe(optimizer="adam", lr=0.01, batch=100)
    on = task(method, recipe=recipe)
    server, states = method.init(on.problem)
    round = whole_round(on)
    replies, _ = backend_of("loop", on).local(method, method.download(server, round), states, round)
    nobodys = replies._replace(weight=torch.where(replies.owner == 3, 0.0, replies.weight))
    new = method.aggregate(server, nobodys, round)
    assert torch.equal(new.models[3], server.models[3])
    assert new.optimizer.steps.tolist() == [1, 1, 1, 0, 1]


def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_buffers_are_averaged_not_differenced():
    method = FedeRiCo(downloads=2)
    even = federation(sizes=(20, 20, 20))
    on = task(method, normed, federated=even, recipe=Recipe(lr=0.1, batch=13))
    _, replies, _, new = one_round(method, on)
    first = on.problem.model.parameters
    phi = method.init(on.problem)[0].models
    for b in range(3):
        total, mass = torch.zeros(on.problem.model.size - first).double(), 0.0
        for i in range(3):
            for slot in range(3):
                if int(replies.owner[i, slot]) == b:
                    w = float(replies.weight[i, slot])
                    total += w * one_client(on, i).train(phi[b])[first:]
                    mass += w
        assert_close(new.models[b, first:], total / mass if mass > 1e-6 else phi[b, first:])
    assert (new.models[:, first + 4 :] > 0).all()  # variances


# ---- what travels --------------------------------------------------------------------------

SMALL = 4 * K + K  # ranks and wishes


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_ledger_of_peers(participation):
    method = FedeRiCo(downloads=3, temperature=1e3)
    on, records = rounds_of(method, participation=participation)
    m = 8 * on.problem.model.size
    for record in records:
        count = len(record.clients)
        peers = min(3, count - 1)
        up = peers * m + (1 + peers) * 16 + SMALL
        assert record.traffic[:2] == (count * (m + 8) * peers, count * up) or peers == 0


def test_ledger_of_the_centralised_form():
    method = FedeRiCo(form="centralised", step="gradient", temperature=1e3)
    on, records = rounds_of(method)
    m = 8 * on.problem.model.size
    for record in records:
        down, up, _ = record.traffic
        assert down == K * (K * m + (K - 1) * 8)
        assert up == K * (K * m + K * 16 + SMALL)


def test_vanished_weights_are_not_sent():
    method = FedeRiCo(downloads=2, temperature=1e-3)
    on = task(method, recipe=PLAIN)
    _, replies, after, _ = one_round(method, on)
    assert (after.weights == 0).any()
    assert torch.equal(replies.change.sent[:, 1:], replies.weight[:, 1:] > 0)
    assert not replies.change.sent[:, 0].any()


def test_only_models_with_weight_are_fetched_to_predict():
    method = FedeRiCo(downloads=K, predict_min_weight=0.2, temperature=20.0)
    _, records = rounds_of(method)
    record, m = records[-1], 8 * len(records[-1].server.models[0])
    A = record.states.weights
    kept = torch.where(A >= 0.2, A, 0.0)
    fetched = (kept > 0) & ~torch.eye(K, dtype=torch.bool)
    assert 0 < fetched.sum() < K * (K - 1)
    assert record.traffic.serve == int(fetched.sum()) * (m + 8)
    mixture = predictors(record)
    assert_close(mixture.weights.sum(1), torch.ones(K).double())
    blended = (mixture.weights[..., None] * mixture.models).sum(1)
    assert_close(blended, kept @ record.server.models / kept.sum(1, keepdim=True))


def test_empty_slots_change_no_bit_of_a_predictor():
    """How many models others predict with decides how many slots are empty."""
    method = FedeRiCo(predict_min_weight=0.0)
    clients = 40
    on = task(method, federated=federation((9,) * clients))
    state = row(method.init(on.problem)[1], 0)
    models, own = on.problem.fresh(torch.arange(10)), torch.ones(1, dtype=torch.bool)
    owner, client = torch.arange(1, 10), one_client(on, 0)
    for seed in range(60):
        chance = torch.Generator().manual_seed(seed)
        weights = torch.rand(clients, generator=chance, dtype=torch.float64)
        held, found = state._replace(weights=weights / weights.sum()), []
        for empty in (0, 1, 5, 28):
            slot = torch.cat([owner, torch.full((empty,), -1)])
            sight = Sight(Parcels(models[:1], own), Bank(models, slot, slot))
            found.append(method.predictor(client, sight, held).weights[:10])
        assert all(torch.equal(found[0], each) for each in found)
