"""``engine.trace`` was ``engine.play``: old configs and folders keep working."""

import json
import warnings

import pytest

import coterie
from coterie.errors import ConfigError, CoterieWarning
from coterie.experiment import comparison_folder
from coterie.experiment.config import loading
from coterie.experiment.config.loading import canonical, config_hash, load

TOY = {
    "data": {"name": "regression_groups"},
    "model": {"name": "linear"},
    "run": {"rounds": 3, "checkpoint_every": 1},
    "engine": {"name": "vmap", "trace": False},
}


def test_a_config_may_use_the_old_name_and_is_told_so():
    with pytest.warns(CoterieWarning, match=r"engine\.play is now engine\.trace"):
        old = load({"engine": {"play": False}})
    assert old == load({"engine": {"trace": False}})
    with pytest.warns(CoterieWarning, match=r"engine\.play is now"):
        assert load({}, {"engine.play": True}).engine.trace
    with pytest.raises(ConfigError, match=r"found both; they are one field; keep engine\.trace"):
        load({"engine": {"play": True, "trace": True}})


def test_hashes_are_those_of_the_old_name(monkeypatch):
    """A hash is computed from the tables that versions before the new name wrote."""
    config = load(TOY)
    tables = canonical(config)
    assert tables["engine"].pop("trace") is False
    tables["engine"]["play"] = False
    monkeypatch.setattr(loading, "canonical", lambda _: json.loads(json.dumps(tables)))
    before = config_hash(config)
    monkeypatch.undo()
    assert config_hash(config) == before
    assert config_hash(config) != config_hash(load({**TOY, "engine": {"name": "vmap"}}))


class Enough(Exception):  # noqa: N818
    pass


def as_before(folder):
    """Rewrite the config of a folder with the old name, as earlier versions wrote it."""
    path = folder / "config.json"
    text = path.read_text()
    assert text.count('"trace"') == 3  # in the config, as asked for, and as resolved
    path.write_text(text.replace('"trace"', '"play"'))
    return path


def test_an_old_folder_is_continued_to_the_same_digest(tmp_path):
    whole = coterie.run(TOY, method="fedavg")

    def stop(step):
        if step.done == 2:
            raise Enough

    with pytest.raises(Enough):
        coterie.run(TOY, method="fedavg", out=tmp_path / "run", progress=stop)
    stored = as_before(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = coterie.resume(tmp_path / "run")
        assert not load(stored).engine.trace  # 'coterie run config.json' repeats it
    assert found.summary["digest"] == whole.summary["digest"]
    assert not any(coterie.verify(tmp_path / "run").values())


def test_an_old_comparison_is_found_finished(tmp_path):
    first = coterie.compare(TOY, methods=["fedavg"], out=tmp_path / "all")
    path = tmp_path / "all" / comparison_folder.COMPARE
    path.write_text(path.read_text().replace('"trace"', '"play"'))
    told = []
    again = coterie.resume(tmp_path / "all", progress=told.append)
    assert all(step.reused for step in told)
    assert again.verdict == first.verdict
