"""Settings in which one method must equal another.

A row is a name and two methods that must leave every client with the same predictor, on ragged
clients with half of them taking part. Rows that need more than that have a test of their own.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from coterie.adapt import Adapted, Distill, ElasticWeights, FineTune, FreezeBase
from coterie.algorithms.apfl import APFL
from coterie.algorithms.cfl import CFL
from coterie.algorithms.cobo import CoBo
from coterie.algorithms.ditto import Ditto
from coterie.algorithms.erosion import Erosion
from coterie.algorithms.fedala import FedALA
from coterie.algorithms.fedamp import FedAMP
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedavg_data import FedAvgData
from coterie.algorithms.fedbabu import FedBABU
from coterie.algorithms.fedem import FedEM
from coterie.algorithms.federico import FedeRiCo
from coterie.algorithms.fedfomo import FedFomo
from coterie.algorithms.fedpac import FedPAC
from coterie.algorithms.fedper import FedPer
from coterie.algorithms.fedprox import FedProx
from coterie.algorithms.fedrep import FedRep
from coterie.algorithms.heurfedamp import HeurFedAMP
from coterie.algorithms.ifca import IFCA
from coterie.algorithms.lgfedavg import LGFedAvg
from coterie.algorithms.local import Local
from coterie.algorithms.mocha import Mocha
from coterie.algorithms.pafl import PaFL
from coterie.algorithms.perfedavg import PerFedAvg
from coterie.algorithms.pfedgraph import PFedGraph
from coterie.algorithms.qfedavg import QFedAvg
from coterie.algorithms.scaffold import Scaffold
from coterie.algorithms.term import TERM
from coterie.core.optim import Recipe
from coterie.training.rounds import train
from support import METHODS, RECIPE, assert_close, engine_of, federation, last, predictors, task

FINE_TUNED = Adapted(FedAvg(), FineTune())
ALONE = Local(budget="matched", keep="last")  # sampled as the others are

CASES = {
    "EWC lam=0 is FT": (Adapted(FedAvg(), ElasticWeights(lam=0.0)), FINE_TUNED),
    "KD hinton alpha=0 is FT": (Adapted(FedAvg(), Distill(alpha=0.0, kd_step="full")), FINE_TUNED),
    "FB of the whole network is FT": (
        Adapted(FedAvg(), FreezeBase(fb_trainable=("1", "3"))),
        FINE_TUNED,
    ),
    "FedProx mu=0 is FedAvg": (FedProx(mu=0.0), FedAvg()),
    "q-FedAvg q=0 is FedAvg": (QFedAvg(q=0.0), FedAvg()),
    "q-FedAvg q=0 of the original is FedAvg": (QFedAvg(q=0.0, step="lipschitz"), FedAvg()),
    "FedAvg+Data without a share is FedAvg": (FedAvgData(share=0.0), FedAvg()),
    "TERM t=0 is FedAvg": (TERM(t=0.0), FedAvg()),
    "PaFL mu=1 is FedAvg": (PaFL(mu=1.0), FedAvg()),
    "FedAMP without attention and pull is Local": (
        FedAMP(alpha=0.0, sigma=1.0, lam=0.0, start="self", predict_with="own"),
        ALONE,
    ),
    "FedeRiCo that looks only at itself is Local": (
        FedeRiCo(downloads=0),
        Local("matched", "independent", "last"),
    ),
    "Weight Erosion that erodes everybody at once is Local": (Erosion(p_d=1e9), Local(keep="last")),
    "APFL alpha=0 is FedAvg": (APFL(alpha=0.0, adaptive=False), FedAvg()),
    "APFL alpha=1 is Local": (APFL(alpha=1.0, adaptive=False), ALONE),
    "HeurFedAMP that looks only at itself is Local": (
        HeurFedAMP(self_weight=1.0, prox=0.0, predict_with="own"),
        ALONE,
    ),
    "LG-FedAvg with all layers global is FedAvg": (LGFedAvg(global_layers=2), FedAvg("uniform")),
    "LG-FedAvg with no layer global is Local": (LGFedAvg(global_layers=0), ALONE),
    "FedPer without a head is FedAvg": (FedPer(head=0), FedAvg()),
    "FedPer that is all head is Local": (FedPer(head=2), ALONE),
    "FedRep without a head is FedAvg": (FedRep(head=0, base_epochs=2), FedAvg()),
    "FedALA that keeps W = 1 is FedAvg": (FedALA(eta=0.0), FedAvg()),
    "FedBABU with a trained head is FedAvg-FT": (FedBABU(head=0, tune_epochs=None), FINE_TUNED),
    "Ditto without a pull is Local": (Ditto(lam=0.0), ALONE),
    "CoBo without a pull is Local": (CoBo(rho=0.0), ALONE),
    "MOCHA without ties is Local": (Mocha(lam1=0.0), ALONE),
    "MOCHA with a learned omega and no ties is Local": (Mocha(lam1=0.0, omega="learned"), ALONE),
    "Per-FedAvg with a=0 is FedAvg": (PerFedAvg(inner_lr=0.0), FedAvg()),
    "Hessian-free Per-FedAvg with a=0 is FedAvg": (PerFedAvg("hf", inner_lr=0.0), FedAvg()),
    "FedEM with one component is FedAvg": (FedEM(components=1), FedAvg()),
    "IFCA k=1 is FedAvg": (IFCA(k=1), FedAvg()),
    "IFCA k=1, redrawn, is FedAvg": (IFCA(k=1, start="redraw"), FedAvg()),
    "CFL eps1=0 is FedAvg": (CFL(eps_mode="absolute", eps1=0.0), FedAvg()),
    "CFL that may never split is FedAvg": (CFL(t_min=99), FedAvg()),
}

BIT_FOR_BIT = {"FedProx mu=0 is FedAvg", "PaFL mu=1 is FedAvg"}


@pytest.mark.parametrize("case", CASES)
def test_reduction(case):
    special, general = CASES[case]
    found = predictors(last(special, task(special), rounds=4))
    expected = predictors(last(general, task(general), rounds=4))
    if case in BIT_FOR_BIT:
        assert torch.equal(found.models, expected.models)
    assert_close(found.models, expected.models, 1e-6)


@cache
def plainly(simple, merge):
    return predictors(last(simple, task(simple, merge=merge), rounds=4)).models


# every method is more than the simplest one of its kind: otherwise a reduction proves nothing
@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("local", "fedavg")])
def test_defaults_are_not_a_plain_method(name):
    algorithm = METHODS[name]()
    found = predictors(last(algorithm, task(algorithm), rounds=4)).models[:, :1]
    for simple in (ALONE, FedAvg()):
        other = plainly(simple, not algorithm.traits.uses_validation)
        assert (found - other).abs().max() > 1e-6


def test_fedfomo_without_downloads_is_local_while_validation_improves():
    gentle = Recipe(lr=0.01, epochs=1, batch=10)
    alone = FedFomo(downloads=0)
    found = last(alone, task(alone, recipe=gentle), rounds=4, participation=1.0)
    other = last(ALONE, task(ALONE, recipe=gentle, merge=False), rounds=4, participation=1.0)
    assert_close(predictors(found).models, predictors(other).models, 1e-6)


def test_scaffold_without_controls_is_uniform_fedavg():
    def forgetful(method):
        on = task(method)
        engine, results = engine_of("vmap", on), []
        for record in train(method, on.problem, engine, 1, participation=1.0):
            results.append(record.server)
        return results[-1]

    # controls are zero before the first round: one round of both methods is the same
    scaffold, fedavg = Scaffold(), FedAvg(weighting="uniform")
    assert_close(forgetful(scaffold).x, forgetful(fedavg), 1e-12)


def test_pfedgraph_that_keeps_to_the_shares_of_samples_is_fedavg():
    """With everybody in every round: an absent client keeps its mixture."""
    method = PFedGraph(alpha=1e9, lam=0.0, predict_with="cloud")
    found = last(method, task(method), rounds=4, participation=1.0)
    other = last(FedAvg(), task(FedAvg()), rounds=4, participation=1.0)
    assert_close(predictors(found).models, predictors(other).models, 1e-6)


def test_fedpac_of_one_client_is_that_client_s_training():
    """Head and body in turn, without a pull towards the means of others: FedRep's two phases."""
    alone, one = federation(sizes=(31,)), replace(RECIPE, epochs=1)
    found, other = (
        last(m, task(m, federated=alone, recipe=one), rounds=3, participation=1.0)
        for m in (FedPAC(lam=0.0), FedRep(head_epochs=1, base_epochs=1))
    )
    assert_close(predictors(found).models, predictors(other).models, 1e-12)


def test_one_participant_becomes_the_average():
    alone = federation(sizes=(31,))
    found = last(FedAvg(), task(FedAvg(), federated=alone), rounds=3, participation=1.0)
    other = last(ALONE, task(ALONE, federated=alone), rounds=3, participation=1.0)
    assert_close(predictors(found).models, predictors(other).models, 1e-12)
