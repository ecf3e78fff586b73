"""Models, datasets and partitions of one's own: the page's code, and what is refused."""

import json
import re
import sys
from pathlib import Path

import pytest

import coterie
from coterie.core.imports import Code
from coterie.data import load

PAGE = (Path(__file__).parents[1] / "docs" / "own_parts.md").read_text("utf-8")


def block(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The page's two files in an empty folder, whose module is forgotten afterwards."""
    (tmp_path / "mine.py").write_text(block("python"))
    (tmp_path / "mine.toml").write_text(block("toml"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("mine", None)


def test_the_pages_commands_work_and_the_run_uses_the_three_classes(folder, command):
    for line in re.findall(r"^coterie .*$", PAGE, re.MULTILINE):
        assert command(*line.split()[1:], "--engine", "loop", "--rounds", "1")[0] == 0, line
    config = json.loads(
        (folder / "runs" / "mine" / "fedfomo" / "seed-0" / "config.json").read_text()
    )
    assert config["partition"] == {"name": "mine:FewAndMany", "clients": 4, "large": 0.5} | {
        "foreign_targets": False
    }
    assert (config["data"]["samples"], config["model"]["width"]) == (400, 8)
    rows = json.loads(
        (folder / "runs" / "mine" / "local" / "seed-0" / "partition.json").read_text()
    )
    sizes = [sum(row[part] for part in ("train", "val", "test")) for row in rows["clients"]]
    assert sizes[0] == 200
    assert max(sizes[1:]) - min(sizes[1:]) <= 1


def test_the_same_code_gives_the_same_digest_and_a_folder_does_not_run_it(folder):
    first, second = (coterie.run("mine.toml", code=".", method="fedavg", out=o) for o in ("a", "b"))
    assert first.summary["digest"] == second.summary["digest"]
    with pytest.raises(coterie.ConfigError, match=r"data\.name: the code .* is not run"):
        coterie.load("a/config.json")
    assert coterie.load("a/config.json", code=".").partition.name == "mine:FewAndMany"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.samplse": 3}, "data.samplse: mine:Rings has no such field; did you mean 'samples'"),
        ({"data.samples": 0}, "data.samples: found 0"),
        ({"partition.large": 2.0}, "partition.large: found 2.0"),
        ({"partition.lareg": 1}, "did you mean 'large'"),
        ({"data.name": "mine:FewAndMany"}, "expected a class that extends coterie.data.datasets"),
        ({"partition.name": "mine:Rings"}, "expected a class that extends coterie.data.partitions"),
        ({"partition.name": "few"}, "there is no partition 'few'"),
    ],
)
def test_fields_and_classes_are_checked_before_anything_is_read(folder, changes, message):
    with pytest.raises(coterie.ConfigError, match=re.escape(message)):
        coterie.load("mine.toml", changes, code=".")


def test_a_field_with_the_name_of_one_of_the_table_is_refused(folder):
    text = (folder / "mine.py").read_text().replace("large", "first")
    (folder / "mine.py").write_text(text)
    with pytest.raises(
        coterie.ConfigError, match=r"field 'first', which is a field of \[partition\]"
    ):
        coterie.load({"partition": {"name": "mine:FewAndMany"}}, code=".")


def test_without_permission_no_code_is_imported(folder):
    for table, name in (("data", "mine:Rings"), ("partition", "mine:FewAndMany")):
        with pytest.raises(coterie.ConfigError, match=f"{table}.name: .*cannot be imported"):
            coterie.load({table: {"name": name}})
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("classes=2,", "classes=1,", "targets y from 0 to 1; expected classes from 0 to 0"),
        ("torch.from_numpy(y),", "torch.from_numpy(y).float(),", "dtype torch.float32; expected"),
        ("torch.from_numpy(y),", "torch.from_numpy(y)[1:],", "400 samples x and 399 entries of y"),
        ("return Dataset(", "return dict(", "a dict; expected a coterie.data.Dataset"),
        ("self.samples) % 2", "self.samples) // 900", "all samples have one class"),
    ],
)
def test_a_wrong_dataset_is_refused_with_the_line_of_its_reader(folder, old, new, message):
    text = (folder / "mine.py").read_text()
    assert old in text
    (folder / "mine.py").write_text(text.replace(old, new))
    with pytest.raises(coterie.DataError, match=message) as told:
        load("mine:Rings", code=Code((folder,)))
    assert "all samples" in message or "Rings.read() (mine.py, line" in str(told.value)


def test_an_error_in_a_reader_names_its_file_and_line(folder):
    text = (
        (folder / "mine.py")
        .read_text()
        .replace("        rng = np", "        1 / 0\n        rng = np")
    )
    (folder / "mine.py").write_text(text)
    with pytest.raises(coterie.EngineError, match=r"mine\.py, line \d+, in read: 1 / 0"):
        load("mine:Rings", code=Code((folder,)))
