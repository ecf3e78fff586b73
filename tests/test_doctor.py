"""What ``coterie doctor`` tells a data team before training."""

import csv
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.algorithms import ALGORITHMS, ALIASES
from coterie.algorithms.exposure import EXPOSURES, leaves, table
from coterie.core.algorithm import Algorithm
from coterie.core.inference import smallest_gain
from coterie.data.datasets import load
from coterie.data.partition import PARTITIONS, federate
from coterie.diagnosis import findings
from coterie.diagnosis.findings import (
    data_warnings,
    extremes,
    leakage_warnings,
    one_sided,
    score_warnings,
)
from coterie.errors import CoterieWarning, DataError
from coterie.runs.estimate import extrapolated

ROOT = Path(__file__).parents[1]
SITES = ("a", "b", "c", "d")


def rows(change=lambda site, row: row, per_site=30):
    """A table of four alike sites; ``change`` writes a site's row in another way."""
    draw = np.random.default_rng(0)
    found = []
    for site in SITES:
        for i in range(per_site):
            row = {
                "site": site,
                "sex": ("female", "male")[i % 2],
                "height": f"{draw.normal(170, 8):.1f}",
                "balance": f"{draw.normal(0, 1):.3f}",  # its median is around zero
                "ill": "yes" if i % 5 == 0 else "no",
            }
            found.append(change(site, row))
    return found


def written(folder: Path, table: list[dict[str, str]]) -> Path:
    path = folder / "sites.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    return path


def federation(folder, change=lambda site, row: row):
    path = written(folder, rows(change))
    data = load(str(path), client="site", target="ill")
    return federate(data, PARTITIONS["natural"](), val=0.2, test=0.3, seed=0)


def only_at(site, **cells):
    """A change of one site's rows."""
    return lambda at, row: (
        {**row, **{k: f(row[k]) for k, f in cells.items()}} if at == site else row
    )


def test_alike_sites_give_no_warning(tmp_path):
    made = federation(tmp_path)
    assert data_warnings(made) == leakage_warnings(made) == []


def test_columns_that_alone_tell_the_outcome_are_asked_about(tmp_path):
    """One that tells four of five rows, if its name says that it is known late."""
    home = {"yes": "hospice", "no": "home"}
    luck = iter(np.random.default_rng(0).random(1000) < 0.25)

    def late(site, row):
        told = home["no" if next(luck) else row["ill"]]
        return {**row, "discharge_to": told, "drink": told, "code": home[row["ill"]]}

    asked = leakage_warnings(federation(tmp_path, late))
    assert ["'discharge_to'" in asked[0], "'code'" in asked[1], len(asked)] == [True, True, 2]


def test_letters_at_every_position_are_a_target_without_warnings():
    made = federate(load("plays"), PARTITIONS["natural"]())
    assert [*leakage_warnings(made), *data_warnings(made)] == []


def test_an_id_is_to_be_a_unit_or_left_out(tmp_path):
    count = itertools.count()
    with pytest.warns(CoterieWarning, match=r"values in .* rows.*data.unit = 'patient_id'.*drop"):
        federation(tmp_path, lambda site, row: {**row, "patient_id": f"{next(count) // 2}"})
    with pytest.raises(DataError, match=r"is no category: .*data.unit = 'who'.*data.drop"):
        federation(tmp_path, lambda site, row: {**row, "who": f"p{next(count)}"})


def test_a_split_without_positives_is_named(tmp_path):
    made = federation(tmp_path, only_at("b", ill=lambda cell: "no"))
    assert one_sided(made) == {"b": ["no 'yes' in train", "no 'yes' in val", "no 'yes' in test"]}
    assert any("b (no 'yes' in train, no 'yes' in val" in line for line in leakage_warnings(made))


@pytest.mark.parametrize(
    ("column", "write", "pair"),
    [
        ("sex", lambda cell: cell[0].upper(), "'F' (c) and 'female' (a, b, d)"),
        ("sex", str.upper, "'FEMALE' (c) and 'female' (a, b, d)"),
        ("sex", lambda cell: f"{cell[:2]}- {cell[2:]}", "'fe- male' (c) and 'female' (a, b, d)"),
        ("ill", str.title, "'Yes' (c) and 'yes' (a, b, d)"),
    ],
    ids=["prefix", "case", "punctuation", "target"],
)
def test_two_spellings_of_a_category_are_named_with_their_sites(tmp_path, column, write, pair):
    found = data_warnings(federation(tmp_path, only_at("c", **{column: write})))
    told = column if column != "ill" else "the target"
    assert all(f"'{told}'" in one and "written in two ways" in one for one in found)
    assert len(found) == 2  # both categories of the column
    assert any(pair in one for one in found)


def test_a_beginning_that_one_site_uses_beside_the_whole_is_another_category(tmp_path):
    """ "mild" and "mildly better" at every site are two categories."""
    write = {"female": "mild", "male": "mildly"}
    made = federation(tmp_path, lambda _, row: {**row, "sex": write[row["sex"]]})
    assert data_warnings(made) == []


