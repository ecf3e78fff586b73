"""Guards that every method must pass.

State isolation: what a round leaves of the server stays as it was. No test access: nothing but an
evaluation reads samples that the server holds. (Purity, test data, order, resume and participation
are laws of ``coterie.testing``; steps and the ledger have tests of their own.)
"""

from dataclasses import replace

import pytest
import torch

from coterie.adapt import Adapted, ElasticWeights
from coterie.algorithms.fedavg import FedAvg
from coterie.core import tree
from coterie.data.partition import hold_aux
from coterie.training.rounds import train
from support import METHODS, engine_of, federation, last, predictors, task

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
