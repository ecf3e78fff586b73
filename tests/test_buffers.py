"""Batch norm: on every engine, under every policy."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import coterie
from coterie.adapt import Adapted
from coterie.adapt.ft import FineTune, FreezeBase
from coterie.algorithms.ditto import Ditto
from coterie.algorithms.fedamp import FedAMP
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedfomo import FedFomo
from coterie.algorithms.fedper import FedPer
from coterie.algorithms.local import Local
from coterie.algorithms.scaffold import Scaffold
from coterie.core.flat import FlatModel
from coterie.core.policies import Apart
from coterie.diagnosis.doctor import doctor
from coterie.errors import ConfigError, EngineError
from coterie.training.rounds import train
from support import (
    METHODS,
    RECIPE,
    assert_close,
    backend_of,
    engine_of,
    federation,
    last,
    normed,
    one_client,
    predictors,
    task,
)

SIZES = (31, 15, 24, 15, 31)  # with 6 of validation: pairs of one size, and 30 = 3 batches
SINGLE = (25, 25, 12)  # with 6 of validation: 31 and 18; 31 leaves a batch of one sample
POLICIES = ("average", "local", "server")
B = 16  # buffers of normed()


def normed_task(algorithm, policy="average", sizes=SIZES, **recipe):
    told = replace(RECIPE, buffers=policy, **recipe)
    return task(algorithm, normed, federation(sizes), told)


@pytest.mark.parametrize("policy", [*POLICIES, "fedbn"])
@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        (FedAvg(), SIZES),
        (FedAvg(), SINGLE),
        *((m, SIZES) for m in (Ditto(), FedAMP(), FedFomo(), Scaffold(), FedPer())),
    ],
)
def test_engines_agree_with_batch_norm(method, policy, sizes):
    on = normed_task(method, policy, sizes, epochs=1)
    reference = last(method, on, "loop", rounds=2)
    for engine, chunk in (("vmap", 5), ("wire", None)):
        other = last(method, on, engine, rounds=2, chunk=chunk)
        assert_close(predictors(other).models, predictors(reference).models)
        assert other.traffic == reference.traffic
        assert_close(
            torch.from_numpy(other.evaluation.test_loss),
            torch.from_numpy(reference.evaluation.test_loss),
        )


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_with_batch_norm_averaged(name):
    method = METHODS[name]()
    # everybody takes part: FedFomo divides by the distance of a model that is another's but for
    # rounding, which is no matter of batch norm
    told = {"rounds": 2, "participation": 1.0}
    models = predictors(last(method, normed_task(method), "loop", **told)).models
    other = predictors(last(method, normed_task(method), "vmap", chunk=5, **told)).models
    assert_close(other, models)


def test_vmap_never_pads_a_batch_of_batch_norm():
    on = normed_task(FedAvg())
    sizes = on.shards.splits["train"].sizes
    chunks = backend_of("vmap", on, chunk=5).chunks(list(range(5)))
    assert sorted(len(chunk) for chunk in chunks) == [1, 2, 2]
    assert all(len({sizes[i] for i in chunk}) == 1 for chunk in chunks)
    assert len(backend_of("vmap", task(FedAvg()), chunk=5).chunks(list(range(5)))) == 1


def test_a_batch_of_one_sample_is_no_step():
    on = normed_task(Local(), sizes=(25, 24))  # 31 and 30 samples in batches of 10
    seen = [one_client(on, i).scan(lambda n, batch: [*n, len(batch.y)], []) for i in (0, 1)]
    assert seen == [[10] * 6, [10] * 6]
    assert [int(one_client(on, i).steps) for i in (0, 1)] == [6, 6]
    assert int(one_client(task(Local(), federated=federation((25, 24))), 0).steps) == 8
    other_order = one_client(on, 0, 1)
    assert other_order.train(on.problem.start).isfinite().all()


def test_a_fixed_number_of_steps_skips_batches_of_one_sample():
    on = normed_task(Local(), sizes=(25,), steps=5)
    seen = one_client(on, 0).scan(lambda n, batch: [*n, batch.position.tolist()], [])
    assert [len(batch) for batch in seen] == [10] * 5
    assert len({p for batch in seen[:3] for p in batch}) == 30


def test_a_client_of_one_sample_does_not_train():
    on = task(Local(), normed, federation((1, 20)), RECIPE, merge=False)
    client = one_client(on, 0)
    assert int(client.steps) == 0
    assert torch.equal(client.train(on.problem.start), on.problem.start)


def test_batches_of_one_are_refused():
    with pytest.raises(ConfigError, match=r"train\.batch: found 1, .*expected 2 or more"):
        normed_task(Local(), batch=1)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(8, track_running_stats=False), nn.BatchNorm1d(8, momentum=None)]
)
def test_statistics_that_a_vector_cannot_hold_are_refused(norm):
    with pytest.raises(ConfigError, match="expected running statistics with a momentum"):
        FlatModel(nn.Sequential(nn.Linear(3, 8), norm))


# ---- the policies ------------------------------------------------------------------------------


def models_of(method, policy, **options):
    options = {"participation": 1.0, "rounds": 3, **options}
    return predictors(last(method, normed_task(method, policy), "loop", **options)).models[:, 0]


def test_averaged_buffers_are_everybodys():
    w = models_of(FedAvg(), "average")
    assert torch.equal(w, w[:1].expand_as(w))


def test_local_buffers_differ_where_parameters_are_shared():
    w = models_of(FedAvg(), "local")
    assert torch.equal(w[:, :-B], w[:1, :-B].expand_as(w[:, :-B]))
    assert (w[1:, -B:] - w[:1, -B:]).abs().amax(1).min() > 1e-3
    # in training batch norm looks at the batch alone, so the parameters learn the same
    assert_close(w[:, :-B], models_of(FedAvg(), "average")[:, :-B])


def test_local_buffers_are_those_of_the_clients_own_training():
    method, on = FedAvg(), normed_task(FedAvg(), "local")
    engine = engine_of("loop", on)
    mine, params = on.problem.statistics.expand(5, -1), on.problem.start
    for record in train(method, on.problem, engine, 2):
        whole = [torch.cat([params, mine[i]]) for i in range(5)]
        averaged = normed_task(FedAvg())  # its vectors are whole
        ends = [one_client(averaged, i, record.index).train(w) for i, w in enumerate(whole)]
        mine = torch.stack([w[-B:] for w in ends])
        params = record.server.method
        assert_close(record.states.buffers, mine)


def test_local_buffers_do_not_travel():
    on = normed_task(FedAvg(), "local")
    model = 8 * on.problem.model.parameters
    traffic = last(FedAvg(), on, participation=1.0).traffic
    assert (traffic.down, traffic.up, traffic.serve) == (5 * model, 5 * (model + 8), 5 * model)


def test_training_alone_is_the_same_under_every_policy():
    usual = models_of(Local(), "average")
    for policy in ("local", "server"):
        assert_close(models_of(Local(), policy), usual)


def test_fedavgs_server_buffers_are_its_averaged_ones():
    assert_close(models_of(FedAvg(), "server"), models_of(FedAvg(), "average"))


@pytest.mark.parametrize("method", [Ditto(), FedFomo(), Scaffold()])
def test_server_buffers_are_one_set_for_every_model(method):
    w = models_of(method, "server")
    assert torch.equal(w[:, -B:], w[:1, -B:].expand(5, -1))
    assert (models_of(method, "local")[1:, -B:] - w[1:, -B:]).abs().max() > 1e-3


def test_absent_clients_keep_their_buffers():
    on = normed_task(FedAvg(), "local")
    before = on.problem.statistics.expand(5, -1)
    for record in train(FedAvg(), on.problem, engine_of("vmap", on), 3, participation=0.5):
        absent = torch.tensor([i not in record.clients for i in range(5)])
        assert torch.equal(record.states.buffers[absent], before[absent])
        assert not torch.equal(record.states.buffers[~absent], before[~absent])
        before = record.states.buffers.clone()


def test_an_adaptation_moves_a_copy_and_a_frozen_base_nothing():
    tuned, frozen = Adapted(FedAvg(), FineTune()), Adapted(FedAvg(), FreezeBase())
    plain = models_of(FedAvg(), "local")
    assert (models_of(tuned, "local")[:, -B:] - plain[:, -B:]).abs().max() > 1e-3
    assert torch.equal(models_of(frozen, "local")[:, -B:], plain[:, -B:])
    assert not torch.equal(models_of(frozen, "local"), plain)


@pytest.mark.parametrize("method", [Adapted(FedAvg(), FineTune()), Adapted(FedAvg(), FreezeBase())])
def test_a_client_by_itself_is_adapted_alike_under_every_policy(method):
    one = [normed_task(method, policy, (31,)) for policy in POLICIES]
    usual, *others = (predictors(last(method, on, "loop", rounds=2)).models for on in one)
    for models in others:
        assert_close(models, usual)


@pytest.mark.parametrize("name", ["fedem", "erosion", "waffle", "federico"])
def test_several_models_of_one_client_are_refused(name):
    method = METHODS[name]()
    for policy in ("local", "server"):
        with pytest.raises(ConfigError, match=r"trains several models.*use 'average'"):
            last(method, normed_task(method, policy), "loop")


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_several_models_side_by_side_are_refused_of_anybodys_method(engine):
    wrapped = Apart(METHODS["erosion"](), "local")
    with pytest.raises(EngineError, match=r"several models side by side.*buffers = 'average'"):
        last(wrapped, normed_task(wrapped, "local"), engine)


def test_a_server_that_judges_models_needs_them_whole():
    held = replace(federation(SIZES), aux=tuple(part[:1] for part in federation(SIZES).test))
    with pytest.raises(ConfigError, match=r"train\.buffers: 'local'.*data\.aux = 0"):
        task(FedAvg(), normed, held, replace(RECIPE, buffers="local"))


def test_a_network_without_buffers_is_not_wrapped():
    on = task(FedAvg(), recipe=replace(RECIPE, buffers="local"))
    assert isinstance(last(FedAvg(), on).server, torch.Tensor)
    assert isinstance(
        Apart(FedAvg(), "local").init(normed_task(FedAvg(), "local").problem)[0], tuple
    )


def test_the_policy_stands_in_the_header(tmp_path):
    config = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "clients": 3},
        "model": {"name": "support:NormedDigits"},
        "train": {"buffers": "server", "batch": 200, "epochs": 1},
    }
    here = Path(__file__).parent
    assert ("batch-norm buffers", "server") in doctor(config, code=here).facts
    result = coterie.run(config, method="fedavg", rounds=1, out=str(tmp_path / "run"), code=here)
    assert result.config["train"]["buffers"] == "server"


# ---- FedBN: the parameters of normalisation layers stay at the client, too -------------------


def grouped():
    """Norms without statistics, of several kinds."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.LayerNorm(64),
        nn.Linear(64, 3),
    )


