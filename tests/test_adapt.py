"""Adaptation after any method."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import coterie
from coterie.adapt import (
    ADAPTATIONS,
    Adapted,
    Distill,
    ElasticWeights,
    FineTune,
    FreezeBase,
    NearestNeighbours,
)
from coterie.adapt.ewc import consolidate, drawn, fisher, strength
from coterie.adapt.ft import top_layer
from coterie.adapt.kd import Terms, combine, descent, distillation, divergence, step_share
from coterie.adapt.knn import Datastore, answered, said
from coterie.algorithms.fedamp import FedAMP
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedem import FedEM
from coterie.algorithms.fedprox import proximal
from coterie.algorithms.local import Local
from coterie.algorithms.scaffold import Scaffold
from coterie.core.algorithm import of_server
from coterie.core.flat import FlatModel
from coterie.core.optim import Recipe
from coterie.data.federation import Dataset, Federation
from coterie.data.partition import PARTITIONS, federate, hold_aux
from coterie.errors import ConfigError, StoreError
from coterie.runs.assemble import assemble
from coterie.runs.config.loading import load
from support import (
    assert_close,
    federation,
    last,
    mlp,
    normed,
    one_client,
    predictors,
    task,
    whole_round,
)

PLAIN = Recipe(lr=0.1, epochs=2, batch=10)
KINDS = ("empirical", "true", "batch_mean")


def with_aux(share=0.3):
    return hold_aux(federation(), share, seed=0)


# ---- any adaptation ------------------------------------------------------------------------------


TRAINED = {name: kind for name, kind in ADAPTATIONS.items() if name != "knn"}
VARIANTS = [
    *(adaptation() for adaptation in TRAINED.values()),
    *(ElasticWeights(lam=20.0, fisher_kind=kind, fisher_data="client_train") for kind in KINDS),
    *(ElasticWeights(lam=20.0, fisher_kind=kind, fisher_data="aggregate") for kind in KINDS),
    *(ElasticWeights(lam=20.0, fisher_kind=kind, fisher_data="server_aux") for kind in KINDS),
    ElasticWeights(lam=20.0, ewc_step="implicit"),
    ElasticWeights(lam=5.0, ewc_step="explicit"),
    Distill(kd_form="paper", lr=0.01),
    Distill(kd_form="yu_code"),
    FreezeBase(fb_trainable=("1",)),
]


@pytest.mark.parametrize("adaptation", VARIANTS, ids=repr)
def test_engines_agree(adaptation):
    algorithm, federated = Adapted(FedAvg(), adaptation), with_aux()
    reference = last(algorithm, task(algorithm, federated=federated), "loop", rounds=2)
    for engine in ("vmap", "wire"):
        on = task(algorithm, federated=federated)
        other = last(algorithm, on, engine, rounds=2, chunk=2)
        assert_close(predictors(other).models, predictors(reference).models)
        assert other.traffic == reference.traffic


@pytest.mark.parametrize("adaptation", VARIANTS, ids=repr)
def test_adapting_leaves_the_run_bit_identical(adaptation):
    algorithm = Adapted(FedAvg(), adaptation)
    adapted = last(algorithm, task(algorithm, federated=with_aux()))
    plain = last(FedAvg(), task(FedAvg(), federated=with_aux()))
    assert torch.equal(adapted.server.method, plain.server)
    assert not torch.equal(predictors(adapted).models, predictors(plain).models)


@pytest.mark.parametrize("adaptation", [kind(epochs=0) for kind in TRAINED.values()])
def test_no_epochs_are_no_adaptation(adaptation):
    algorithm = Adapted(FedAvg(), adaptation)
    found = predictors(last(algorithm, task(algorithm))).models
    assert torch.equal(found, predictors(last(FedAvg(), task(FedAvg()))).models)


@pytest.mark.parametrize("method", [Scaffold(), FedAMP(), Local()])
@pytest.mark.parametrize("name", TRAINED)
def test_any_method_can_be_adapted(method, name):
    algorithm = Adapted(method, ADAPTATIONS[name]())
    found = predictors(last(algorithm, task(algorithm), rounds=2)).models
    plain = predictors(last(method, task(method), rounds=2)).models
    assert bool(found.isfinite().all())
    assert not torch.equal(found, plain)


# ---- freezebase ----------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [mlp, normed])
def test_frozen_tensors_stay_bit_for_bit(network):
    on = task(FedAvg(), network)
    w = one_client(on, 0).train(on.problem.start)
    found = FreezeBase().adapt(one_client(on, 4), w)
    head = torch.zeros(on.problem.model.size, dtype=torch.bool)
    head[on.problem.model.positions([top_layer(on.problem.model)])] = True
    assert torch.equal(found[~head], w[~head])
    assert (found[head] != w[head]).any()


def test_freeing_every_layer_is_fine_tuning():
    on = task(FedAvg(), normed)
    everything = FreezeBase(fb_trainable=("1", "2", "4")).adapt(one_client(on, 0), on.problem.start)
    assert torch.equal(everything, FineTune().adapt(one_client(on, 0), on.problem.start))


def test_frozen_statistics_are_those_the_head_learns_on():
    on = task(FedAvg(), normed, recipe=Recipe(lr=0.1, epochs=1, batch=100))
    client = one_client(on, 0)
    w = client.train(on.problem.start)
    found = FreezeBase().adapt(client, w)
    head = on.problem.model.positions(["4"])
    gradient = client.gradient(w, "train")  # evaluation mode, all samples in one batch
    assert_close(found[head], (w - 0.1 * gradient)[head], 1e-12)


def test_the_top_layer_is_where_the_last_parameter_is():
    assert top_layer(FlatModel(normed())) == "4"
    assert top_layer(FlatModel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))) == "1"
    bare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    assert top_layer(FlatModel(bare)) == "0"


def test_an_unknown_layer_is_named():
    on = task(FedAvg())
    with pytest.raises(ConfigError, match="no layer 'fc'"):
        FreezeBase(fb_trainable=("fc",)).adapt(one_client(on, 0), on.problem.start)


# ---- the Fisher diagonal -------------------------------------------------------------------------


def slow_gradient(on, w, x, y):
    """One backward pass of torch's own autograd."""
    v = w.clone().requires_grad_()
    F.cross_entropy(on.problem.model(v, x), y).backward()
    return v.grad[: on.problem.model.parameters]


