"""What the methods are for, on data small enough to see it happen.

A row of ``FINDERS`` is a method that must tell two groups of opposite regressions apart, with what
it is told beyond its defaults and where its finding is read. FedeRiCo's models change hands: a
group may settle on a model that a client of the other group started. Its weights are therefore read
as ``A Aᵀ``: who draws on the same models.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from coterie.algorithms import ALGORITHMS
from coterie.core import random
from coterie.core.optim import Recipe
from coterie.data.datasets import load
from coterie.data.federation import Dataset
from coterie.data.partition import PARTITIONS, federate
from coterie.data.simulation import simulate
from coterie.training.rounds import train
from support import assert_close, backend_of, engine_of, one_client, whole_round

STEPS = Recipe(lr=0.1, epochs=1, batch=10)
WHOLE = Recipe(lr=0.1, epochs=1, batch=100)  # one step on all data
STRANGER = 3  # the client with random labels


def linear(features):
    return lambda: nn.Linear(features, 1)


def task_of(method, dataset, recipe=STEPS, seed=0, federated=None):
    if federated is None:
        federated = federate(dataset, PARTITIONS["natural"](), seed=seed)
    return simulate(
        federated,
        linear(dataset.x.shape[1]),
        recipe,
        seed=seed,
        dtype=torch.float64,
        merge_val=False,
    )


def records(method, dataset, rounds=20, **options):
    on = task_of(method, dataset, **options)
    return list(train(method, on.problem, engine_of("vmap", on), rounds, metric="rmse"))


def common(record):
    """How much two clients draw on the same models."""
    return record.collaboration @ record.collaboration.T


def drawn_on(record):
    return record.collaboration


def affinity(record):
    """FedFomo's affinities, from the least to the most preferred: 0 to 1."""
    P = record.states.affinity.numpy()
    return (P[:, :, None] > P[:, None, :]).mean(2)


def inside(A, groups):
    """The share of what clients give to others that stays in the group."""
    others = A * ~np.eye(len(A), dtype=bool)
    return others[groups[:, None] == groups].sum() / others.sum()


FINDERS = {
    "fedfomo": ({}, drawn_on),
    "fedfomo_ma": ({}, drawn_on),
    "federico": ({}, common),
    "fedamp": ({}, drawn_on),
    "heurfedamp": ({}, drawn_on),
    "waffle_stable": ({}, drawn_on),
    "cfl": ({}, drawn_on),
    "ifca": ({}, drawn_on),
}


def regression_groups(seed):
    """Eight clients of two groups: ``y = x·b`` for one half, ``y = -x·b`` for the other."""
    key = random.derive(seed, "regression_groups")
    owners, groups = torch.arange(8).repeat_interleave(40), torch.arange(8) // 4
    x = random.normal(key, "x", torch.arange(320 * 5).view(320, 5))
    b = random.normal(key, "b", torch.arange(5))
    noise = 0.1 * random.normal(key, "noise", torch.arange(320))
    y = (1.0 - 2.0 * groups[owners]) * (x @ (b / b.norm())) + noise
    names = tuple(f"client{i}" for i in range(8))
    return Dataset(
        "regression_groups", x.float(), y.float(), 0,
        owners=owners, owner_names=names, owner_groups=groups,
    )  # fmt: skip


GROUPS = {seed: regression_groups(seed) for seed in (0, 1)}


def loss_of(name, seed=0, **fields):
    """Every client's test loss after the last round."""
    return records(ALGORITHMS[name](**fields), GROUPS[seed], seed=seed)[-1].evaluation.test_loss


@pytest.mark.parametrize("seed", GROUPS)
@pytest.mark.parametrize("name", FINDERS)
def test_two_groups_are_found_and_it_pays(name, seed):
    fields, read = FINDERS[name]
    last = records(ALGORITHMS[name](**fields), GROUPS[seed], seed=seed)[-1]
    groups = GROUPS[seed].owner_groups.numpy()
    assert read(last).sum() > 1
    assert inside(read(last), groups) > 0.9
    together = loss_of("fedavg", seed)
    assert last.evaluation.test_loss.mean() < 0.1 * together.mean()
    assert (last.evaluation.test_loss < together).all()


@pytest.mark.parametrize("seed", GROUPS)
def test_averaging_everybody_is_worse_than_alone(seed):
    assert (loss_of("local", seed) < 0.2 * loss_of("fedavg", seed)).all()


def test_the_share_inside_can_be_low():
    groups = GROUPS[0].owner_groups.numpy()
    uniform = np.ones((8, 8)) / 8
    assert inside(uniform, groups) == pytest.approx(3 / 7)


@pytest.mark.parametrize("seed", GROUPS)
def test_fedfomo_prefers_its_own_kind(seed):
    last = records(ALGORITHMS["fedfomo"](), GROUPS[seed], seed=seed)[-1]
    groups, ranked = GROUPS[seed].owner_groups.numpy(), affinity(last)
    same = groups[:, None] == groups
    for i in range(8):
        mine = same[i] & (np.arange(8) != i)
        assert ranked[i, mine].min() > ranked[i, ~same[i]].max()


@pytest.mark.parametrize("name", ["federico", "fedfomo_ma", "heurfedamp", "cfl", "ifca"])
def test_finding_friends_beats_training_alone(name):
    assert loss_of(name).mean() < loss_of("local").mean()