def scales_of(network):
    """Where a whole vector has the parameters and statistics of normalisation layers."""
    model = FlatModel(network())
    names = [n for n, m in network().named_modules() if "Norm" in type(m).__name__]
    mine = torch.zeros(model.size, dtype=torch.bool)
    return mine.index_fill(0, model.positions(names), True)


@pytest.mark.parametrize("network", [normed, grouped])
@pytest.mark.parametrize("recipe", [{}, {"optimizer": "adam", "lr": 0.01}])
def test_a_client_alone_trains_all_parameters_as_ever(network, recipe):
    usual, apart = (
        last(
            FedAvg(),
            task(FedAvg(), network, federation((31,)), replace(RECIPE, **told)),
            "loop",
            participation=1.0,
        )
        for told in (recipe, {**recipe, "buffers": "fedbn"})
    )
    found, expected = predictors(apart).models, predictors(usual).models
    assert_close(found, expected)


@pytest.mark.parametrize("network", [normed, grouped])
def test_norms_stay_at_the_client_and_all_else_is_shared(network):
    told = replace(RECIPE, buffers="fedbn")
    records = [
        last(FedAvg(), task(FedAvg(), network, federation(SIZES), told), engine, participation=1.0)
        for engine in ("loop", "vmap", "wire")
    ]
    models, own = predictors(records[0]).models[:, 0], scales_of(network)
    assert_close(models[:, ~own], models[:1, ~own].expand(5, -1), 0)
    assert ((models[:, None, own] - models[:, own]).abs().amax(-1) > 1e-6).sum() == 20  # all pairs
    assert records[2].traffic.down == 5 * 8 * int((~own).sum())
    for other in records[1:]:
        assert_close(predictors(other).models, predictors(records[0]).models)


@pytest.mark.parametrize("method", ["feddbe", "fedbabu", "fedrod", "fedala", "apfl", "ditto"])
def test_methods_with_steps_of_their_own_train_the_norms(method):
    told, algorithm = replace(RECIPE, buffers="fedbn"), METHODS[method]()
    record = last(algorithm, task(algorithm, normed, federation(SIZES), told), "vmap", chunk=2)
    other = last(algorithm, task(algorithm, normed, federation(SIZES), told), "loop")
    assert_close(predictors(record).models, predictors(other).models)
    own, start = scales_of(normed), FlatModel(normed()).flatten(normed())
    gammas = own & (torch.arange(len(own)) < FlatModel(normed()).parameters)
    assert (predictors(record).models[:, 0][:, gammas] - start[gammas]).abs().max() > 1e-3
