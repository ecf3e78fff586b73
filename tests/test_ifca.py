"""IFCA: choices, averages, starts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.algorithms.ifca import IFCA, Models, Pick, groups_by_gap
from coterie.core.mixing import nobody_yet
from coterie.errors import ConfigError
from coterie.training.rounds import train
from support import (
    assert_close,
    backend_of,
    engine_of,
    last,
    one_client,
    task,
    whole_round,
)

GIVEN = IFCA(k=3, start="redraw", draws=1)


def first_round(method, server, on, index=1):
    round = whole_round(on, index)
    engine = backend_of("vmap", on)
    uploads, _ = engine.local(method, method.download(server, round), (), round)
    return uploads, method.aggregate(server, uploads, round)


def test_everybody_trains_the_model_that_fits_best():
    on = task(GIVEN)
    server, _ = GIVEN.init(on.problem)
    uploads, _ = first_round(GIVEN, server, on)
    for i in range(on.problem.population):
        client = one_client(on, i, 1)
        losses = torch.stack([client.loss(w, "train") for w in server.theta])
        assert int(uploads.choice[i]) == int(losses.argmin())
        assert_close(uploads.w[i], client.train(server.theta[losses.argmin()]), 1e-10)


def uploads_of(choice, size=None):
    n = len(choice)
    w = torch.arange(2.0 * n).double().view(n, 2)
    sizes = torch.ones(n, dtype=torch.int64) if size is None else torch.tensor(size)
    return Pick(w, sizes, torch.tensor(choice))


def server_of(k, population):
    theta = -torch.ones(k, 2).double() * torch.arange(1, k + 1)[:, None]
    nothing = theta.new_zeros(0, 2)
    sizes = torch.ones(population, dtype=torch.int64)
    nobody = torch.full((population,), -1)
    return Models(theta, nobody, nothing[:, None], nothing, sizes, nobody_yet(theta, population))


def test_models_are_averages_over_those_who_chose_them_and_the_others_stay():
    on = task(GIVEN)
    uploads = uploads_of([0, 2, 0, 2, 2], size=[1, 1, 3, 2, 1])
    server = server_of(4, 5)
    new = GIVEN.aggregate(server, uploads, whole_round(on, 1))
    assert_close(new.theta[0], (uploads.w[0] + 3 * uploads.w[2]) / 4, 1e-12)
    slow = (uploads.w[1] + 2 * uploads.w[3] + uploads.w[4]) / 4
    assert_close(new.theta[2], slow, 1e-12)
    assert torch.equal(new.theta[[1, 3]], server.theta[[1, 3]])  # nobody chose them
    assert new.choice.tolist() == [0, 2, 0, 2, 2]


@pytest.mark.parametrize("order", [[1, 2, 0], [2, 1, 0]])
def test_relabelling_the_models_changes_nothing(order):
    on = task(GIVEN)
    server, _ = GIVEN.init(on.problem)
    uploads, new = first_round(GIVEN, server, on)
    turned, later = first_round(GIVEN, server._replace(theta=server.theta[order]), on)
    assert_close(turned.w, uploads.w, 1e-12)
    assert torch.equal(torch.tensor(order)[turned.choice], uploads.choice)
    assert_close(later.theta, new.theta[order], 1e-12)


def test_absent_clients_keep_their_choice():
    on = task(GIVEN)
    server = server_of(3, 5)._replace(choice=torch.tensor([2, 1, 0, -1, 2]))
    round = whole_round(on, 1)._replace(clients=torch.tensor([0, 3]))
    new = GIVEN.aggregate(server, uploads_of([1, 1]), round)
    assert new.choice.tolist() == [1, 1, 0, 1, 2]


# ---- how the models start --------------------------------------------------------------------


def test_lopsided_draws_are_drawn_again():
    method = IFCA(k=2, start="redraw", draws=3, min_share=0.4)
    on = task(method)
    server, _ = method.init(on.problem)
    assert server.spare.shape[:2] == (2, 2)
    lopsided = Pick(
        torch.zeros(5, on.problem.model.size).double(),
        torch.ones(5).long(),
        torch.tensor([0, 0, 0, 0, 1]),
    )
    second = method.aggregate(server, lopsided, whole_round(on))
    assert torch.equal(second.theta, server.spare[0])
    assert (second.choice == -1).all()
    third = method.aggregate(second, lopsided, whole_round(on, 1))
    assert torch.equal(third.theta, server.spare[1])
    kept = method.aggregate(third, lopsided, whole_round(on, 2))  # no draw is left
    assert not kept.theta.any()
    fair = lopsided._replace(choice=torch.tensor([0, 1, 0, 1, 1]))
    assert len(method.aggregate(server, fair, whole_round(on)).spare) == 0


def test_draws_are_unlike_each_other_and_the_first_is_the_common_start():
    method = IFCA(k=2, start="redraw", draws=2)
    on = task(method)
    server, _ = method.init(on.problem)
    models = torch.cat([server.theta, server.spare[0]])
    assert torch.equal(models[0], on.problem.start)
    assert (torch.cdist(models, models) + torch.eye(4)).min() > 0.1


def test_only_pretraining_finds_the_number_of_models():
    with pytest.raises(ConfigError, match="give the number of models"):
        IFCA(start="redraw")


def test_pretraining_averages_clients_that_changed_alike():
    method = IFCA(k=2)
    on = task(method)
    server, _ = method.init(on.problem)
    change = torch.zeros(5, on.problem.model.size).double()
    change[:, 0] = torch.tensor([1.0, -1, 1, -1, 1])
    change[:, 1] = torch.tensor([0.1, 0.2, -0.1, 0.1, 0.3])
    uploads = Pick(on.problem.start + change, on.problem.sizes, torch.zeros(5).long())
    new = method.aggregate(server, uploads, whole_round(on, 0))
    assert new.choice[0] == new.choice[2] == new.choice[4] != new.choice[1] == new.choice[3]
    p = on.problem.sizes[[1, 3]].double() / on.problem.sizes[[1, 3]].sum()
    odd = p[0] * uploads.w[1] + p[1] * uploads.w[3]
    assert_close(new.theta[new.choice[1]], odd, 1e-12)


def test_pretraining_waits_for_everybody_but_not_for_ever():
    method = IFCA(k=2)
    on = task(method)
    heard, records = set(), []
    for record in train(method, on.problem, engine_of("vmap", on), 30, participation=0.4):
        records.append(record)
        if heard == set(range(5)):
            break
        heard |= set(record.clients)
        models = len(record.server.theta)
        assert models == (2 if len(heard) == 5 else 1)
        assert (record.server.choice >= 0).tolist() == [i in heard for i in range(5)]
    assert len(records) > 2  # it did wait
    short = last(method, on, rounds=5, participation=0.2)  # a fifth of it is the first round
    assert len(short.server.theta) == 2
    assert len(short.server.changes) == 0


def test_more_models_than_clients_in_the_first_round_leave_some_at_the_start():
    method = IFCA(k=4)
    record = last(method, task(method), rounds=1)  # two of five take part
    assert record.server.theta.shape[0] == 4
    at_start = (record.server.theta == task(method).problem.start).all(1)
    assert int(at_start.sum()) == 2


def test_the_largest_drop_decides_the_number_of_groups():
    assert groups_by_gap([0.9, 0.8, 0.7, 0.1]) == 2
    assert groups_by_gap([0.9, 0.8, 0.75, 0.1, 0.05]) == 3
    assert groups_by_gap([0.3]) == 2  # two clients
    assert groups_by_gap([0.5, 0.4]) == 2  # three clients: no more than two groups


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30))
def test_the_number_of_groups_is_between_two_and_half_the_clients(levels):
    found = groups_by_gap(sorted(levels, reverse=True))
    assert 2 <= found <= max(2, (len(levels) + 1) // 2)
