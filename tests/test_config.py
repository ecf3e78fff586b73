"""Configs: what they mean, what they refuse, and that none of it is lost on the way to a file."""

import dataclasses
import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.algorithms import ALGORITHMS, ALIASES
from coterie.data.arrays import AUTO_SCALE
from coterie.data.partition import PARTITIONS
from coterie.errors import ConfigError, CoterieError
from coterie.runs.assemble import assemble
from coterie.runs.config.loading import canonical, config_hash, load, merge
from coterie.runs.config.schema import DEMO, METHODS


def write(folder, text, name="x.toml"):
    path = folder / name
    path.write_text(text)
    return path


# ---- laws --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tables",
    [
        {},
        DEMO,
        {"algorithm": {"name": "fedamp", "sigma": 2.0}, "adapt": {"name": "ft", "epochs": 3}},
        {"data": {"name": "sine", "clients": 4}, "model": {"name": "mlp", "hidden": [3, 2]}},
        {"partition": {"name": "dirichlet", "alpha": 0.5}, "run": {"seeds": [3, 1]}},
    ],
)
def test_canonical_is_loaded_back_to_the_same_config(tables):
    config = load(tables)
    through_a_file = json.loads(json.dumps(canonical(config)))
    assert load(through_a_file) == config
    assert config_hash(load(through_a_file)) == config_hash(config)


@pytest.mark.parametrize("name", [*ALGORITHMS, *ALIASES])
def test_every_method_survives_being_cut_out_of_a_comparison(name):
    tables = {"run": {"methods": [name]}, "adapt": {"epochs": 7} if name in ALIASES else {}}
    config = load(tables)
    method = config.method(name)
    alone = load(json.loads(json.dumps(canonical(config.single(method, 5)))))
    assert alone.method() == method
    assert alone.seeds == (5,)
    assert alone.method().build() == method.build()


def test_every_default_of_a_method_is_written_down():
    tables = canonical(load({"run": {"methods": ["fedfomo"]}}))
    cls = ALGORITHMS["fedfomo"]
    assert tables["algorithm"]["fedfomo"] == dataclasses.asdict(cls())


CHANGES = {
    "data.val": 0.3,
    "data.scale": "unit",
    "partition.clients": 9,
    "model.hidden": [5],
    "train.lr": 0.01,
    "algorithm.fedfomo.epsilon": 0.5,
    "engine.name": "loop",
    "run.rounds": 3,
    "run.methods": ["fedavg"],
    "adapt.name": "ft",
}


@pytest.mark.parametrize(("field", "value"), CHANGES.items())
def test_the_hash_changes_with_every_table(field, value):
    assert config_hash(load(None, {field: value})) != config_hash(load())


@pytest.mark.parametrize("partition", [{}, {"clients": 4}])
def test_what_auto_stood_for_is_loaded_back_to_the_same_config(partition):
    config = assemble(load({"data": {"name": "digits"}, "partition": partition})).config
    assert config.model.name != "auto" != config.partition.name
    assert config_hash(load(canonical(config))) == config_hash(config)  # or else no run resumes


def test_the_pixel_scale_of_images_is_settled_and_written_down():
    config = assemble(load({}, {"data.name": "digits", "partition.clients": 3})).config
    assert config.data.scale == AUTO_SCALE
    other = "unit" if AUTO_SCALE == "standard" else "standard"
    changed = assemble(load({}, {"data.name": "digits", "data.scale": other})).config
    assert canonical(changed)["data"]["scale"] == other
    table = assemble(load({}, {"data.name": "sine"})).config
    assert table.data.scale == "auto"  # there is nothing to settle
    with pytest.raises(ConfigError, match=r"data\.scale: found 'loud'"):
        load({}, {"data.scale": "loud"})


def test_the_hash_does_not_depend_on_the_folder_or_the_order():
    one = load({"train": {"lr": 0.2, "epochs": 2}, "run": {"out": "here"}})
    other = load({"run": {"out": "there"}, "train": {"epochs": 2, "lr": 0.2}})
    assert config_hash(one) == config_hash(other)


TREE = st.recursive(
    st.integers(), lambda t: st.dictionaries(st.sampled_from("abc"), t, max_size=3), max_leaves=6
)


@given(
    st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from("xyz"), TREE)),
    st.sampled_from("abc"),
    st.sampled_from("xyz"),
    st.integers(),
)
def test_merge_sets_one_field_and_changes_no_argument(tables, table, field, value):
    before = json.dumps(tables)
    merged = merge(tables, {f"{table}.{field}": value})
    assert json.dumps(tables) == before
    assert merged[table].pop(field) == value
    rest = {k: v for k, v in tables.get(table, {}).items() if k != field}
    assert merged == {**tables, table: rest}


# ---- meaning -----------------------------------------------------------------------------------


def test_the_built_in_default_is_the_demo():
    config = load()
    assert config.partition.name == "concept_shift"
    assert [method.label for method in config.methods()] == list(METHODS)
    assert load(None, {"data.name": "sine"}).partition.name == "auto"  # not the digits' partition


