"""Tests use one thread each: two workers share two cores, and results do not depend on it."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