def test_spellings_at_one_site_are_named_too(tmp_path):
    """Case alone makes no category, even where one site uses both."""
    turns = iter(range(1000))
    made = federation(
        tmp_path, only_at("a", sex=lambda cell: cell.title() if next(turns) % 4 < 2 else cell)
    )
    found = data_warnings(made)
    assert ["'Female' (a) and 'female' (a, b, c, d)" in found[0], len(found)] == [True, 2]


def test_a_site_with_categories_of_its_own_is_named(tmp_path):
    made = federation(tmp_path, only_at("b", sex=lambda cell: {"female": "w", "male": "x"}[cell]))
    (odd,) = data_warnings(made)
    assert "'sex': no other client uses the categories of 'b' (w, x)" in odd
    assert "the others use female, male;" in odd


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_another_unit_is_named_and_medians_around_zero_are_not(tmp_path, factor):
    made = federation(tmp_path, only_at("d", height=lambda cell: f"{factor * float(cell):.4f}"))
    (odd,) = findings.scales(made)
    assert odd.startswith("client 'd': column 'height' has a median of ")
    own, others = map(float, re.findall(r"(?:of|others) ([\d.e+-]+),", odd))
    assert own == pytest.approx(factor * others, rel=0.1)
    wide = federation(tmp_path, only_at("d", balance=lambda cell: f"{20 * float(cell):.4f}"))
    (odd,) = findings.scales(wide)
    assert odd.startswith("client 'd': column 'balance' has a spread of ")


@pytest.mark.parametrize("column", ["height", "sex"])
def test_a_column_that_is_empty_at_one_site_is_named(tmp_path, column):
    cells = iter(range(1000))

    def change(site, row):
        """Empty at site a, and one cell at site b."""
        gone = site == "a" or (site == "b" and next(cells) == 0)
        return {**row, column: ""} if gone else row

    made = federation(tmp_path, change)
    assert findings.empty_columns(made) == {column: ["a"]}
    assert any(f"column '{column}' is empty in all rows of a;" in t for t in data_warnings(made))
    parts = findings.parts(made)
    assert [part.missing for part in parts] == pytest.approx([1 / 3, 1 / 90, 0, 0])


def test_parts_hold_counts_balance_and_the_commonest_class(tmp_path):
    made = federation(tmp_path)
    for part in findings.parts(made):
        assert part.rows == 30
        assert part.classes == {"no": pytest.approx(0.8), "yes": pytest.approx(0.2)}
        assert part.test == part.test_units == 9
        assert part.commonest == pytest.approx(100 * 7 / 9)  # 30 % of 24 and of 6, rounded


def test_auc_is_suggested_where_one_class_dominates_and_only_there():
    part = findings.SitePart("a", 60, 20, 20, 20, None, {"no": 0.9, "yes": 0.1}, 90.0, 10.0)
    assert 'metric = "auc"' in score_warnings([part], "accuracy")[0]
    assert score_warnings([part], "auc") == []
    assert score_warnings([part._replace(commonest=60.0)], "accuracy") == []


def test_small_test_sets_are_named():
    shares = {"no": 0.5, "yes": 0.5}
    part = findings.SitePart("tiny", 20, 5, 3, 3, None, shares, 50.0, smallest_gain(3, 4))
    larger = part._replace(client="mid", test=10, test_units=10, smallest_gain=smallest_gain(10, 4))
    blind, coarse = score_warnings([part, larger], "accuracy")
    assert "tiny (3)" in blind
    assert "mid (10: from 40 points" in coarse


@pytest.mark.parametrize(("sites", "bar"), [(1, 0.05), (2, 0.025), (8, 0.1)])
def test_the_smallest_gain_is_the_first_that_a_site_is_told(sites, bar):
    """By brute force over the numbers of wins without a loss; more samples show smaller gains."""
    found = [smallest_gain(n, sites) for n in range(1, 200)]
    for n, gain in enumerate(found, 1):
        shown = [w for w in range(n + 1) if 0.5**w <= bar]
        assert gain == (pytest.approx(100 * shown[0] / n) if shown else None)
    known = [gain for gain in found if gain is not None]
    assert known == sorted(known, reverse=True)


# ---- a number that is wildly out of scale at one client ------------------------------------------


def costs(tmp_path, change=None, heavy=False):
    rng = np.random.default_rng(0)
    ages = rng.normal(50, 10, 120)
    prices = rng.lognormal(3, 2, 120) if heavy else rng.normal(1, 0.1, 120)
    rows = [
        [f"s{i % 4}", f"{age:.1f}", f"{cost:.3f}", str(i % 2), "ill" if i % 3 else "well"]
        for i, (age, cost) in enumerate(zip(ages, prices, strict=True))
    ]
    if change is not None:
        row, column, value = change
        rows[row][column] = value
    text = "\n".join(",".join(row) for row in [["site", "age", "cost", "flag", "y"], *rows])
    path = tmp_path / "sites.csv"
    path.write_text(text)
    return load(str(path), client="site", target="y")


