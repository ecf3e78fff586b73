"""The tutorial and the notebook are run as they stand, but for fewer rounds."""

import csv
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import coterie

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "tutorial.md").read_text("utf-8")
QUICK = {  # what makes a command of the page quick
    "doctor": ["--rounds", "1", "--engine", "loop", "--methods", "fedfomo"],
    "compare": ["--rounds", "2", "--engine", "loop"],
    "onboard": ["--samples", "5", "--draws", "1"],
    "advise": ["--rounds", "1", "--seeds", "1", "--engine", "loop"],
}


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [text for tongue, text in found if tongue == language]


def commands():
    """Every line of the page that is typed: of blocks whose first line is a command."""
    typed = [block for block in blocks("") if block.startswith("coterie ")]
    return [line for block in typed for line in block.splitlines()]


def test_the_tutorial_leads_from_the_table_to_predictions(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (patients,) = blocks("csv")
    Path("new-patients.csv").write_text(patients)
    done = []
    for line in commands():
        words = shlex.split(line)
        if words[0] != "coterie":
            subprocess.run(["bash", "-c", line], check=True)
            continue
        code, _, err = command(*words[1:], *QUICK.get(words[1], []))
        assert not code, (line, err)
        done.append(words[1])
    assert done == ["new", "doctor", "compare", "report", "export", "predict", "onboard", "advise"]
    assert Path("north.html").stat().st_size > 1000
    answers = list(csv.DictReader(Path("answers.csv").read_text().splitlines()))
    assert [row["id"] for row in answers] == ["a", "b", "c"]
    assert (Path("new-site-model") / "README.md").exists()
    (code,) = blocks("python")
    names = {}
    exec(compile(code, "tutorial.md", "exec"), names)
    assert names["answers"].labels == [row["predicted readmitted"] for row in answers]


def test_the_config_of_the_tutorial_is_what_new_writes(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    command("new", "my-federation")
    written = tomllib.loads(Path("my-federation.toml").read_text())["data"]
    (shown,) = (tomllib.loads(block)["data"] for block in blocks("toml"))
    assert shown.pop("name") == "sites.csv"
    assert shown.items() <= written.items()
    (head,) = (block for block in blocks("") if block.startswith("site,"))
    assert Path("my-federation.csv").read_text().startswith(head)


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    """Its code cells in order, in one namespace; no output is stored in the file."""
    book = json.loads((DOCS / "notebook.ipynb").read_text("utf-8"))
    assert (book["nbformat"], len({cell["id"] for cell in book["cells"]})) == (
        4,
        len(book["cells"]),
    )
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, cell in enumerate(book["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert {row["method"] for row in names["rows"]} == {"local", "fedavg", "fedfomo"}
    assert names["answer"].client == "north"
    assert names["answers"].labels == ["yes", "no"]
    assert isinstance(names["swept"], coterie.StudyOutcome)
    assert "downloads=3" in capsys.readouterr().out
