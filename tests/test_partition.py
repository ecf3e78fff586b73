"""Laws of all partitions, and the papers' own numbers for each."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

import coterie
from coterie.api import configure
from coterie.data import PARTITIONS, describe, emd, federate, load, manifest
from coterie.data.federation import Dataset, Federation
from coterie.data.manifest import changes, class_counts, distance, listed, ranges
from coterie.data.partition import Fold, folds_of, take_share
from coterie.data.partitions import latent
from coterie.data.partitions.base import even, largest_remainder, shard_classes
from coterie.data.partitions.labels import (
    LISTS,
    SIZES,
    conflicting,
    label_shares,
    quotas,
    serve,
    share_out,
    sized,
    standard_groups,
)
from coterie.data.partitions.latent import consecutive
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.runs.assemble import assemble
from coterie.runs.config.loading import WRITTEN, config_hash
from coterie.runs.config.loading import load as read_config


def balanced(classes: int, train: int, test: int = 0, name: str = "toy") -> Dataset:
    """So many training and test samples of each class, in a scrambled order."""
    y = np.repeat(np.arange(classes), train)
    y_test = np.repeat(np.arange(classes), test)
    order = np.random.default_rng(0).permutation(len(y))
    labels = torch.from_numpy(np.concatenate([y[order], y_test]))
    parts = torch.tensor([0] * len(y) + [2] * len(y_test), dtype=torch.int8)
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(len(labels), 2)).astype(np.float32))
    names = tuple(f"c{i}" for i in range(classes))
    return Dataset(name, x, labels, classes, fixed=parts if test else None, class_names=names)


def samples(made: Federation) -> list[int]:
    """Every index that was given out, as often as it was."""
    return [
        i for split in (made.train, made.val, made.test) for part in split for i in part.tolist()
    ]


def counts(made: Federation) -> np.ndarray:
    return class_counts(made, made.train, made.val)


# Laws

CLASSY = ["iid", "pathological", "label_groups", "concept_shift", "dirichlet",
          "dirichlet_clusters", "practical_groups", "waffle"]  # fmt: skip


@st.composite
def situations(draw):
    """Any dataset with any partition of it, sensible or not."""
    classes = draw(st.integers(2, 12))
    sizes = draw(st.lists(st.integers(0, 30), min_size=classes, max_size=classes))
    tests = draw(st.lists(st.integers(0, 8), min_size=classes, max_size=classes))
    y = torch.tensor(
        np.repeat(np.arange(classes), sizes).tolist()
        + np.repeat(np.arange(classes), tests).tolist(),
        dtype=torch.int64,
    )
    fixed = torch.tensor([0] * sum(sizes) + [2] * sum(tests), dtype=torch.int8)
    x = torch.arange(len(y), dtype=torch.float32)[:, None]
    data = Dataset("any", x, y, classes, fixed=fixed if draw(st.booleans()) else None)
    name = draw(st.sampled_from(CLASSY))
    fields = PARTITIONS[name].__dataclass_fields__
    options = {}
    if "clients" in fields:
        options["clients"] = draw(st.integers(1, 40))
    for field in ("groups", "clusters", "per_client"):
        if field in fields:
            options[field] = draw(st.integers(1, 6))
    if "alpha" in fields:
        options["alpha"] = draw(st.sampled_from([0.01, 0.5, 100.0]))
    if "distribution" in fields:
        options["distribution"] = draw(st.sampled_from(["A", "B", "C", "A*", "B*"]))
        options["sizes"] = draw(st.sampled_from("ABC"))
    return data, name, options, draw(st.integers(0, 2**31))


@given(situations())
@settings(max_examples=60, deadline=2000)
def test_any_situation_gives_a_partition_or_a_clear_refusal(situation):
    data, name, options, seed = situation
    try:
        made = federate(data, PARTITIONS[name](**options), seed=seed)
    except CoterieError:
        return
    given_out = samples(made)
    assert len(given_out) == len(set(given_out))
    assert len(made.train) == len(made.val) == len(made.test) == len(made)
    if data.fixed is not None and (data.fixed == 2).any():
        is_test = data.fixed == 2
        assert all(is_test[part].all() for part in made.test)
        assert not any(is_test[part].any() for part in (*made.train, *made.val))
    if made.relabel is not None:
        assert (made.relabel.sort(dim=1).values == torch.arange(data.classes)).all()
    again = federate(data, PARTITIONS[name](**options), seed=seed)
    assert again.fingerprint == made.fingerprint


@pytest.mark.parametrize("name", CLASSY)
def test_the_seed_and_nothing_else_decides(name):
    data = balanced(10, 60, 20)
    partition = PARTITIONS[name]()
    one = federate(data, partition, seed=1, val=0)  # nothing but the dealing is random
    assert federate(data, partition, seed=1, val=0).fingerprint == one.fingerprint
    assert federate(data, partition, seed=2, val=0).fingerprint != one.fingerprint


@pytest.mark.parametrize("name", [n for n in CLASSY if n != "iid"])
def test_partitions_of_classes_refuse_a_regression(name):
    with pytest.raises(DataError, match="use iid or natural"):
        federate(load("sine"), PARTITIONS[name]())


@pytest.mark.parametrize(
    ("classes", "each", "name", "options", "words"),
    [
        (2, 10, "iid", {"clients": 30}, "30 clients but only 20 training samples"),
        (2, 10, "pathological", {"clients": 4, "per_client": 3}, "only 2 classes"),
        (9, 20, "waffle", {}, "needs ten"),
        (10, 20, "concept_shift", {"clients": 22, "groups": 11}, "only 10 groups"),
    ],
)
def test_what_the_data_cannot_give_is_refused(classes, each, name, options, words):
    with pytest.raises(CoterieError, match=words):
        federate(balanced(classes, each), PARTITIONS[name](**options))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("label_groups", {"clients": 2, "groups": 3}),
        ("latent", {"clients": 2, "distributions": 3}),
        ("latent", {"embedding": "vgg11", "components": 257}),
        ("practical_groups", {"table": [{"clients": 1}]}),
        ("practical_groups", {"table": [{"clients": 0, "classes": [0], "train": 1, "test": 1}]}),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(name, options):
    with pytest.raises(ConfigError, match=rf"\.({'|'.join(options)}): found .*; expected"):
        PARTITIONS[name](**options)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_impossible_shares_are_refused(share):
    with pytest.raises(ConfigError, match=r"data\.val"):
        federate(load("digits"), PARTITIONS["iid"](), val=share)


# Splits


def test_splits_are_stratified():
    made = federate(balanced(4, 100), PARTITIONS["iid"](clients=2), val=0.25, test=0.2)
    whole = class_counts(made, made.train, made.val, made.test)
    assert np.abs(class_counts(made, made.test) - 0.2 * whole).max() < 1
    assert np.abs(class_counts(made, made.val) - 0.2 * whole).max() < 1.5


@given(st.integers(0, 12), st.sampled_from([0.0, 0.01, 0.2, 0.5, 0.99]), st.integers(0, 9))
def test_a_share_takes_something_and_leaves_something(count, share, seed):
    data = balanced(3, 4)
    taken = take_share(data, torch.arange(count), share, seed, "test", 1)
    assert len(taken) == count
    if share == 0 or count < 2:
        assert not taken.any()
    else:
        assert 0 < int(taken.sum()) < count


def test_clients_alike_in_size_are_split_differently():
    made = federate(load("sine"), PARTITIONS["natural"]())
    places = {tuple((part - 20 * i).tolist()) for i, part in enumerate(made.test)}
    assert len(places) > 6


def test_equal_shares_do_not_favour_low_classes():
    data = balanced(10, 1)
    seen = torch.zeros(10)
    for seed in range(200):
        seen[data.y[take_share(data, torch.arange(10), 0.2, seed, "test", 1)]] += 1
    assert seen.min() > 20  # forty expected of each


@given(st.integers(0, 500), st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any))
def test_largest_remainders_add_up_and_stay_within_one(total, shares):
    quota = largest_remainder(total, np.array(shares, float))
    exact = total * np.array(shares) / sum(shares)
    assert quota.sum() == total
    assert (np.abs(quota - exact) < 1).all()


@given(st.integers(0, 1000), st.integers(1, 50))
def test_even_parts_add_up_and_differ_by_one(total, parts):
    cut = even(total, parts)
    assert cut.sum() == total
    assert cut.max() - cut.min() <= 1


# Natural, IID


def test_natural_clients_keep_their_samples_and_groups():
    data = replace(load("sine"), owner_groups=torch.arange(12) // 6)
    made = federate(data, PARTITIONS["natural"]())
    assert made.clients == data.owner_names
    assert torch.equal(made.groups, data.owner_groups)
    for i in range(len(made)):
        mine = torch.cat([made.train[i], made.val[i], made.test[i]])
        assert (data.owners[mine] == i).all()
        assert len(mine) == 20


# Pathological (13.1)


@pytest.mark.parametrize("clients", [15, 100])
def test_pathological_clients_hold_two_classes_in_equal_shards(clients):
    made = federate(balanced(10, 400, 100), PARTITIONS["pathological"](clients=clients))
    held = counts(made)
    shards = clients * 2 // 10
    assert ((held > 0).sum(axis=1) == 2).all()
    assert held[held > 0].max() - held[held > 0].min() <= 1
    assert ((held > 0).sum(axis=0) == shards).all()
    tests = class_counts(made, made.test)
    assert ((tests > 0) == (held > 0)).all()
    assert tests.sum() == 1000
    assert emd(made).emd_p1 == pytest.approx(2.4, abs=0.01)
    assert made.groups is None


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 12), st.integers(0, 99))
def test_distinct_shards_never_repeat_a_class(clients, each, classes, seed):
    if each > classes:
        return
    hands = shard_classes(clients, each, classes, seed)
    assert hands.shape == (clients, each)
    assert all(len(set(hand)) == each for hand in hands.tolist())
    often = np.bincount(hands.reshape(-1), minlength=classes)
    assert often.max() - often.min() <= 1


def test_shards_beyond_the_supply_are_refused_by_class_and_number():
    data = balanced(10, 20)
    keep = (data.y != 0) | ((data.y == 0).cumsum(0) <= 3)  # three samples of class c0 are left
    rare = replace(data, x=data.x[keep], y=data.y[keep])
    with pytest.raises(
        DataError, match=r"class c0: the partition cuts it into 8 shards .* 3 train"
    ):
        federate(rare, PARTITIONS["pathological"](clients=40))


# Latent distributions (13.2)


def test_clients_take_clusters_in_consecutive_blocks():
    assert consecutive(15, 5).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert consecutive(8, 3).tolist() == [0, 0, 1, 1, 2, 2, 0, 1]


def test_a_users_embedding_decides_the_clusters(tmp_path):
    data = balanced(4, 30, 10)
    place = 10.0 * torch.nn.functional.one_hot(data.y % 2, 2) + 0.01 * data.x
    np.save(tmp_path / "e.npy", place.numpy())
    partition = PARTITIONS["latent"](clients=6, distributions=2, embedding=str(tmp_path / "e.npy"))
    made = federate(data, partition)
    assert made.note == "embedding: e.npy"
    for group in (0, 1):
        members = (made.groups == group).nonzero()[:, 0]
        held = {int(c) % 2 for i in members for c in data.y[made.train[i]]}
        assert len(held) == 1
    assert sum(len(part) for part in made.test) == 40


@pytest.mark.parametrize("content", [np.zeros((3, 2)), np.zeros(120), np.full((160, 2), np.nan)])
def test_a_wrong_embedding_is_refused(tmp_path, content):
    np.save(tmp_path / "e.npy", content)
    partition = PARTITIONS["latent"](clients=6, distributions=2, embedding=str(tmp_path / "e.npy"))
    with pytest.raises(DataError, match="expected 160 rows"):
        federate(balanced(4, 30, 10), partition)


@pytest.fixture
def brief(monkeypatch):
    """Few steps for both networks, and few channels for VGG-11."""
    narrow = tuple(width // 16 for width in latent.CHANNELS)
    shorter = {"CHANNELS": narrow, "WIDTH": 24, "EPOCHS": 1, "FEWEST_STEPS": 40, "BATCH": 32}
    shorter |= {"SMALL_WIDTH": 24, "GREY_EPOCHS": 1}
    for name, value in shorter.items():
        monkeypatch.setattr(latent, name, value)


@pytest.mark.parametrize(("network", "name"), [(None, "vgg-small-512"), ("vgg11", "vgg11")])
def test_an_embedding_is_trained_once_and_its_accuracy_is_named(brief, monkeypatch, network, name):
    digits = load("digits")
    parts = torch.zeros(400, dtype=torch.int8)
    parts[300:] = 2
    data = replace(digits, x=digits.x[:400], y=digits.y[:400], fixed=parts)
    partition = PARTITIONS["latent"](clients=6, distributions=3, embedding=network)
    made = federate(data, partition)
    assert made.note.startswith(f"embedding: {name}, test accuracy ")
    assert sum(map(len, made.test)) == 100  # training and test samples are clustered together
    assert emd(made).l1 > 0.5  # clusters of the network follow the classes
    monkeypatch.setattr(latent, "train", lambda *_: pytest.fail("trained again"))
    assert federate(data, partition).fingerprint == made.fingerprint
    labels = PARTITIONS["latent"](clients=20, distributions=10, embedding=network)
    assert federate(data, labels).note == "the distributions are the classes"


def test_vgg11_learns_from_the_training_part_alone(brief):
    """Other test labels change which answers are right, and nothing else."""
    digits, device = load("digits"), torch.device("cpu")
    data = replace(digits, x=digits.x[:120], y=digits.y[:120])
    other = replace(data, y=torch.cat([data.y[:100], (data.y[100:] + 1) % 10]))
    found = []
    for dataset in (data, other):
        torch.manual_seed(0)
        found.append(latent.train_vgg11(dataset, torch.arange(100), device))
    (points, right), (again, wrong) = found
    assert np.array_equal(points, again)
    assert np.array_equal(right[:100], wrong[:100])
    assert not (right[100:] & wrong[100:]).any()


def test_the_kept_components_are_those_of_principal_component_analysis(monkeypatch):
    monkeypatch.setattr(latent, "COMPONENTS", 7)
    points = np.random.default_rng(0).normal(size=(300, 20)) * np.arange(1, 21) + 5
    kept = latent._principal(torch.from_numpy(points).float()).numpy()
    assert np.allclose(np.abs(kept), np.abs(PCA(7).fit_transform(points)), atol=1e-3)


def test_tables_are_their_own_embedding_and_text_has_none():
    data = balanced(4, 30)
    made = federate(data, PARTITIONS["latent"](clients=4, distributions=2))
    assert made.note == "embedding: the features themselves"
    tokens = replace(data, x=data.y[:, None])
    with pytest.raises(DataError, match=r"partition\.embedding"):
        federate(tokens, PARTITIONS["latent"](clients=4, distributions=2))


# Practical groups (13.4)


def test_mnists_groups_are_as_specified():
    made = federate(balanced(10, 6000, 1000, "mnist"), PARTITIONS["practical_groups"]())
    held = counts(made)
    assert len(made) == 100
    assert made.groups.bincount().tolist() == [30, 30, 40]
    assert held.sum(axis=1).tolist() == [600] * 30 + [500] * 30 + [400] * 40
    assert (held[:30, :3] == 160).all()  # 80 % of 600 over three classes
    assert (np.abs(held[:30, 3:] - 120 / 7) < 1).all()
    assert (held[60:, 6:] == 80).all()
    assert [len(part) for part in made.test] == [50] * 100


def test_emnists_groups_are_the_papers():
    table, scaled = standard_groups(balanced(62, 1, name="emnist"))
    assert [group.clients for group in table] == [10, 26, 26]
    assert [group.train for group in table] == [1000, 700, 400]
    assert [group.test for group in table] == [100, 100, 100]
    assert table[1].classes == tuple(range(10, 36))
    assert not scaled
    assert standard_groups(balanced(62, 1, name="femnist")) == (table, True)


def test_cifar100s_groups_follow_superclasses():
    coarse = torch.arange(100) % 20
    data = replace(balanced(100, 500, 100, "cifar100"), superclass=coarse)
    made = federate(data, PARTITIONS["practical_groups"]())
    held = counts(made)
    dominating = coarse.numpy() < 7
    assert made.groups.bincount().tolist() == [33, 33, 34]
    assert (held[:33][:, dominating].sum(axis=1) == 400).all()
    assert (held[:33].sum(axis=1) == 500).all()


def test_other_datasets_get_sizes_that_fit():
    made = federate(load("digits"), PARTITIONS["practical_groups"](clients=12))
    sizes = np.array(
        [len(a) + len(b) + len(c) for a, b, c in zip(made.train, made.val, made.test, strict=True)]
    )
    assert made.groups.bincount().tolist() == [4, 4, 4]
    assert sizes[0] > sizes[4] > sizes[8]
    assert sizes.sum() > 0.7 * 1797


def test_groups_as_a_table_and_demand_beyond_supply():
    rows = [
        {"clients": 2, "classes": [0, 1], "train": 50, "test": 10},
        {"clients": 3, "classes": [2, 3], "train": 20, "test": 5},
    ]
    made = federate(balanced(4, 60, 20), PARTITIONS["practical_groups"](table=rows))
    assert counts(made).sum(axis=1).tolist() == [50, 50, 20, 20, 20]
    assert counts(made)[0].tolist() == [20, 20, 5, 5]
    with pytest.raises(DataError, match=r"class c0: the partition asks for 46 training .* are 30"):
        federate(balanced(4, 30, 20), PARTITIONS["practical_groups"](table=rows))
    with pytest.raises(ConfigError, match="found class 3"):
        federate(balanced(3, 30), PARTITIONS["practical_groups"](table=rows))


def test_leftovers_go_to_different_classes():
    table = quotas(np.full(7, 10), [(0,)] * 7, 0.5, 4)
    assert (table.sum(axis=1) == 10).all()
    assert (table[:, 1:].sum(axis=0) >= 10).all()  # 7 times 5 samples over 3 classes


# WAFFLE (13.5)


def test_distribution_c_is_p4s_list_shifted_right():
    shares = label_shares(LISTS["C"])
    assert shares[0].tolist() == [0, 0, 0, 0.1, 0.2, 0.4, 0.2, 0.1, 0, 0]
    assert shares[1].tolist() == [0, 0, 0, 0, 0.1, 0.2, 0.4, 0.2, 0.1, 0]
    assert shares[9].tolist() == [0, 0, 0.1, 0.2, 0.4, 0.2, 0.1, 0, 0, 0]


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_every_class_is_used_up_exactly_once(name):
    made = federate(balanced(10, 200, 50), PARTITIONS["waffle"](distribution=name))
    assert (counts(made).sum(axis=0) == 200).all()
    expected = label_shares(LISTS[name])
    assert np.array_equal(counts(made), np.rint(200 * expected))
    assert np.abs(class_counts(made, made.test) - 50 * expected).max() <= 0.5
    assert made.relabel is None


def test_agents_of_b_have_four_labels_each():
    made = federate(balanced(10, 40), PARTITIONS["waffle"](distribution="B"))
    held = [np.flatnonzero(row).tolist() for row in counts_all(made)]
    assert held[0] == [0, 1, 2, 3]
    assert held[1] == [1, 2, 3, 4]
    assert held[9] == [0, 1, 2, 9]


def counts_all(made: Federation) -> np.ndarray:
    return class_counts(made, made.train, made.val, made.test)


@pytest.mark.parametrize("name", ["A*", "B*"])
def test_concept_shift_leaves_alice_alone(name):
    made = federate(balanced(10, 40, 10), PARTITIONS["waffle"](distribution=name))
    assert made.relabel[0].tolist() == list(range(10))
    assert len({tuple(row) for row in made.relabel.tolist()}) == 10
    plain = federate(balanced(10, 40, 10), PARTITIONS["waffle"](distribution=name[0]))
    assert np.array_equal(counts(made), counts(plain))


def test_agents_have_the_sizes_of_p4s_list():
    made = federate(balanced(10, 1000, 10), PARTITIONS["waffle"](distribution="A", sizes="B"))
    assert counts(made).sum(axis=1).tolist() == [round(10_000 * size) for size in SIZES["B"]]


@pytest.mark.parametrize("sizes", ["B", "C"])
def test_sizes_shrink_alike_where_a_class_would_not_suffice(sizes):
    wanted = np.array(SIZES[sizes])
    shares = sized(label_shares(LISTS["C"]), wanted)
    assert shares.sum(axis=0).max() == pytest.approx(1)  # the scarcest class is used up
    given_out = share_out(shares, np.full(10, 6000)).sum(axis=1)
    assert given_out.sum() < 60000
    assert np.allclose(given_out / given_out.sum(), wanted, atol=1e-3)


# Label groups (13.6), concept shift


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_label_groups_have_disjoint_labels_and_equal_shares(groups):
    for seed in range(5):
        made = federate(balanced(10, 60), PARTITIONS["label_groups"](groups=groups), seed=seed)
        held = counts_all(made)
        labels = [
            set(np.flatnonzero(held[made.groups.numpy() == g].sum(axis=0))) for g in range(groups)
        ]
        assert sorted(c for group in labels for c in group) == list(range(10))
        assert max(map(len, labels)) - min(map(len, labels)) <= 1
        for g in range(groups):
            sizes = held[made.groups.numpy() == g].sum(axis=1)
            assert sizes.max() - sizes.min() <= 1


@given(st.integers(1, 10), st.integers(0, 999))
def test_groups_disagree_about_every_class(groups, seed):
    names = conflicting(groups, 10, seed)
    for a in range(groups):
        assert sorted(names[a].tolist()) == list(range(10))
        for b in range(a):
            assert (names[a] != names[b]).all()


def test_concept_shift_is_shared_inside_a_group():
    made = federate(load("digits"), PARTITIONS["concept_shift"]())
    assert made.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for i in range(12):
        for j in range(12):
            same = torch.equal(made.relabel[i], made.relabel[j])
            assert same == bool(made.groups[i] == made.groups[j])
    some = federate(load("digits"), PARTITIONS["concept_shift"](clients=6, groups=2, strangers=2))
    assert some.groups.tolist() == [0, 0, 1, 1, 2, 3]
    assert len(some.relabel.unique(dim=0)) == 4
    alone = federate(load("digits"), PARTITIONS["concept_shift"](shared=False))
    assert alone.groups is None
    assert len({tuple(row) for row in alone.relabel.tolist()}) == 12


# Dirichlet (13.7, 13.8)


def test_dirichlet_shares_are_rounded_and_served_in_order():
    shares = np.array([[0.26, 0.0], [0.26, 0.5], [0.48, 0.5]])
    assert serve(shares, np.array([10, 5])).tolist() == [[3, 0], [3, 2], [4, 2]]
    assert serve(np.array([[0.5], [0.5]]), np.array([3])).tolist() == [[2], [1]]


def test_dirichlet_concentration_decides_how_unlike_clients_are():
    data = balanced(10, 500)
    apart = [
        emd(federate(data, PARTITIONS["dirichlet"](clients=10, alpha=a))).l1 for a in (0.1, 1, 100)
    ]
    assert apart[0] > apart[1] > apart[2]
    assert apart[2] < 0.3


def test_dirichlet_test_data_follows_the_training_shares():
    made = federate(balanced(10, 1000, 1000), PARTITIONS["dirichlet"](clients=5))
    assert np.abs(counts(made) - class_counts(made, made.test)).max() <= 1


def test_clusters_of_labels_are_shared_out_together():
    made = federate(balanced(12, 300), PARTITIONS["dirichlet_clusters"](clients=5))
    held = counts_all(made)
    assert held.sum() == 3600
    alike = np.corrcoef(held.T) > 0.95  # classes of one cluster rise and fall together
    assert sorted(alike.sum(axis=1)) == [3] * 12


# Target shuffling (13.10)


def test_foreign_targets_are_pairs_of_another_client():
    data = balanced(10, 60, 30)
    partition = PARTITIONS["latent"](clients=20, distributions=10)
    own = federate(data, partition)
    made = federate(data, partition, foreign_targets=True)
    assert sorted(made.foreign.tolist()) == list(range(20))
    assert made.foreign.tolist() != list(range(20))
    for i, j in enumerate(made.foreign.tolist()):
        assert torch.equal(made.train[i], own.train[i])
        assert torch.equal(made.val[i], own.val[j])
        assert torch.equal(made.test[i], own.test[j])
    assert made.fingerprint != own.fingerprint
    with pytest.raises(ConfigError, match="concept shift"):
        federate(load("digits"), PARTITIONS["concept_shift"](), foreign_targets=True)


# Distances (13.11), manifest, drawing


@pytest.mark.parametrize(("held", "emd_p1", "l1"), [(1, 2.7, 1.8), (2, 2.4, 1.6), (5, 1.5, 1.0)])
def test_distances_are_p1s(held, emd_p1, l1):
    table = np.zeros((10, 10), int)
    for client in range(10):
        table[client, [(client + k) % 10 for k in range(held)]] = 6
    assert distance(table) == pytest.approx((emd_p1, l1))


def test_clients_without_data_do_not_count():
    table = np.eye(10, dtype=int)
    assert distance(np.vstack([table, np.zeros((3, 10), int)])) == distance(table)


def indices_in(text: str) -> list[int]:
    """The indices that a manifest writes as ranges."""
    pairs = [[int(end) for end in part.split("-")] for part in text.split(",") if part]
    return [i for pair in pairs for i in range(pair[0], pair[-1] + 1)]


@given(st.lists(st.integers(0, 40), unique=True))
def test_ranges_say_the_indices_in_their_order(indices):
    assert indices_in(ranges(torch.tensor(indices, dtype=torch.int64))) == indices


def test_the_manifest_is_complete_and_json():
    made = federate(load("digits"), PARTITIONS["concept_shift"]())
    found = json.loads(json.dumps(manifest(made)))
    assert found["fingerprint"] == made.fingerprint
    assert found["partition"] == "ConceptShift(clients=12, groups=3, shared=True, strangers=0)"
    first = found["clients"][0]
    assert indices_in(first["indices"]["train"]) == made.train[0].tolist()
    assert first["permutation"] == made.relabel[0].tolist()
    assert first["group"] == 0
    assert sum(first["histogram"]) == first["train"] + first["val"]
    assert (first["data"], first["partition"]) == made.seals[0]
    assert set(found) >= {"emd_p1", "l1", "dataset", "classes", "note"}
    regression = manifest(federate(load("sine"), PARTITIONS["natural"]()))
    assert regression["emd_p1"] is None
    assert regression["clients"][0]["histogram"] == []


def test_sites_list_what_a_simulation_lists():
    made = federate(load("sine"), PARTITIONS["natural"]())
    data, whole = made.dataset, manifest(made)
    for client in whole["clients"]:
        del client["indices"]
    target = data.target_scale, data.target_shift
    assert listed(made, describe(made), "sine", (), target, made.partition) == whole


# The real datasets


@pytest.mark.shared
@pytest.mark.skipif("COTERIE_DATA" not in os.environ, reason="needs the data pack")
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar100", "femnist"])
def test_the_specified_groups_fit_the_real_data(name):
    made = federate(load(name), PARTITIONS["practical_groups"]())
    assert len(made) == (62 if name == "femnist" else 100)
    assert min(len(part) for part in made.test) > 0
    given_out = samples(made)
    assert len(given_out) == len(set(given_out))


# Every partition at its own defaults


def ten_sites(tmp_path):
    """A table that fits every partition: ten classes, five sites, 80 rows of each class."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 80)
    a, b = np.cos(y) * 5 + rng.normal(size=800), np.sin(y) * 5 + rng.normal(size=800)
    rows = [f"s{i % 5},{a[i]:.4f},{b[i]:.4f},{y[i]}" for i in rng.permutation(800)]
    path = tmp_path / "sites.csv"
    path.write_text("\n".join(["site,a,b,y", *rows]) + "\n")
    return {"name": str(path), "client": "site", "target": "y"}


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_partition_works_at_its_defaults(name, tmp_path):
    data = ten_sites(tmp_path)
    config = {"data": data, "partition": {"name": name}, "model": {"name": "linear"}}
    made = coterie.run(config, method="local", rounds=1, engine="loop", out=str(tmp_path / "a"))
    assert made.summary["clients_scored"] > 0
    stored = json.loads((tmp_path / "a" / "config.json").read_text())
    tables = {key: value for key, value in stored.items() if key not in WRITTEN}
    assert config_hash(read_config({**tables, **stored["asked"]})) == stored["hash"]


