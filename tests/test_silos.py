"""From a hospital's table to a verdict: scikit-learn's tables in uneven silos, three lines each."""

import csv
import math

import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine

import coterie
from coterie.core.metrics import higher_is_better
from coterie.views.page import page

SHARES = {"north": 0.45, "south": 0.25, "east": 0.2, "west": 0.1}  # of the rows, nobody alike
TABLES = {"cancer": load_breast_cancer, "wine": load_wine, "diabetes": load_diabetes}
METRICS = {
    "cancer": ("accuracy", "auc", "auprc", "brier"),
    "wine": ("accuracy", "balanced_accuracy", "f1", "log_loss"),
    "diabetes": ("rmse", "mae", "r2"),
}
GUESSED = {"rmse": 1.0, "mae": 1.0, "r2": 0.0, "log_loss": 1.1, "brier": 0.34}  # without a model


def silos(folder, name):
    """The table as CSV with a site for every row, and the three lines that name it."""
    table = TABLES[name]()
    rows = [(i * 7919) % len(table.data) for i in range(len(table.data))]  # targets are sorted
    sites = [site for site, share in SHARES.items() for _ in range(round(share * len(rows)))]
    sites += ["north"] * (len(rows) - len(sites))
    with (folder / "sites.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["site", *map(str, table.feature_names), "outcome"])
        for site, row in zip(sites, rows, strict=False):
            target = table.target[row]
            label = f"class {target}" if name != "diabetes" else float(target) / 100
            writer.writerow([site, *table.data[row], label])
    config = folder / "that.toml"
    config.write_text('[data]\nname = "sites.csv"\nclient = "site"\ntarget = "outcome"\n')
    return config


@pytest.mark.parametrize("name", TABLES)
def test_three_lines_are_enough_for_a_verdict(name, tmp_path, command):
    config, out = silos(tmp_path, name), tmp_path / "out"
    told = ["--rounds", "2", "--methods", "local,fedavg", "--out", out]
    code, shown, _ = command("compare", config, *told)
    assert code == 0
    assert "FedAvg" in shown
    assert coterie.resume(out).verdict in shown  # a finished one is read


@pytest.mark.parametrize(("name", "metric"), [(n, m) for n in METRICS for m in METRICS[n]])
def test_every_metric_of_a_kind_of_target_judges(name, metric, tmp_path):
    config = silos(tmp_path, name)
    found = coterie.compare(
        config, methods=["local", "fedavg"], rounds=5, engine="vmap", set={"run.metric": metric}
    )
    assert found.verdict
    assert [run.metric for run in found.runs] == [metric, metric]
    mean = float(found.runs[0].last.mean())
    assert math.isfinite(mean)
    guessed = GUESSED.get(metric, 60.0)
    assert mean > guessed if higher_is_better(metric) else mean < guessed


def test_where_an_outcome_is_rare_the_verdict_is_about_auc(tmp_path):
    """One cultivar of wine against the rest: 48 of 178 rows, too few in a fifth of them."""
    config = silos(tmp_path, "wine")
    text = (tmp_path / "sites.csv").read_text()
    (tmp_path / "sites.csv").write_text(text.replace("class 1", "class 0"))
    asked = {"methods": ["fedavg"], "rounds": 2, "engine": "loop"}
    few = coterie.compare(config, **asked)
    assert few.metric == "auc"
    assert "No site has enough test rows (a class needs 10 units) to judge FedAvg" in few.verdict
    found = coterie.compare(config, folds=3, **asked)
    assert "sites and the models of 3 folds, " in found.verdict
    assert "FedAvg has a mean AUC of" in found.verdict
    shown = page(found)
    for beside in ("AUPRC", "balanced accuracy", "Brier", "slope", "sensitivity"):
        assert f'<th scope="col">{beside}</th>' in shown


def test_the_metric_is_chosen_by_the_targets(tmp_path):
    for name in TABLES:
        folder = tmp_path / name
        folder.mkdir()
        run = coterie.run(silos(folder, name), method="local", rounds=1, engine="loop")
        assert run.metric == METRICS[name][0]
        sizes = run.roster.n_train
        assert max(sizes) > 3 * min(sizes)
