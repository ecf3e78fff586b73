"""A column that is wildly out of scale at one client is named by doctor, with the client."""

import re

import numpy as np
import pytest

from coterie.data import PARTITIONS, federate, load
from coterie.diagnosis.doctor import doctor
from coterie.diagnosis.findings import extremes


def table(tmp_path, change=None, heavy=False):
    rng = np.random.default_rng(0)
    ages = rng.normal(50, 10, 120)
    costs = rng.lognormal(3, 2, 120) if heavy else rng.normal(1, 0.1, 120)
    rows = [
        [f"s{i % 4}", f"{age:.1f}", f"{cost:.3f}", str(i % 2), "ill" if i % 3 else "well"]
        for i, (age, cost) in enumerate(zip(ages, costs, strict=True))
    ]
    if change is not None:
        row, column, value = change
        rows[row][column] = value
    text = "\n".join(",".join(row) for row in [["site", "age", "cost", "flag", "y"], *rows])
    path = tmp_path / "sites.csv"
    path.write_text(text)
    return {"data": {"name": str(path), "client": "site", "target": "y"}}


def found(tmp_path, *given, **options):
    data = load(table(tmp_path, *given, **options)["data"]["name"], client="site", target="y")
    told = extremes(federate(data, PARTITIONS["natural"]()))
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


def test_doctor_says_which(tmp_path):
    config = {**table(tmp_path, (6, 1, "1e30")), "engine": {"name": "loop"}, "run": {"rounds": 1}}
    warned = [text for text in doctor(config, methods=["fedavg"]).warnings if "age" in text]
    assert len(warned) == 1
    assert warned[0].startswith("client 's2': column 'age' holds 1e+30")