# What the fingerprint covers


def four_sites() -> Dataset:
    return replace(
        balanced(4, 20),
        numeric=torch.tensor([True, True]),
        owners=torch.arange(80) // 20,
        owner_names=("a", "b", "c", "d"),
    )


def test_the_fingerprint_covers_everything_that_is_made_of_the_data():
    data = four_sites()
    natural = PARTITIONS["natural"]()
    made = federate(data, natural)
    units = torch.arange(80) // 2
    others = {
        "foreign": federate(data, natural, foreign_targets=True),
        "aux": federate(data, natural, aux=0.3),
        "units": federate(replace(data, units=units), natural),
        "same splits, units": replace(made, source=replace(data, units=units)),
        "other units": replace(made, source=replace(data, units=units // 2)),
        "target": replace(made, source=replace(data, y=data.y.flip(0))),
        "scale": replace(made, dataset=replace(made.dataset, scale=made.dataset.scale * 2)),
        "unit of the target": replace(made, dataset=replace(made.dataset, target_scale=3.0)),
        "val": federate(data, natural, val=0.4),
        "order": replace(made, clients=("b", "a", "c", "d")),
        "relabel": replace(made, relabel=torch.arange(4).flip(0).expand(4, 4)),
        "groups": replace(made, groups=torch.arange(4)),
    }
    found = [federation.fingerprint for federation in (made, *others.values())]
    assert len(set(found)) == len(found)
    assert federate(data, natural).fingerprint == made.fingerprint


def test_one_clients_change_shows_in_its_own_hash_alone():
    data = four_sites()
    natural = PARTITIONS["natural"]()
    data.x[70, 0] = torch.nan  # filled by everybody's mean
    made = federate(data, natural)
    x = data.x.clone()
    x[made.train[1][0], 0] += 1  # moves that mean
    other = federate(replace(data, x=x), natural)
    assert other.fingerprint != made.fingerprint
    changed = [a != b for a, b in zip(made.seals, other.seals, strict=True)]
    assert changed == [False, True, False, False]
    assert changes(manifest(made), other) == ["other data: b"]
    assert changes(manifest(made), federate(data, natural)) == []
    divided = federate(data, natural, seed=1)
    assert changes(manifest(made), divided) == ["the same data divided in another way: a, b, c, d"]
    scaled = replace(made, dataset=replace(made.dataset, scale=made.dataset.scale * 2))
    assert "scaled" in changes(manifest(made), scaled)[0]
    assert changes({"clients": [{}]}, made) == ["the stored partition is not as a run writes it"]


# Practical groups with a rare class


@pytest.mark.parametrize("rare", [0, 1, 3])
def test_a_rare_class_does_not_shrink_the_others(rare):
    full = balanced(9, 120)
    kept = torch.ones(len(full.y), dtype=torch.bool)
    kept[(full.y == 4).nonzero().flatten()[rare:]] = False
    few = replace(full, x=full.x[kept], y=full.y[kept])
    partition = PARTITIONS["practical_groups"](clients=9)
    whole, made = counts(federate(full, partition)), counts(federate(few, partition))
    assert made.sum() > 0.7 * whole.sum()
    assert (made.sum(1) > 0).all()
    assert int((few.y[samples(federate(few, partition))] == 4).sum()) == rare  # nothing is lost
    outside = np.setdiff1d(np.arange(9), [4])
    ratio = made[:, outside].sum(0) / whole[:, outside].sum(0)
    assert ratio.min() > 0.6


# ---- folds ---------------------------------------------------------------------------------------


def test_folds_test_every_sample_once_and_have_the_same_classes():
    data, parts = load("digits"), PARTITIONS["iid"](clients=3)
    made = [federate(data, parts, seed=2, fold=Fold(part, 5)) for part in range(5)]
    for k in range(3):
        tests = [set(one.test[k].tolist()) for one in made]
        everything = {*made[0].train[k].tolist(), *made[0].val[k].tolist(), *tests[0]}
        assert set.union(*tests) == everything
        assert sum(map(len, tests)) == len(everything)
        own = np.bincount(data.y[torch.tensor(sorted(everything))].numpy(), minlength=10) / 5
        for one, test in zip(made, tests, strict=True):
            assert not test & {*one.train[k].tolist(), *one.val[k].tolist()}
            counts = np.bincount(data.y[one.test[k]].numpy(), minlength=10)
            assert np.abs(counts - own).max() < 2


def test_a_fold_keeps_units_together():
    data = load("digits")
    data = replace(data, units=torch.arange(len(data.x)) // 7)
    mine = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[:400]
    masks = [folds_of(data, mine, 5, 0, "fold") == part for part in range(5)]
    assert (torch.stack(masks).sum(0) == 1).all()
    units = [set(data.units[mine[mask]].tolist()) for mask in masks]
    assert sum(map(len, units)) == len(set.union(*units))
    assert max(map(len, units)) - min(map(len, units)) <= 1


def test_a_fold_of_samples_with_times_is_a_stretch_of_time():
    data = load("digits")
    data = replace(data, times=torch.arange(len(data.x)).flip(0).double() // 3)
    for part in range(4):
        made = federate(data, PARTITIONS["iid"](clients=1), val=0.0, fold=Fold(part, 4))
        inside, outside = (data.times[rows[0]] for rows in (made.test, made.train))
        assert ((outside < inside.min()) | (outside > inside.max())).all()


def test_the_option_folds_takes_the_place_of_a_configs_seeds():
    assert configure({"run": {"seed": 2, "seeds": [0, 1]}}, folds=3).seeds == (2, 3, 4)
    with pytest.raises(ConfigError, match=r"beside run\.seeds"):
        configure(None, folds=3, seeds=2)


def test_a_comparison_of_folds_trains_each_with_a_seed_of_its_own():
    config = configure(None, seed=3, folds=4)
    assert config.seeds == (3, 4, 5, 6)
    made = assemble(config).federations
    single = config.single(config.method("local"), 5)
    assert (single.run.fold, single.run.folds, single.seeds, single.dealt(5)) == (2, 4, (5,), 3)
    assert assemble(single).federations[5].fingerprint == made[5].fingerprint
    tested = [set(made[seed].test[0].tolist()) for seed in config.seeds]
    assert not set.intersection(*tested)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run.folds": 5, "run.seeds": [0, 1]}, "run.folds: found it beside run.seeds"),
        ({"run.folds": 5, "run.deal": "anew"}, "run.folds: found it beside run.deal"),
        ({"run.fold": 1}, "run.fold: found 1 without run.folds"),
        ({"run.folds": 3, "run.fold": 3}, "expected less than run.folds"),
        ({"run.folds": 3, "partition.common_test": True}, "beside partition.common_test"),
    ],
)
def test_what_folds_exclude_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        configure(None, set=changes)


def test_data_with_test_samples_of_its_own_has_no_folds():
    data = load("digits")
    data = replace(data, fixed=(torch.arange(len(data.x)) % 4 == 0).to(torch.int8) * 2)
    with pytest.raises(ConfigError, match="comes with test data of its own"):
        federate(data, PARTITIONS["iid"](clients=2), fold=Fold(0, 5))


# ---- which seed divides the data -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("deal", "seeds"), [("fixed", (4, 4, 4)), ("anew", (4, 5, 6)), (9, (9, 9, 9))]
)
def test_seeds_train_the_same_clients_unless_each_divides_the_data(deal, seeds):
    config = configure(None, seed=4, seeds=3, set={"run.deal": deal})
    assert tuple(config.dealt(seed) for seed in config.seeds) == seeds
    made = assemble(config).federations
    alike = {seed: made[seed].fingerprint for seed in config.seeds}
    assert len({*alike.values()}) == len({*seeds})
    for seed in config.seeds:  # a run's own config divides the data as the comparison did
        single = config.single(config.method("local"), seed)
        assert single.dealt(seed) == config.dealt(seed)
        assert assemble(single).federations[seed].fingerprint == alike[seed]
        tested = {int(row) for own in made[seed].test for row in own}
        trained = {int(row) for one in made.values() for own in one.train for row in own}
        assert bool(tested & trained) == (deal == "anew")


def test_runs_of_seeds_that_divide_the_data_are_what_they_are_alone():
    """Records of cards, in which each seed divides the data, keep their keys."""
    several = configure(None, seeds=2, set={"run.deal": "anew"})
    for seed in (0, 1):
        alone = configure(None, seed=seed)
        method = several.method("local")
        assert several.single(method, seed) == alone.single(method, seed)
