"""PaFL."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from coterie.adapt import Adapted, ElasticWeights
from coterie.adapt.ewc import fisher
from coterie.adapt.kd import Terms, distillation
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedprox import FedProx
from coterie.algorithms.pafl import PaFL, Phase, Sent
from coterie.algorithms.pafl_ewc import PaFLEWC
from coterie.algorithms.pafl_kd import PaFLKD, PaFLKDBounded
from coterie.core.algorithm import of_server, round_of
from coterie.core.optim import Recipe
from coterie.data.partition import hold_aux
from coterie.errors import ConfigError
from coterie.training.guard import Guard
from coterie.training.rounds import train
from support import assert_close, engine_of, federation, last, normed, one_client, predictors, task

PLAIN = Recipe(lr=0.1, epochs=1, batch=20)
ONE_STEP = Recipe(lr=0.1, epochs=1, batch=100)


def with_aux():
    return hold_aux(federation(), 0.3, seed=0)


def records(algorithm, rounds=4, federated=None, recipe=PLAIN, **options):
    on = task(algorithm, recipe=recipe, federated=federated)
    options.setdefault("participation", 1.0)
    return list(train(algorithm, on.problem, engine_of("loop", on), rounds, **options))


@cache
def plain(rounds):
    """The servers of FedAvg's rounds."""
    return [record.server for record in records(FedAvg(), rounds)]


VARIANTS = [
    PaFLEWC(lam=20.0, fisher_data="aggregate", fisher_kind="true"),
    PaFL(personal="ewc", mu=0.3, lam=20.0, fisher_data="server_aux"),
    PaFL(personal="ewc", lam=20.0, fisher_data="aggregate"),
    PaFL(personal="proximal", checkpoint="best_federated_validation"),
    PaFLKD(kd_form="yu_code", checkpoint="best_federated_validation"),
    PaFLKD(kd_form="paper", server_lr=0.5),
    PaFLEWC(fisher_kind="batch_mean", fisher_data="client_train", weighting="uniform"),
]


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_engines_agree(algorithm):
    reference = last(algorithm, task(algorithm, federated=with_aux()), "loop", rounds=2)
    for engine in ("vmap", "wire"):
        other = last(algorithm, task(algorithm, federated=with_aux()), engine, rounds=2, chunk=2)
        assert_close(predictors(other).models, predictors(reference).models)
        assert other.traffic == reference.traffic


@pytest.mark.parametrize("personal", ["kd", "ewc", "proximal"])
def test_mu_one_is_fedavg_bit_for_bit(personal):
    found = records(PaFL(mu=1.0, personal=personal))
    for one, other in zip(found, plain(4), strict=True):
        assert torch.equal(one.server.theta, other)


def test_half_a_proximal_term_is_fedprox_at_half_the_rate():
    found = records(PaFL(personal="proximal", mu=0.5))[-1]
    other = records(FedProx(mu=1.0), recipe=replace(PLAIN, lr=0.05))[-1]
    assert_close(found.server.theta, other.server, 1e-10)


@pytest.mark.parametrize("algorithm", [PaFLKD(), PaFLEWC()])
@pytest.mark.parametrize(("rounds", "first"), [(4, 2), (5, 3)])
def test_the_first_half_is_fedavg_bit_for_bit(algorithm, rounds, first):
    pairs = zip(records(algorithm, rounds), plain(rounds), strict=True)
    same = [torch.equal(one.server.theta, other) for one, other in pairs]
    assert same == [True] * first + [False] * (rounds - first)


def test_one_step_of_distillation_is_a_small_step_of_fedavg():
    """At C = G the divergence has no gradient: what is left is (1 − α) of the rate."""
    found = records(PaFL(personal="kd", mu=0.0, alpha=0.95), 3, recipe=ONE_STEP)
    control = records(FedAvg(), 3, recipe=Recipe(lr=0.005, epochs=1, batch=100))
    for one, other in zip(found, control, strict=True):
        assert_close(one.server.theta, other.server, 1e-10)
    more = records(PaFL(personal="kd", mu=0.0), 1, recipe=PLAIN)[0].server.theta
    slow = records(FedAvg(), 1, recipe=replace(PLAIN, lr=0.005))[0].server
    assert (more - slow).abs().max() > 1e-6  # with several steps the teacher is felt


def test_mu_of_ewc_weighs_the_pull():
    """μ CE + (1 − μ)(CE + R) is CE + (1 − μ) R."""
    third = records(PaFL(personal="ewc", mu=0.75, lam=40.0))[-1]
    other = records(PaFL(personal="ewc", mu=0.0, lam=10.0))[-1]
    assert_close(third.server.theta, other.server.theta, 1e-12)


def test_any_function_can_be_a_schedule():
    seen = []

    def own(client, w, G, batch):
        return ((w - G) ** 2).sum() + client.loss(w, batch)

    def schedule(t, horizon):
        seen.append((t, horizon))
        return (1.0, "kd") if t == 0 else (0.25, own)

    found = records(PaFL(schedule=schedule), 2)
    assert torch.equal(found[0].server.theta, records(FedAvg(), 1)[0].server)
    assert set(seen) == {(0, 2), (1, 2)}

    # 0.25 CE + 0.75 (‖·‖² + CE) = CE + 0.75 ‖·‖²: FedProx with μ = 1.5
    alike = records(PaFL(schedule=lambda t, T: Phase(0.25, own)), 2)[-1]
    assert_close(alike.server.theta, records(FedProx(mu=1.5), 2)[-1].server, 1e-10)


