"""Guards that every method must pass.

The regulariser is alive: the data say nothing here (all inputs are zero, the layer has no bias), so
one step from anchor + δ must move by exactly −η times the regulariser's gradient, and by something.
Methods whose clients start at the anchor are held to their second step instead.

State isolation: what a round leaves of the server stays as it was. No test access: nothing but an
evaluation reads samples that the server holds. (Purity, test data, order, resume and participation
are laws of ``coterie.testing``; the ledger has tests of its own.)
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.adapt import Adapted, ElasticWeights
from coterie.adapt.ewc import consolidate, fisher
from coterie.algorithms.attention import Cloud
from coterie.algorithms.attention import Own as FedAMPOwn
from coterie.algorithms.ditto import Ditto
from coterie.algorithms.ditto import Own as DittoOwn
from coterie.algorithms.fedamp import FedAMP
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedprox import FedProx
from coterie.algorithms.heurfedamp import HeurFedAMP
from coterie.algorithms.mocha import Mocha, Ties
from coterie.algorithms.mocha import Own as MochaOwn
from coterie.algorithms.pafl import PaFL, Sent
from coterie.algorithms.pfedme import Own as PFedMeOwn
from coterie.algorithms.pfedme import PFedMe, envelope_step
from coterie.core import tree
from coterie.core.optim import Recipe
from coterie.data.federation import Dataset, Federation
from coterie.data.partition import hold_aux
from coterie.data.simulation import simulate
from coterie.training.rounds import train
from support import (
    METHODS,
    assert_close,
    engine_of,
    federation,
    last,
    one_client,
    predictors,
    task,
)

ETA = 0.05
ANCHOR = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
DELTA = torch.tensor([0.3, 0.1, -0.7], dtype=torch.float64)


def silent_client():
    data = Dataset("silence", torch.zeros(12, 3), torch.zeros(12), classes=0)
    splits = ((torch.arange(8),), (torch.arange(8, 10),), (torch.arange(10, 12),))
    federated = Federation(data, "one", ("site",), *splits)
    on = simulate(
        federated,
        lambda: nn.Linear(3, 1, bias=False),
        Recipe(lr=ETA, steps=1, batch=8),
        dtype=torch.float64,
    )
    return one_client(on, 0)


def ditto():
    _, new = Ditto(lam=2.0).local(silent_client(), ANCHOR, DittoOwn(ANCHOR + DELTA))
    return new.v, 2.0 * DELTA, ETA


def pfedme_personal():
    method = PFedMe(lam=4.0, inner_steps=1, inner_lr=0.1, start="kept")
    _, new = method.local(silent_client(), ANCHOR, PFedMeOwn(ANCHOR + DELTA))
    return new.theta, 4.0 * DELTA, 0.1


def mocha(lam2=0.0):
    """Three unequal columns; ours is anchor + δ."""
    columns = torch.stack([ANCHOR + DELTA, -ANCHOR, 3 * ANCHOR])
    mean = columns.mean(0)
    ties = Ties(-(columns[1] + columns[2]) / 3, torch.tensor(2 / 3, dtype=torch.float64))
    method = Mocha(lam1=0.5, lam2=lam2)
    _, new = method.local(silent_client(), ties, MochaOwn(columns[0]))
    return new.w, 2 * 0.5 * (columns[0] - mean) + 2 * lam2 * columns[0], ETA


def fedamp(method):
    cloud = Cloud(ANCHOR, torch.tensor(3.0, dtype=torch.float64))
    _, new = method.local(silent_client(), cloud, FedAMPOwn(ANCHOR + DELTA))
    return new.w, 3.0 * DELTA, ETA


def ewc():
    M = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    found = consolidate(silent_client(), ANCHOR + DELTA, ANCHOR, M, 4.0, "explicit")
    return found, 4.0 * M * DELTA, ETA


GUARDED = {
    "fedamp": lambda: fedamp(FedAMP(start="self", sigma=1.0)),
    "heurfedamp": lambda: fedamp(HeurFedAMP(start="self", sigma=1.0)),
    "ewc": ewc,
    "ditto": ditto,
    "pfedme": pfedme_personal,
    "mocha": mocha,
    "mocha with decay": lambda: mocha(lam2=0.3),
}


@pytest.mark.parametrize("name", GUARDED)
def test_the_regulariser_moves_the_model(name):
    found, gradient, rate = GUARDED[name]()
    assert gradient.norm() > 0.1
    assert_close(found, ANCHOR + DELTA - rate * gradient, 1e-12)


def test_pfedme_s_shared_model_follows_the_personal_one():
    method = PFedMe(lam=4.0, inner_steps=1, inner_lr=0.1, lr=0.02, start="kept")
    up, new = method.local(silent_client(), ANCHOR, PFedMeOwn(ANCHOR + DELTA))
    assert_close(up.w, ANCHOR - 0.02 * 4.0 * (ANCHOR - new.theta), 1e-12)
    assert_close(up.w, envelope_step(ANCHOR, new.theta, 0.02, 4.0), 0)
    assert (up.w - ANCHOR).norm() > 1e-3


# ---- the regulariser of methods that start at the anchor -----------------------------------------

TWO_STEPS = Recipe(lr=ETA, steps=2, batch=100)


def first_step(client, w, loss=None):
    return w - ETA * client.gradient(w, client.batch(0), loss)


def from_fedprox(client, w):
    return FedProx(mu=2.0).local(client, w, ())[0].w, lambda v: 2.0 * (v - w)


def from_pafl(client, w):
    """A constant schedule with the proximal term: half of each."""
    upload, _ = PaFL(schedule="fedprox", mu=0.5).local(client.tuned(lr=2 * ETA), Sent(w, ()), ())
    return upload.update.w, lambda v: v - w


def from_pafl_ewc(client, w):
    M = fisher(client, w, "empirical")
    method = PaFL(personal="ewc", mu=0.0, lam=3.0)
    return method.local(client, Sent(w, M), ())[0].update.w, lambda v: 3.0 * M * (v - w)


def from_ewc(client, w):
    M = fisher(client, w, "empirical")
    found = ElasticWeights(lam=3.0).adapt(client, w)
    return found, lambda v: 3.0 * M * (v - w)


@pytest.mark.parametrize("from_method", [from_fedprox, from_pafl, from_pafl_ewc, from_ewc])
def test_the_regulariser_bends_the_second_step(from_method):
    on = task(FedAvg(), recipe=TWO_STEPS)
    client, w = one_client(on, 0), on.problem.start
    found, pull = from_method(client, w)
    once = first_step(client, w)
    expected = once - ETA * (client.gradient(once, client.batch(1)) + pull(once))
    assert (ETA * pull(once)).norm() > 1e-4
    assert_close(found, expected, 1e-12)


# ---- state isolation -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_server_is_no_alias_of_anything_that_lives_on(name):
    """What a record holds of the server stays as it was, whatever later rounds write."""
    algorithm = METHODS[name]()
    on = task(algorithm)
    kept = []
    for record in train(algorithm, on.problem, engine_of("vmap", on), 4, participation=0.5):
        kept.append((record.server, tree.map_leaves(torch.clone, record.server)))
    for now, then in kept:
        for a, b in zip(tree.leaves(now), tree.leaves(then), strict=True):
            assert torch.equal(a, b)


# ---- no test access ------------------------------------------------------------------------------


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
