"""Foreign targets: own data is trained on, another client's data judges."""

import pytest
import torch

import coterie
from coterie.core.algorithm import Sharing
from coterie.core.optim import Recipe
from coterie.data import PARTITIONS, emd, federate, load, manifest
from coterie.data.simulation import simulate
from coterie.runs import collaboration
from coterie.runs.run import Roster

GROUPS = PARTITIONS["label_groups"](clients=9, groups=3)


def pair(**options):
    """The same federation with everybody's own targets, and with foreign ones."""
    data = load("digits")
    own = federate(data, GROUPS, **options)
    return own, federate(data, GROUPS, foreign_targets=True, **options)


def indices(ragged, i):
    split = ragged.rows([i])
    return set(split.samples[0, : int(split.size[0])].tolist())


def linear():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


@pytest.mark.parametrize("sharing", [None, Sharing("from_clients", 0.1), Sharing("held_out", 0.1)])
@pytest.mark.parametrize("merge", [False, True])
def test_nothing_of_the_target_is_trained_on(merge, sharing):
    own, made = pair(aux=0.2)
    task = simulate(made, linear, Recipe(), merge_val=merge, sharing=sharing)
    same = simulate(own, linear, Recipe(), merge_val=merge, sharing=sharing)
    for i, j in enumerate(made.foreign.tolist()):
        assert indices(task.shards.splits["train"], i) == indices(same.shards.splits["train"], i)
        assert indices(task.shards.splits["val"], i) == set(own.val[j].tolist())
        assert indices(task.shards.splits["test"], i) == set(own.test[j].tolist())
        if merge and i != j:
            assert indices(task.shards.splits["train"], i) >= set(own.val[i].tolist())
        assert not indices(task.shards.splits["train"], i) & indices(task.shards.splits["test"], i)
    assert task.problem.sizes.tolist() == same.problem.sizes.tolist()
    assert sorted(task.problem.aux.y.tolist()) == sorted(same.problem.aux.y.tolist())


def test_the_owner_of_judging_data_is_known():
    own, made = pair()
    for i in range(len(own)):
        assert torch.equal(made.own_val[i], own.val[i])
        assert torch.equal(made.own_test[i], own.test[i])
    assert own.own_val is own.val
    assert made.target_groups.tolist() == [int(own.groups[j]) for j in made.foreign.tolist()]


def test_distances_and_histograms_are_of_own_data():
    own, made = pair()
    assert emd(made) == emd(own)
    told = manifest(made)
    assert [c["histogram"] for c in told["clients"]] == [
        c["histogram"] for c in manifest(own)["clients"]
    ]
    judged = [own.clients[j] for j in made.foreign.tolist()]
    assert [c["judged_on"] for c in told["clients"]] == judged


def test_weights_are_scored_against_the_targets_group():
    _, made = pair()
    roster = Roster.of(made)
    groups = roster.groups
    A = (roster.targets[:, None] == groups).astype(float)  # everybody finds what judges it
    assert collaboration.in_group_weight(A, *roster.truth(False)) == 1.0
    assert collaboration.weight_recovery(A, *roster.truth(False)) == 1.0
    assert collaboration.in_group_weight(A, groups) < 1.0
    kin = collaboration.kinship(A, True)  # clients of one target use the same models
    assert collaboration.in_group_weight(kin, *roster.truth(True)) == 1.0
    worst = (roster.targets[:, None] != groups).astype(float)
    assert collaboration.in_group_weight(worst, *roster.truth(False)) == 0.0


def test_fedfomo_serves_the_target_and_local_does_not():
    """P1's Table 3: who looks for helpful models wins where training data is of no use."""
    config = {
        "partition": {"name": "label_groups", "clients": 9, "groups": 3, "foreign_targets": True},
        "model": {"name": "mlp"},
        "train": {"lr": 0.1, "epochs": 2, "batch": 10},
        "run": {"evaluate_every": 6},
    }
    methods = ["local", "fedavg", "fedavg_data", "fedfomo"]
    found = coterie.compare(config, methods=methods, rounds=6, engine="vmap", seed=0)
    mean = {row.method: row.mean.mean for row in found.rows}
    assert mean["fedfomo"] > mean["fedavg"] + 1
    assert mean["fedfomo"] > mean["fedavg_data"]
    assert mean["fedavg"] > mean["local"] + 20
    assert all(row.alarms == () for row in found.rows)
    local = next(run for run in found.runs if run.method == "local")
    elsewhere = local.roster.targets != local.roster.groups
    assert local.last[elsewhere].max() < 10  # it has never seen these classes
    assert local.last[~elsewhere].min() > 70
    fomo = next(row for row in found.rows if row.method == "fedfomo")
    assert fomo.in_group_weight.mean > 0.9
