"""Runs as a DataFrame; pandas is imported only by who asks for one."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest

import coterie
from coterie.errors import CoterieError


@pytest.fixture(scope="module")
def result():
    return coterie.compare(
        data="sine", model="linear", methods=["fedavg"], rounds=3, seeds=2, engine="loop"
    )


needs_pandas = pytest.mark.skipif(not find_spec("pandas"), reason="pandas is not installed")


@needs_pandas
def test_every_row_names_its_method_seed_round_and_client(result):
    """Scores and gains of a row are those of this client in this round of this run."""
    found = result.to_pandas()
    assert len(found) == sum(run.test.size for run in result.runs)
    for run in result.runs:
        local = result.of_seed(run.seed)["local"]
        for at, client in enumerate(run.roster.clients):
            mine = (found["method"] == run.method) & (found["seed"] == run.seed)
            mine &= found["client"] == client
            assert found["round"][mine].tolist() == [1, 2, 3]
            assert np.array_equal(found["test"][mine], run.test[:, at])
            gain = local.test[:, at] - run.test[:, at]  # of an error
            assert np.allclose(found["gain"][mine], gain)


@needs_pandas
def test_a_run_alone_has_no_gain(result):
    found = next(run for run in result.runs if run.method == "fedavg").to_pandas()
    assert len(found["client"]) == 3 * 12
    assert np.isnan(found["gain"]).all()


def test_without_pandas_the_error_says_how_to_get_it(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(CoterieError, match=r"pip install coterie\[pandas\]"):
        result.to_pandas()
