"""``coterie tune``: one budget for every method, choices by validation data, resumed searches."""

import json
import math
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.commands.arguments import settings
from coterie.errors import ConfigError, StoppedError
from coterie.runs.config.loading import config_hash, load
from coterie.studies.card_file import merged
from coterie.studies.records import read_records
from coterie.studies.tuned import (
    Choices,
    Range,
    Tuned,
    TunedMethod,
    TunedTrial,
    TunePlan,
    read_plan,
)
from coterie.studies.tuning import tuning_of
from support import cards_home

RATES = {"low": 1e-4, "high": 1.0, "log": True}
SPLITS = ["train"] * 6 + ["val"] * 3 + ["test"] * 3


def table(path, target, seed=0, shuffled=False):
    """Three sites with two inputs; ``shuffled`` permutes the targets of test rows alone."""
    drawn, lines = np.random.default_rng(seed), ["site,split,a,b,y"]
    for site in "ab":
        x = drawn.normal(size=(36, 2))
        y = np.array([target(row) for row in x])
        split = np.array(SPLITS * 3)
        if shuffled:
            y[split == "test"] = np.roll(y[split == "test"], 4)
        rows = zip(split, x, y, strict=True)
        lines += [f"{site},{s},{a:.4f},{b:.4f},{t}" for s, (a, b), t in rows]
    path.write_text("\n".join(lines))
    return path


def classes(row):
    return "yes" if row[0] > row[1] else "no"


def line(row):
    return f"{3 * row[0] - 2 * row[1] + 1:.4f}"


@pytest.fixture
def config(tmp_path):
    """The tables of a config on a table of two classes."""

    def made(tune, methods=("local", "fedavg"), target=classes, shuffled=False, **algorithm):
        path = table(tmp_path / f"{target.__name__}{shuffled}.csv", target, shuffled=shuffled)
        data = {"name": str(path), "client": "site", "split": "split", "target": "y"}
        return {
            "data": data,
            "model": {"name": "linear"},
            "train": {"batch": 18},
            "engine": {"name": "loop"},
            "run": {"rounds": 1, "methods": list(methods)},
            "algorithm": algorithm,
            "tune": tune,
        }

    return made


def found(tuned):
    return [(method.label, method.trials) for method in tuned.methods]


def test_every_method_has_the_same_number_of_different_trials(config):
    tune = {"trials": 3, "train": {"lr": RATES}, "fedprox": {"mu": [0.1, 1.0]}}
    tuned = coterie.tune(config(tune, ["local", "fedavg", "fedprox"]))
    for method in tuned.methods:
        assert len(method.trials) == 3
        assert len({json.dumps(trial.values) for trial in method.trials}) == 3
        assert not method.exhausted
    alike = [[t.values for t in m.trials] for m in tuned.methods if m.label != "fedprox"]
    assert alike[0] == alike[1]  # the same fields: the same first values


def test_a_method_with_fewer_combinations_ends_earlier_and_the_result_says_so(config):
    tune = {"trials": 6, "train": {"lr": [0.1, 0.3]}, "fedprox": {"mu": [0.1, 0.5, 1.0]}}
    tuned = coterie.tune(config(tune, ["local", "fedprox"]))
    assert {m.label: len(m.trials) for m in tuned.methods} == {"local": 2, "fedprox": 6}
    assert all(method.exhausted for method in tuned.methods)
    assert any("local" in note and "all values were tried" in note for note in tuned.notes)


@pytest.mark.parametrize(("rates", "stop"), [([0.001, 0.01, 0.1], 1), (RATES, 9)])
def test_a_search_that_is_stopped_ends_in_the_same_result_and_repeats_no_trial(
    config, tmp_path, rates, stop
):
    asked = config({"trials": 3, "train": {"lr": rates}})
    asked["run"]["rounds"] = 2
    whole = coterie.tune(asked, out=tmp_path / "whole")
    steps = []

    def watch(step):
        steps.append(step)
        if len(steps) == stop:
            raise StoppedError("stopped", 15)

    with pytest.raises(StoppedError):
        coterie.tune(asked, out=tmp_path / "cut", progress=watch)
    records = tmp_path / "cut" / "records"
    before = {path: path.stat().st_mtime_ns for path in records.glob("*.json")}
    ran = []
    again = coterie.tune(asked, out=tmp_path / "cut", progress=ran.append)
    assert found(again) == found(whole)
    assert again.toml() == whole.toml()
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())
    assert len(list(records.glob("*.json"))) == 6
    ended = [step for step in ran if step.done == step.rounds]
    assert len(ended) == 6 - len(before)
    ran.clear()
    assert found(coterie.tune(asked, out=tmp_path / "cut", progress=ran.append)) == found(whole)
    assert ran == []


