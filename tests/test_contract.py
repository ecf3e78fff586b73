"""What every method promises, on every engine: one table-driven test for all of them.

Each law comes with a sensitivity check that shows the comparison can fail.
"""

from dataclasses import replace

import pytest
import torch

from coterie import tree
from coterie.engines import make_engine
from coterie.run import run
from support import (
    METHODS,
    RECIPE,
    assert_close,
    cnn,
    federation,
    last,
    mlp,
    predictors,
    task,
    whole_round,
)

NAMES = list(METHODS)
NETWORKS = {"mlp": mlp, "cnn": cnn}
WITHOUT_PEERS = {"local"}


def run_of(name, engine="vmap", network="mlp", recipe=RECIPE, federated=None, **options):
    algorithm = METHODS[name]()
    on = task(algorithm, NETWORKS[network], recipe=recipe, federated=federated)
    return last(algorithm, on, engine, **options)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", NAMES)
def test_engines_agree(name, network):
    reference = run_of(name, "loop", network)
    for engine, chunk in (("vmap", 2), ("vmap", 5), ("wire", None)):
        other = run_of(name, engine, network, chunk=chunk)
        assert_close(predictors(other).models, predictors(reference).models)
        assert_close(predictors(other).weights, predictors(reference).weights)
        for found, expected in zip(other.evaluation, reference.evaluation, strict=True):
            assert_close(torch.from_numpy(found), torch.from_numpy(expected))
        assert other.traffic == reference.traffic
        assert other.clients == reference.clients


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_rate_shows(name):
    usual = predictors(run_of(name)).models
    other = predictors(run_of(name, recipe=replace(RECIPE, lr=0.1001))).models
    assert (usual - other).abs().max() > 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_bits(name):
    first, second = predictors(run_of(name)), predictors(run_of(name))
    assert torch.equal(first.models, second.models)
    assert torch.equal(first.weights, second.weights)


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_shows(name):
    algorithm = METHODS[name]()
    usual = predictors(last(algorithm, task(algorithm)))
    other = predictors(last(algorithm, task(algorithm, seed=1)))
    assert (usual.models - other.models).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_evaluating_more_often_changes_nothing(name):
    often = predictors(run_of(name, rounds=4, evaluate_every=1))
    once = predictors(run_of(name, rounds=4, evaluate_every=4))
    assert torch.equal(often.models, once.models)


@pytest.mark.parametrize("name", NAMES)
def test_listing_clients_in_another_order_changes_nothing(name):
    order = [3, 0, 4, 2, 1]
    usual = predictors(run_of(name, "loop"))
    listed = predictors(run_of(name, "loop", federated=federation(order=order)))
    assert_close(listed.models, usual.models[order])
    assert_close(listed.weights, usual.weights[order])


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_unchanged(name):
    algorithm = METHODS[name]()
    on = task(algorithm)
    engine = make_engine("loop", on)
    server, states = algorithm.init(on)
    for index in range(2):
        round = whole_round(on, index)
        held = (server, states, round.clients)
        before = tree.map_leaves(torch.clone, held)
        received = algorithm.download(server, round)
        message = tree.map_leaves(torch.clone, received)
        uploads, after = engine.local(algorithm, received, states, round)
        sent = tree.map_leaves(torch.clone, uploads)
        new = algorithm.aggregate(server, uploads, round)
        algorithm.collaboration(server, states, round)
        engine.predict(algorithm, algorithm.serve(server, round), states, round, "accuracy")
        for now, then in ((held, before), (received, message), (uploads, sent)):
            for a, b in zip(tree.leaves(now), tree.leaves(then), strict=True):
                assert torch.equal(a, b)
        server, states = new, after


@pytest.mark.parametrize("name", NAMES)
def test_absent_clients_keep_their_state(name):
    algorithm = METHODS[name]()
    on = task(algorithm)
    _, states = algorithm.init(on)
    before = tree.map_leaves(torch.clone, states)
    for record in run(algorithm, on, make_engine("vmap", on), 4, participation=0.5):
        here = set(record.clients)  # everybody, for some methods
        absent = torch.tensor([i not in here for i in range(on.population)])
        for now, then in zip(tree.leaves(record.states), tree.leaves(before), strict=True):
            assert torch.equal(now[absent], then[absent])
        before = tree.map_leaves(torch.clone, record.states)


def keeps_state(name):
    algorithm = METHODS[name]()
    _, states = algorithm.init(task(algorithm))
    return any(True for _ in tree.leaves(states))


@pytest.mark.parametrize("name", list(filter(keeps_state, NAMES)))
def test_a_lost_state_shows(name):
    algorithm = METHODS[name]()
    on = task(algorithm)
    engine = make_engine("loop", on)
    server, fresh = algorithm.init(on)
    states = fresh
    for index in range(2):
        round = whole_round(on, index)
        received = algorithm.download(server, round)
        uploads, states = engine.local(algorithm, received, states, round)
        server = algorithm.aggregate(server, uploads, round)
    round = whole_round(on, 2)

    def seen_from(states):
        served = algorithm.serve(server, round)
        worked = engine.local(algorithm, algorithm.download(server, round), states, round)
        return worked, engine.predict(algorithm, served, states, round, "accuracy")[1]

    pairs = zip(tree.leaves(seen_from(states)), tree.leaves(seen_from(fresh)), strict=True)
    assert any(not torch.equal(kept, lost) for kept, lost in pairs)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in WITHOUT_PEERS])
def test_removed_peers_show(name):
    together = predictors(run_of(name, participation=1.0)).models[:1]
    alone = federation(sizes=(31,))
    apart = predictors(run_of(name, participation=1.0, federated=alone)).models
    assert (together - apart).abs().max() > 1e-3
