"""The golden path, typed as a data team would: doctor, compare, page, export, predict, onboard.

Seven sites hold tables of patients. Age raises the risk at some sites and lowers it at others;
Hilltop is tiny, Metro is big, few patients are ill, and Harbour writes ``F`` for ``female``.
"""

import csv
import json

import numpy as np
import pytest

RAISES, LOWERS = ("county", "lakeside", "north"), ("harbour", "metro", "valley")
TINY = "hilltop"  # age raises the risk there too
ROWS = {**dict.fromkeys((*RAISES, *LOWERS), 160), "metro": 500, TINY: 14}
MARKERS = ("age", "iron", "lipids", "pressure", "sodium", "sugar", "urea", "weight", "zinc")
COLUMNS = ("site", *MARKERS, "sex", "outcome")

CONFIG = """
[data]
name = "patients.csv"
client = "site"
target = "outcome"
test = 0.5

[model]
name = "linear"

[train]
lr = 0.3
epochs = 2
batch = 20

[engine]
name = "loop"

[run]
methods = ["local", "fedavg", "fedfomo", "fedamp"]
rounds = 10
seeds = 3
metric = "auc"
"""


def patients(site, rows, seed):
    """Rows of one site; about one patient in six is ill."""
    draws = np.random.default_rng(seed)
    measured = draws.normal(size=(rows, len(MARKERS)))
    sign = -1.0 if site in LOWERS else 1.0
    risk = sign * measured.sum(1) + 1.2 * draws.normal(size=rows)
    ill = risk > np.quantile(risk, 0.82)
    female, male = ("F", "M") if site == "harbour" else ("female", "male")
    for i in range(rows):
        values = 60 + 12 * measured[i]
        sex = female if draws.random() < 0.5 else male
        outcome = "ill" if ill[i] else "well"
        yield dict(zip(COLUMNS, [site, *(f"{v:.2f}" for v in values), sex, outcome], strict=True))


def write(path, columns, rows):
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    place = tmp_path_factory.mktemp("golden")
    rows = [row for seed, (site, n) in enumerate(ROWS.items()) for row in patients(site, n, seed)]
    write(place / "patients.csv", COLUMNS, rows)
    write(place / "new-patients.csv", COLUMNS[1:-1], patients("north", 9, 50))
    write(place / "new-site.csv", COLUMNS[1:], patients("valley", 120, 60))
    (place / "federation.toml").write_text(CONFIG)
    return place


@pytest.fixture
def typed(home, command, monkeypatch):
    """Type a command in the folder; what it printed."""
    monkeypatch.chdir(home)

    def call(*words):
        code, out, err = command(*words)
        assert not code, err
        return out

    return call


def test_the_golden_path(home, typed):
    told = typed("doctor", "federation.toml", "--set", "run.metric=accuracy")
    assert "hilltop" in told
    for clash in ("female", "F", "harbour"):
        assert clash in told
    assert "auc" in told.lower()  # the commonest class alone scores high: another metric is better
    found = json.loads(typed("compare", "federation.toml", "--out", "result", "--json"))
    _right_answers({site["client"]: site for site in found["sites"]}, found["recommended"])
    page = (home / "result" / "report.html").read_text()
    assert "cannot tell" in page
    run = f"result/{found['recommended']['method']}/seed-0"
    typed("export", run, "--client", "north", "--out", "model")
    typed("predict", "model", "new-patients.csv", "--out", "predicted.csv")
    with (home / "predicted.csv").open() as file:
        answers = list(csv.DictReader(file))
    assert len(answers) == 9
    shares = [
        sum(float(answer[f"probability of {c}"]) for c in ("ill", "well")) for answer in answers
    ]
    assert shares == pytest.approx([1.0] * 9, abs=1e-3)
    _right_collaborators(json.loads(typed("onboard", run, "--data", "new-site.csv", "--json")))


def _right_answers(sites, recommended):
    """A site is told sites of its own kind alone; the tiny one that nobody can tell."""
    assert recommended["method"] in ("fedfomo", "fedamp")
    assert sites.keys() == {*RAISES, *LOWERS, TINY}
    named = {name: {*site["helpers"]} for name, site in sites.items()}
    assert all(named[name] <= {*RAISES, TINY} for name in (*RAISES, TINY))
    assert all(named[name] <= {*LOWERS} for name in LOWERS)
    assert sum(bool(helpers) for helpers in named.values()) >= 5  # a site may need nobody
    assert sites[TINY]["shown"] == "unclear"
    assert f"{TINY}: cannot tell, {sites[TINY]['test_rows']} test rows" in sites[TINY]["sentence"]


def _right_collaborators(found):
    weights = found["collaborators"]
    weights = weights if isinstance(weights, dict) else {w["client"]: w["weight"] for w in weights}
    assert sum(weights.get(name, 0.0) for name in LOWERS) > 0.8