@pytest.mark.parametrize("seed", GROUPS)
@pytest.mark.parametrize("name", ["cfl_mean", "ifca"])
def test_clusters_are_the_groups_exactly(name, seed):
    last = records(ALGORITHMS[name](), GROUPS[seed], seed=seed)[-1]
    groups = GROUPS[seed].owner_groups.numpy()
    assert np.array_equal(last.collaboration > 0, groups[:, None] == groups)


def test_a_single_requester_is_enough_for_alice():
    alice = ALGORITHMS["waffle"](requesters=(0,))
    loss = records(alice, GROUPS[0])[-1].evaluation.test_loss
    assert np.isnan(loss[1:]).all()
    assert loss[0] == pytest.approx(loss_of("waffle")[0])


def test_erosion_keeps_its_own_kind_longest():
    middle = records(ALGORITHMS["erosion"](), GROUPS[0])[5].collaboration
    assert inside(middle, GROUPS[0].owner_groups.numpy()) > 0.6
    assert loss_of("erosion").mean() < 0.1 * loss_of("fedavg").mean()


def test_apfl_learns_to_prefer_its_own_model():
    last = records(ALGORITHMS["apfl"](), GROUPS[0], rounds=40)[-1]
    assert (last.states.alpha > 0.5).all()
    assert last.evaluation.test_loss.mean() < 0.1 * loss_of("fedavg").mean()


# ---- P2's sine -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_neighbours_on_a_sine_share_weight_and_the_distant_do_not(seed):
    method = ALGORITHMS["federico"](downloads=5)
    recipe = Recipe(optimizer="adam", lr=0.05, epochs=5, batch=20)
    last = records(method, load("sine", seed=seed), rounds=40, recipe=recipe, seed=seed)[-1]
    shared, place = common(last), np.arange(12)
    apart = np.abs(place[:, None] - place)
    near, further, far = (shared[which].mean() for which in (apart == 1, apart == 2, apart >= 5))
    assert near > further > far
    assert near > 3 * far


# ---- a client twice ------------------------------------------------------------------------


def with_a_twin():
    """Clients 0 and 1 hold the same data."""
    whole = federate(GROUPS[0], PARTITIONS["natural"]())
    twice = {
        split: (*getattr(whole, split)[:1] * 2, *getattr(whole, split)[2:])
        for split in ("train", "val", "test")
    }
    return replace(whole, **twice)


TWINS = {
    "fedfomo": {"downloads": 7},
    "fedfomo_ma": {},
    "fedamp": {},
    "heurfedamp": {},
    "waffle": {},
    "erosion": {},
}


@pytest.mark.parametrize("name", TWINS)
def test_twins_get_the_same_weight(name):
    method = ALGORITHMS[name](**TWINS[name])
    first, second = records(method, GROUPS[0], rounds=2, recipe=WHOLE, federated=with_a_twin())
    A = torch.from_numpy((first if name in ("waffle", "erosion") else second).collaboration)
    assert_close(A[2:, 0], A[2:, 1])
    assert (A[2:, 0] > 1e-6).any()
    assert (A[2:, :1] - A[2:, 2:]).abs().max() > 1e-6  # not just everybody


def test_federico_weighs_twins_alike():
    method = ALGORITHMS["federico"](downloads=7, loss_reduction="mean")
    on = task_of(method, GROUPS[0], WHOLE, federated=with_a_twin())
    server, states = method.init(on.problem)
    alone = torch.stack([one_client(on, i).train(on.problem.start) for i in range(8)])
    assert_close(alone[0], alone[1])
    round = whole_round(on)
    received = method.download(server._replace(models=alone), round)
    _, after = backend_of("loop", on).local(method, received, states, round)
    assert_close(after.weights[:, 0], after.weights[:, 1])
    assert (after.weights[:, 0] - after.weights[:, 2]).abs().max() > 1e-3


# ---- a client with random labels -----------------------------------------------------------


def with_a_stranger(seed):
    """One client's targets have nothing to do with its inputs."""
    honest = GROUPS[seed]
    mine = honest.owners == STRANGER
    noise = torch.randn(int(mine.sum()), generator=torch.Generator().manual_seed(seed))
    return replace(honest, y=honest.y.masked_scatter(mine, noise))


@pytest.mark.parametrize("seed", GROUPS)
@pytest.mark.parametrize("name", ["fedfomo", "federico"])
def test_a_stranger_loses_all_weight(name, seed):
    read = FINDERS[name][1]
    history = records(ALGORITHMS[name](), with_a_stranger(seed), seed=seed)
    honest = [i for i in range(8) if i != STRANGER]
    friends = [i for i in range(4) if i != STRANGER]
    weights = [read(record) for record in history]
    assert weights[-1][honest, STRANGER].max() < 0.01
    among = [A[friends][:, friends] for A in weights]
    assert max(A.sum() - np.trace(A) for A in among) > 0.1  # friends do share
    assert history[-1].evaluation.test_loss[honest].mean() < 0.02


def test_fedfomo_likes_a_stranger_least_of_its_group():
    last = records(ALGORITHMS["fedfomo"](), with_a_stranger(0))[-1]
    ranked = affinity(last)
    for i in range(3):
        assert ranked[i, STRANGER] < min(ranked[i, j] for j in range(3) if j != i)
