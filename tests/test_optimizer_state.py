"""Optimiser states that live on between rounds: ``train.optimizer_state = "kept"``."""

import json
from dataclasses import dataclass, replace
from types import FunctionType

import pytest
import torch

import coterie
from coterie.adapt import Adapted, FineTune
from coterie.algorithms.fedavg import FedAvg, Update
from coterie.algorithms.federico import FedeRiCo
from coterie.algorithms.local import Local
from coterie.core import tree
from coterie.core.algorithm import Algorithm
from coterie.core.optim import AdamState, OptimizerStates, Recipe
from coterie.core.policies import Apart, KeptOptimizers, governed
from coterie.deploy.peer_part import OwnPart
from coterie.errors import ConfigError, EngineError
from coterie.training.guard import Guard
from coterie.training.rounds import Begin, train
from hostile import StopError
from support import (
    METHODS,
    assert_close,
    engine_of,
    federation,
    last,
    normed,
    one_client,
    predictors,
    task,
)

ADAM = Recipe(optimizer="adam", lr=0.01, epochs=1, batch=10)
HEAVY = Recipe(lr=0.05, epochs=1, batch=10, momentum=0.9)
KEPT = replace(ADAM, optimizer_state="kept")
NAMES = [name for name in METHODS if name != "pfedme"]  # it is refused
ENGINES = ("loop", "vmap")
EVERYBODY = 1.0
CODE = (FunctionType, property)
SEPARATE = Local(keep="last")


def rounds_of(method, recipe=KEPT, engine="loop", rounds=3, participation=EVERYBODY, **options):
    on = task(method, recipe=recipe, merge=False, **options)
    made = engine_of(engine, on)
    for record in train(method, on.problem, made, rounds, participation=participation):
        yield record, on


def models_of(method, recipe=KEPT, engine="loop", rounds=3, participation=EVERYBODY, **options):
    on = task(method, recipe=recipe, merge=False, **options)
    found = last(method, on, engine, rounds, participation=participation)
    return predictors(found).models


def uninterrupted(on, client, rounds, optimizer):
    """One client's batches of all rounds with one optimiser of torch."""
    w = on.problem.start.clone().requires_grad_()
    rule = optimizer([w])
    for index in range(rounds):
        here = one_client(on, client, index)
        for number in range(int(here.steps)):
            rule.zero_grad()
            here.loss(w, here.batch(number)).backward()
            rule.step()
    return w.detach()