@pytest.mark.parametrize("network", [mlp, normed])
@pytest.mark.parametrize("kind", KINDS)
def test_fisher_against_a_slow_loop(kind, network):
    on = task(FedAvg(), network)
    client = one_client(on, 4)
    w = client.train(on.problem.start)
    total, count = torch.zeros(on.problem.model.parameters, dtype=torch.float64), 0
    (block,) = client.blocks("train")
    y = drawn(client, w, block, 0) if kind == "true" else block.y
    for i in range(0, len(y), 10 if kind == "batch_mean" else 1):
        part = slice(i, i + (10 if kind == "batch_mean" else 1))
        size = len(y[part])
        total += size * slow_gradient(on, w, block.x[part], y[part]) ** 2
        count += size
    found = fisher(client, w, kind)
    assert_close(found, total / count, 1e-10)
    assert bool((found >= 0).all())
    assert count == int(client.size)


@pytest.mark.parametrize("kind", ["empirical"])
def test_fisher_adds_up_over_disjoint_data(kind):
    parts, total = federation(), 0
    on = task(FedAvg(), federated=parts, merge=False)
    for i in range(len(parts)):
        total = total + int(on.problem.sizes[i]) * fisher(one_client(on, i), on.problem.start, kind)
    # all samples at one client, labelled as their owners read them
    y = parts.dataset.y.clone()
    for own, relabel in zip(parts.train, parts.relabel, strict=True):
        y[own] = relabel[y[own]]
    everything, nothing = (torch.cat(parts.train),), (torch.zeros(0, dtype=torch.int64),)
    data = replace(parts.dataset, y=y)
    one = Federation(data, "", ("all",), everything, nothing, nothing)
    together = task(FedAvg(), federated=one)
    whole = fisher(one_client(together, 0), on.problem.start, kind)
    assert_close(len(everything[0]) * whole, total, 1e-10)