def test_test_data_decides_nothing(config, tmp_path):
    tune = {"trials": 3, "train": {"lr": RATES}}
    methods = ["local", "fedfomo"]
    one = coterie.tune(config(tune, methods), out=tmp_path / "one")
    other = coterie.tune(config(tune, methods, shuffled=True), out=tmp_path / "other")
    assert found(one) == found(other)
    scores = [
        sorted(
            r.summary["accuracy_last"] for r in read_records(tmp_path / name / "records").values()
        )
        for name in ("one", "other")
    ]
    assert scores[0] != scores[1]  # the test data does differ


def test_a_table_trained_with_its_validation_data_is_tuned_without(config, tmp_path):
    asked = config({"train": {"lr": [0.01, 0.1]}}, ["local"])
    asked["train"]["merge_val"] = True
    tuned = coterie.tune(asked, out=tmp_path / "out")
    assert any("merge_val" in note for note in tuned.notes)
    records = read_records(tmp_path / "out" / "records").values()
    assert all(not record.config["train"]["merge_val"] for record in records)
    apart = config({"train": {"lr": [0.01, 0.1]}}, ["local"])
    again = coterie.tune(apart)
    assert found(again) == found(tuned)
    assert "merge_val" not in str(again)


def test_the_rate_that_is_clearly_best_is_found(config):
    """A line by least squares: too small a rate does not move, too large a one diverges."""
    asked = config({"train": {"lr": [1e-6, 0.1, 50.0]}}, ["local"], target=line)
    asked["algorithm"] = {"local": {"keep": "last"}}
    asked["run"]["rounds"] = 4
    for method in coterie.tune(asked).methods:
        assert method.metric == "rmse"
        assert 0.01 < method.best.values["train.lr"] < 2.0
        others = [trial.score for trial in method.trials if trial != method.best]
        assert all(method.best.score < score for score in others)


@pytest.mark.parametrize(("metric", "lost"), [("rmse", math.inf), ("r2", -math.inf)])
def test_a_model_that_diverged_is_never_chosen(metric, lost):
    def of(*scores):
        trials = tuple(TunedTrial({"train.lr": float(i)}, s) for i, s in enumerate(scores))
        return TunedMethod("local", "local", metric, {}, trials, {})

    assert of(lost, 3.0, lost).best == TunedTrial({"train.lr": 1.0}, 3.0)
    nothing = of(lost, lost)
    assert nothing.best is None
    tuned = Tuned("a title", 2, (nothing,), (), None)
    assert "| Local | — | — | 2 |" in str(tuned)
    assert tomllib.loads(tuned.toml()) == {}


def test_the_best_values_as_toml_make_the_config_of_the_best_trial(config):
    tune = {
        "train": {"lr": [0.01]},
        "fedprox@strong": {"mu": [2.0, 3.0]},
        "fedavg@ft": {"adapt": {"epochs": [1, 2]}},
    }
    own = {
        "fedprox": {"mu": 0.3, "train": {"epochs": 2}},
        "fedavg": {"adapt": {"name": "ft", "lr": 0.3}},
    }
    asked = config(tune, ["local", "fedprox", "fedprox_ft", "fedprox@strong", "fedavg@ft"], **own)
    tuned = coterie.tune(asked)
    chosen = load(merged(asked, tomllib.loads(tuned.toml())))
    before = {method.label: method for method in load(asked).methods()}
    for method in tuned.methods:
        made, was = chosen.method(method.name), before[method.label]
        values = dict(method.best.values)
        assert made.train == {**was.train, "lr": values.pop("train.lr")}
        adapted = {"epochs": values.pop("adapt.epochs")} if "adapt.epochs" in values else {}
        assert made.adapt_fields == {**was.adapt_fields, **adapted}
        assert made.fields == {**was.fields, **values}


def test_a_table_tune_is_no_part_of_the_config(config):
    asked = config({"train": {"lr": [0.1]}})
    plain = {name: table for name, table in asked.items() if name != "tune"}
    assert config_hash(load(asked)) == config_hash(load(plain))


