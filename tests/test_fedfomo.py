"""FedFomo's formulae, selection and edge cases."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.algorithms.fedfomo import FedFomo, fomo_weights
from coterie.core.optim import Recipe
from coterie.core.tree import Bank
from coterie.training.rounds import train
from support import (
    assert_close,
    engine_of,
    one_client,
    predictors,
    task,
    whole_round,
)

numbers = st.floats(-1e30, 1e30)
lengths = st.floats(0, 1e30)


def wide(values):
    return torch.tensor(values, dtype=torch.float64)


def test_golden():
    old = torch.zeros(2, dtype=torch.float64)
    models = wide([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]])
    raw, shares = fomo_weights(wide(1.0), wide([0.0, 0.5, 1.3]), (models - old).norm(dim=1))
    assert_close(raw, wide([0.2, 0.25, -0.3]), 1e-9)
    assert_close(shares, wide([0.4444, 0.5556, 0.0]), 1e-4)
    assert_close(old + shares @ (models - old), wide([1.3333, 2.8889]), 1e-4)


def test_a_model_equal_to_the_old_one_counts_nothing():
    raw, shares = fomo_weights(wide(1.0), wide([0.2, 0.4]), wide([0.0, 2.0]))
    assert raw.tolist() == [0.0, pytest.approx(0.3)]
    assert shares.tolist() == [0.0, 1.0]


def test_nothing_helps():
    _, shares = fomo_weights(
        wide(1.0), wide([1.0, 2.0, math.inf, math.nan]), torch.ones(4).double()
    )
    assert shares.tolist() == [0, 0, 0, 0]


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            arrays(float, n, elements=numbers), arrays(float, n, elements=lengths), numbers
        )
    )
)
def test_shares_are_a_simplex_or_zero(drawn):
    losses, distances, base = drawn
    raw, shares = fomo_weights(wide(base), wide(losses), wide(distances))
    assert shares.isfinite().all()
    assert (shares >= 0).all()
    total = float(shares.sum())
    assert total == pytest.approx(1) if (raw > 0).any() else total == 0
    order = torch.arange(len(losses) - 1, -1, -1)
    _, turned = fomo_weights(wide(base), wide(losses)[order], wide(distances)[order])
    assert_close(turned, shares[order], 1e-12)


def test_a_model_that_differs_by_rounding_counts_nothing():
    """Otherwise a loss difference of 1e-16 over a distance of 1e-16 outweighs every real gain."""
    method = FedFomo(downloads=1)
    on = task(method)
    client, old = one_client(on, 0), on.problem.start
    twin = old * (1 + 1e-15)
    state = type(method.init(on.problem)[1])(
        old, old, torch.zeros(5).double(), torch.zeros(5).double()
    )
    slots = torch.tensor([0])
    theta, raw, _ = method.weigh(client, Bank(twin[None], slots, slots + 1), state)
    assert raw.tolist() == [0, 0]
    assert torch.equal(theta, old)
    better = client.train(old)
    _, raw, _ = method.weigh(client, Bank(better[None], slots, slots + 1), state)
    assert raw[1] != 0


def test_scaling_all_losses_scales_affinity_and_leaves_shares():
    losses, distances = wide([0.1, 0.7, 0.4]), wide([1.0, 2.0, 3.0])
    raw, shares = fomo_weights(wide(0.6), losses, distances)
    more, same = fomo_weights(wide(6.0), 10 * losses, distances)
    assert_close(more, 10 * raw)
    assert_close(same, shares)


def slow_round(client, state, peers, method):
    """Steps 3 to 5 of FedFomo, one candidate after the other."""
    base = float(client.loss(state.old, "val"))
    raw = []
    for theta in [state.theta, *peers]:
        gain, apart = base - float(client.loss(theta, "val")), theta - state.old
        length = {"l2": apart.norm(), "l1": apart.abs().sum(), "sq_l2": apart.norm() ** 2}
        raw.append(gain / float(length[method.distance]) if apart.abs().max() > 0 else 0.0)
    positive = [max(w, 0.0) for w in raw]
    theta = state.old.clone()
    for share, model in zip(positive, [state.theta, *peers], strict=True):
        if sum(positive) > 0:
            theta = theta + share / sum(positive) * (model - state.old)
    return theta, raw


@pytest.mark.parametrize("distance", ["l2", "l1", "sq_l2"])
def test_a_round_equals_the_slow_double_loop(distance):
    method = FedFomo(distance=distance, downloads=3)
    on = task(method)
    *_, record = train(method, on.problem, engine_of("loop", on), 3)
    served = method.serve(record.server, whole_round(on, 3))
    for i in range(on.problem.population):
        client = one_client(on, i, 3)
        state = type(record.states)(*(leaf[i] for leaf in record.states))
        bank = Bank(served.models, served.slot[i], served.owner[i])
        peers = [served.models[j] for j in served.slot[i].tolist() if j >= 0]
        theta, raw = slow_round(client, state, peers, method)
        found, found_raw, _ = method.weigh(client, bank, state)
        assert_close(found, theta)
        assert_close(found_raw, wide(raw))
        upload, after = method.local(client, bank, state)
        grown = state.affinity.clone()
        grown[i] += raw[0]
        for j, w in zip(served.slot[i].tolist(), raw[1:], strict=True):
            grown[j] += w
        assert_close(after.affinity, grown)
        assert_close(after.old, theta)
        assert_close(upload.theta, client.train(theta))
        assert float(after.weights.sum()) == pytest.approx(1)


def test_round_zero_only_trains():
    method = FedFomo()
    on = task(method)
    round = whole_round(on, 0)
    received = method.download(method.init(on.problem)[0], round)
    assert (received.slot == -1).all()


def test_greedy_selection_follows_the_wishes():
    method = FedFomo(downloads=2, epsilon=0.0)
    on = task(method)
    server, _ = method.init(on.problem)
    ranks = torch.tensor([[0, 3, 1, 2, 4]] * 5, dtype=torch.int32)
    server = server._replace(ranks=ranks, uploaded=torch.ones(5, dtype=torch.bool))
    chosen = method.download(server, whole_round(on, 1)).owner
    assert chosen.tolist() == [[2, 3], [0, 2], [0, 3], [0, 2], [0, 2]]


@pytest.mark.parametrize(
    ("rule", "expected"), [("subtractive", [0.3, 0.25, 0.0]), ("multiplicative", [0.3, 0.285])]
)
def test_exploration_fades(rule, expected):
    method = FedFomo(eps_decay=rule)
    rounds = [0, 1, 6][: len(expected)]
    assert [method._chance(t) for t in rounds] == pytest.approx(expected)
    assert FedFomo(eps_decay="multiplicative")._chance(6) == pytest.approx(0.3 * 0.95**6)


def test_without_downloads_the_better_of_two_own_models_stays():
    method = FedFomo(downloads=0)
    on = task(method, recipe=Recipe(lr=3.0, epochs=3, batch=5))  # wild steps: some hurt
    *_, record = train(method, on.problem, engine_of("loop", on), 3)
    served = method.serve(record.server, whole_round(on, 3))
    outcomes = set()
    for i in range(on.problem.population):
        client = one_client(on, i, 3)
        state = type(record.states)(*(leaf[i] for leaf in record.states))
        bank = Bank(served.models, served.slot[i], served.owner[i])
        better = bool(client.loss(state.theta, "val") < client.loss(state.old, "val"))
        assert_close(method.weigh(client, bank, state)[0], state.theta if better else state.old)
        outcomes.add(better)
    assert outcomes == {True, False}  # both cases were met


def test_the_matrix_may_be_the_affinity_whose_growth_gives_the_weights():
    plain, shown = FedFomo(downloads=2), FedFomo(downloads=2, matrix="affinity")
    on = task(plain)
    runs = [list(train(m, on.problem, engine_of("loop", on), 4)) for m in (plain, shown)]
    before, signs = torch.eye(5, dtype=torch.float64), set()
    for weights, affinity in zip(*runs, strict=True):
        P = torch.from_numpy(affinity.collaboration)
        gained = P - before  # raw w_n of those that were weighed
        assert ((gained != 0).sum(1) <= 3).all()
        positive = gained.clamp(min=0)
        applied = torch.from_numpy(weights.collaboration)
        helped = positive.sum(1) > 0
        assert_close(applied[helped], (positive / positive.sum(1, keepdim=True))[helped])
        signs |= set(gained.sign().unique().tolist())
        before = P
    assert signs == {-1.0, 0.0, 1.0}
    assert torch.equal(*(predictors(run[-1]).models for run in runs))
