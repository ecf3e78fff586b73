"""How a client that was not there joins a finished run: the rule of every method."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from coterie.adapt import Adapted
from coterie.algorithms import ALGORITHMS
from coterie.algorithms.newcomers import REFUSALS, RULES, Finals, join_rule
from coterie.core.algorithm import Algorithm, GlobalModel, round_of
from coterie.core.optim import Recipe
from coterie.errors import ConfigError
from support import METHODS, federation, last, one_client, predictors, task

SIZES = (40, 36, 44, 38, 42, 40)  # two groups of three: even and odd clients
RECIPE = Recipe(lr=0.2, epochs=3, batch=10)
MIXING = ("fedfomo", "fedfomo_ma", "federico", "fedamp", "heurfedamp", "ifca", "circle", "fedem")


def simulation(method):
    return task(METHODS[method](), federated=federation(SIZES), recipe=RECIPE, merge=False)


@cache
def finished(method, rounds=6):
    """A simulation, and what a finished run of a method keeps."""
    on = simulation(method)
    record = last(METHODS[method](), on, rounds=rounds, participation=1.0)
    return on, finals_of(on, *predictors(record))


def finals_of(on, weights, models):
    after = round_of(on.problem, 10, 11, torch.arange(1))
    return Finals(weights, models, on.problem.sizes, on.problem.start, after)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_rule_or_a_reason_of_its_own(method):
    """A new method must say how a newcomer joins it, or why nobody can."""
    algorithm = METHODS[method]()
    kinds = {*RULES, *REFUSALS} & {*type(algorithm).__mro__}
    assert kinds
    if not {*RULES} & kinds:
        with pytest.raises(ConfigError, match="nobody can join") as refused:
            join_rule(algorithm)
        assert "expected a run of fedavg" in str(refused.value)
        assert "no rule for a client" not in str(refused.value)


def test_the_methods_that_a_refusal_names_have_a_rule():
    told = "fedavg, fedfomo, federico, fedamp, heurfedamp, ifca, cfl, circle, fedem"
    with pytest.raises(ConfigError, match=told):
        join_rule(METHODS["local"]())
    for method in told.split(", "):
        join_rule(METHODS[method]())


def test_a_method_of_ones_own_with_a_global_model_can_be_joined():
    """And another one is refused in general terms."""
    mine = type("Mine", (ALGORITHMS["fedavg"],), {})()
    assert isinstance(mine, GlobalModel)
    on, finals = finished("fedavg", 1)
    assert join_rule(mine)(mine, one_client(on, 0), finals).weights is None
    other = type("Other", (Algorithm,), dict.fromkeys(Algorithm.__abstractmethods__))()
    with pytest.raises(ConfigError, match="no rule for a client that joins later"):
        join_rule(other)
    with pytest.raises(ConfigError, match="after the adaptation"):
        join_rule(METHODS["fedavg_ft"]())
    assert Adapted in REFUSALS


@pytest.mark.parametrize("method", MIXING)
def test_a_copy_of_a_client_gets_that_clients_group_as_its_collaborators(method):
    """Clients of the other group read the labels otherwise: each of them gets less weight."""
    algorithm = METHODS[method]()
    on, finals = finished(method)
    for client in (0, 3):
        joined = join_rule(algorithm)(algorithm, one_client(on, client, 10), finals)
        assert joined.weights is not None
        weights = joined.weights.to(torch.float64)
        if ALGORITHMS[method]().traits.models_change_hands:  # a model may end in the other group
            best = int(weights.argmax())
            assert one_client(on, client).error(finals.own[best], "val") < 0.3
            continue
        mine = torch.arange(len(SIZES)) % 2 == client % 2
        assert float(weights[mine].min()) > float(weights[~mine].max()), weights
        assert float(weights[mine].sum() / weights.sum()) > 0.7, weights


@pytest.mark.parametrize("method", ["fedfomo", "fedamp", "heurfedamp"])
def test_the_parts_of_a_newcomers_model_make_that_model(method):
    """Without training of its own; what no client's model is part of is the common start."""
    algorithm = METHODS[method]()
    _, finals = finished(method)
    still = task(algorithm, federated=federation(SIZES), recipe=replace(RECIPE, lr=1e-30))
    joined = join_rule(algorithm)(algorithm, one_client(still, 0, 10), finals)
    start = 1.0 - float(joined.parts.sum())
    made = joined.parts.to(finals.own.dtype) @ finals.own + start * finals.start
    torch.testing.assert_close(joined.predictor.models[0], made, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["fedfomo", "federico", "ifca", "cfl", "circle"])
def test_with_all_weight_on_one_model_the_newcomer_gets_that_model(method):
    """One client has a good model; the others have the untrained start or nonsense."""
    algorithm = METHODS[method]()
    on, finals = finished("local")
    models = finals.models.clone()
    models[1:] = on.problem.start if method == "fedfomo" else 50 * models[1:].roll(3, -1)
    joined = join_rule(algorithm)(algorithm, one_client(on, 0, 10), finals._replace(models=models))
    torch.testing.assert_close(joined.predictor.models[0], models[0, 0], rtol=0, atol=1e-12)
    assert joined.predictor.weights.tolist() == [1.0]
    assert float(joined.weights[0]) == 1.0
    assert float(joined.weights[1:].sum()) == pytest.approx(0.0, abs=1e-12)


def test_the_average_of_a_global_method_is_joined_unchanged():
    algorithm = METHODS["fedavg"]()
    on, finals = finished("fedavg", 2)
    joined = join_rule(algorithm)(algorithm, one_client(on, 2, 10), finals)
    assert joined.weights is None
    assert torch.equal(joined.predictor.models[0], finals.own[0])
    apart = finals.models.clone()  # batch-norm statistics of their own
    apart[:, :, -1] = torch.arange(len(SIZES), dtype=apart.dtype)[:, None]
    joined = join_rule(algorithm)(algorithm, one_client(on, 2, 10), finals._replace(models=apart))
    assert 0 < float(joined.predictor.models[0, -1]) < len(SIZES) - 1


def test_if_no_model_helps_fedfomo_begins_at_the_start():
    algorithm = METHODS["fedfomo"]()
    on, finals = finished("local")
    bad = finals._replace(models=30 * finals.models.roll(5, -1))
    joined = join_rule(algorithm)(algorithm, one_client(on, 0, 10), bad)
    assert float(joined.weights.sum()) == 0
    assert torch.equal(joined.predictor.models[0], on.problem.start)


def test_scaffold_with_own_predictors_is_refused():
    algorithm = ALGORITHMS["scaffold"](predict_with="local")
    on, finals = finished("local", 1)
    with pytest.raises(ConfigError, match="personal models"):
        join_rule(algorithm)(algorithm, one_client(on, 0, 10), finals)
