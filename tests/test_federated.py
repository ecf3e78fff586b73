"""A federation of sites gives what the simulator gives, and nothing else leaves a site."""

import pytest

import coterie
from coterie.experiment import interrupt
from coterie.experiment.config.loading import merge
from coterie.experiment.runner import execute
from coterie.experiment.setting import Cell
from sites import FAST, InProcess, handler_of, setting_of, site_folders, write_tables
from support import METHODS


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("data"))


def executed(setting, out=None):
    method = setting.config.method()
    with interrupt.held(None) as stop:
        return execute(setting, Cell(method, setting.config.run.seed, out), stop=stop)


@pytest.mark.parametrize("method", ["fedavg", "fedfomo", "fedper", "federico", "waffle"])
@pytest.mark.parametrize("participation", [1.0, 0.67])
def test_sites_give_the_digest_of_the_simulator(tables, tmp_path, method, participation):
    asked = merge(FAST, {"algorithm.name": method, "run.participation": participation})
    here = coterie.run(
        asked, data=str(tables), engine="loop", set={"data.target": "label"}
    )
    handlers = {n: handler_of(f) for n, f in site_folders(tmp_path, tables).items()}
    there = executed(setting_of(asked, InProcess(handlers)))
    assert there.summary["digest"] == here.summary["digest"]
    assert there.summary["partition_fingerprint"] == here.summary["partition_fingerprint"]
