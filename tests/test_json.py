"""``--json``: stdout is one JSON value whose keys are those of docs/json.md."""

import json
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "json.md").read_text("utf-8")
QUICK = ["--rounds", 1, "--engine", "loop", "--clients", 3, "--methods", "fedavg"]


@pytest.fixture
def command(command, tmp_path, monkeypatch):
    """Run a command in an empty folder; its exit code, the value on stdout, and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code, out, err = command(*words, "--json")
        return code, json.loads(out) if out else None, err

    return call


def documented(name: str) -> set[str]:
    """The keys in the table of a command."""
    section = PAGE.partition(f"## coterie {name} --json")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def told(text: str, key: str) -> set[str]:
    """The keys in the cell that describes a key."""
    cells = re.findall(rf"^\| `{key}` \| (.*) \|$", text, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", cells[-1]))


def test_compare_and_verify_print_one_value_each(command, tmp_path):
    asked = ["--contrast", "fedavg,local", "--like-these"]
    code, value, err = command("compare", *QUICK, "--out", "mine", *asked)
    assert code == 0
    assert value["contrast"]["sentence"] == "FedAvg against Local: cannot tell: run 5 seeds."
    assert {*value} == documented("compare")
    assert "local, seed 0" in err
    assert [row["method"] for row in value["methods"]] == ["local", "fedavg"]
    assert told(PAGE, "clients") <= {*value["clients"][0]}
    assert told(PAGE, "runs") == {*value["runs"][0]}
    assert told(PAGE, "recommended") == {*value["recommended"]}
    assert Path(value["page"]).is_file()
    code, value, _ = command("verify", "mine")
    assert (code, value["ok"], {*value}) == (0, True, documented("verify"))
    (tmp_path / "mine" / "local" / "seed-0" / "summary.json").write_text("{}")
    code, value, _ = command("verify", "mine")
    assert (code, value["ok"]) == (1, False)
    assert any(value["folders"].values())


def test_doctor_prints_one_value(command):
    code, value, _ = command("doctor", *QUICK)
    assert code == 0
    assert {*value} == documented("doctor")
    assert told(PAGE, "sites") == {*value["sites"][0]}
    assert told(PAGE, "estimate") == {*value["estimate"]}
    assert value["estimate"]["seconds"] > 0


def test_list_prints_one_value(command):
    code, value, _ = command("list", "methods")
    assert code == 0
    assert all({*row} == documented("list") for row in value)
    assert "fedfomo" in {row["name"] for row in value}
