"""``coterie new``: its files can be checked and compared at once; nothing is overwritten."""

import csv
import tomllib
from collections import Counter

import pytest


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows_of(folder):
    """The rows of the table, by column."""
    return list(csv.DictReader((folder / "mine.csv").read_text().splitlines()))


def test_what_new_writes_is_checked_at_once(command, tmp_path):
    """The commands that it prints name the files; tests/test_tutorial.py types them all."""
    code, out, _ = command("new", "mine")
    assert code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.csv", "mine.toml"]
    printed = [line.split("#")[0].split() for line in out.splitlines() if "#" in line]
    assert printed == [["coterie", name, "mine.toml"] for name in ("doctor", "compare")]
    code, out, _ = command("doctor", "mine.toml", "--engine", "loop")
    assert code == 0
    assert "360 samples" in out
    assert "by time" in out


def test_every_field_has_a_line_of_its_own_with_an_explanation(command, tmp_path):
    """Commented fields are valid TOML, too; every column that is named is one of the table's."""
    command("new", "mine")
    text = (tmp_path / "mine.toml").read_text()
    fields = [line for line in text.splitlines() if "=" in line]
    assert all(line.removeprefix("# ").partition("# ")[2] for line in fields)
    tables = tomllib.loads(text)
    assert {tables["data"][role] for role in ("client", "target", "unit", "time")} <= {
        *rows_of(tmp_path)[0]
    }
    for line in fields:
        assert tomllib.loads(line.removeprefix("# "))


def test_the_table_shows_units_times_categories_and_missing_cells(command, tmp_path):
    """Its score raises the risk at three sites, and lowers it at the others."""
    command("new", "mine")
    rows = rows_of(tmp_path)
    sites = Counter(row["site"] for row in rows)
    assert sorted(sites.values()) == [60] * 6
    apart = dict.fromkeys(sites, 0.0)
    for row in rows:
        ill = 1 if row["readmitted"] == "yes" else -1
        apart[row["site"]] += ill * (float(row["score"] or 50) - 50)
    assert sum(value > 0 for value in apart.values()) == 3
    assert 0 < sum(row["score"] == "" for row in rows) < len(rows) / 4
    assert {row["sex"] for row in rows} == {"female", "male"}
    assert len({row["patient"] for row in rows}) < len(rows)


@pytest.mark.parametrize("there", ["mine.toml", "mine.csv"])
def test_new_overwrites_nothing(command, tmp_path, there):
    (tmp_path / there).write_text("my own")
    code, out, err = command("new", "mine")
    assert (code, out) == (2, "")
    assert f"{there}: exists already" in err
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "my own"


@pytest.mark.parametrize("name", ["", "a b", 'x"y', "..", "a.csv", "-x/../ "])
def test_new_refuses_names_that_are_no_plain_file_name(command, tmp_path, name):
    code, _, err = command("new", "--", name)
    assert code == 2
    assert "expected letters, digits" in err
    assert list(tmp_path.iterdir()) == []


def test_new_makes_the_folder_that_is_named(command, tmp_path):
    assert command("new", "deep/er/mine.toml")[0] == 0
    assert (tmp_path / "deep" / "er" / "mine.toml").is_file()