@pytest.mark.parametrize(
    ("recipe", "rule"),
    [
        (ADAM, lambda w: torch.optim.Adam(w, lr=0.01)),
        (HEAVY, lambda w: torch.optim.SGD(w, lr=0.05, momentum=0.9)),
    ],
    ids=["adam", "momentum"],
)
def test_training_alone_is_one_uninterrupted_run_of_torchs_optimiser(recipe, rule):
    kept = models_of(SEPARATE, replace(recipe, optimizer_state="kept"))[:, 0]
    anew = models_of(SEPARATE, recipe)[:, 0]
    on = task(SEPARATE, recipe=recipe, merge=False)
    expected = torch.stack([uninterrupted(on, i, 3, rule) for i in range(5)])
    assert_close(kept, expected)
    assert (anew - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_every_method_keeps_its_optimisers_on_every_engine(name):
    method = METHODS[name]()
    few = {"rounds": 3, "federated": federation((12, 17, 9))}
    loop, vmap = ([r for r, _ in rounds_of(method, engine=e, **few)][-1] for e in ENGINES)
    assert_close(predictors(vmap).models, predictors(loop).models)
    for found, expected in zip(*(tree.leaves(r.states) for r in (vmap, loop)), strict=True):
        assert_close(found, expected)
    assert (loop.states.optimizers.steps > 0).all()


@pytest.mark.parametrize("name", ["federico", "fedavg_ft"])
def test_processes_agree_and_send_no_optimiser(name):
    method = METHODS[name]()
    on, anew = (task(method, recipe=recipe, merge=False) for recipe in (KEPT, ADAM))
    there, here = (last(method, on, engine, 2) for engine in ("wire", "loop"))
    assert torch.equal(predictors(there).models, predictors(here).models)
    assert here.traffic[:2] == there.traffic[:2] == last(method, anew, "loop", 2).traffic[:2]


def test_statistics_of_batch_norm_may_be_kept_too():
    recipe = replace(KEPT, buffers="local")
    on = task(FedAvg(), normed, federation((24, 24, 31)), recipe)
    runs = [last(FedAvg(), on, engine, 2, participation=1.0) for engine in ("loop", "vmap", "wire")]
    for other in runs[1:]:
        assert_close(predictors(other).models, predictors(runs[0]).models)
    assert governed(governed(FedAvg(), on.problem), on.problem) == governed(FedAvg(), on.problem)


# ---- what a client keeps -----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_an_absent_client_keeps_its_state_and_steps_are_counted(engine):
    steps, before = torch.zeros(5, dtype=torch.float64), None
    for record, on in rounds_of(FedAvg(), engine=engine, rounds=4, participation=0.5):
        for i in record.clients:
            steps[i] += one_client(on, i).steps
        state = record.states.optimizers
        assert torch.equal(state.steps[:, 0], steps)
        if before is not None:
            absent = [i for i in range(5) if i not in record.clients]
            assert torch.equal(state.square[absent], before.square[absent])
            assert (state.square != before.square).any()
        before = tree.map_leaves(torch.clone, state)


@dataclass(frozen=True)
class Broken(FedAvg):
    """Its third client sends a model that is not a number in the second round."""

    def local(self, client, received, state):
        update, kept = FedAvg.local(self, client, received, state)
        if client.round == 1 and int(client.id) == 2:
            update = Update(update.w * torch.nan, update.size)
        return update, kept


def test_a_rejected_client_keeps_its_old_state():
    states = [
        tree.map_leaves(torch.clone, record.states.optimizers)
        for record, _ in rounds_of(Broken(), rounds=2)
    ]
    changed = [not torch.equal(*(state.mean[i] for state in states)) for i in range(5)]
    assert changed == [True, True, False, True, True]


@pytest.mark.parametrize("name", ["fedem", "federico"])
def test_a_run_goes_on_with_the_states_of_its_snapshot(name):
    method = METHODS[name]()
    on = task(method, recipe=KEPT, merge=False)
    whole = last(method, on, "loop", 4)
    made = train(method, on.problem, engine_of("loop", on), 4, participation=0.5)
    next(made)
    half = next(made)
    begin = Begin(2, half.server, tree.map_leaves(torch.clone, half.states), half.accepted)
    rest = train(method, on.problem, engine_of("loop", on), 4, participation=0.5, begin=begin)
    *_, end = rest
    assert torch.equal(predictors(end).models, predictors(whole).models)


def test_a_stopped_run_is_resumed_to_the_same_digest(tmp_path):
    config = {
        "data": {"name": "digits"},
        "partition": {"name": "concept_shift", "clients": 4, "groups": 2},
        "model": {"name": "linear"},
        "train": {"batch": 50, "optimizer": "adam", "lr": 0.01, "optimizer_state": "kept"},
        "engine": {"name": "loop"},
        "run": {"rounds": 3, "checkpoint_every": 1, "participation": 0.5},
    }

    def stop(step):
        if step.done == 2:
            raise StopError

    def digest(folder):
        return json.loads((folder / "summary.json").read_text())["digest"]

    coterie.run(config, method="fedfomo", out=str(tmp_path / "whole"))
    with pytest.raises(StopError):
        coterie.run(config, method="fedfomo", out=str(tmp_path / "cut"), progress=stop)
    coterie.resume(str(tmp_path / "cut"))
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


def test_one_client_alone_is_the_same_under_every_method_that_averages():
    one = federation((31,))
    alone = models_of(SEPARATE, federated=one)
    for name in ("fedavg", "cfl", "ifca", "fedper"):
        assert_close(models_of(METHODS[name](), federated=one)[:, -1], alone[:, 0])


def test_federico_without_peers_is_training_alone():
    method = FedeRiCo(downloads=0, start="common")
    assert_close(models_of(method)[:, 0], models_of(SEPARATE)[:, 0])


def test_federicos_clients_keep_the_mean_of_their_models_states():
    method = FedeRiCo(downloads=4, loss_reduction="mean")
    (record, on), *_ = rounds_of(method, rounds=1)
    server, begun = governed(method, on.problem).init(on.problem)
    for i in range(5):
        ends = []
        for w in server.models:
            copy = OptimizerStates(tree.row(begun.optimizers, i))
            one_client(on, i).continuing(copy).train(w)
            ends.append(copy.after())
        p = record.states.method.weights[i]
        assert p.max() < 0.9
        for found, *parts in zip(
            tree.leaves(tree.row(record.states.optimizers, i)), *map(tree.leaves, ends), strict=True
        ):
            assert_close(found, sum(share * part for share, part in zip(p, parts, strict=True)))


def test_fedem_keeps_a_state_of_every_component():
    method = METHODS["fedem"]()
    *_, (record, on) = rounds_of(method, rounds=2)
    state = record.states.optimizers
    assert state.mean.shape == (5, method.components, on.problem.model.parameters)
    assert (state.mean[:, 0] != state.mean[:, 1]).any(1).all()


def test_an_adaptation_begins_anew():
    method = Adapted(FedAvg(), FineTune())
    *_, (record, on) = rounds_of(method, rounds=2)
    for i in range(5):
        expected = one_client(on, i, 2).train(record.server.method)
        assert_close(predictors(record).models[i, 0], expected)


# ---- the states of models side by side ---------------------------------------------------------


def states(count):
    zero = torch.zeros(count, 2)
    return AdamState(torch.arange(count), zero, zero)


def ends(*rows):
    mean = torch.tensor(rows)
    return AdamState(torch.ones(len(rows)), mean, mean)


def test_models_side_by_side_have_a_state_each_or_a_weighted_mean():
    three = OptimizerStates(states(3))
    three.beside(ends([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]), 3, None)
    assert three.after().mean.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    one = OptimizerStates(states(1))
    bad = [torch.nan, torch.inf]
    one.beside(ends([1.0, 2.0], bad, [5.0, 6.0]), 3, torch.tensor([0.25, 0.0, 0.75]))
    assert one.after().mean.tolist() == [[4.0, 5.0]]
    unused = OptimizerStates(states(1))
    unused.beside(ends([1.0, 2.0], bad), 2, torch.zeros(2))
    assert unused.after().mean.tolist() == [[1.0, 2.0]]


def test_a_state_that_was_not_used_is_unchanged():
    kept = OptimizerStates(states(2))
    assert kept.begin().steps == 0
    kept.end(AdamState(torch.tensor(7), torch.ones(2), torch.ones(2)))
    assert kept.after().steps.tolist() == [7, 1]


# ---- what is refused ---------------------------------------------------------------------------


def test_an_optimiser_of_a_single_minibatch_cannot_live_on():
    with pytest.raises(ConfigError, match=r"pfedme.*every minibatch; use optimizer_state"):
        models_of(METHODS["pfedme"]())
    models_of(METHODS["pfedme"](), replace(HEAVY, momentum=0.0, optimizer_state="kept"), rounds=1)


def test_peers_begin_anew():
    method = FedeRiCo()
    on = task(method, recipe=KEPT)
    with pytest.raises(ConfigError, match=r"among peers.*use optimizer_state = 'round'"):
        OwnPart(on.problem, on.shards, method, 0, Guard())
    OwnPart(on.problem, on.shards, FedeRiCo(step="gradient"), 0, Guard())


@dataclass(frozen=True)
class Twice(FedAvg):
    """Trains twice and declares one optimiser."""

    def local(self, client, received, state):
        return Update(client.train(client.train(received)), client.size), ()


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """Takes one step and does not give the state back."""

    def local(self, client, received, state):
        batch = client.batch(0)
        g = client.gradient(received, batch)
        return Update(client.step(received, g, client.begin(received), batch)[0], client.size), ()


@dataclass(frozen=True)
class Crowd(FedAvg):
    """Trains three models side by side and declares one optimiser."""

    def local(self, client, received, state):
        trained = client.map(client.train, received.expand(3, -1))
        return Update(trained.mean(0), client.size), ()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Twice(), r"more trainings than the 1 that optimizers\(\).*'round'"),
        (Forgetful(), r"began 1 with client\.begin\(\) and gave 0 back.*client\.end\(state\)"),
        (Crowd(), r"trains 3 models side by side.*declares 1.*shares"),
    ],
)
def test_a_method_that_loses_states_is_refused(method, said, engine):
    with pytest.raises(EngineError, match=said):
        models_of(method, engine=engine, rounds=1)
    models_of(method, ADAM, engine, rounds=1)


def test_a_wrapper_is_added_only_where_a_state_lives_on():
    for recipe, wrapped in ((ADAM, False), (KEPT, True)):
        on = task(FedAvg(), recipe=recipe)
        assert isinstance(governed(FedAvg(), on.problem), KeptOptimizers) == wrapped
    assert not isinstance(governed(FedeRiCo(step="gradient"), on.problem), KeptOptimizers)


@pytest.mark.parametrize("wrapper", [KeptOptimizers, Apart, Adapted])
def test_a_wrapper_forwards_every_function_of_a_method(wrapper):
    """One that is forgotten would be the base class's, which says nothing of the method."""
    names = {name for name, value in vars(Algorithm).items() if isinstance(value, CODE)}
    public = {name for name in names if not name.startswith("_")}
    assert {n for n in public if getattr(wrapper, n) is getattr(Algorithm, n)} == set()
