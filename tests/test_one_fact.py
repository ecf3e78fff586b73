"""Two outputs that state one fact state it alike: terminal, page, site page, card and JSON."""

import csv
import html
import math
import re

import numpy as np
import pytest

import coterie
from coterie.core.answers import Answers
from coterie.core.metrics import BESIDE
from coterie.errors import CoterieError, CoterieWarning, DataError
from coterie.views import words
from coterie.views.clinical import clinical_run, companions, estimated_score
from coterie.views.page import page
from coterie.views.site_page import site_page

SITES = ("Hôpital Étienne", "Łódź", "Süd", "Île aux Cerfs")
SIZES = (90, 60, 45, 15)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Four sites with ward codes of their own; the smallest one has two rows with the outcome."""
    path, rng, rows = tmp_path_factory.mktemp("facts") / "sites.csv", np.random.default_rng(3), []
    for at, (site, size) in enumerate(zip(SITES, SIZES, strict=True)):
        for i in range(size):
            x = rng.normal()
            ill = x + rng.normal() > 0 if size > 20 else i in (2, 9)
            day = f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}"
            ward = f"{at}-{'AB'[i % 2]}"
            rows.append((site, day, round(x, 3), ward, "mf"[i % 2], "yes" if ill else "no"))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("site", "day", "x", "ward", "sex", "ill"), *rows])
    return path


def config(table, **data):
    return {
        "data": {
            **{"name": str(table), "client": "site", "target": "ill", "drop": ["day"]},
            **{"subgroup": "sex", **data},
        },
        "run": {"rounds": 2, "metric": "auc", "methods": ["local", "fedavg", "fedfomo"]},
        "engine": {"name": "loop"},
    }


@pytest.fixture(scope="module")
def folds(table, tmp_path_factory):
    out = tmp_path_factory.mktemp("folds") / "runs"
    return coterie.compare(config(table), folds=3, out=str(out))


def cells(text: str, *first: str) -> list[list[str]]:
    """The rows of a page's tables that begin with these cells."""
    rows = re.findall(r"<tr.*?</tr>", text, re.DOTALL)
    split = [[html.unescape(c) for c in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", r)] for r in rows]
    return [row for row in split if row[: len(first)] == list(first)]


def test_the_gain_of_a_site_over_folds_is_one_number(folds):
    whole, best = page(folds), folds.choice.method
    scores = {m: folds.site_scores(m) for m in folds.methods}
    for i, site in enumerate(SITES):
        gain = words.number(scores[best][i] - scores["local"][i], "auc", sign=True)
        titles = re.findall(rf"<title>{site}: ([+−]?[0-9.]+)[ ;<]", whole)
        others = [m for m in folds.methods if m != "local"]
        expected = [
            words.number(scores[m][i] - scores["local"][i], "auc", sign=True) for m in others
        ]
        assert sorted(titles) == sorted(2 * expected)  # a panel and a scatter of each method
        (row,) = cells(whole, site, str(folds.runs[0].roster.n_train[i]))
        assert row[2:5] == [words.number(scores[m][i], "auc") for m in folds.methods]
        assert row[5].split()[0] == gain
        lines = [cells(site_page(folds, site), words.label(m)) for m in folds.methods]
        assert [line[0][1] for line in lines] == row[2:5]


def test_a_sites_rows_are_all_of_its_rows_over_folds(folds):
    for site, size in zip(SITES, SIZES, strict=True):
        own = site_page(folds, site)
        assert re.search(rf"{size} (test )?rows?", folds.client(site).sentence)
        assert "<dt>rows of this site, each tested in one fold</dt>" in own
        assert "training rows" not in own
        (row,) = [line for line in cells(own, site) if len(line) > 6]
        assert row[2] == str(size)


def test_what_stands_beside_an_auc_is_the_pages_row_of_all_sites(folds):
    whole, best = page(folds), folds.choice.method
    for method in (best, "local"):
        rows = (["all sites", *row][-11:] for row in cells(whole) if len(row) > 9)
        row = next(row for row in rows if row[1:3] == [words.label(method), str(sum(SIZES))])
        beside = companions(folds.told(method))
        for name, value in zip(("AUPRC", "balanced accuracy"), row[5:7], strict=True):
            assert f"{name} {value} %" in beside
        assert f"Brier score {row[8]}" in beside
        assert f"{words.label(method)} (mean of 3 folds), all test rows: {beside}." in repr(folds)
    runs = folds.told("local")
    means = np.nanmean([clinical_run([run]).sites[0].beside for run in runs], axis=0)
    assert clinical_run(runs).sites[0].beside == pytest.approx(means)


def test_worse_off_counts_a_site_once_over_folds(folds):
    (row,) = cells(page(folds), "FedAvg", words.spread(folds.rows[1].mean, "auc"))
    lost = int((folds.site_gain("fedavg") < 0).sum())
    assert row[3] == f"{lost} of 4"
    assert f"{lost} of 4 below training alone" in page(folds)


def test_a_verdict_on_some_sites_says_over_whom_its_means_are(folds):
    """A mean over all sites does not stand beside a gain over some as if it were theirs."""
    judged, row = folds.judgements[folds.choice.method], folds.rows[folds.methods.index("fedavg")]
    assert judged.these_sites.sites < row.served
    assert f"Over all {row.served} sites with a score, " in folds.verdict


def test_a_site_without_a_score_is_named_and_its_page_says_so(table):
    found = coterie.compare(config(table), set={"data.test": 0.2})
    empty = [s for s, x in zip(SITES, found.site_scores("local"), strict=True) if math.isnan(x)]
    assert empty
    assert f"the test rows of {words.listing(empty)} have no AUC" in found.verdict
    own = site_page(found, SITES[3])
    assert "of this site’s 3 test rows (test rows of seed 0). Fewer than 10 rows" in own
    assert "A curve on the diagonal" not in own


def test_a_gain_without_an_interval_says_so():
    assert words.gain_cell(5.0, -math.inf, math.inf, "auc") == (
        "+5.0 (too few test rows for an interval)"
    )
    assert "∞" not in words.interval(5.0, -math.inf, math.inf, "auc")
    assert words.gain_cell(-1.0, -3.0, 1.0, "auc") == "−1.0 (−3.0 to 1.0)"


def test_one_answer_for_all_rows_has_an_interval():
    """Balanced accuracy is 50 in every draw; its shares are those of few rows."""
    p = np.tile([0.9, 0.1], (40, 1))
    answers = Answers(p, (np.arange(40) < 12).astype(int), np.arange(40))
    found = estimated_score(BESIDE[2], answers)
    assert found.value == 50.0
    assert 40 < found.low < 46 < 60 < found.high < 65


def test_codes_of_their_own_are_one_warning(table):
    told = [w for w in coterie.doctor(config(table)).warnings if "'ward'" in w]
    assert len(told) == 1
    assert all(f"'{site}'" in told[0] for site in SITES)


def test_a_column_of_dates_is_asked_about_as_time(tmp_path):
    days = [(s, f"20{10 + i // 12}-{1 + i % 12:02d}-01", i % 2) for i in range(130) for s in "ab"]
    path = tmp_path / "days.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("site", "day", "ill"), *days])
    with pytest.raises(DataError, match=r"different dates .*say data.time = 'day'"):
        coterie.doctor({"data": {"name": str(path), "client": "site", "target": "ill"}})


def test_attacks_that_need_images_are_left_out_of_a_table(table):
    given = config(table)
    given["run"]["methods"] = ["fedavg"]
    with pytest.warns(CoterieWarning, match="left out for this data: A7: a backdoor"):
        found = coterie.attack(given, rounds=1, seeds=1)
    assert {row.attack for row in found.rows} & {"A7", "A10"} == set()
    with pytest.raises(DataError, match=r"--attacks: found A7: a backdoor.*leave A7 out"):
        coterie.attack(given, attacks=["A1", "A7"], rounds=1)


def test_gains_have_the_names_of_the_clients(folds):
    best = folds.choice.method
    assert [*folds.gains(best)] == list(SITES)
    assert [*folds.gains(best).values()] == folds.site_gain(best).tolist()
    told = {one.client: one.gain.gain for one in folds.judgements[best].clients}
    assert told == pytest.approx({name: folds.gains(best)[name] for name in told})
    with pytest.raises(CoterieError, match=r"no method is called 'fedafg'.*fedavg"):
        folds.gains("fedafg")


def test_a_card_without_a_score_does_not_speak_of_one(table, tmp_path):
    run = coterie.run(
        config(table), method="fedamp", set={"data.test": 0.2}, out=str(tmp_path / "run")
    )
    out = coterie.export(run.path, SITES[3], tmp_path / "model")
    card, told = (out / "README.md").read_text("utf-8"), (out / "config.json").read_text("utf-8")
    assert "It has no test score: there are no positives among the client's 3" in card
    assert "It was not judged: it has no test score." in card
    assert "the score is itself uncertain" not in card
    assert card.startswith("# Model of Île aux Cerfs, trained by FedAMP\n")
    assert '"entered": 0.0,' not in told  # who entered has a part, however small
