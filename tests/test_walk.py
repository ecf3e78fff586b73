"""The walk of ``coterie run`` in docs/architecture.md is the way that a real run takes."""

import re
import sys
from pathlib import Path

import pytest

import coterie
from coterie import cli

SOURCE = Path(coterie.__file__).parent
PAGE = SOURCE.parents[1] / "docs" / "architecture.md"
FILES = 25  # at most, in the walk


def walk() -> list[tuple[str, str]]:
    """The file and the name of every function in the walk; functions of methods are left out."""
    text = PAGE.read_text().partition("## The walk of `coterie run`")[2].partition("\n## ")[0]
    found, file = [], ""
    for before, token in re.findall(r"(the\s+method's\s+)?`([^`]+)`", text.partition("\n1. ")[2]):
        if token.endswith(".py"):
            file = token
        elif not before and re.fullmatch(r"[a-z_]+|[A-Z]\w+\.\w+", token):
            found.append((file, token))
    return found


def followed(arguments: list[str]) -> list[tuple[str, str]]:
    """The functions of the package that a command calls, by file, in the order of first calls."""
    calls: dict[tuple[str, str], None] = {}
    source = f"{SOURCE}/"

    def called(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(source):
            calls.setdefault((code.co_filename.removeprefix(source), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        with pytest.raises(SystemExit):
            cli.main(arguments)
    finally:
        sys.setprofile(before)
    return list(calls)


def test_a_run_takes_the_walk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--method", "fedavg", "--rounds", "2", "--clients", "3", "--model", "linear"]
    every = ["--engine", "loop", "--set", "run.checkpoint_every=1"]
    calls = followed(["run", *small, *every])
    steps = walk()
    assert [step for step in steps if step not in calls] == []  # in the walk, but not called
    assert steps == sorted(steps, key=calls.index)


def test_the_walk_is_short():
    files = {file for file, _ in walk()}
    assert len(files) <= FILES
    assert f"{len(files)} files" in PAGE.read_text()
    assert len(walk()) == len(set(walk()))