def found(tmp_path, *given, **options):
    told = extremes(federate(costs(tmp_path, *given, **options), PARTITIONS["natural"]()))
    return [re.match(r"client '(\w+)': column '(\w+)' holds ", one).groups() for one in told]


@pytest.mark.parametrize("cell", ["1e30", "-1e6", "520000"])
def test_one_huge_cell_is_named_with_its_client_and_column(tmp_path, cell):
    assert found(tmp_path, (6, 1, cell)) == [("s2", "age")]


def test_honest_tables_are_not_blamed(tmp_path):
    assert found(tmp_path) == []
    assert found(tmp_path, heavy=True) == []


def test_a_column_of_two_values_is_judged_alike(tmp_path):
    assert found(tmp_path, (6, 3, "300")) == []
    assert found(tmp_path, (6, 3, "90000")) == [("s2", "flag")]


# ---- what leaves a site --------------------------------------------------------------------------


def test_the_table_of_the_docs_is_the_codes_and_has_every_method():
    assert {*EXPOSURES} == {*ALGORITHMS, *ALIASES}
    assert f"\n{table()}\n" in (ROOT / "docs" / "who-sees-what.md").read_text("utf-8")


def test_a_method_of_ones_own_tells_by_its_docstring():
    class Mine(Algorithm):
        """A method.

        Travels: my model up,
        nothing down.
        """

    class Silent(Algorithm):
        """A method."""

    assert leaves("mine", Mine) == "my model up, nothing down."
    assert "no paragraph 'Travels:'" in leaves("mine", Silent)


def test_before_training_it_tells_to_how_many_a_model_goes_and_what_the_run_spends():
    pytest.importorskip("opacus", reason="pip install 'coterie[dp]'")
    asked = {"run": {"rounds": 2}, "privacy": {"noise": 1.0}}
    asked |= {"algorithm": {"fedfomo": {"downloads": 3}}}
    told = dict(coterie.doctor(asked, methods=["fedfomo"]).leaves)
    spent = coterie.run(asked, method="fedfomo").summary["privacy"]["epsilon"]
    assert "up to 3 raw models" in told["fedfomo"]
    assert f"ε at most {max(spent.values()):.1f} at δ = 1e-05" in told["fedfomo"]
    assert "ε" not in told["local"]


# ---- the whole -----------------------------------------------------------------------------------


def test_the_estimate_counts_evaluated_rounds_as_often_as_they_come():
    """A run whose rounds take 1 s, and 3 s more if evaluated; the first takes 10 s."""
    assert extrapolated([10.0, 4.0], 11, 1) == pytest.approx(10 + 10 * 4)
    assert extrapolated([10.0, 4.0, 1.0], 11, 5) == pytest.approx(10 + 10 * 1.6)
    assert extrapolated([10.0], 1, 1) == 10.0
    slow = [10.0, 4.0, 1.0, 90.0, 1.0, 4.0, 1.0]  # one round was disturbed
    assert extrapolated(slow, 11, 5) == pytest.approx(10 + 10 * 1.6)


def test_doctor_shows_sites_exposure_time_and_memory(tmp_path):
    path = written(tmp_path, rows(only_at("c", sex=lambda cell: cell[0].upper())))
    config = {
        "data": {"name": str(path), "client": "site", "target": "ill"},
        "model": {"name": "linear"},
        "run": {"rounds": 4, "evaluate_every": 2},
        "engine": {"name": "loop"},
    }
    found = coterie.doctor(config, methods=["fedfomo"])
    text = repr(found)
    assert "commonest class" in text
    assert "fedfomo  the server sees: its model, and its ranking" in text
    assert "'F' (c) and 'female' (a, b, d)" in text
    assert [row.client for row in found.sites] == list(SITES)
    assert "from the first rounds of 2 of 2 methods" in dict(found.facts)["training time"]
    told = found.to_dict()
    assert {*told} == {"facts", "estimate", "sites", "leaves", "warnings"}
    assert told["estimate"]["mib"] > 50  # a process with torch in it
    assert [site["smallest_gain"] for site in told["sites"]] == [
        pytest.approx(200 / 3)
    ] * 4  # 4 of 6 test samples


def test_it_says_why_the_automatic_metric_is_auc(tmp_path):
    """Only where "auto" chose it."""
    path = written(tmp_path, rows())
    data = {"name": str(path), "client": "site", "target": "ill"}
    asked = {"data": data, "model": {"name": "linear"}, "run": {"methods": ["fedavg"]}}
    told = dict(coterie.doctor(asked, rounds=2).facts)["metric"]
    assert told.startswith(
        "auc: chosen because 20 % of the samples have the class 'yes', less than"
    )
    assert dict(coterie.doctor(asked, rounds=2, metric="auc").facts)["metric"] == "auc"