def test_labels_are_drawn_from_the_model():
    on = task(FedAvg())
    w = 3 * on.problem.start  # not too sure, not too unsure
    (block,) = one_client(on, 0).blocks("train")
    counts = torch.zeros(len(block.y), 3)
    for round_index in range(400):
        client = one_client(on, 0, round_index)
        counts += F.one_hot(drawn(client, w, block, 0), 3)
    expected = on.problem.model(w, block.x).softmax(-1)
    assert (counts / 400 - expected).abs().max() < 0.1
    assert (expected - 1 / 3).abs().max() > 0.2  # uniform labels would be noticed


def test_drawn_values_of_a_regression_have_variance_one():
    on = straight_lines()
    (block,) = one_client(on, 0).blocks("train")
    draws = [drawn(one_client(on, 0, r), on.problem.start, block, 0) for r in range(500)]
    noise = torch.stack(draws) - on.problem.model(on.problem.start, block.x).squeeze(-1)
    assert float(noise.std()) == pytest.approx(1, abs=0.05)
    assert float(noise.mean()) == pytest.approx(0, abs=0.1)


# ---- elastic weight consolidation ----------------------------------------------------------------

TARGET = torch.tensor([1.0, -2.0, 0.5])
CURVATURE = torch.tensor([1, 2, 1], dtype=torch.float64) / 4


def straight_lines(recipe=Recipe(lr=0.5, epochs=1, batch=10)):  # noqa: B008
    """One client whose loss is Σ_k ½ a_k (w_k − b_k)² up to a factor: inputs are unit vectors."""
    axis = torch.tensor([0, 1, 1, 2])
    data = Dataset("quadratic", torch.eye(3)[axis], TARGET[axis], 0)
    mine, none = (torch.arange(4),), (torch.zeros(0, dtype=torch.int64),)
    federated = Federation(data, "", ("one",), mine, none, none)
    return task(FedAvg(), lambda: nn.Linear(3, 1, bias=False), federated, recipe)


@pytest.mark.parametrize("step", ["explicit", "implicit", "auto"])
def test_minimiser_of_a_quadratic(step):
    on = straight_lines(Recipe(lr=0.5, epochs=400, batch=10))
    G, M = torch.tensor([3.0, 3.0, 3.0]).double(), torch.tensor([0.5, 0.0, 2.0]).double()
    found = consolidate(one_client(on, 0), on.problem.start, G, M, 1.0, step)
    expected = (CURVATURE * TARGET + M * G) / (CURVATURE + M)
    assert_close(found, expected, 1e-8)


def test_the_implicit_step_is_stable_where_the_explicit_one_is_not():
    on = straight_lines(Recipe(lr=0.5, epochs=400, batch=10))
    G, M = torch.full((3,), 3.0).double(), torch.tensor([1e-4, 0.5, 40.0]).double()
    lam = 100.0  # ηλM is 0.005, 25, 2000
    expected = (CURVATURE * TARGET + lam * M * G) / (CURVATURE + lam * M)
    for step in ("implicit", "auto"):
        assert_close(consolidate(one_client(on, 0), G, G, M, lam, step), expected, 1e-8)
    thrown = consolidate(one_client(on, 0), G, G, M, lam, "explicit")
    assert not bool((thrown.abs() < 1e6).all())


def test_explicit_and_implicit_steps_agree_to_first_order():
    G, M = torch.full((3,), 3.0).double(), torch.tensor([0.5, 1.0, 2.0]).double()

    def apart(lr):
        on = straight_lines(Recipe(lr=lr, epochs=1, batch=10))
        start = on.problem.start + 1.0
        steps = (
            consolidate(one_client(on, 0), start, G, M, 1.0, s) for s in ("explicit", "implicit")
        )
        return float(torch.dist(*steps))

    assert apart(1e-3) / apart(1e-4) == pytest.approx(100, rel=0.05)