@pytest.mark.parametrize("name", PARTITIONS)
def test_another_partition_of_the_demo_does_not_get_the_demos_options(name):
    assert load(None, {"partition.name": name}).partition.name == name


def test_overrides_win_over_the_file(tmp_path):
    path = write(tmp_path, "[train]\nlr = 0.5\nbatch = 7\n")
    config = load(path, {"train.lr": 0.25})
    assert (config.train.lr, config.train.batch) == (0.25, 7)


def test_relative_paths_are_relative_to_the_file(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "site,a,y\n", "sites.csv")
    path = write(tmp_path / "sub", '[data]\nname = "sites.csv"\n[run]\nout = "results"\n')
    monkeypatch.chdir(tmp_path)
    config = load("sub/x.toml")
    assert config.data.name == str(tmp_path / "sub" / "sites.csv")
    assert config.run.out == str(tmp_path / "sub" / "results")
    assert load(path, {"run.out": "results"}).run.out == "results"  # told by hand: where one is


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({}, (0,)),
        ({"seed": 4}, (4,)),
        ({"seeds": 3}, (0, 1, 2)),
        ({"seed": 5, "seeds": 2}, (5, 6)),
        ({"seeds": [7, 3]}, (7, 3)),
    ],
)
def test_seeds_are_a_count_or_a_list(run, expected):
    assert load({"run": run}).seeds == expected


def labels(**tables):
    return [method.label for method in load(tables).methods()]


def test_local_is_in_every_comparison_once():
    assert labels(run={"methods": ["fedavg", "fedamp"]}) == ["local", "fedavg", "fedamp"]
    assert labels(run={"methods": ["fedavg", "local"]}) == ["fedavg", "local"]
    assert labels(algorithm={"name": "scaffold"}) == ["local", "scaffold"]


def test_adapting_a_comparison_adapts_all_but_local():
    found = labels(adapt={"name": "ft"}, run={"methods": ["fedavg", "fedavg_ft", "fedfomo"]})
    assert found == ["local", "fedavg_ft", "fedfomo_ft"]


def test_a_method_that_adapts_another_is_told_what_the_other_is_told():
    told = {"fedavg": {"weighting": "uniform"}}
    config = load({"algorithm": told, "run": {"methods": ["fedavg", "fedavg_ft"]}})
    assert config.method("fedavg_ft").fields["weighting"] == "uniform"
    told["fedavg_ft"] = {"weighting": "samples"}
    config = load({"algorithm": told, "run": {"methods": ["fedavg", "fedavg_ft"]}})
    assert config.method("fedavg_ft").fields["weighting"] == "samples"


def test_fields_beside_the_name_and_in_the_methods_own_table_meet():
    told = {"name": "fedfomo", "epsilon": 0.5, "fedfomo": {"downloads": 2}}
    found = load({"algorithm": told}).method().fields
    assert (found["epsilon"], found["downloads"]) == (0.5, 2)


OWN = """
from dataclasses import dataclass
from coterie.algorithms.fedavg import FedAvg
@dataclass(frozen=True)
class Mine(FedAvg):
    strength: float = 1.0
class Scaffold(Mine): pass
class NotOne: pass
"""


def test_own_classes_are_found_in_a_folder_that_is_named(tmp_path):
    write(tmp_path, OWN, "own_methods_of_test_config.py")
    name = "own_methods_of_test_config:Mine"
    path = write(tmp_path, f'[algorithm]\nname = "{name}"\nstrength = 2\n')
    with pytest.raises(ConfigError, match="looked in installed packages; the current directory"):
        load(path)
    allowed = functools.partial(load, code=tmp_path)
    method = allowed(path).method()
    assert method.label == "mine"
    assert method.build().strength == 2.0
    with pytest.raises(ConfigError, match="Mine has no such field; did you mean 'strength'"):
        allowed(path, {"algorithm.strenght": 1.0})
    with pytest.raises(ConfigError, match="expected a class that extends coterie"):
        allowed(path, {"algorithm": {"name": name.replace("Mine", "NotOne")}})
    both = ["scaffold", name.replace("Mine", "Scaffold")]
    with pytest.raises(ConfigError, match="two classes would both be called 'scaffold'"):
        allowed(path, {"run.methods": both})


# ---- refusals ----------------------------------------------------------------------------------

