"""What every method promises, on every engine: one table-driven test for all of them.

The laws are those of ``coterie.testing``, which anyone's method is checked with; that each of them
can fail is shown in ``test_testing.py``. Beside them are the laws of tracing and compiling, and
what shows that runs which must differ do.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.adapt import ADAPTATIONS, Adapted
from coterie.algorithms.pafl_ewc import PaFLEWC
from coterie.core import tree
from coterie.core.calls import WRITTEN
from coterie.core.optim import Recipe
from coterie.core.policies import governed
from coterie.engines.simulator import Simulator
from coterie.engines.vmap import VmapBackend
from coterie.testing import check_method
from coterie.training.rounds import train
from support import (
    METHODS,
    RECIPE,
    assert_close,
    backend_of,
    cnn,
    federation,
    last,
    mlp,
    normed,
    predictors,
    slower,
    task,
    whole_round,
    with_a_compiler,
)

NAMES = list(METHODS)
OF_MANY_MODELS = ("cfl", "fedem", "federico", "fedfomo", "fedfomo_ma", "ifca", "waffle")
NETWORKS = {"mlp": mlp, "cnn": cnn}
WITHOUT_PEERS = {"local"}
PLAIN = Recipe(lr=0.1, epochs=2, batch=10)  # no momentum: weights are moved in place
SOME_ALIKE = (17, 17, 17, 24, 31)  # three without padding but a short last batch, two with padding


def run_of(name, recipe=RECIPE, federated=None, **options):
    algorithm = METHODS[name]()
    on = task(algorithm, recipe=recipe, federated=federated, merge=False)
    return last(algorithm, on, **options)


@pytest.mark.parametrize("name", NAMES)
def test_every_law_holds(name):
    check_method(METHODS[name]())


@pytest.mark.parametrize("adaptation", ["fb", "kd", "ewc"])  # ft is among the methods
def test_every_law_holds_for_an_adapted_method(adaptation):
    check_method(Adapted(METHODS["fedavg"](), ADAPTATIONS[adaptation]()))


@pytest.mark.parametrize("name", NAMES)
def test_engines_agree_on_a_convolutional_network(name):
    check_method(METHODS[name](), laws=["engines"], network=cnn)


def assert_plays(algorithm, network=mlp, rounds=2, compiled=False, chunk=3):
    """Playing gives what the reference gives; the calls that are done otherwise."""
    on = task(algorithm, network, federation(SOME_ALIKE), PLAIN, merge=False)
    reference = last(algorithm, on, "loop", rounds, participation=1.0, evaluate_every=rounds)
    engine = VmapBackend(on.problem, on.shards, chunk=chunk, threads=2, compiled=compiled)
    *_, played = train(algorithm, on.problem, Simulator(engine), rounds, evaluate_every=rounds)
    assert_close(predictors(played).models, predictors(reference).models)
    assert_close(predictors(played).weights, predictors(reference).weights)
    for found, expected in zip(played.evaluation, reference.evaluation, strict=True):
        assert_close(torch.from_numpy(found), torch.from_numpy(expected))
    assert played.traffic == reference.traffic
    return slower(engine)


@pytest.mark.compiled
@pytest.mark.parametrize("name", NAMES)
def test_played_rounds_of_a_convolutional_network_agree(name):  # of a dense one: the law "replay"
    assert not assert_plays(METHODS[name](), cnn)


@pytest.mark.compiled
@pytest.mark.parametrize("name", OF_MANY_MODELS)
def test_played_rounds_of_one_client_and_one_model_at_a_time_agree(name):
    assert not assert_plays(METHODS[name](), chunk=1)


# Every compilation takes seconds: all methods with one network, some with the other.
OF_BOTH_NETWORKS = ("fedavg", "fedamp", "federico", "fedfomo", "fedper", "pafl", "waffle")
COMPILED = [
    pytest.param(
        name,
        network,
        marks=() if network == "mlp" or name in OF_BOTH_NETWORKS else pytest.mark.slow,
    )
    for name in NAMES
    for network in NETWORKS
]


@with_a_compiler
@pytest.mark.parametrize(("name", "network"), COMPILED)
def test_compiled_rounds_agree(name, network):
    assert not assert_plays(METHODS[name](), NETWORKS[network], compiled=True)


@pytest.mark.compiled
@pytest.mark.parametrize("adaptation", ["fb", "kd", "ewc"])  # ft is among the methods
def test_played_adaptations_agree(adaptation):
    assert not assert_plays(Adapted(METHODS["fedavg"](), ADAPTATIONS[adaptation]()))


def with_dropout():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def group_normed():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


RECIPES = {
    "adam": (mlp, replace(PLAIN, optimizer="adam", lr=0.01)),
    "kept": (mlp, replace(PLAIN, optimizer="adam", lr=0.01, optimizer_state="kept")),
    "steps": (mlp, replace(PLAIN, steps=5)),
    "clip": (mlp, replace(PLAIN, clip=0.5)),
    "balanced": (mlp, replace(PLAIN, class_weights="balanced")),
    "crop_flip": (cnn, replace(PLAIN, augment="crop_flip")),
    "dropout": (with_dropout, PLAIN),
    "group norm": (group_normed, PLAIN),
    "average": (normed, PLAIN),
    "local": (normed, replace(PLAIN, buffers="local")),
    "server": (normed, replace(PLAIN, buffers="server")),
}


def assert_trains(name, recipe, compiled=False):
    """Playing gives what the reference gives, and all is played; the player."""
    network, how = RECIPES[recipe]
    plain = METHODS[name]()
    on = task(plain, network, federation(SOME_ALIKE), how)
    algorithm = governed(plain, on.problem)
    loop, played = (
        backend_of("loop", on),
        VmapBackend(on.problem, on.shards, chunk=3, threads=2, compiled=compiled),
    )
    server, states = algorithm.init(on.problem)
    for index in range(2):
        round = whole_round(on, index)
        received = algorithm.download(server, round)
        found, expected = (e.local(algorithm, received, states, round) for e in (played, loop))
        for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
            assert_close(a, b)
        server, states = algorithm.aggregate(server, expected[0], round), expected[1]
    assert WRITTEN not in {form.way for form in played.forms}
    return slower(played)


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ditto", "scaffold", "fedfomo"])
def test_played_training_agrees_for_every_recipe(name, recipe):
    assert_trains(name, recipe)


@with_a_compiler
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_training_agrees_for_every_recipe(recipe):
    left = assert_trains("scaffold", recipe, compiled=True)
    assert bool(left) == (RECIPES[recipe][0] in (normed, group_normed))  # torch's are taken


@pytest.mark.compiled
@pytest.mark.parametrize(
    "algorithm",
    [PaFLEWC(lam=1.0, fisher_data="aggregate"), METHODS["pafl_kd"](), METHODS["feddbe"]()],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_played_rounds_follow_the_chapters_of_a_method(algorithm):
    assert not assert_plays(algorithm, rounds=5)
    keys = [algorithm.trace_key(index, 5) for index in range(5)]
    assert len(set(keys)) > 1
    assert METHODS["fedavg"]().trace_key(0, 5) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_rate_shows(name):
    usual = predictors(run_of(name)).models
    other = predictors(run_of(name, recipe=replace(RECIPE, lr=0.1001))).models
    assert (usual - other).abs().max() > 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_shows(name):
    algorithm = METHODS[name]()
    usual = predictors(last(algorithm, task(algorithm)))
    other = predictors(last(algorithm, task(algorithm, seed=1)))
    assert (usual.models - other.models).abs().max() > 1e-3


def keeps_state(name):
    algorithm = METHODS[name]()
    _, states = algorithm.init(task(algorithm).problem)
    return any(True for _ in tree.leaves(states))


@pytest.mark.parametrize("name", list(filter(keeps_state, NAMES)))
def test_a_lost_state_shows(name):
    algorithm = METHODS[name]()
    on = task(algorithm)
    engine = backend_of("loop", on)
    server, fresh = algorithm.init(on.problem)
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