def test_auto_is_explicit_where_that_is_stable():
    on = task(FedAvg())
    client, M = one_client(on, 4), torch.full((on.problem.model.parameters,), 1.0).double()
    G = one_client(on, 0).train(on.problem.start)
    steps = [consolidate(client, G, G, M, 5.0, step) for step in ("auto", "explicit", "implicit")]
    assert torch.equal(steps[0], steps[1])  # ηλM = 0.5
    assert not torch.equal(steps[0], steps[2])
    steps = [consolidate(client, G, G, M, 50.0, step) for step in ("auto", "explicit", "implicit")]
    assert torch.equal(steps[0], steps[2])  # ηλM = 5


def test_a_fisher_of_ones_is_a_proximal_term():
    on = task(FedAvg())
    client, ones = one_client(on, 4), torch.ones(on.problem.model.parameters, dtype=torch.float64)
    near = consolidate(client, on.problem.start, on.problem.start, ones, 0.7, "explicit")
    assert_close(
        near,
        client.train(on.problem.start, penalty=lambda w: proximal(w, on.problem.start, 0.7)),
        1e-12,
    )


def test_a_fisher_of_zeros_is_fine_tuning():
    on = task(FedAvg())
    client, zeros = one_client(on, 4), torch.zeros(on.problem.model.parameters, dtype=torch.float64)
    for step in ("explicit", "implicit"):
        found = consolidate(client, on.problem.start, on.problem.start, zeros, 5000.0, step)
        assert torch.equal(found, client.train(on.problem.start))


def test_the_servers_fisher_is_of_the_samples_it_holds():
    federated = with_aux()
    algorithm = Adapted(FedAvg(), ElasticWeights(fisher_data="server_aux"))
    on = task(algorithm, federated=federated)
    server, _ = algorithm.init(on.problem)
    total, count = 0, 0
    for held, relabel in zip(federated.aux, federated.relabel, strict=True):
        for sample in held:
            x, y = on.shards.inputs(sample[None]), relabel[federated.dataset.y[sample]][None]
            total, count = total + slow_gradient(on, on.problem.start, x, y) ** 2, count + 1
    served = algorithm.serve(server, whole_round(on))
    assert_close(served.extra, (total / count).expand(on.problem.population, -1), 1e-10)


def test_the_clients_average_is_of_the_model_before_the_round():
    algorithm = Adapted(FedAvg(), ElasticWeights(fisher_data="aggregate"))
    on = task(algorithm)
    record = last(algorithm, on, rounds=1, participation=1.0)
    each = torch.stack([fisher(one_client(on, i), on.problem.start, "empirical") for i in range(5)])
    expected = on.problem.sizes.double() @ each / on.problem.sizes.sum()
    assert_close(record.server.extra, expected, 1e-10)


def test_a_server_without_samples_says_what_to_set():
    algorithm = Adapted(FedAvg(), ElasticWeights(fisher_data="server_aux"))
    with pytest.raises(ConfigError, match=r"data\.aux"):
        algorithm.check(task(algorithm).problem, 10)


def test_a_server_cannot_look_at_models_it_does_not_have():
    algorithm = Adapted(FedAMP(), ElasticWeights(fisher_data="server_aux"))
    with pytest.raises(ConfigError, match="one model for all"):
        algorithm.check(task(algorithm, federated=with_aux()).problem, 10)


def test_auto_takes_what_is_there():
    for federated, source in ((with_aux(), "server_aux"), (federation(), "client_train")):
        found, named = (
            last(algorithm, task(algorithm, federated=federated), rounds=2)
            for algorithm in (
                Adapted(FedAvg(), ElasticWeights()),
                Adapted(FedAvg(), ElasticWeights(fisher_data=source)),
            )
        )
        assert torch.equal(predictors(found).models, predictors(named).models)


# ---- the server's samples ------------------------------------------------------------------------


def spoilt(federated):
    """The same federation with other test samples and other test labels."""
    data, at = federated.dataset, torch.cat(federated.test)
    x, y = data.x.clone(), data.y.clone()
    x[at], y[at] = x[at].flip(0) * 3 + 1, (y[at] + 1) % 3
    return replace(federated, dataset=replace(data, x=x, y=y))