FAULTS = [
    # form
    ("[trian]\nlr = 1", "trian: there is no such table; did you mean 'train'?"),
    ("train = 3", "train: found 3; expected a table"),
    ("[privacy]\nclip = 1.0", "privacy: found neither of noise and epsilon"),
    ("[train]\nrate = 1", "train.rate: [train] has no such field; (known: optimizer, lr,"),
    ("[run]\nrouds = 3", "run.rouds: [run] has no such field; did you mean 'rounds'?"),
    # numbers
    ("[train]\nlr = -0.1", "train.lr: found -0.1; expected a number greater than 0"),
    ("[train]\nlr = 0.0", "train.lr: found 0.0; expected a number greater than 0"),
    ("[train]\nlr = nan", "train.lr: found nan; expected a finite number"),
    ("[train]\nlr = inf", "train.lr: found inf; expected a finite number"),
    ("[train]\nepochs = 0", "train.epochs: found 0; expected a number greater than or equal to 1"),
    ("[train]\nepochs = 1.5", "train.epochs: found 1.5; expected a valid integer"),
    ("[train]\nbatch = -3", "train.batch: found -3"),
    ("[train]\nmomentum = 1.0", "train.momentum: found 1.0; expected a number less than 1"),
    ("[train]\nweight_decay = -1e-4", "train.weight_decay: found -0.0001"),
    ("[train]\nlr = '0.1'", "train.lr: found '0.1'; expected a valid number"),
    ("[run]\nrounds = 0", "run.rounds: found 0"),
    ("[run]\nparticipation = 0", "run.participation: found 0; expected a number greater than 0"),
    ("[run]\nparticipation = 1.5", "run.participation: found 1.5; expected a number less than or"),
    ("[run]\nseed = -1", "run.seed: found -1"),
    ("[run]\nseeds = 0", "run.seeds: found 0; expected from 1 to 10,000, or a list"),
    ("[run]\nseeds = 1000000000", "run.seeds: found 1000000000; expected from 1 to 10,000"),
    ("[guard]\nbound = 0.5", "guard.bound: found 0.5"),
    ("[run]\nseeds = [1, 1]", "run.seeds: 1 stands there twice"),
    ("[run]\nmethods = []", "run.methods: found an empty list"),
    ("[data]\ntest = 1.0", "data.test: found 1.0; expected a number less than 1"),
    # names
    ("[data]\nname = 'digts'", "no dataset and no file is called 'digts'; did you mean 'digits'?"),
    ("[data]\nname = 'digits'\nsize = 3", "data.size: digits has no such field"),
    ("[partition]\nname = 'idd'", "there is no partition 'idd'; did you mean 'iid'?"),
    ("[model]\nname = 'lenet'", "there is no model 'lenet'; did you mean 'lenet5'?"),
    ("[model]\nhidden = [3]", "model.hidden: auto has no such field"),
    ("[algorithm]\nname = 'fedfom'", "algorithm.name: no method is called 'fedfom'; did you mean"),
    ("[algorithm.fedfom]\nepsilon = 1", "algorithm.fedfom: no method is called 'fedfom'"),
    ("[run]\nmethods = ['fedav']", "run.methods: no method is called 'fedav'"),
    ("[adapt]\nname = 'tf'", "adapt.name: there is no adapt 'tf'; (known: none, "),
    ("[engine]\nname = 'gpu'", "engine.name: found 'gpu'; expected 'auto', "),
    ("[engine]\ndevice = 'tpu'", "engine.device: found 'tpu'; expected cpu, cuda or cuda:N"),
    ("[run]\nmetric = 'acc'", "run.metric: found 'acc'; expected 'auto', 'accuracy',"),
    # fields of names
    (
        "[algorithm]\nname = 'fedfomo'\nepsilonn = 0.1",
        "algorithm.epsilonn: FedFomo has no such field; did you mean 'epsilon'? "
        "(fields: downloads, epsilon, decay",
    ),
    ("[algorithm.fedfomo]\nepsilonn = 0.1", "algorithm.fedfomo.epsilonn: FedFomo has no such"),
    ("[algorithm]\nepsilon = 0.1", "algorithm.epsilon: no method is named here"),
    (
        "[algorithm.fedamp]\nsigma = 'wide'",
        "found 'wide'; expected a number above 0 and at most 1e9, or 'median'",
    ),
    ("[algorithm.fedfomo]\ndownloads = true", "found True; expected a whole number"),
    ("[algorithm.fedfomo]\nepsilon = nan", "algorithm.fedfomo.epsilon: found nan"),
    ("[algorithm.local]\nx = 1", "algorithm.local.x: Local has no such field"),
    (
        "[partition]\nname = 'iid'\nclients = 0",
        "partition.clients: found 0; expected a whole number from 1 to 1e9 "
        "(clients: the number of clients)",
    ),
    ("[partition]\nname = 'iid'\nclients = 'x'", "found 'x'; expected a whole number"),
    ("[partition]\nname = 'natural'\nclients = 3", "natural has no such field; it has none"),
    ("[model]\nname = 'mlp'\nhidden = ['a']", "expected a list of whole numbers"),
    ("[run]\nmethods = ['fedavg']\n[adapt]\nepochs = 2", "adapt.epochs: nothing is adapted here"),
    # files
    ("[train\nlr = 1", "is not valid TOML"),
]


@pytest.mark.parametrize(("text", "message"), FAULTS, ids=[f[0].replace("\n", " ") for f in FAULTS])
def test_faults_name_the_file_the_field_and_the_way_out(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(CoterieError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fault_told_by_hand_does_not_blame_the_file(tmp_path):
    path = write(tmp_path, "")
    with pytest.raises(ConfigError, match=r"^train\.lr: found -1"):
        load(path, {"train.lr": -1.0})


def test_a_missing_or_unreadable_file_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    with pytest.raises(ConfigError, match=r"latin\.toml: cannot be read .* expected UTF-8"):
        load(tmp_path / "latin.toml")
