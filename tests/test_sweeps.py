"""Variants of a method, a method's own recipe and adaptation, and sweeps (docs/sweeps.md)."""

import pytest

import coterie
from coterie.errors import ConfigError
from coterie.runs.config.loading import canonical, config_hash, load
from coterie.runs.config.sweeps import points, shared_sweeps, with_variants

SMALL = {
    "data": {"name": "digits", "test": 0.5},
    "partition": {"name": "concept_shift", "clients": 4, "groups": 2},
    "model": {"name": "linear"},
    "train": {"lr": 0.1, "batch": 20, "precision": "float64"},
    "engine": {"name": "loop"},
    "run": {"rounds": 2},
}


def config(algorithm, methods=None, **run):
    listed = {} if methods is None else {"methods": methods}
    return {**SMALL, "algorithm": algorithm, "run": {**SMALL["run"], **listed, **run}}


def digest(tables):
    return coterie.run(tables).summary["digest"]


def test_a_sweep_of_a_methods_fields_makes_one_variant_per_combination():
    swept = {"epsilon": {"sweep": [0, 0.3]}, "downloads": {"sweep": [1, 2, 3]}, "decay": 0.5}
    found = load(config({"fedfomo": swept}, ["local", "fedfomo"]))
    made = [method for method in found.methods() if method.label != "local"]
    assert len(made) == 6
    assert {(m.fields["epsilon"], m.fields["downloads"]) for m in made} == {
        (epsilon, downloads) for epsilon in (0.0, 0.3) for downloads in (1, 2, 3)
    }
    assert all(method.fields["decay"] == 0.5 for method in made)
    assert made[0].label == "fedfomo@epsilon=0,downloads=1"


@pytest.mark.parametrize(
    "algorithm",
    [
        {"fedfomo": {"epsilon": {"sweep": [0, 0.3]}}},
        {"name": "fedfomo", "epsilon": {"sweep": [0, 0.3]}},
        {"name": "fedfomo", "fedfomo": {"epsilon": {"sweep": [0, 0.3]}}},
    ],
)
def test_a_sweep_may_be_written_in_the_methods_table_or_beside_its_name(algorithm):
    labels = [method.label for method in load(config(algorithm)).methods()]
    assert {"local", "fedfomo@epsilon=0", "fedfomo@epsilon=0.3"} <= {*labels}
    assert "fedfomo" not in labels


def test_a_variant_has_its_methods_fields_and_its_own_in_their_place():
    tables = {"fedfomo": {"downloads": 3, "epsilon": 0.1}, "fedfomo@few": {"downloads": 1}}
    found = {m.label: m.fields for m in load(config(tables, ["fedfomo", "fedfomo@few"])).methods()}
    assert (found["fedfomo"]["downloads"], found["fedfomo"]["epsilon"]) == (3, 0.1)
    assert (found["fedfomo@few"]["downloads"], found["fedfomo@few"]["epsilon"]) == (1, 0.1)


def test_a_variant_trains_as_the_method_with_these_fields_does():
    variant = config({"name": "fedprox@strong", "fedprox@strong": {"mu": 2.0}})
    plain = config({"name": "fedprox", "fedprox": {"mu": 2.0}})
    assert digest(variant) == digest(plain) != digest(config({"name": "fedprox"}))


def test_a_methods_own_recipe_is_the_recipe_of_its_run_alone():
    own = config({"local": {"train": {"lr": 0.01, "epochs": 2}}}, ["local", "fedavg"])
    found = coterie.compare(own)
    slow = {**SMALL, "train": {**SMALL["train"], "lr": 0.01, "epochs": 2}}
    alone = {**slow, "algorithm": {"name": "local"}}
    digests = {run.method: run.summary["digest"] for run in found.runs}
    assert digests["local"] == digest(alone)
    assert digests["fedavg"] == digest(config({"name": "fedavg"}))