CARD = """
[card]
id = "P1-T9"
paper = "FedFomo"
title = "A table of ours"
number = "bmta"
clients = [1]
[data]
name = "digits"
test = 0.5
[partition]
name = "concept_shift"
groups = 2
[model]
name = "linear"
[engine]
name = "loop"
[run]
methods = ["local", "fedavg"]
rounds = 2
seeds = 2
[tune.train]
lr = [0.01, 0.2]
[columns.few]
partition.clients = 3
[columns.some]
partition.clients = 4
[columns."some, worst"]
partition.clients = 4
number = "worst_tenth"
[scales.small]
note = "one round"
run.rounds = 1
tune.train.lr = [0.05]
"""


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """A folder with one card, in which the test runs."""
    return cards_home(tmp_path, monkeypatch, t9=CARD)


def test_the_values_of_a_card_are_those_with_the_best_mean_over_its_columns(cards):
    tuned = coterie.tune("P1-T9", methods=["fedavg"], out="out")
    records = read_records(Path("out/records")).values()
    assert len(records) == 2 * 2  # two rates, two different columns, one seed
    (method,) = tuned.methods
    for trial in method.trials:
        lr = trial.values["train.lr"]
        scores = [r.validation["best"][1] for r in records if r.config["train"]["lr"] == lr]
        assert trial.score == pytest.approx(np.mean(scores))
    assert method.best.score == max(trial.score for trial in method.trials)
    written = tomllib.loads(Path("out/tuned.toml").read_text())
    assert written == tomllib.loads(tuned.toml())
    lr = method.best.values["train.lr"]
    assert written["scales"]["tuned"]["algorithm"]["fedavg"]["train"]["lr"] == lr


def test_a_scale_of_a_card_may_search_other_values(cards):
    made = tuning_of("p1-t9", "small", columns=("few",))
    assert made.plan.space("local") == {"train.lr": Choices((0.05,))}
    assert made.expected() == 2
    tuned = made.run()
    assert "small" in tomllib.loads(tuned.toml())["scales"]


def test_a_method_that_the_chosen_columns_lack_and_a_card_that_waits_are_refused(cards):
    path = cards / "p1" / "t9.toml"
    path.write_text(CARD.replace("[columns.some]", '[columns.some]\nrun.methods = ["fedprox"]'))
    made = tuning_of("P1-T9", columns=("few",))
    assert [method.label for method in made.methods] == ["local", "fedavg"]
    with pytest.raises(ConfigError, match="the columns have none of fedprox"):
        tuning_of("P1-T9", columns=("few",), methods=("fedprox",))
    path.write_text(CARD.replace("clients = [1]", 'waits = "for better days"'))
    with pytest.raises(ConfigError, match="cannot be run yet: for better days"):
        tuning_of("P1-T9")


def test_the_command_of_a_search_can_be_typed_again(cards):
    made = tuning_of("P1-T9", "small", {"tune.train.lr": RATES, "tune.trials": 3})
    told = "tune.train.lr={low = 0.0001, high = 1.0, log = true}"
    assert made.command == f"coterie tune P1-T9 --scale small --set '{told}' --set 'tune.trials=3'"
    assert settings([told]) == {"tune.train.lr": RATES}


def test_infinite_validation_scores_count_and_old_records_have_none(cards):
    coterie.tune("P1-T9", scale="small", columns=["few"], methods=["local"], out="out")
    (path,) = Path("out/records").glob("*.json")
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "validation": {"last": [1.0, None, "inf"]}}))
    (record,) = read_records(path.parent).values()
    assert record.validation_score("last") == math.inf
    assert record.validation_score("last", [0, 1]) == 1.0
    assert math.isnan(record.validation_score("last", [1]))
    path.write_text(json.dumps({**told, "validation": {"last": ["many"]}}))
    with pytest.raises(coterie.StoreError, match="validation"):
        read_records(path.parent)
    del told["validation"]
    path.write_text(json.dumps(told))
    assert not next(iter(read_records(path.parent).values())).validation


