"""Runs as a DataFrame; pandas is imported only by who asks for one."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import coterie
from coterie.errors import CoterieError


@pytest.fixture(scope="module")
def result():
    return coterie.compare(
        data="heart", model="linear", methods=["fedavg"], rounds=3, seeds=2, engine="loop"
    )


@pytest.fixture
def columns(monkeypatch):
    """A stand-in for pandas: a frame is its dict of columns, joined one after the other."""

    def concat(frames, ignore_index):
        assert ignore_index
        return {name: np.concatenate([f[name] for f in frames]) for name in frames[0]}

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict, concat=concat))


def test_every_row_names_its_method_seed_round_and_client(result, columns):
    """Scores and gains of a row are those of this client in this round of this run."""
    found = result.to_pandas()
    assert len({len(column) for column in found.values()}) == 1
    for run in result.runs:
        local = result.of_seed(run.seed)["local"]
        for at, client in enumerate(run.roster.clients):
            mine = (found["method"] == run.method) & (found["seed"] == run.seed)
            mine &= found["client"] == client
            assert found["round"][mine].tolist() == [1, 2, 3]
            assert np.array_equal(found["test"][mine], run.test[:, at])
            gain = run.test[:, at] - local.test[:, at]
            assert np.allclose(found["gain"][mine], gain)


def test_a_run_alone_has_no_gain(result, columns):
    found = next(run for run in result.runs if run.method == "fedavg").to_pandas()
    assert len(found["client"]) == 3 * 4
    assert np.isnan(found["gain"]).all()


def test_without_pandas_the_error_says_how_to_get_it(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(CoterieError, match=r"pip install coterie\[pandas\]"):
        result.to_pandas()


def test_importing_coterie_and_running_imports_no_pandas():
    code = "import sys, coterie.api, coterie.data.given, coterie.views.frame; "
    code += "sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
