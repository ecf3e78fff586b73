"""LG-FedAvg, FedPer, FedRep: which part of a model travels, which stays, which trains when."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.adapt.ft import top_layer
from coterie.algorithms.fedbabu import FedBABU
from coterie.algorithms.fedper import FedPer
from coterie.algorithms.fedrep import FedRep
from coterie.algorithms.lgfedavg import LGFedAvg, parts
from coterie.core.flat import FlatModel
from coterie.data.federation import Dataset
from coterie.networks.registry import factory
from support import (
    RECIPE,
    assert_close,
    backend_of,
    last,
    mlp,
    one_client,
    predictors,
    task,
    whole_round,
)

BODY, HEAD = 36 * 8 + 8, 8 * 3 + 3  # the two layers of support.mlp


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    )


def test_parts_cover_the_vector_once_and_join_to_it():
    model = FlatModel(normed())
    w = torch.arange(model.size)
    for layers in (0, 1, 2, 3, 9, ("4",), ("2", "1")):
        at = parts(model, layers)
        assert torch.equal(torch.cat([at.upper, at.lower]).sort().values, w)
        assert torch.equal(at.join(w[at.upper], w[at.lower]), w)


def test_the_last_layer_is_the_one_next_to_the_output():
    assert parts(FlatModel(mlp()), 1).upper.tolist() == list(range(BODY, BODY + HEAD))


def test_batch_norm_statistics_go_with_their_layer():
    model = FlatModel(normed())
    norm = parts(model, ("2",)).upper
    assert len(norm) == 4 * 8  # scale, shift, mean, variance
    assert (norm >= model.parameters).sum() == 2 * 8


@pytest.mark.parametrize(
    ("method", "travels"),
    [(LGFedAvg(), HEAD), (FedPer(), BODY), (FedRep(), BODY), (FedPer(head=("3",)), BODY)],
)
def test_only_the_shared_part_travels(method, travels):
    on = task(method)
    engine = backend_of("vmap", on)
    server, states = method.init(on.problem)
    round = whole_round(on)
    received = method.download(server, round)
    uploads, after = engine.local(method, received, states, round)
    assert received.shape == uploads.w.shape == (on.problem.population, travels)
    assert next(iter(after)).shape == (on.problem.population, BODY + HEAD - travels)


@pytest.mark.parametrize(("method", "shared"), [(LGFedAvg(), "upper"), (FedPer(), "lower")])
def test_predictors_share_the_shared_part_and_differ_in_the_rest(method, shared):
    on = task(method)
    at = parts(on.problem.model, 1)
    models = predictors(last(method, on, participation=1.0)).models[:, 0]
    same = models[:, getattr(at, shared)]
    own = models[:, at.lower if shared == "upper" else at.upper]
    assert_close(same, same[:1].expand_as(same), 0)
    assert (own[0] - own[1]).abs().max() > 1e-3


# ---- FedRep's two phases ---------------------------------------------------------------------


def fedrep_round(**epochs):
    method = FedRep(**epochs)
    on = task(method)
    base, heads = method.init(on.problem)
    update, head = method.local(one_client(on, 0), base, type(heads)(heads.w[0]))
    return base, heads.w[0], update.w, head.w


def test_the_head_phase_leaves_the_base_alone_and_the_base_phase_the_head():
    base, head, base1, head1 = fedrep_round(head_epochs=3, base_epochs=0)
    assert torch.equal(base, base1)
    assert (head - head1).abs().max() > 1e-3
    _, _, base2, head2 = fedrep_round(head_epochs=3, base_epochs=2)
    assert torch.equal(head1, head2)
    assert (base1 - base2).abs().max() > 1e-3


def test_fedrep_equals_two_torch_optimisers():
    method = FedRep(head_epochs=2, base_epochs=1)
    on = task(method)
    base, heads = method.init(on.problem)
    update, head = method.local(one_client(on, 0), base, type(heads)(heads.w[0]))

    module = mlp().double()
    vector = on.problem.start.clone()
    for p in module.parameters():
        p.data, vector = vector[: p.numel()].view(p.shape).clone(), vector[p.numel() :]
    client = one_client(on, 0)
    phases = (
        (module[3], client.tuned(epochs=2, batches="head")),
        (module[1], client.tuned(epochs=1)),
    )
    for layer, clock in phases:
        rule = torch.optim.SGD(layer.parameters(), RECIPE.lr, RECIPE.momentum, weight_decay=1e-3)
        for number in range(int(clock.steps)):
            batch = clock.batch(number)
            module.zero_grad()
            nn.functional.cross_entropy(module(batch.x), batch.y).backward()
            rule.step()
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    assert_close(torch.cat([update.w, head.w]), flat, 1e-10)


def test_the_recipe_s_epochs_do_not_reach_fedrep():
    method = FedRep()
    usual = predictors(last(method, task(method))).models
    longer = predictors(last(method, task(method, recipe=replace(RECIPE, epochs=5)))).models
    assert torch.equal(usual, longer)


# ---- FedBABU ---------------------------------------------------------------------------------


def test_fedbabu_trains_the_body_alone_and_predicts_with_the_whole_network_fine_tuned():
    method = FedBABU(tune_epochs=2)
    on = task(method)
    record = last(method, on, participation=1.0)
    theta, start = record.server.theta, on.problem.start
    assert torch.equal(theta[BODY:], start[BODY:])
    assert (theta[:BODY] - start[:BODY]).abs().max() > 1e-3
    found = predictors(record).models[:, 0]
    for i in range(on.problem.population):
        assert_close(found[i], one_client(on, i, 3).tuned(epochs=2).train(theta))


def bare() -> nn.Module:
    """A head that is nothing but a tied weight."""
    module = nn.Sequential(
        nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 6, False)
    )
    module[3].weight = module[0].weight
    return module


def test_a_tied_head_is_found_by_module():
    network = FlatModel(factory("word_lstm", tokens())())
    at = parts(network, 1)
    assert len(at.upper) == 50 * 200 + 50
    assert torch.equal(at.upper, parts(network, ("head",)).upper)
    assert torch.equal(at.upper, network.positions([top_layer(network)]))
    assert network.layers() == ["lstm.0", "lstm.1", "head"]
    assert len(parts(FlatModel(bare()), 1).upper) == 24
    assert top_layer(FlatModel(bare())) == "3"


def tokens() -> Dataset:
    x = torch.arange(50).repeat(2)[:60].view(6, 10)
    return Dataset("words", x, torch.arange(6), 50)
