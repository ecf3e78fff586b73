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
    engine_of,
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
OF_BOTH_NETWORKS = ("fedavg", "fedamp", "federico", "fedfomo", "fedper", "pafl", "waffle")
NETWORKS = {"mlp": mlp, "cnn": cnn}
WITHOUT_PEERS = {"local"}
PLAIN = Recipe(lr=0.1, batch=10)  # no momentum: weights are moved in place
# Three without padding but with a short last batch; two with padding, one with a batch of one.
SOME_ALIKE = (12, 12, 12, 15, 21)


@pytest.mark.parametrize("name", NAMES)
def test_every_law_holds(name):
    check_method(METHODS[name]())


@pytest.mark.parametrize("adaptation", ["fb", "kd", "ewc"])  # ft is among the methods
def test_every_law_holds_for_an_adapted_method(adaptation):
    check_method(Adapted(METHODS["fedavg"](), ADAPTATIONS[adaptation]()))


@pytest.mark.parametrize("name", OF_BOTH_NETWORKS)  # of all others: replayed rounds, below
def test_engines_agree_on_a_convolutional_network(name):
    check_method(METHODS[name](), laws=["engines"], network=cnn)


def assert_plays(algorithm, network=mlp, rounds=2, compiled=False, chunk=5):
    """Playing gives what the reference gives; the calls that are done otherwise.

    Every chunk of another form is traced and compiled anew: five clients are one chunk, with
    padding; three are one without.
    """
    on = task(algorithm, network, federation(SOME_ALIKE), PLAIN, merge=False)
    reference = last(algorithm, on, "loop", rounds, participation=1.0, evaluate_every=rounds)
    engine = VmapBackend(on.problem, on.shards, chunk=chunk, threads=1, compiled=compiled)
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
    chunk = 3 if name in OF_BOTH_NETWORKS else 5
    assert not assert_plays(METHODS[name](), NETWORKS[network], compiled=True, chunk=chunk)


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
        VmapBackend(
            on.problem, on.shards, chunk=5 if compiled else 3, threads=1, compiled=compiled
        ),
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
@pytest.mark.parametrize("name", ["ditto", "scaffold", "fedfomo"])
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
def test_a_run_follows_its_rate_seed_and_peers_and_leaves_records_alone(name):
    algorithm = METHODS[name]()

    def models(participation=1.0, **options):
        on, kept = task(algorithm, merge=False, **options), []
        told = {"participation": participation, "evaluate_every": 3}
        for record in train(algorithm, on.problem, engine_of("vmap", on), 3, **told):
            kept.append((record.server, tree.map_leaves(torch.clone, record.server)))
        for now, then in kept:  # whatever later rounds write
            assert all(map(torch.equal, tree.leaves(now), tree.leaves(then)))
        return predictors(record).models[:, 0]

    usual = models()
    assert (usual - models(recipe=replace(RECIPE, lr=0.1001))).abs().max() > 1e-6
    assert (usual - models(seed=1)).abs().max() > 1e-3
    if name not in WITHOUT_PEERS:
        assert (usual[:1] - models(federated=federation(sizes=(31,)))).abs().max() > 1e-3
    models(participation=0.5)


def keeps_state(name):
    algorithm = METHODS[name]()
    _, states = algorithm.init(task(algorithm).problem)
    return any(True for _ in tree.leaves(states))


@pytest.mark.parametrize("name", list(filter(keeps_state, NAMES)))
def test_a_lost_state_shows(name):
    algorithm = METHODS[name]()
    on = task(algorithm)
    engine, (server, fresh) = backend_of("vmap", on), algorithm.init(on.problem)
    round = whole_round(on)
    uploads, states = engine.local(algorithm, algorithm.download(server, round), fresh, round)
    server, round = algorithm.aggregate(server, uploads, round), whole_round(on, 1)

    def seen_from(states):
        served = algorithm.serve(server, round)
        worked = engine.local(algorithm, algorithm.download(server, round), states, round)
        return worked, engine.predict(algorithm, served, states, round, "accuracy")[1]

    pairs = zip(tree.leaves(seen_from(states)), tree.leaves(seen_from(fresh)), strict=True)
    assert any(not torch.equal(kept, lost) for kept, lost in pairs)