def test_random_trials_repeat_nothing_and_are_the_same_again():
    space = {"lr": Range(0.001, 1.0, True), "n": Range(1, 5, False), "kind": Choices(("a", [1]))}
    found = TunePlan(12, 1, space, {}).trials_of("local")
    assert found == TunePlan(12, 1, space, {}).trials_of("fedavg")
    assert found[:6] == TunePlan(6, 1, space, {}).trials_of("local")  # more trials keep the first
    assert len({json.dumps(values) for values in found}) == 12
    assert all(0.001 <= v["lr"] <= 1.0 and v["n"] in range(1, 6) for v in found)
    assert all(isinstance(v["n"], int) and v["kind"] in ("a", [1]) for v in found)
    assert 0.01 < np.median([v["lr"] for v in found]) < 0.2  # uniform in its logarithm
    few = TunePlan(5, 1, {"n": Range(1, 6, False)}, {}).trials_of("local")
    assert len({values["n"] for values in few}) == 5
    whole = TunePlan(5, 1, {"n": Range(1, 3, False)}, {}).trials_of("local")
    assert [values["n"] for values in whole] == [1, 2, 3]


@pytest.mark.parametrize(
    ("tune", "told"),
    [
        (None, r"tune: found nothing; .*\[tune.train\]"),
        ({"trials": 3}, "tune: no field is searched"),
        ({"trials": 0, "train": {"lr": [1]}}, "tune.trials: found 0; expected from 1"),
        ({"seeds": True, "train": {"lr": [1]}}, "tune.seeds: found True"),
        ({"fedavgg": {"mu": [1]}}, "tune.fedavgg: .*did you mean 'fedavg'"),
        ({"train": [1]}, r"tune.train: found \[1\]; expected a table|tune.train: .*cannot"),
        ({"train": {"lr": 0.1}}, "tune.train.lr: found 0.1; expected a list"),
        ({"train": {"lr": []}}, r"tune.train.lr: found \[\]"),
        ({"train": {"lr": [0.1, 0.1]}}, "tune.train.lr: 0.1 stands there twice"),
        ({"train": {"lr": [{}]}}, "tune.train.lr: found a table"),
        ({"train": {"lr": {"low": 1}}}, "tune.train.lr: .*expected a list of values"),
        ({"train": {"lr": {"low": 1, "high": 0.5}}}, "tune.train.lr: .*expected low < high"),
        ({"train": {"lr": {"low": 0, "high": 1, "log": True}}}, "tune.train.lr.low: .*above 0"),
        ({"train": {"lr": {"low": 1, "high": 2, "log": 1}}}, "tune.train.lr.log: found 1"),
        ({"train": {"rate": [0.1]}}, "tune.train.rate: 0.1 cannot be tried: .*rate"),
        ({"train": {"merge_val": [True]}}, "tune.train.merge_val: "),
        ({"train": {"lr": [0.1, -1.0]}}, "tune.train.lr: -1.0 cannot be tried"),
        ({"fedprox": {"mu": [1], "nu": [1]}}, "tune.fedprox.nu: 1 cannot be tried: .*mu"),
        ({"fedprox": {"mu": {"low": -1.0, "high": 1.0}}}, "tune.fedprox.mu: -1.0 cannot"),
    ],
)
def test_a_bad_table_is_refused_with_its_place_and_a_hint_before_anything_runs(config, tune, told):
    with pytest.raises(ConfigError, match=told):
        coterie.tune(config(tune, ["local", "fedavg", "fedprox"]), progress=pytest.fail)


def test_data_without_validation_data_is_refused(config):
    asked = config({"train": {"lr": [0.1]}}, ["local"])
    path = Path(asked["data"]["name"])
    path.write_text(path.read_text().replace(",val,", ",train,"))
    asked["data"]["val"] = 0.0
    with pytest.raises(ConfigError, match=r"no client has a validation score; .*data\.val"):
        coterie.tune(asked)


def test_the_command_prints_the_table_and_json_as_documented(cards, command):
    given = "--set", "tune.train.lr=[0.1,0.2]", "--columns", "few", "--methods", "local"
    asked = ["tune", "P1-T9", "--scale", "small", *given, "--out", "out"]
    code, out, err = command(*asked)
    assert not code
    assert "| Local | train.lr = " in out
    assert "local, seed 0" in err
    value = json.loads(command(*asked, "--json")[1])
    page = (Path(__file__).parents[1] / "docs" / "json.md").read_text("utf-8")
    section = page.partition("## coterie tune --json")[2].partition("\n## ")[0]
    assert {*value} == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert {*value["methods"][0]} <= set(re.findall(r"`(\w+)`", section))
    plan = read_plan({"train": {"lr": [0.1, 0.2]}}, ["local"])
    assert value["budget"] == plan.trials