def test_a_methods_own_adaptation_is_that_of_its_run_alone():
    tuned = {"adapt": {"name": "ft", "epochs": 2}}
    found = coterie.compare(config({"fedavg@ft2": tuned}, ["local", "fedavg", "fedavg@ft2"]))
    digests = {run.method: run.summary["digest"] for run in found.runs}
    wanted = {**SMALL, "algorithm": {"name": "fedavg"}, "adapt": {"name": "ft", "epochs": 2}}
    assert digests["fedavg@ft2"] == digest(wanted)
    assert digests["fedavg"] == digest(config({"name": "fedavg"}))


@pytest.mark.parametrize("name", ["fedprox@a", "fedavg_ft@b", "fedavg@c", "local"])
def test_the_config_of_one_run_is_read_again_as_the_same_method(name):
    tables = {
        "fedprox@a": {"mu": 1.0, "train": {"epochs": 3}},
        "fedavg@c": {"adapt": {"name": "kd", "epochs": 2}},
        "local": {"train": {"lr": 0.5}},
    }
    whole = load(config(tables, ["fedprox@a", "fedavg_ft@b", "fedavg@c"]))
    single = whole.single(whole.method(name), 3)
    again = load(canonical(single))
    assert config_hash(again) == config_hash(single)
    assert again.method().label == whole.method(name).label
    assert again.method().build() == whole.method(name).build()
    assert again.train == single.train


def test_a_folder_of_variants_is_written_read_resumed_and_verified(tmp_path):
    asked = config({"fedprox": {"mu": {"sweep": [0.1, 1.0]}}}, ["local", "fedprox"])
    found = coterie.compare(asked, out=tmp_path / "out")
    assert not any(coterie.verify(tmp_path / "out").values())
    again = coterie.resume(tmp_path / "out")
    assert again.methods == found.methods == ("local", "fedprox@mu=0.1", "fedprox@mu=1.0")
    assert "FedProx (mu=0.1)" in str(again)


def test_shared_sweeps_are_found_and_every_combination_is_one_point():
    tables = {"data": {"val": {"sweep": [0.1, 0.2]}}, "train": {"lr": {"sweep": [1, 2, 3]}}}
    assert shared_sweeps(tables) == {"data.val": [0.1, 0.2], "train.lr": [1, 2, 3]}
    assert len(list(points(shared_sweeps(tables)))) == 6
    assert list(points({})) == [{}]
    assert with_variants(tables) == tables  # no method's field is swept


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"data": {"name": "digits", "val": {"sweep": [0.1]}}}, "'coterie sweep'"),
        ({"algorithm": {"fedfomo": {"epsilon": {"sweep": []}}}}, "expected a list of values"),
        ({"algorithm": {"epsilon": {"sweep": [1]}}}, "no method is named"),
        ({"algorithm": {"fedfomo@": {}}}, "behind the @"),
        ({"algorithm": {"fedfomo@a/b": {}}}, "behind the @"),
        ({"algorithm": {"fedfomo@../x": {}}}, "behind the @"),
        ({"algorithm": {"fedavg": {"train": {"precision": "bf16"}}}}, "no such field for itself"),
        ({"algorithm": {"fedavg": {"train": {"lr": -1}}}}, "algorithm.fedavg.train.lr"),
        ({"algorithm": {"fedavg": {"train": 3}}}, "expected a table"),
        ({"algorithm": {"fedavg@x": {"adapt": {"name": "fit"}}}}, "algorithm.fedavg@x.adapt.name"),
        ({"algorithm": {"fedfomo@x": {"epsilonn": 1}}}, "did you mean 'epsilon'"),
        (
            {"algorithm": {"fedfomo": {f: {"sweep": [*range(40)]} for f in ("a", "b")}}},
            "at most 1,000",
        ),
    ],
)
def test_a_wrong_variant_or_sweep_is_refused_with_its_place(tables, says):
    with pytest.raises(ConfigError, match=says):
        load(tables)
