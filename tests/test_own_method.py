"""The page that teaches how to write a method is run as it stands, so that it cannot rot."""

import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.testing import LAWS, BrokenLawsError, check_method

PAGE = (Path(__file__).parents[1] / "docs" / "own_method.md").read_text("utf-8")


def block(language: str, number: int = 0) -> str:
    """A block of the page by its language, which commands lack, and its number."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for tongue, text in blocks if tongue == language][number]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the page's two files, and nothing of it left behind."""
    (tmp_path / "twin.py").write_text(block("python"), "utf-8")
    (tmp_path / "twin.toml").write_text(block("toml"), "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("twin", None)


def test_the_commands_of_the_page_run(folder, command):
    """Each line as printed, but for fewer rounds."""
    for line in block("").strip().splitlines():
        code, out, err = command(*shlex.split(line)[1:], "--rounds", "2", "--engine", "vmap")
        assert not code, err
    assert "twin" in out
    assert (folder / "twin-run" / "summary.json").exists()


def test_the_method_of_the_page_is_local_training_at_share_0_and_not_at_its_default(folder):
    """A share of 0 is Local exactly; the default mixes models, the same in every engine."""
    options = {"rounds": 3, "clients": 6, "engine": "loop"}
    config = tomllib.loads(block("toml"))
    alone = coterie.run(config | {"algorithm": {"name": "local"}}, **options)
    none = coterie.run("twin.toml", set={"algorithm.share": 0.0}, code=".", **options)
    half = coterie.run("twin.toml", code=".", **options)
    wire = coterie.run("twin.toml", code=".", **{**options, "engine": "wire"})
    assert np.array_equal(alone.test_loss, none.test_loss)
    assert not np.array_equal(alone.test_loss, half.test_loss)
    assert half.summary["digest"] == wire.summary["digest"]
    assert np.allclose(half.weights.sum(1), 1)


def test_the_check_of_the_page_passes(folder, monkeypatch):
    """The page's second block of Python, as pytest would run it."""
    monkeypatch.syspath_prepend(folder)
    scope = {}
    exec(block("python", 1), scope)
    scope["test_twin"]()


def test_the_mistake_of_the_page_is_told_as_printed(folder, monkeypatch):
    """The page says what the error would say; it does."""
    monkeypatch.syspath_prepend(folder)
    whole = block("python").replace("server.used.clone()", "server.used")
    assert whole != block("python")
    (folder / "twin.py").write_text(whole, "utf-8")
    twin = importlib.import_module("twin")
    with pytest.raises(BrokenLawsError) as found:
        check_method(twin.Twin)
    assert block("text") in str(found.value)


def test_the_page_lists_the_laws():
    """Each law with its promise, in the order in which they are checked."""
    listed = re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE)
    assert listed == [(name, law.promise) for name, law in LAWS.items()]


def test_the_method_fits_in_the_lines_that_are_promised():
    """Forty lines of code, imports aside."""
    _, _, body = block("python").partition("\n\n\n")
    code = [line for line in body.splitlines() if line.strip()]
    assert len(code) <= 40
