"""FedAvg + Data."""

from dataclasses import replace

import pytest
import torch

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedavg_data import FedAvgData, Sent
from coterie.core.algorithm import Sharing
from coterie.data.simulation import form_pool
from coterie.training.rounds import train
from support import assert_close, engine_of, federation, last, one_client, task

FROM_CLIENTS, HELD_OUT = Sharing("from_clients", 0.2), Sharing("held_out", 0.2)
BOTH = [FROM_CLIENTS, HELD_OUT]


@pytest.mark.parametrize("sharing", BOTH)
def test_the_pool_is_of_training_data_only(sharing):
    parts = federation()
    pool = form_pool(parts, sharing, seed=0)
    assert len(pool.samples) > 0
    judged = torch.cat([*parts.val, *parts.test])
    assert not bool(torch.isin(pool.samples, judged).any())
    for sample, owner in zip(pool.samples, pool.owner, strict=True):
        assert sample in parts.train[owner]
    assert len(pool.samples.unique()) == len(pool.samples)


def test_every_client_gives_the_same_share():
    parts = federation()
    pool = form_pool(parts, FROM_CLIENTS, seed=0)
    given = torch.bincount(pool.owner, minlength=5).tolist()
    assert given == [6, 3, 5, 2, 8]  # a fifth of 31, 17, 24, 9, 40, rounded
    assert all(torch.equal(a, b) for a, b in zip(pool.train, parts.train, strict=True))


def test_a_held_out_pool_is_balanced_and_gone_from_its_owners():
    parts = federation()
    pool = form_pool(parts, HELD_OUT, seed=0)
    read = parts.relabel[pool.owner, parts.dataset.y[pool.samples]]
    assert torch.bincount(read, minlength=3).tolist() == [8, 8, 8]  # a fifth of 121 in thirds
    assert not bool(torch.isin(torch.cat(pool.train), pool.samples).any())
    assert len(torch.cat(pool.train)) == 121 - 24


def test_all_of_a_class_that_has_too_few():
    parts = federation()
    few = replace(parts.dataset, y=parts.dataset.y.clone())
    few.y[torch.cat(parts.train)[3:]] = 0
    plain = replace(parts, dataset=few, relabel=None)
    pool = form_pool(plain, Sharing("held_out", 0.3), seed=0)
    # 0.3 of 121 in thirds are 12 of each class; of the last two there are three samples in all
    counts = torch.bincount(few.y[pool.samples], minlength=3)
    assert (int(counts[0]), int(counts[1:].sum())) == (12, 3)


@pytest.mark.parametrize("kind", ["from_clients", "held_out"])
@pytest.mark.parametrize("merge", [True, False])
def test_everybody_trains_on_own_and_pool_once(kind, merge):
    method, parts = FedAvgData(share=0.2, pool=kind), federation()
    on = task(method, federated=parts, merge=merge)
    pool = form_pool(parts, method.traits.sharing, 0)
    for i in range(on.problem.population):
        client = one_client(on, i)
        (block,) = client.blocks("train")
        own = torch.cat([pool.train[i], parts.val[i]]) if merge else pool.train[i]
        others = pool.samples if kind == "held_out" else pool.samples[pool.owner != i]
        givers = pool.owner if kind == "held_out" else pool.owner[pool.owner != i]
        assert_close(block.x, on.shards.inputs(torch.cat([own, others])))
        y = parts.dataset.y
        read = torch.cat([parts.relabel[i][y[own]], parts.relabel[givers, y[others]]])
        assert torch.equal(block.y, read)  # as their owners read them
        assert int(client.size) == len(own) + len(others)
        assert int(client.own) == len(own)


def test_averages_count_only_what_is_a_clients_own():
    method = FedAvgData(share=0.2)
    on = task(method)
    server, _ = method.init(on.problem)
    uploads = [method.local(one_client(on, i), method_row(server), ())[0] for i in range(5)]
    assert [int(upload.size) for upload in uploads] == [37, 23, 30, 15, 46]  # with validation data


def method_row(server):
    return Sent(server.theta, ())


@pytest.mark.parametrize("kind", ["from_clients", "held_out"])
def test_the_pool_is_sent_once_to_everybody(kind):
    method = FedAvgData(share=0.2, pool=kind)
    on = task(method)
    owner = on.problem.pool.owner
    n = len(owner)
    a_sample = 36 * 4 + 8 + 8  # float32 pixels, the label, the giver
    a_model, met = on.problem.model.size * 8, set()
    for record in train(method, on.problem, engine_of("wire", on), 4, participation=0.5):
        new = [i for i in record.clients if i not in met]
        met |= set(new)
        lacking = sum(n if kind == "held_out" else n - int((owner == i).sum()) for i in new)
        assert record.traffic.down == len(record.clients) * a_model + lacking * a_sample
        assert record.traffic.up == len(record.clients) * (a_model + 8)
    assert len(met) > 2


def test_what_is_sent_are_the_samples():
    method = FedAvgData(share=0.2)
    on = task(method)
    server, _ = method.init(on.problem)
    pool = form_pool(on.federation, method.traits.sharing, 0)
    x = server.samples[:, : 36 * 4].contiguous().view(torch.float32).view(-1, 1, 6, 6)
    y = server.samples[:, 36 * 4 :].contiguous().view(torch.int64).flatten()
    data = on.federation.dataset
    assert torch.equal(x, data.x[pool.samples])
    assert torch.equal(y, on.federation.relabel[pool.owner, data.y[pool.samples]])


def test_sharing_helps_where_clients_lack_classes():
    """What the method is for: a client that never saw a class learns it from the pool."""
    parts = federation(groups=1)
    single = tuple(own[parts.dataset.y[own] == i % 3] for i, own in enumerate(parts.train))
    skewed = replace(parts, train=single, val=single)
    scores = {}
    for method in (FedAvg(), FedAvgData(share=0.3)):
        on = task(method, federated=skewed, merge=False)
        scores[type(method)] = last(method, on, rounds=5, participation=1.0).evaluation.test_loss
    assert scores[FedAvgData].mean() < scores[FedAvg].mean()