def test_samples_that_the_server_holds_are_in_no_evaluation():
    algorithm = Adapted(FedAvg(), ElasticWeights(fisher_data="server_aux"))
    federated = hold_aux(federation(), 0.3, seed=0)
    usual = last(algorithm, task(algorithm, federated=federated))
    other = last(algorithm, task(algorithm, federated=spoilt(federated)))
    assert torch.equal(predictors(usual).models, predictors(other).models)
    held = spoilt(replace(federated, test=federated.aux))
    changed = last(algorithm, task(algorithm, federated=replace(held, test=federated.test)))
    assert not torch.equal(predictors(usual).models, predictors(changed).models)
    plain = last(FedAvg(), task(FedAvg(), federated=federated))
    same = last(FedAvg(), task(FedAvg(), federated=replace(held, test=federated.test)))
    assert (plain.evaluation.test_loss == same.evaluation.test_loss).all()


def test_the_server_holds_a_share_of_the_test_data():
    before, after = federation(), with_aux(0.3)
    held, tested = torch.cat(after.aux), torch.cat(after.test)
    assert len(held) == 11  # 0.3 of 35, rounded
    assert torch.equal(
        torch.cat([held, tested]).sort().values, torch.cat(before.test).sort().values
    )
    assert all(len(part) for part in after.test)
    assert after.fingerprint != before.fingerprint
    order = [3, 0, 4, 2, 1]
    other = hold_aux(federation(order=order), 0.3, seed=0)
    for i, j in enumerate(order):
        assert torch.equal(other.aux[i], after.aux[j])


def test_a_config_fills_it():
    settings = {"data": {"aux": 0.1}, "partition": {"name": "iid", "clients": 4}}
    (made,) = assemble(load(settings)).federations.values()
    (plain,) = assemble(load({"partition": settings["partition"]})).federations.values()
    count = len(torch.cat(plain.test))
    assert len(torch.cat(made.aux)) == int(0.1 * count + 0.5)
    assert len(torch.cat(made.test)) == count - len(torch.cat(made.aux))
    assert plain.aux is None


def test_nobody_loses_its_last_test_sample():
    some = federation()
    small = replace(some, test=tuple(part[:1] for part in some.test))
    assert all(len(part) == 1 for part in hold_aux(small, 0.9, seed=0).test)


def test_no_share_is_no_change():
    some = federation()
    assert hold_aux(some, 0.0, seed=0) is some
    assert of_server(task(FedAvg(), federated=some).problem, 0, 1) is None
    with pytest.raises(ConfigError, match=r"data\.aux: found 1"):
        federate(some.dataset, PARTITIONS["iid"](), aux=1.0)


# ---- distillation --------------------------------------------------------------------------------


def test_the_forms_of_distillation():
    ce, kl, tau, alpha = torch.tensor(0.7), torch.tensor(0.3), 6.0, 0.95
    found = {
        form: combine(ce, kl, 10, Terms(tau, alpha, form))
        for form in ("hinton", "paper", "yu_code")
    }
    assert float(found["paper"]) == pytest.approx(34.2 * 0.7 + 0.05 * 0.3)
    assert float(found["hinton"]) == pytest.approx(0.05 * 0.7 + 34.2 * 0.3)
    assert float(found["yu_code"]) == pytest.approx(0.05 * 0.7 + 3.42 * 0.3)


def test_divergence_against_a_double_loop():
    teacher, student = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).double()
    for b, value in enumerate(divergence(teacher, student, 6.0).tolist()):
        p, q = (z[b].div(6.0).exp() / z[b].div(6.0).exp().sum() for z in (teacher, student))
        assert value == pytest.approx(sum(float(p[c] * (p[c] / q[c]).log()) for c in range(3)))


def test_a_student_at_its_teacher_feels_nothing():
    teacher = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    student = teacher.clone().requires_grad_()
    value = divergence(teacher, student, 6.0).sum()
    value.backward()
    assert float(value.detach()) == pytest.approx(0, abs=1e-12)
    assert student.grad.abs().max() < 1e-12