# ---- where the Fisher diagonal comes from --------------------------------------------------------


def test_the_servers_diagonal_is_taken_anew_in_every_round():
    algorithm, federated = PaFLEWC(fisher_data="server_aux"), with_aux()
    on = task(algorithm, federated=federated)
    for record in records(algorithm, 4, federated)[:-1]:
        round = record_round(on, record.index + 1, 4)
        sent = algorithm.download(record.server, round)
        if record.index + 1 < 2:
            assert sent.fisher == ()
        else:
            expected = fisher(
                of_server(on.problem, record.index + 1, 4), record.server.theta, "empirical"
            )
            assert torch.equal(sent.fisher[0], expected)


def record_round(on, index, horizon):
    return round_of(on.problem, index, horizon, torch.arange(on.problem.population))


def test_the_clients_average_is_sent_a_round_later():
    algorithm = PaFLEWC(fisher_data="aggregate")
    on = task(algorithm, recipe=PLAIN)
    found = records(algorithm, 4)
    assert torch.equal(found[0].server.fisher, torch.zeros(on.problem.model.parameters).double())
    received = found[0].server.theta  # what everybody had in round 1, the last one before T/2
    each = torch.stack([fisher(one_client(on, i, 1), received, "empirical") for i in range(5)])
    expected = on.problem.sizes.double() @ each / on.problem.sizes.sum()
    assert_close(found[1].server.fisher, expected, 1e-10)
    sent = algorithm.download(found[1].server, record_round(on, 2, 4))
    assert torch.equal(sent.fisher[0], found[1].server.fisher)


def test_a_server_without_samples_says_what_to_set():
    with pytest.raises(ConfigError, match=r"data\.aux"):
        records(PaFLEWC(fisher_data="server_aux"))


def test_auto_takes_what_is_there():
    for federated, source in ((with_aux(), "server_aux"), (federation(), "client_train")):
        found = records(PaFLEWC(), 4, federated)[-1]
        named = records(PaFLEWC(fisher_data=source), 4, federated)[-1]
        assert torch.equal(found.server.theta, named.server.theta)
    assert torch.equal(found.server.theta, records(PaFLEWC(), 4)[-1].server.theta)


def test_batch_norm_has_no_fisher():
    algorithm = PaFLEWC(fisher_data="aggregate")
    on = task(algorithm, normed)
    server = last(algorithm, on, rounds=4, participation=1.0).server
    assert server.fisher.shape == (on.problem.model.parameters,)
    assert bool(server.theta.isfinite().all())


def test_the_default_strength_is_stable_where_the_papers_is_not():
    for lam, survives in (("auto", True), (5000.0, False)):
        theta = records(PaFLEWC(lam=lam), 8)[-1].server.theta
        assert bool((theta.abs() < 100).all()) == survives


@pytest.mark.parametrize(("method", "rises"), [(PaFLKDBounded(), False), (PaFLKD(), True)])
def test_the_loss_before_and_after_distillation_is_recorded(method, rises):
    """Of the model that was received, and of what the clients made of it; only from T/2 on."""
    wild = Recipe(lr=2.0, epochs=4, batch=100)
    found = records(method, 4, recipe=wild)
    assert [record.observed.keys() for record in found[:2]] == [set(), set()]
    for record in found[2:]:
        before, after = record.observed["distillation"]
        assert (after > before) == rises


def test_the_recorded_loss_is_the_whole_objective():
    algorithm = PaFL(personal="kd", mu=0.25)
    on = task(algorithm, recipe=PLAIN)
    client, terms = one_client(on, 4), Terms(6.0, 0.95, "hinton")
    upload, _ = algorithm.local(client, Sent(on.problem.start, ()), ())
    (block,) = client.blocks("train")
    for w, told in zip((on.problem.start, upload.update.w), upload.taught, strict=True):
        own = 0.25 * client.loss(w, block)
        assert_close(
            told, own + 0.75 * distillation(client, w, on.problem.start, block, terms), 1e-10
        )


# ---- the checkpoint ------------------------------------------------------------------------------


def test_the_checkpoint_is_the_model_validated_best():
    wild = Recipe(lr=2.0, epochs=2, batch=10)  # the loss goes up and down
    algorithm = PaFLKD(checkpoint="best_federated_validation")
    on = task(algorithm, recipe=wild)
    found = records(algorithm, 6, recipe=wild, guard=Guard(bound=None))  # everybody's loss counts
    candidates = [on.problem.start, *(record.server.theta for record in found[:-1])]
    p = on.problem.sizes.double() / on.problem.sizes.sum()
    losses = [
        float(p @ torch.stack([one_client(on, i).loss(theta, "val") for i in range(5)]))
        for theta in candidates
    ]
    best = min(range(6), key=losses.__getitem__)
    assert 0 < best < 5
    assert torch.equal(found[-1].server.best, candidates[best])
    assert torch.equal(predictors(found[-1]).models[0, 0], candidates[best])
    assert float(found[-1].server.lowest) == pytest.approx(losses[best])


def test_only_a_checkpoint_reads_validation_data():
    assert PaFLKD(checkpoint="best_federated_validation").traits.uses_validation
    assert not PaFLKD().traits.uses_validation


def test_pafl_can_be_adapted_with_the_servers_samples():
    algorithm = Adapted(PaFLEWC(fisher_data="server_aux"), ElasticWeights(fisher_data="server_aux"))
    record = last(algorithm, task(algorithm, federated=with_aux()), rounds=2)
    assert bool(predictors(record).models.isfinite().all())
