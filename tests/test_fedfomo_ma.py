"""FedFomo's model-average variant."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.algorithms.fedfomo_ma import FedFomoMA, average_weights, leave_one_out
from coterie.training.rounds import train
from support import RAGGED, assert_close, engine_of, last, one_client, task, whole_round

K = len(RAGGED)


def wide(values):
    return torch.tensor(values, dtype=torch.float64)


def test_golden():
    theta = wide([[0.0], [2.0]])
    average, without = leave_one_out(theta)

    def loss(model):
        return ((model - 1.2) ** 2).sum(-1)

    raw, shares = average_weights(loss(average), loss(without), torch.ones(2).double())
    assert_close(raw, wide([0.6, 1.4]))
    assert_close(shares, wide([0.3, 0.7]))
    assert_close(average + shares @ (theta - average), wide([1.4]))


@given(arrays(float, (4, 3), elements=st.floats(-1e6, 1e6)))
def test_averages_give_every_model_away(models):
    theta = torch.from_numpy(models)
    average, without = leave_one_out(theta)
    assert_close(average, theta.mean(0))
    for n in range(4):
        assert_close(without[n], torch.cat([theta[:n], theta[n + 1 :]]).mean(0), 1e-6)
        assert_close(4 * average - 3 * without[n], theta[n], 1e-6)


@given(arrays(float, 5, elements=st.floats(-1e100, 1e100)))
def test_shares_are_a_simplex_or_nothing(losses):
    losses = torch.from_numpy(losses)
    raw, shares = average_weights(losses[0], losses[1:], torch.ones(4).double())
    assert (shares >= 0).all()
    assert float(shares.sum()) == pytest.approx(1.0 if (raw > 0).any() else 0.0)


@pytest.mark.parametrize("distance", ["none", "l2", "l1", "sq_l2"])
def test_weighing_equals_a_slow_loop(distance):
    method = FedFomoMA(distance=distance)
    on = task(method)
    record = last(method, on, rounds=2, participation=1.0)
    received = method.download(record.server, whole_round(on, 2))
    theta = record.server.models
    average = theta.mean(0)
    for i in range(K):
        client = one_client(on, i)
        base, raw = float(client.loss(average, "val")), []
        for n in range(K):
            without = torch.cat([theta[:n], theta[n + 1 :]]).mean(0)
            apart = without - average
            length = {"none": 1.0, "l2": apart.norm(), "l1": apart.abs().sum(),
                      "sq_l2": apart.norm() ** 2}[distance]  # fmt: skip
            raw.append((float(client.loss(without, "val")) - base) / float(length))
        clipped = wide(raw).clamp(min=0)
        expected = clipped / clipped.sum() if clipped.sum() > 0 else torch.full_like(clipped, 1 / K)
        row = type(received)(received.models, received.slot[i], received.owner[i])
        found, shares = method.weigh(client, row)
        assert_close(shares, expected, 1e-8)
        assert_close(found, expected @ theta, 1e-8)


def test_where_nobody_helps_the_average_is_taken():
    method = FedFomoMA()
    on = task(method)
    server, _ = method.init(on.problem)
    same = server._replace(uploaded=torch.ones(K, dtype=torch.bool))  # five equal models
    received = method.download(same, whole_round(on, 1))
    row = type(received)(received.models, received.slot[0], received.owner[0])
    found, shares = method.weigh(one_client(on, 0), row)
    assert_close(found, on.problem.start)
    assert_close(shares, torch.full((K,), 1 / K, dtype=torch.float64))


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_ledger(participation):
    method = FedFomoMA()
    on = task(method)
    m, heard = 8 * on.problem.model.size, set()
    for record in train(method, on.problem, engine_of("wire", on), 3, participation=participation):
        count = len(record.clients)
        assert record.traffic.down == count * (len(heard) + 1) * (m + 8)
        assert record.traffic.up == count * (m + 8 * K)
        heard |= set(record.clients)