def test_hot_divergence_pulls_logits_together():
    """The gradient of τ² KL tends to (z_C − z_G) / classes for logits of mean zero."""
    z = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0)).double()
    teacher, student = z - z.mean(-1, keepdim=True)
    student.requires_grad_()
    tau = 1e4
    (tau**2 * divergence(teacher, student, tau).sum()).backward()
    assert_close(student.grad, (student.detach() - teacher) / 5, 1e-3)


def test_labels_alone_in_the_papers_form_are_a_faster_fine_tuning():
    on = task(FedAvg(), recipe=PLAIN)
    client = one_client(on, 4)
    found = Distill(alpha=1.0, kd_form="paper", tau=3.0, lr=0.01).adapt(client, on.problem.start)
    assert_close(found, FineTune(lr=0.09).adapt(client, on.problem.start), 1e-10)


def test_distillation_of_a_regression_is_half_the_squared_difference():
    on = straight_lines(Recipe(lr=0.5, epochs=400, batch=10))
    G = torch.tensor([3.0, 3.0, 3.0]).double()
    # labels and teacher see the same inputs: the minimiser lies between their answers
    found = Distill(alpha=0.25).adapt(one_client(on, 0), G)
    assert_close(found, 0.75 * TARGET.double() + 0.25 * G, 1e-8)


# ---- how strong and how long a step is -----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_automatic_strength_has_no_scale(kind, scale):
    """Whatever unit the Fisher diagonal has: the largest pull is one whole step, ηλM = 1."""
    on = task(FedAvg())
    client = one_client(on, 4)
    M = fisher(client, on.problem.start, kind)
    lam = strength(client, scale * M, "auto")
    assert_close(client.lr * lam * scale * M, M / M.max(), 1e-12)
    assert float(strength(client, 0 * M, "auto")) == 0.0
    assert strength(client, M, 5000.0) == 5000.0


@pytest.mark.parametrize("kind", KINDS)
def test_ewc_by_default_still_learns(kind):
    """At the papers' strength nothing that matters moves; by default a good part of FT is left."""
    on = task(FedAvg(), recipe=PLAIN)

    def gain(adaptation):
        client = one_client(on, 4)
        before = client.loss(on.problem.start, "train")
        return float(before - client.loss(adaptation.adapt(client, on.problem.start), "train"))

    free = gain(FineTune())
    assert gain(ElasticWeights(fisher_kind=kind)) > 0.4 * free
    if kind != "batch_mean":
        assert gain(ElasticWeights(fisher_kind=kind, lam=5000.0)) < 0.2 * free


def test_a_shortened_step_ends_at_the_minimum_of_its_line():
    H, g = torch.tensor([30.0, 1.0]).double(), torch.tensor([2.0, 1.0]).double()
    w, eta = g / H, 0.5  # the minimum is at 0, the gradient is H w
    for probe in (1e-3, 0.1, 10.0):
        share = step_share(g, H * (w - probe * g), probe, eta)
        assert_close(share * eta, (g @ g) / (g @ (H * g)), 1e-9)
        assert float(step_share(g, H * (w - probe * g), probe, 1e-3)) == 1.0
    assert float(step_share(g, g + 1, 0.1, eta)) == 1.0  # the loss is concave on the line
    assert float(step_share(0 * g, 0 * g, 0.1, eta)) == 1.0


@pytest.mark.parametrize("form", ["hinton", "paper", "yu_code"])
@pytest.mark.parametrize("lr", [0.05, 0.5, 5.0])
def test_a_bounded_step_never_raises_the_distillation_loss(form, lr):
    """One batch, one step from a student that has left its teacher: the loss falls at any rate."""
    on = task(FedAvg(), recipe=Recipe(lr=lr, epochs=1, batch=100))
    client, terms = one_client(on, 4), Terms(6.0, 0.95, form)
    G = one_client(on, 0).tuned(lr=0.1).train(3 * on.problem.start)
    start = client.tuned(lr=0.1).train(G)

    def loss(w, batch):
        return distillation(client, w, G, batch, terms)

    batch = client.batch(0)
    before = float(loss(start, batch))
    assert float(loss(descent(client, start, loss, "bounded"), batch)) < before
    if lr == 5.0:
        assert float(loss(descent(client, start, loss, "full"), batch)) > before


