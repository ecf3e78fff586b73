"""Tests use one thread each: two workers share two cores, and results do not depend on it."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from support import OPEN

torch.set_num_threads(1)
hypothesis.settings.register_profile("busy", deadline=None)  # the machine may have other work
hypothesis.settings.load_profile("busy")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test adds to ``sys.path`` is gone after it."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def named_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Name the C++ compiler by ``CXX``, as a user does; ``""`` names none."""
    native: Any = importlib.import_module("coterie.compiled.kernels.native")  # it is optional

    def name(command: str) -> None:
        monkeypatch.setenv("CXX", command)
        native.compiler.cache_clear()

    yield name
    native.compiler.cache_clear()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Type a command; its exit code, stdout and stderr."""
    from coterie import cli

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[float], None]], None]:
    """Set what happens at each look at a cell that another process runs, instead of a pause."""

    def does(look: Callable[[float], None]) -> None:
        monkeypatch.setattr("coterie.runs.execute.time.sleep", look)

    return does


@pytest.fixture(autouse=True)
def _closed_engines() -> Iterator[None]:
    """Engines of a test end with it: some have files."""
    yield
    while OPEN:
        OPEN.pop().close()
