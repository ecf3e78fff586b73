"""The model that somebody takes home answers as it did in its run, with coterie and without."""

import contextlib
import csv
import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import coterie
from coterie.cli import main
from coterie.core.algorithm import Mixture
from coterie.core.flat import FlatModel, build
from coterie.core.imports import Code
from coterie.data.arrays import scaled
from coterie.data.federation import Dataset
from coterie.data.sources.sheets import TargetColumn
from coterie.data.standard import Preprocessing, preprocessing_of
from coterie.deploy import federated as sites_of
from coterie.deploy.federated import federated
from coterie.deploy.site_folder import SiteFolder
from coterie.deploy.site_model import export_site
from coterie.engines.evaluation import outputs
from coterie.engines.site import MODEL
from coterie.errors import ConfigError, CoterieWarning, DataError, StoreError
from coterie.exporting.exported_model import Predictions
from coterie.exporting.model_card import NAMES, ModelFacts, NetworkFacts, written_network
from coterie.exporting.writing import Trained, trained_client, write_export
from coterie.networks import registry
from coterie.runs.assemble import assemble
from coterie.runs.config.loading import load, merge
from coterie.storage import files
from sites import FAST, InProcess, handler_of, signed, simulated, site_folders, write_tables
from sites import exported as divided

AUC = {"run.metric": "auc"}  # answers on test samples are then probabilities


def tabular(place, method="fedfomo"):
    """A run on three CSV files."""
    data = write_tables(place / "data")
    asked = merge(FAST, {"algorithm.name": method, "data.target": "label", **AUC})
    return data, coterie.run(asked, data=str(data), engine="loop", out=place / "run")