def test_steps_that_do_not_overshoot_are_the_papers():
    on = task(FedAvg(), recipe=Recipe(lr=1e-3, epochs=2, batch=10))
    found = [
        Distill(kd_step=s).adapt(one_client(on, 4), on.problem.start) for s in ("bounded", "full")
    ]
    assert torch.equal(*found)


def tied():
    """Tokens in, an output layer that shares the weight of the embedding."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 6))
    module[3].weight = module[0].weight
    return module


def test_a_tied_weight_belongs_to_the_head():
    model = FlatModel(tied())
    assert model.layers() == ["2", "3"]
    assert top_layer(model) == "3"
    assert len(model.positions(["3"])) == 6 * 4 + 6
    assert torch.equal(model.positions(["0"]), torch.arange(24))


# ---- nearest neighbours --------------------------------------------------------------------------


def scored(algorithm, engine="loop"):
    return last(algorithm, task(algorithm, merge=False), engine, rounds=2, metric="log_loss")


@pytest.mark.parametrize("method", [FedAvg(), FedEM()], ids=repr)
def test_engines_agree_on_what_neighbours_say(method):
    algorithm = Adapted(method, NearestNeighbours())
    reference = scored(algorithm)
    for engine in ("vmap", "wire"):
        other = scored(algorithm, engine)
        assert other.evaluation.test == pytest.approx(reference.evaluation.test, rel=1e-6)
        assert_close(predictors(other).models, predictors(reference).models)
    assert (reference.evaluation.test != scored(method).evaluation.test).any()


def test_a_share_of_zero_is_the_model():
    found, plain = scored(Adapted(FedAvg(), NearestNeighbours(share=0.0))), scored(FedAvg())
    assert np.array_equal(found.evaluation.test, plain.evaluation.test)
    assert torch.equal(predictors(found).models, predictors(plain).models)


def test_the_chosen_share_is_the_best_on_validation_data():
    on = task(FedAvg(), merge=False)
    client = one_client(on, 1)
    w = client.train(on.problem.start)
    memory = NearestNeighbours(k=3).memory(client, w)
    (block,) = client.blocks("val")
    by_share = []
    for share in torch.linspace(0, 1, 11, dtype=w.dtype):
        p = answered(client.model, w, block.x, memory._replace(share=share), False)
        by_share.append(float(F.nll_loss(p.clamp(min=1e-7).log(), block.y)))
    assert by_share.index(min(by_share)) == round(10 * float(memory.share))


def test_neighbours_answer_as_the_formula_says():
    """A slow double loop; padding never answers, and k may exceed the number of samples."""
    rng = torch.Generator().manual_seed(0)
    keys, x = (torch.randn(n, 4, generator=rng, dtype=torch.float64) for n in (7, 5))
    y, held = torch.arange(7) % 3, torch.tensor([1.0] * 5 + [0.0] * 2)
    for k in (1, 3, 9):
        memory = Datastore(keys, F.one_hot(y, 3).double(), held, torch.tensor(k), torch.tensor(1.0))
        for row, point in zip(said(memory, x), x, strict=True):
            near = sorted((float((point - keys[i]).norm()), int(y[i])) for i in range(5))[:k]
            expected = [sum(math.exp(-d) for d, c in near if c == which) for which in range(3)]
            assert_close(row, torch.tensor(expected, dtype=torch.float64) / sum(expected), 1e-9)


@pytest.mark.parametrize(
    "asked", [{"adapt": "knn"}, {"set": {"algorithm.fedavg.adapt.name": "knn"}}]
)
def test_a_model_without_its_neighbours_is_not_handed_out(asked):
    config = {"partition": {"name": "iid", "clients": 2}, "model": {"name": "linear"}}
    run = coterie.run(config, method="fedavg", rounds=1, engine="loop", **asked)
    with pytest.raises(StoreError, match="their own samples beside the model"):
        run.predictor(0)
