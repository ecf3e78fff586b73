"""``coterie onboard``: a client that was not there joins a finished run with its own samples."""

import contextlib
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie import cli
from coterie.algorithms import ALGORITHMS
from coterie.algorithms.newcomers import Joined
from coterie.api import configure
from coterie.core.algorithm import single
from coterie.core.answers import Answers
from coterie.core.optim import Recipe
from coterie.data.datasets import load
from coterie.errors import ConfigError, CoterieWarning, DataError, StoreError
from coterie.onboarding.labelled import read_labelled
from coterie.onboarding.left_out import leave_out
from coterie.onboarding.newcomer import (
    FEWEST,
    JoinOutcome,
    client_of,
    draws_of,
    training_helps,
)
from coterie.onboarding.onboarded import curve_point
from coterie.runs import run_folder
from coterie.runs.assemble import assemble
from coterie.runs.config.loading import merge
from sites import FAST, write_tables
from support import federation, task

PAGE = (Path(__file__).parents[1] / "docs" / "json.md").read_text("utf-8")
QUICK = {"sizes": (6, 12), "draws": 2}


def newcomer(place, rows=60, columns=("a", "b", "kind", "label"), seed=9, **replaced):
    """A site like ash and cedar: ``a`` raises the risk; birch, where it lowers it, is not alike."""
    draws = np.random.default_rng(seed)
    a, b = draws.normal(size=(2, rows))
    kind = draws.choice(["x", "y"], size=rows)
    label = np.where(a + 0.3 * b + 0.3 * draws.normal(size=rows) > 0, "ill", "well")
    cells = {"a": a.round(4), "b": b.round(4), "kind": kind, "label": label, **replaced}
    lines = [",".join(columns)]
    lines += [",".join(str(cells[c][i]) for c in columns) for i in range(rows)]
    place.write_text("\n".join(lines) + "\n")
    return place


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A comparison of three sites, with a folder for each method."""
    place = tmp_path_factory.mktemp("onboard")
    data = write_tables(place / "data", rows=(80, 80, 80))
    asked = merge(FAST, {"data.target": "label", "run.rounds": 8, "train.lr": 0.3})
    methods = ["fedavg", "fedavg_ft", "fedfomo"]
    coterie.compare(asked, data=str(data), methods=methods, engine="loop", out=place / "runs")
    newcomer(place / "oak.csv")
    return place


def run_of(home, method):
    return home / "runs" / method / "seed-0"


@pytest.fixture(scope="module")
def joined(home):
    out = home / "oak-model"
    found = coterie.onboard(run_of(home, "fedfomo"), home / "oak.csv", out=out, **QUICK)
    return home, found


def test_the_newcomer_finds_its_collaborators_and_gains_from_few_samples(joined):
    """Sites with the same sign get the weight; joining helps more, the fewer samples there are."""
    _, found = joined
    weights = found.collaborators
    assert sum(weights.get(name, 0) for name in ("ash", "cedar")) > 0.9
    assert weights.get("birch", 0) < 0.05
    assert [point.samples for point in found.points] == [6, 12, 48]
    assert [point.draws for point in found.points] == [2, 2, 1]
    assert found.points[0].joined.mean > found.points[0].alone.mean
    for point in found.points:
        assert point.gain == pytest.approx(point.joined.mean - point.alone.mean)
        assert point.low <= point.gain <= point.high
    assert found.average is not None  # of the run of FedAvg beside it
    first = next(iter(weights))
    assert f"Your collaborators: {first} {weights[first]:.2f}" in repr(found)
    assert "48 (all)" in repr(found)


def test_the_exported_model_is_the_personal_one_and_its_card_says_how(joined):
    home, found = joined
    model = coterie.load_export(found.path)
    facts = model.config.model
    assert (facts.client, facts.onboarded, facts.method) == ("oak", True, "fedfomo")
    assert (facts.train, facts.test) == (48, found.test)
    named = {one.name: one.average for one in facts.collaborators}
    assert {**named, **found.collaborators} == named
    assert facts.score == pytest.approx(found.points[-1].joined.mean)
    card = (found.path / "README.md").read_text("utf-8")
    assert "not in the federation" in card
    assert "The models of these clients entered it" in card
    answers = model.predict(home / "oak.csv")
    truth = [line.split(",")[-1] for line in (home / "oak.csv").read_text().splitlines()[1:]]
    right = np.mean([a == b for a, b in zip(answers.labels, truth, strict=True)])
    assert right > 0.75
    with pytest.raises(StoreError, match="not empty"):
        coterie.onboard(run_of(home, "fedfomo"), home / "oak.csv", out=found.path, **QUICK)


def test_without_local_training_the_newcomer_of_fedavg_has_the_runs_own_model(
    home, tmp_path, monkeypatch
):
    monkeypatch.setattr(JoinOutcome, "joins", lambda *_: True)  # else the better one is written
    run, data = run_of(home, "fedavg"), home / "oak.csv"
    found = coterie.onboard(run, data, epochs=0, out=tmp_path / "oak", sizes=(), draws=1)
    (point,) = found.points
    assert point.joined.mean == pytest.approx(found.average)
    kept = run_folder.read(run).predictor(0)
    made = coterie.load_export(tmp_path / "oak").predictor
    assert torch.equal(made.models, kept.models)
    assert set(found.collaborators.values()) == {None}
    assert "one model for all" in found.words
    trained = coterie.onboard(run, data, epochs=30, sizes=(), draws=1)
    assert trained.points[0].joined.mean != point.joined.mean


@pytest.mark.parametrize(
    ("method", "why"),
    [("local", "trained alone"), ("fedavg_ft", "without the adaptation")],
)
def test_a_run_that_nobody_can_join_says_why_and_what_to_use(home, method, why):
    with pytest.raises(ConfigError, match=why) as refused:
        coterie.onboard(run_of(home, method), home / "no-such-file.csv")
    assert "expected a run of fedavg" in str(refused.value)


def test_folders_that_hold_no_run_to_join_are_refused(home, tmp_path, monkeypatch):
    data = home / "oak.csv"
    with pytest.raises(ConfigError, match="comparison of several runs"):
        coterie.onboard(home / "runs", data)
    with pytest.raises(StoreError, match="no finished run"):
        coterie.onboard(tmp_path, data)
    monkeypatch.setattr(run_folder, "verify", lambda path: [])
    old = Path(shutil.copytree(run_of(home, "fedfomo"), tmp_path / "old"))
    (old / "preprocessing.json").unlink()  # as in a folder of an earlier version
    with pytest.raises(StoreError, match="an earlier version"):
        coterie.onboard(old, data)
    with pytest.raises(ConfigError, match="has a client 'ash' already"):
        coterie.onboard(run_of(home, "fedfomo"), data, name="ash")


ODD = np.array(["x"] * 59 + ["new"])
CASES = {
    "lacks 2 of the model's 3 columns: 'b', 'kind'": {"columns": ("a", "label")},
    "has no column 'label', which the model predicts": {"columns": ("a", "b", "kind")},
    "line 61: found the class 'new' in column 'label'": {"label": np.where(ODD == "x", "ill", ODD)},
    "found 3 labelled samples; expected 4 or more": {"rows": 3},
    "is empty, as in 1 of 60 rows": {"label": np.where(ODD == "x", "ill", "")},
}


@pytest.mark.parametrize("message", CASES)
def test_the_newcomers_table_is_checked_by_the_runs_columns(home, tmp_path, message):
    data = newcomer(tmp_path / "new.csv", **CASES[message])
    with pytest.raises(DataError, match=re.escape(message)):
        coterie.onboard(run_of(home, "fedfomo"), data)


def test_the_better_of_joined_and_alone_is_recommended_and_written(home, tmp_path):
    """A newcomer with codes of its own whose labels are turned round gains nothing by joining."""
    data = newcomer(
        tmp_path / "elm.csv", id=np.arange(60), columns=("id", "a", "b", "kind", "label")
    )
    turned = data.read_text().replace(",x,", ",new,").replace("ill", "?").replace("well", "ill")
    (tmp_path / "elm.csv").write_text(turned.replace("?", "well"))
    run, once = run_of(home, "fedavg"), {"sizes": (), "draws": 1, "epochs": 0}
    with pytest.warns(CoterieWarning, match="'kind' holds 'new'"):
        found = coterie.onboard(run, data, out=tmp_path / "elm", **once)
    (point,), facts = found.points, coterie.load_export(tmp_path / "elm").config.model
    assert point.gain < 0
    assert (found.recommended, facts.method, facts.collaborators) == ("alone", "local", ())
    assert facts.score == pytest.approx(point.alone.mean)
    assert "Recommended: your model trained alone" in found.words
    joined = coterie.onboard(run_of(home, "fedfomo"), home / "oak.csv", **once)
    assert (joined.recommended == "joined") == (joined.points[0].gain > 0)
    with pytest.raises(DataError, match="found 'new' in column 'kind'"):
        coterie.onboard(run, data, strict=True, **once)


def test_rows_of_another_site_are_told(home):
    with pytest.warns(CoterieWarning, match="the 80 samples are also samples of cedar"):
        coterie.onboard(
            run_of(home, "fedavg"), home / "data" / "cedar.csv", name="yew", sizes=(), draws=1
        )


def test_columns_that_the_run_used_otherwise_are_no_inputs(home):
    """The client column is ignored if it is there; units stay together."""
    schema = run_folder.read_preprocessing(run_of(home, "fedfomo")).schema
    table = {
        "site": ["oak"] * 4,
        "patient": [1, 1, 2, 2],
        "a": [0.5, -0.5, 1.0, -1.0],
        "b": [0.0, None, 1.0, 2.0],
        "kind": ["x", "y", "x", "z"],
        "label": ["ill", "well", "ill", "well"],
    }
    options = {"client": "site", "unit": "patient", "target": "label"}
    made = read_labelled(table, schema, options)
    assert made.y.tolist() == [0, 1, 0, 1]
    assert made.units.tolist() == [0, 0, 1, 1]
    assert made.x.shape == (4, len(schema.feature_names))
    assert read_labelled(table, schema, {"target": "label"}).units is None


def test_a_newcomer_with_images_joins_by_a_file_of_samples(tmp_path):
    asked = {
        "partition": {"name": "iid", "clients": 3},
        "model": {"name": "linear"},
        "run": {"rounds": 1},
        "train": {"batch": 100},
        "data": {"name": "digits"},
    }
    run = coterie.run(asked, method="ifca", engine="loop", out=tmp_path / "run")
    data = load("digits")
    np.savez(tmp_path / "mine.npz", x=data.x[:60].numpy(), y=data.y[:60].numpy())
    with pytest.warns(CoterieWarning, match="also samples of client"):
        found = coterie.onboard(run.path, tmp_path / "mine.npz", sizes=(10,), draws=2)
    assert found.client == "mine"
    assert sum(found.collaborators.values()) == pytest.approx(1.0, abs=1e-3)
    np.savez(tmp_path / "wide.npz", x=np.zeros((9, 9, 9), np.uint8), y=np.arange(9))
    with pytest.raises(DataError, match=re.escape("[samples, 1, 8, 8]")):
        coterie.onboard(run.path, tmp_path / "wide.npz")
    np.savez(tmp_path / "more.npz", x=data.x[:11].numpy(), y=np.arange(11))
    with pytest.raises(DataError, match="found the class '10'"):
        coterie.onboard(run.path, tmp_path / "more.npz")


def test_smaller_draws_are_within_larger_ones_and_the_last_has_all_samples():
    pool = torch.arange(100, 140)
    plan = draws_of(pool, (5, 20, 60), 3, seed=1)
    assert [len(draw) for draw in plan] == [5, 5, 5, 20, 20, 20, 40]
    small, large = plan[:3], plan[3:6]
    for one, other in zip(small, large, strict=True):
        assert set(one.tolist()) <= set(other.tolist())
    assert len({tuple(draw.tolist()) for draw in small}) == 3
    assert torch.equal(plan[-1], pool)
    again = draws_of(pool, (5, 20, 60), 3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(plan, again, strict=True))


def test_too_few_samples_to_check_are_not_trained_on():
    assert not training_helps(None, torch.arange(FEWEST - 1), None, 0)


def test_local_training_is_kept_where_it_pays_on_samples_left_out():
    """It pays from the untrained start, and not with a decay that makes a good model forget."""

    def helps(recipe, w=None):
        on = task(ALGORITHMS["local"](), federated=federation((40, 40)), recipe=recipe)
        start = on.problem.start if w is None else w
        samples = on.shards.splits["train"].of(0)
        return training_helps(on, samples, lambda client: Joined(None, single(start)), 3), on

    found, on = helps(Recipe(lr=0.2, epochs=8, batch=10))
    assert found
    good = client_of(on, 0, 0).tuned(epochs=20).train(on.problem.start)
    assert not helps(Recipe(lr=0.001, weight_decay=999.0, batch=10), good)[0]


def answers(right, total=200):
    values = (np.arange(total) < right).astype(int)
    return Answers(values, np.ones(total, dtype=int), np.arange(total))


def test_the_interval_of_a_gain_covers_the_test_samples_and_the_draws():
    """Draws that differ widen it; repeating the same draw does not make test samples more."""
    same = curve_point("accuracy", 5, [(answers(160), answers(120))] * 4)
    once = curve_point("accuracy", 5, [(answers(160), answers(120))])
    apart = curve_point("accuracy", 5, [(answers(r), answers(120)) for r in (140, 180, 130, 190)])
    assert same.gain == once.gain == apart.gain == pytest.approx(20.0)
    assert same.high - same.low > 0.9 * (once.high - once.low)
    assert apart.high - apart.low > 1.5 * (same.high - same.low)
    many = [(answers(20 * r, 4000), answers(2400, 4000)) for r in (140, 180, 130, 190)]
    sure = curve_point("accuracy", 5, many)  # only the draws are uncertain: t of four gains
    gains = np.array([10.0, 30.0, 5.0, 35.0])
    reach = 3.18 * gains.std(ddof=1) / 2
    assert (sure.high - sure.low) / 2 == pytest.approx(reach, rel=0.05)
    assert same.shown
    none = curve_point("auc", 5, [(answers(3, 3), answers(3, 3))])
    assert math.isnan(none.gain)
    assert not none.shown


def test_the_command_prints_the_table_or_documented_json(home, capsys, tmp_path):
    run, data = str(run_of(home, "fedfomo")), str(home / "oak.csv")
    few = ["--samples", "8", "--draws", "1"]

    def call(*more):
        with pytest.raises(SystemExit) as ended:
            cli.main(["onboard", run, "--data", data, *few, *more])
        return ended.value.code or 0, capsys.readouterr()

    code, printed = call("--json")
    value = json.loads(printed.out)
    section = PAGE.partition("## coterie onboard --json")[2].partition("\n## ")[0]
    assert code == 0
    assert {*value} == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    told = re.findall(r"^\| `curve` \| (.*) \|$", section, re.MULTILINE)[0]
    assert {*value["curve"][0]} == set(re.findall(r"`(\w+)`", told))
    code, printed = call("--out", str(tmp_path / "model"))
    assert code == 0
    assert "Your collaborators:" in printed.out
    assert f"use:   coterie predict {tmp_path / 'model'} FILE" in printed.out
    few[1] = "8,x"
    code, printed = call()
    assert (code, printed.out) == (2, "")
    assert "--samples" in printed.err


# ---- leave one site out --------------------------------------------------------------------------


def test_a_site_that_is_left_out_trains_nothing_of_the_model_it_is_told(tmp_path):
    """Other training rows at cedar change the others' models elsewhere, and not cedar's."""
    data = write_tables(tmp_path / "data", rows=(40, 40, 40))
    asked = merge(FAST, {"data.target": "label", "run.rounds": 3, "run.metric": "log_loss"})
    with contextlib.closing(assemble(configure(asked, data=str(data)))) as assembly:
        before, (seed,) = leave_out(assembly), assembly.config.seeds
        made = assembly.federations[seed]
        x = made.source.x.clone()
        x[made.train[made.clients.index("cedar")]] += 5.0
        assembly.federations[seed] = replace(made, source=replace(made.source, x=x))
        after = leave_out(assembly)
    for one, other in zip(before.sites, after.sites, strict=True):
        assert (one.score == other.score) == (one.client == "cedar")
        assert one.alone == other.alone
    scores, weights = [one.score for one in before.sites], [one.test for one in before.sites]
    assert before.means()[0] == pytest.approx(np.mean(scores))
    assert before.means(weights)[0] == pytest.approx(np.average(scores, weights=weights))
    assert "mean by test samples" in repr(before)
    assert "mean" not in repr(replace(before, sites=before.sites[:1]))
    section = PAGE.partition("## coterie leave-out --json")[2].partition("\n## ")[0]
    assert {*before.to_dict()} == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