@pytest.fixture(scope="module")
def table_run(tmp_path_factory):
    return tabular(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def exported(table_run, tmp_path_factory):
    data, run = table_run
    return data, run, coterie.export(run.path, "cedar", tmp_path_factory.mktemp("export") / "cedar")


@pytest.fixture
def copied(exported, tmp_path):
    return Path(shutil.copytree(exported[2], tmp_path / "copy"))


def test_the_card_of_a_fold_says_whose_mean_was_judged(table_run, tmp_path):
    asked = merge(FAST, {"data.target": "label", "run.folds": 2, "run.fold": 1})
    run = coterie.run(asked, data=str(table_run[0]), method="fedavg", out=tmp_path / "run")
    said = (coterie.export(run.path, "ash", tmp_path / "out") / "README.md").read_text()
    assert "one of the models of 2 folds" in " ".join(said.split())


def rows_of(path):
    """The cells of a CSV file, line by line."""
    return [*csv.reader(io.StringIO(path.read_text()))]


def test_rows(run, client):
    """The lines of the client's own file that are its test samples, counted without the header."""
    stored = json.loads((run.path / "partition.json").read_text())["clients"]
    before = 0
    for one in stored:
        if one["name"] == client:
            break
        before += one["train"] + one["val"] + one["test"]
    parts = [part.split("-") for part in one["indices"]["test"].split(",")]
    return [row - before for part in parts for row in range(int(part[0]), int(part[-1]) + 1)]


test_rows.__test__ = False


def answers_of(run, client):
    """The run's own answers on the client's test samples."""
    at = run.roster.clients.index(client)
    return list(run.outcomes.clients())[at].values


def new_rows(exported, place, order=("a", "b", "kind"), rows=None, client="cedar"):
    """A table of the client's test rows without the label, with columns in some order."""
    data, run, _ = exported
    header, *cells = rows_of(data / f"{client}.csv")
    rows = test_rows(run, client) if rows is None else rows
    lines = [[cells[row][header.index(name)] for name in order] for row in rows]
    place.write_text("\n".join(",".join(line) for line in [list(order), *lines]) + "\n")
    return place


# ---- the same answers ----------------------------------------------------------------------------


def test_a_table_is_answered_as_in_the_run(exported, tmp_path):
    """Its rows have gaps and categories; the answers are the run's, in the order of the rows."""
    model = coterie.load_export(exported[2])
    found = model.predict(new_rows(exported, tmp_path / "new.csv"))
    np.testing.assert_allclose(found.values, answers_of(exported[1], "cedar"), atol=1e-6, rtol=0)
    assert found.labels == [("ill", "well")[at] for at in found.values.argmax(1)]
    assert "" in {row[1] for row in rows_of(tmp_path / "new.csv")}


def test_other_orders_and_a_table_in_memory_give_the_same_answers(exported, tmp_path):
    model, rows = coterie.load_export(exported[2]), test_rows(exported[1], "cedar")
    once = model.predict(new_rows(exported, tmp_path / "a.csv")).values
    turned = model.predict(new_rows(exported, tmp_path / "b.csv", order=("kind", "b", "a")))
    np.testing.assert_array_equal(once, turned.values)
    back = model.predict(new_rows(exported, tmp_path / "c.csv", rows=rows[::-1]))
    np.testing.assert_allclose(once[::-1], back.values, atol=1e-6, rtol=0)
    header, *cells = rows_of(tmp_path / "a.csv")
    columns = {name: [row[at] or None for row in cells] for at, name in enumerate(header)}
    columns["a"] = [float(cell) for cell in columns["a"]]
    np.testing.assert_array_equal(model.predict(columns).values, once)


@pytest.mark.parametrize("method", ["fedem", "federico"])
def test_a_mixture_is_exported_and_predicts_as_the_mixture(tmp_path, method):
    data, run = tabular(tmp_path, method)
    made = run, coterie.export(run.path, "birch", tmp_path / "birch")
    stored = load_file(made[1] / "model.safetensors")
    assert len(stored["weights"]) > 1
    assert f"{len(stored['weights']) - 1}/head.weight" in stored
    new = new_rows((data, *made), tmp_path / "new.csv", client="birch")
    found = coterie.load_export(made[1]).predict(new)
    np.testing.assert_allclose(found.values, answers_of(run, "birch"), atol=1e-6, rtol=0)


DIGITS = {
    "data": {"name": "digits"},
    "partition": {"name": "concept_shift", "clients": 2, "groups": 2},
    "model": {"name": "lenet5"},
    "train": {"batch": 50},
    "engine": {"name": "loop"},
    "run": {"rounds": 1, "metric": "auc"},
}
NUMBERS = {
    "data": {"name": "sine.csv", "client": "who", "target": "height"},
    "model": {"name": "linear"},
    "train": {"precision": "float64"},
    "run": {"rounds": 2},
}


def encoded_test(asked, client, method):
    """The stored test samples of a client, as a simulation of this config has them."""
    config = load(asked)
    with contextlib.closing(assemble(config)) as assembly:
        federation = assembly.simulated(config.method(method).build(), config).federation
    at = federation.clients.index(client)
    return federation.source.x[federation.test[at]]


@pytest.fixture(scope="module")
def image_run(tmp_path_factory):
    place = tmp_path_factory.mktemp("images")
    run = coterie.run(DIGITS, method="local", out=place / "run")
    return run, coterie.export(run.path, "client1", place / "export")


def test_images_are_answered_as_in_the_run(image_run, tmp_path):
    run, place = image_run
    model, x = coterie.load_export(place), encoded_test(DIGITS, "client1", "local")
    expected = answers_of(run, "client1")
    np.testing.assert_allclose(model.predict(x).values, expected, atol=1e-6, rtol=0)
    np.savez(tmp_path / "new.npz", x=x[:, 0].numpy())
    np.testing.assert_allclose(
        model.predict(tmp_path / "new.npz").values, expected, atol=1e-6, rtol=0
    )
    assert "name the classes differently" in (place / "README.md").read_text()


@pytest.fixture(scope="module")
def number_run(tmp_path_factory):
    place, draws = tmp_path_factory.mktemp("numbers"), np.random.default_rng(0)
    x, who = draws.normal(size=80) * 30, ["north", "south"] * 40
    lines = [f"{w},{v:.3f},{v * 2 + 170 + draws.normal():.2f}" for w, v in zip(who, x, strict=True)]
    (place / "sine.csv").write_text("\n".join(["who,x,height", *lines]) + "\n")
    asked = merge(NUMBERS, {"data.name": str(place / "sine.csv")})
    run = coterie.run(asked, method="fedavg", out=place / "run")
    return asked, run, coterie.export(run.path, "south", place / "export")


def test_a_regression_is_answered_in_its_unit(number_run):
    asked, run, place = number_run
    x = encoded_test(asked, "south", "fedavg")
    found = coterie.load_export(place).predict({"x": x[:, 0].tolist()})
    np.testing.assert_allclose(found.values, answers_of(run, "south"), atol=1e-6, rtol=1e-9)
    assert found.values.mean() > 100  # not the standardised target
    assert found.header == ("predicted height",)


def test_a_batch_norm_network_is_exported_with_its_statistics(tmp_path):
    asked = merge(DIGITS, {"model": {"name": "support:NormedDigits"}, "train.buffers": "local"})
    code = Path(__file__).parent
    run = coterie.run(asked, method="fedavg", out=tmp_path / "run", code=code)
    coterie.export(run.path, "client0", tmp_path / "export", code=code)
    with pytest.raises(ConfigError, match="support:NormedDigits"):
        coterie.load_export(tmp_path / "export")
    model = coterie.load_export(tmp_path / "export", code=code)
    x = encoded_test(merge(asked, {"model": {"name": "linear"}}), "client0", "fedavg")
    expected = answers_of(run, "client0")
    np.testing.assert_allclose(model.predict(x).values, expected, atol=1e-6, rtol=0)


# ---- a site --------------------------------------------------------------------------------------


@pytest.fixture
def sites(exported, tmp_path, monkeypatch):
    """A federation of sites with the tables of the simulation."""
    folders = site_folders(tmp_path, exported[0])
    divided(folders, tmp_path / "divided")
    handlers = {name: handler_of(folder) for name, folder in folders.items()}

    def connect(config, _):
        return federated(config, signed(InProcess(handlers)), "in_process", "fed")

    monkeypatch.setattr(sites_of, "federation_of", connect)
    return tmp_path


def test_a_site_exports_the_model_that_the_simulation_exports(exported, sites, capsys):
    run = simulated(
        sites / "divided", merge(FAST, {"algorithm.name": "fedfomo", **AUC}), out=sites / "here"
    )
    place = coterie.export(run.path, "cedar", sites / "cedar-here")
    with pytest.raises(SystemExit, match="2"):
        main(["site", "export", str(sites / "cedar"), "--out", str(sites / "early")])
    assert "no experiment has finished here" in capsys.readouterr().err
    asked = merge(FAST, {"algorithm.name": "fedfomo", **AUC})
    there = coterie.run(asked, federation=str(sites / "fed"), out=sites / "there")
    with pytest.raises(StoreError, match="at the sites"):
        coterie.export(there.path, "cedar", sites / "none")
    called("site", "export", sites / "cedar", "--out", sites / "own")
    name = "model.safetensors"
    assert (sites / "own" / name).read_bytes() == (place / name).read_bytes()
    own, here = (json.loads((p / "preprocessing.json").read_text()) for p in (sites / "own", place))
    assert own["schema"] == here["schema"]
    numbers = [0, 1]  # the other inputs are categories, which are not standardised
    for part in ("mean", "std"):
        ours, theirs = (np.array(one["moments"][part])[numbers] for one in (own, here))
        assert ours == pytest.approx(theirs, rel=1e-12)
    own, here = (json.loads((p / "config.json").read_text()) for p in (sites / "own", place))
    assert {**own, "model": None} == {**here, "model": None}
    same = ("client", "method", "rounds", "train", "val", "test", "metric", "score")
    assert [own["model"][key] for key in same] == [here["model"][key] for key in same]
    assert own["model"]["collaborators"] == [
        {"name": name, "average": None, "last": None, "entered": None} for name in ("ash", "birch")
    ]
    cards = [(folder / "README.md").read_text() for folder in (sites / "own", place)]
    own, here = (text.partition("## How far to trust")[2].partition("\n## ")[0] for text in cards)
    assert own == here
    assert "Brier score" in own
    new = new_rows(exported, sites / "new.csv")
    assert called("site", "predict", sites / "own", new) == called("predict", place, new)


def test_a_site_chooses_an_experiment_by_its_hash(sites):
    for method in ("fedavg", "local"):
        asked = merge(FAST, {"algorithm.name": method, "run.rounds": 1})
        coterie.run(asked, federation=str(sites / "fed"))
    site = SiteFolder.open(sites / "ash")
    newest, *_ = sorted(site.experiments.iterdir(), key=lambda p: -(p / MODEL).stat().st_mtime_ns)
    export_site(site, sites / "new")
    said = json.loads((sites / "new" / "config.json").read_text())["model"]
    assert (said["run"], said["method"], said["collaborators"]) == (newest.name, "local", [])
    (other,) = (p.name for p in site.experiments.iterdir() if p != newest)
    export_site(site, sites / "old", other[:10])
    assert json.loads((sites / "old" / "config.json").read_text())["model"]["run"] == other
    with pytest.raises(ConfigError, match=r"2 finished experiments begin with ''; expected one"):
        export_site(site, sites / "none", "")
    agreement = newest / "agreement.json"
    agreement.write_text(agreement.read_text().replace("ash", "asp"))
    with pytest.raises(StoreError, match="has changed since it was agreed to"):
        export_site(site, sites / "none")


# ---- without coterie -----------------------------------------------------------------------------


PLAIN = """
import pathlib, re, sys, os, torch
sys.modules["coterie"] = None  # an import of it fails
for folder in sys.argv[1:]:
    os.chdir(folder)
    text = pathlib.Path("README.md").read_text()
    (code,) = re.findall("^```python\\n(.*?)^```", text, re.M | re.S)
    names = {}
    exec(code, names)
    from safetensors.torch import load_file, save_file
    with torch.no_grad():
        answers = names["predict"](load_file("../inputs.safetensors")["x"])
    save_file({"answers": answers.contiguous()}, "../answers.safetensors")
"""

FACTS = ModelFacts("a", "local", 1, 0, "", None, 1, 1, 1, "accuracy", None, ())


def dataset_for(name, side=32):
    """Samples that fit a network of ours."""
    generator = torch.Generator().manual_seed(0)
    if name.endswith("lstm"):  # the words' network has as many classes as tokens: tied weights
        x = torch.randint(0, 11, (6, 5), generator=generator)
        return Dataset(name, x.clamp(max=9), torch.arange(6), 10)
    x = torch.randint(0, 256, (6, 3, side, side), generator=generator).to(torch.uint8)
    return scaled(Dataset(name, x, torch.arange(6) % 4, 4), "standard")


EVERY = [(name, {}) for name in registry.MODELS] + [("resnet18", {"norm": "batch"})]


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_every_network_is_written_out_as_it_is(name, options):
    module = registry.factory(name, dataset_for(name), **options)
    code, names = written_network(module()), {}
    exec("from collections import OrderedDict\nimport torch\nfrom torch import Tensor, nn", names)
    exec(code.definitions, names)
    with torch.device("meta"):
        made = eval(code.expression, names)
    assert [(n, p.shape) for n, p in made.state_dict().items()] == [
        (n, p.shape) for n, p in module().state_dict().items()
    ]
    assert repr(made).replace("p=0.0", "p=0.2") == repr(module()).replace("p=0.0", "p=0.2")


def test_a_network_of_foreign_classes_is_not_written_out():
    assert written_network(torch.nn.Sequential(torch.nn.Tanh())) is None


def untrained(name, place, options, count, side=32):
    """The export of a mixture of new networks, and what it must answer."""
    data = dataset_for(name, side)
    factory = registry.factory(name, data, **options)
    model = FlatModel(build(factory, 0, "start"))
    others = [build(factory, seed, "start") for seed in range(1, count + 1)]
    models = torch.stack([model.flatten(one) for one in others])
    predictor = Mixture(torch.full((count,), 1 / count), models)
    network = NetworkFacts(name, options, tuple(data.x.shape[1:]), data.classes, "float32")
    made = Trained(FACTS, network, preprocessing_of(data), model, predictor)
    write_export(made, place / "export")
    inputs = made.preprocessing.inputs(data.x)
    save_file({"x": inputs}, place / "inputs.safetensors")
    with torch.no_grad():
        return data.x, outputs(model, predictor, inputs, False)


def test_the_cards_lines_load_the_model_without_coterie(tmp_path):
    """The lines are executed as they stand in the card, where coterie cannot be imported."""
    expected = {}
    cases = (("mlp", {}, 3), ("lenet5", {}, 2), ("word_lstm", {}, 1))
    for name, options, count in cases:
        (tmp_path / name).mkdir()
        x, expected[name] = untrained(name, tmp_path / name, options, count, side=12)
        own = coterie.load_export(tmp_path / name / "export").predict(x)
        np.testing.assert_allclose(own.values, expected[name], atol=1e-6, rtol=0)
    folders = [str(tmp_path / name / "export") for name in expected]
    subprocess.run([sys.executable, "-c", PLAIN, *folders], check=True)
    for name, values in expected.items():
        found = load_file(tmp_path / name / "answers.safetensors")["answers"]
        np.testing.assert_allclose(found, values, atol=1e-6, rtol=0, err_msg=name)


def test_a_recalibrated_model_answers_so_and_its_card_shows_both(exported, tmp_path):
    """The threshold is chosen on validation data; plain PyTorch gives the same probabilities."""
    place = coterie.export(exported[1].path, "cedar", tmp_path / "cedar", recalibrate=True)
    once, again = coterie.load_export(exported[2]), coterie.load_export(place)
    t = again.config.temperature
    rows = new_rows(exported, tmp_path / "new.csv")
    p, found = once.predict(rows).values, again.predict(rows).values
    expected = p ** (1 / t) / (p ** (1 / t)).sum(1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    card = (place / "README.md").read_text()
    assert "| log loss |" in card
    assert "was chosen on the client's validation samples" in card
    assert "were not calibrated" not in card
    lines = card.partition("```python")[2].partition("```")[0]
    space: dict = {}
    with contextlib.chdir(place):
        exec(lines, space)
    x = again.inputs(torch.zeros(2, len(again.preprocessing.moments.mean)))
    wanted = space["predict"](x) ** (1 / t)
    np.testing.assert_allclose(
        space["calibrated"](x).detach(), (wanted / wanted.sum(-1, keepdim=True)).detach(), rtol=1e-5
    )


def test_the_cards_lines_give_the_values_of_a_regression(number_run, monkeypatch):
    model = coterie.load_export(number_run[2])
    monkeypatch.chdir(number_run[2])
    text, names = Path("README.md").read_text(), {}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    x, moments = torch.tensor([[-40.0], [3.0], [torch.nan]]), model.preprocessing.moments
    assert f"* {moments.target_std!r} + {moments.target_mean!r}" in text
    with torch.no_grad():
        found = names["predict"](model.inputs(x)) * moments.target_std + moments.target_mean
    with pytest.warns(CoterieWarning, match="empty cells"):
        expected = model.predict({"x": [-40.0, 3.0, None]}).values
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_card_says_what_the_model_is_and_escapes_names(exported, tmp_path):
    text = (exported[2] / "README.md").read_text()
    run, said = exported[1], json.loads((exported[2] / "config.json").read_text())["model"]
    at = run.roster.clients.index("cedar")
    assert f"{said['test']} test samples" in text
    assert f"AUC {run.last[at]:.1f} %" in text
    assert run.summary["digest"] in text
    assert said["collaborators"]
    assert all(one["name"] in text for one in said["collaborators"])
    made = trained_client(run.path, "cedar", Code())
    facts = replace(made.facts, client="<b>|x`\n# y")
    write_export(made._replace(facts=facts), tmp_path / "odd")
    assert "\\<b\\>\\|x\\`\\\\n\\# y" in (tmp_path / "odd" / "README.md").read_text()


# ---- what a table must be ------------------------------------------------------------------------

STRICT = {"strict": True}
REFUSED = {
    "a missing column": ("a,b\n1,2", STRICT, r"lacks 1 of the model's 3 columns: 'kind'"),
    "a renamed column": ("a,B,kind\n1,2,x", STRICT, r"lacks 1 .*: 'b', and has others: 'B'; exp"),
    "hardly a column": ("a,id\n1,2", {}, r"lacks 2 of the model's 3 columns: 'b', 'kind'"),
    "an unknown category": ("a,b,kind\n1,2,x\n1,2,w", STRICT, r"line 3: found 'w'.*'x', 'y', 'z'"),
    "a text as a number": ("a,b,kind\n1,2,x\nhigh,2,x", {}, r"line 3: found 'high'.*a number"),
    "a decimal comma": ("a;b;kind\n1,5;2;x", {"delimiter": ";"}, r"line 2: found '1,5'"),
    "a huge number": ("a,b,kind\n1e39,2,x", {}, r"line 2: column 'a' holds 1e\+39"),
    "an empty category": ("a,b,kind\n1,2,", STRICT, r"found '\(missing\)' in column 'kind'"),
    "no rows": ("a,b,kind\n", {}, r"column names but no rows"),
    "another delimiter": ("a;b;kind\n1;2;x", {}, r"it looks separated by ';'"),
    "nothing to keep": ("a,b,kind\n1,2,x", {"keep": ["id"]}, r"--keep: .* has no column 'id'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_that_does_not_fit_is_refused_with_what_to_do(exported, tmp_path, case):
    text, options, expected = REFUSED[case]
    (tmp_path / "new.csv").write_text(text + "\n")
    with pytest.raises(DataError, match=expected):
        coterie.load_export(exported[2]).predict(tmp_path / "new.csv", **options)


def test_unknown_categories_are_a_category_that_training_had(exported, tmp_path):
    """They are zero in all features of their column, as hidden ones in training; each is named."""
    model = coterie.load_export(exported[2])
    rows = {"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0]}
    with pytest.warns(CoterieWarning, match=r"'kind' holds 'w', '\(missing\)' in 2 of 3 rows"):
        found = model.predict({**rows, "kind": ["w", None, "x"]}).values
    np.testing.assert_array_equal(found[0], found[1])
    assert found[0].tolist() != found[2].tolist()
    with pytest.warns(CoterieWarning, match=r"lacks 1 .*: 'kind'.*EVERY ANSWER"):
        np.testing.assert_array_equal(model.predict(rows).values[0], found[0])
    codes = tmp_path / "codes.csv"
    codes.write_text("column,code,means\nkind,7,x\n")
    mapped = model.predict({**rows, "kind": [7, 7, 7]}, codes=codes)
    np.testing.assert_array_equal(mapped.values[0], found[2])


def test_the_file_that_people_have_is_answered_and_judged(exported, tmp_path):
    """An id and a site are ignored with a note; the target column gives scores with intervals."""
    data, run, place = exported
    header, *cells = rows_of(data / "cedar.csv")
    rows = test_rows(run, "cedar")
    lines = [[*header, "id", "site"], *([*cells[at], f"p{at}", "cedar"] for at in rows)]
    (tmp_path / "all.csv").write_text("\n".join(map(",".join, lines)) + "\n")
    model = coterie.load_export(place)
    found = model.predict(tmp_path / "all.csv")
    np.testing.assert_allclose(found.values, answers_of(run, "cedar"), atol=1e-6, rtol=0)
    assert "ignored: 'id', 'site'" in found.notes[0]
    auc = found.scores["auc"]
    assert auc.value == pytest.approx(run.last[run.roster.clients.index("cedar")], abs=1e-4)
    assert auc.low < auc.value < auc.high or auc.value in (auc.low, auc.high)
    assert f"on the {len(rows)} of {len(rows)} rows" in found.notes[1]
    assert not model.predict(new_rows(exported, tmp_path / "new.csv")).scores


def test_a_gap_that_training_never_had_is_filled_with_the_mean_and_told(exported, tmp_path):
    model = coterie.load_export(exported[2])
    mean = model.preprocessing.moments.mean[0]
    (tmp_path / "gap.csv").write_text("a,b,kind\n,0.5,x\n")
    with pytest.warns(CoterieWarning, match="column 'a' has 1 empty cells and had none"):
        found = model.predict(tmp_path / "gap.csv")
    expected = model.predict({"a": [mean], "b": [0.5], "kind": ["x"]})
    np.testing.assert_allclose(found.values, expected.values, atol=1e-6)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros((2, 8, 7), np.uint8), r"shape \[2, 8, 7\]; expected uint8 pixels of shape"),
        (np.zeros((2, 8, 8)), r"type float64 as images; expected uint8"),
        (np.zeros((0, 8, 8), np.uint8), r"shape \[0, 8, 8\]"),
    ],
)
def test_an_array_that_does_not_fit_is_refused(image_run, array, expected):
    with pytest.raises(DataError, match=expected):
        coterie.load_export(image_run[1]).predict(array)


def test_tokens_are_checked(tmp_path):
    x, _ = untrained("char_lstm", tmp_path, {}, 1)
    model = coterie.load_export(tmp_path / "export")
    with pytest.raises(DataError, match="tokens from 0 to 10; expected tokens below 10"):
        model.predict(x * 0 + torch.arange(6)[:, None] * 2)


# ---- the commands --------------------------------------------------------------------------------


def called(*words):
    """What a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert not ended.value.code
    return out.getvalue()


def test_the_commands_write_a_model_and_answers(exported, tmp_path):
    data, run, place = exported
    told = called("export", run.path, "--client", "cedar", "--out", tmp_path / "model")
    assert "coterie predict" in told
    for name in NAMES:
        assert (tmp_path / "model" / name).read_bytes() == (place / name).read_bytes()
    header, *cells = rows_of(data / "cedar.csv")
    new = tmp_path / "new.csv"
    rows = [[f"p{i}", *row] for i, row in enumerate(cells)]
    new.write_text("\n".join(",".join(row) for row in [["id", *header], *rows]) + "\n")
    words = ("predict", tmp_path / "model", new, "--keep", "id")
    printed = called(*words)
    called(*words, "--out", tmp_path / "answers.csv")
    assert printed == (tmp_path / "answers.csv").read_text()
    first, *answers = csv.reader(io.StringIO(printed))
    assert first == ["id", "predicted label", "probability of ill", "probability of well"]
    assert [row[0] for row in answers] == [row[0] for row in rows]
    for row in answers:
        assert float(row[2]) + float(row[3]) == pytest.approx(1)
        assert row[1] == ("ill" if float(row[2]) > float(row[3]) else "well")


def test_a_class_that_a_spreadsheet_would_run_is_quoted():
    names = ("=2+3", "-1", "ok")
    found = Predictions(TargetColumn("", "texts", names), np.eye(3), {}).to_csv().splitlines()
    assert [line.split(",")[0] for line in found] == ["predicted", "'=2+3", "-1", "ok"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"client": "cedra"}, r"no client is called 'cedra'"),
        ({"run": "comparison"}, r"is a comparison of several runs"),
        ({"run": "nothing"}, r"holds no finished run"),
        ({"out": "used"}, r"exists and is not empty"),
    ],
)
def test_what_cannot_be_exported_is_refused(exported, tmp_path, change, expected):
    (tmp_path / "comparison").mkdir()
    (tmp_path / "comparison" / "compare.json").write_text("{}")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("mine")
    asked = {"run": exported[1].path, "client": "cedar", "out": "new", **change}
    with pytest.raises((ConfigError, StoreError), match=expected):
        coterie.export(tmp_path / asked["run"], asked["client"], tmp_path / asked["out"])
    assert not (tmp_path / "new").exists()


def test_a_run_that_was_changed_is_not_exported(exported, tmp_path):
    place = Path(shutil.copytree(exported[1].path, tmp_path / "run"))
    flip(place / "models.safetensors")
    with pytest.raises(StoreError):
        coterie.export(place, "cedar", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_client_without_a_finite_model_is_refused(exported, tmp_path):
    made = trained_client(exported[1].path, "cedar", Code())
    weights, models = made.predictor
    for wrong, expected in (
        (Mixture(weights * 0, models), "has no model"),
        (Mixture(weights, models * torch.inf), "diverged"),
    ):
        with pytest.raises(StoreError, match=expected):
            write_export(made._replace(predictor=wrong), tmp_path / "new")


# ---- an export that cannot be trusted ------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", [*NAMES, "MANIFEST.json"])
def test_a_flipped_bit_is_refused(copied, name):
    coterie.load_export(copied)
    flip(copied / name)
    with pytest.raises(StoreError):
        coterie.load_export(copied)


def sealed(place):
    files.seal(place, sorted(NAMES))


def edited(place, name, *path, value):
    """Change a value of a JSON file, with a manifest to match."""
    whole = json.loads((place / name).read_text())
    at = whole
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    (place / name).write_text(json.dumps(whole))
    sealed(place)


FALSE = {
    "a newer format": ("config.json", "format", 2),
    "a format that is no number": ("config.json", "format", "1"),
    "another network": ("config.json", "network", "name", "linear"),
    "a foreign network": ("config.json", "network", "name", "os:system"),
    "another width": ("config.json", "network", "options", {"hidden": [7]}),
    "a huge network": ("config.json", "network", "options", {"hidden": [100_000, 100_000]}),
    "options of another kind": ("config.json", "network", "options", {"hidden": "x"}),
    "an unknown option": ("config.json", "network", "options", {"__class__": 1}),
    "another shape": ("config.json", "network", "shape", [7]),
    "another precision": ("config.json", "network", "precision", "float64"),
    "an unknown field": ("config.json", "surprise", 1),
    "another digest": ("config.json", "digest", "0" * 64),
    "fewer means": ("preprocessing.json", "moments", "mean", [0.0]),
    "a deviation of zero": ("preprocessing.json", "moments", "std", [0.0] * 6),
    "more levels": ("preprocessing.json", "schema", "columns", 2, "levels", ["w", "x", "y", "z"]),
    "pixels of a table": ("preprocessing.json", "pixels", {"scale": [1.0], "shift": [0.0]}),
}


@pytest.mark.parametrize("case", FALSE)
def test_values_that_do_not_fit_are_refused_although_the_manifest_does(copied, case):
    *path, value = FALSE[case]
    edited(copied, *path, value=value)
    with pytest.raises((StoreError, ConfigError)):
        coterie.load_export(copied)


@pytest.mark.parametrize("case", ["shape", "name", "type", "not finite", "pickle", "no weights"])
def test_parameters_that_do_not_fit_are_refused(copied, case):
    path = copied / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    bias = tensors["0/head.bias"]
    changes = {
        "shape": {"0/head.bias": bias[:1].clone()},
        "name": {"0/head.extra": bias.clone()},
        "type": {"0/head.bias": bias.double()},
        "not finite": {"0/head.bias": bias * torch.nan},
        "no weights": {"weights": torch.ones(1, 1)},
    }
    if case == "pickle":
        torch.save(tensors, path)
    else:
        save_file({**tensors, **changes[case]}, path)
    sealed(copied)
    with pytest.raises(StoreError):
        coterie.load_export(copied)


def test_a_link_in_an_export_is_refused(copied, tmp_path):
    moved = (copied / "config.json").rename(tmp_path / "config.json")
    (copied / "config.json").symlink_to(moved)
    with pytest.raises(StoreError, match="is a link"):
        coterie.load_export(copied)


def test_preprocessing_is_read_back_bit_for_bit(exported, number_run, image_run):
    for place in (exported[2], number_run[2], image_run[1]):
        text = (place / "preprocessing.json").read_text()
        assert Preprocessing.from_json(text).to_json() + "\n" == text
