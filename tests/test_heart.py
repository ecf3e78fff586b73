"""The heart disease study of four hospitals: its files, its table, and the commands that use it."""

import csv
import re

import coterie
from coterie.data import load
from coterie.data.sources.heart import FOLDER, heart_table
from coterie.runs.assemble import assemble
from coterie.runs.config.loading import load as load_config


def test_the_table_has_the_patients_of_the_source():
    """The README states how many there are, and how many are ill."""
    stated = re.findall(
        r"\.data` \| ([\w ]+?)(?: \(.*\))? \| (\d+) \| (\d+) \|",
        (FOLDER / "README.md").read_text(encoding="utf-8"),
    )
    rows = list(csv.DictReader(heart_table().splitlines()))
    assert len(stated) == 4
    for name, patients, ill in stated:
        mine = [row for row in rows if row["hospital"] == name]
        assert len(mine) == int(patients)
        assert sum(row["disease"] == "yes" for row in mine) == int(ill)
    # Nobody's cholesterol was measured in Zurich; a zero is no measurement.
    assert {row["cholesterol"] for row in rows if row["hospital"] == "Zurich"} == {""}
    assert all(row[name] != "0" for row in rows for name in ("cholesterol", "resting_pressure"))


def test_the_clients_are_the_hospitals_and_the_name_shows_the_investigators(command):
    found = load("heart")
    assert (len(found.x), found.owner_names) == (
        920,
        ("Cleveland", "Budapest", "Zurich", "Long Beach"),
    )
    shown = command("show", "heart")[1]
    assert all(name in shown for name in ("Janosi", "Steinbrunn", "Pfisterer", "Detrano"))


def test_the_config_heart_is_that_of_new_heart(tmp_path, monkeypatch, command):
    """``compare heart`` and ``new heart`` train and test on the same rows in the same way."""
    monkeypatch.chdir(tmp_path)
    named = load_config("heart")
    assert "wrote heart.toml and heart.csv" in command("new", "heart")[1]
    written = load_config("heart.toml")
    assert written.model_copy(update={"data": named.data}) == named
    assert (written.data.val, written.data.test) == (named.data.val, named.data.test)
    pair = [assemble(config).federations[0] for config in (named, written)]
    assert [pair[0].seals, pair[0].clients] == [pair[1].seals, pair[1].clients]


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heart").write_text("[run]\nrounds = 3\n")
    assert load_config("heart").run.rounds == 3


def test_zurich_is_told_why_it_cannot_tell():
    """Three of its test patients are healthy: no model can be right in enough rows more."""
    found = coterie.compare("heart", methods=["fedfomo"], seeds=1, engine="loop")
    said = {one: found.client(one).sentence for one in found.runs[0].roster.clients}
    why = "; training alone is wrong in only 3 of them, too few to show a gain."
    assert [one for one in said if "wrong in" in said[one]] == ["Zurich"]
    assert said["Zurich"].endswith(why)
