"""``run.spread``: as one run after the other."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import coterie
from coterie.algorithms.fedavg import FedAvg
from coterie.engines import EngineSettings
from coterie.errors import ConfigError, EngineError, StoppedError, StoreError
from coterie.runs import comparison_folder, run_folder, spread
from coterie.runs.assemble import assemble
from coterie.runs.config.loading import canonical
from coterie.runs.interrupt import Stop, told_by
from coterie.runs.plan import Cell, Plan, columns

ray = pytest.importorskip("ray")

TESTS = Path(__file__).parent
TINY = {
    "partition": {"name": "concept_shift", "clients": 5, "groups": 2},
    "model": {"name": "linear"},
    "train": {"batch": 50},
    "engine": {"name": "loop", "threads": 1},
    "run": {"rounds": 3, "participation": 0.7, "checkpoint_every": 1},
}
TOKEN = "a" * 64  # else Ray writes one into the home folder
COMPARED = ["fedfomo", "fedavg", "local"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of two workers on this machine; no dashboard, no report of its use, no token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.setenv("COTERIE_CACHE", str(tmp_path_factory.mktemp("cache")))
        before = signal.getsignal(signal.SIGTERM)
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
        yield
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


# ---- what cannot be run --------------------------------------------------------------------------


@dataclass(frozen=True)
class Failing(FedAvg):
    """Raises an error at one client."""

    def local(self, client: Any, received: Any, state: Any) -> Any:
        if int(client.id) == 2:
            raise ValueError("no such ward")
        return super().local(client, received, state)


def test_a_lock_is_refused_by_name():
    with pytest.raises(EngineError, match=r"cannot be told of this method.*leave run\.spread out"):
        spread.Told.of(threading.Lock())


def test_what_a_worker_cannot_import_is_named():
    told = spread.Told([], sys.argv, b"cnowhere_at_all\nThing\n.")
    with pytest.raises(EngineError, match=r"nowhere_at_all.*importable on every node"):
        told.load()


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'coterie\[ray\]'"):
        coterie.compare(TINY, methods=["fedavg"], set={"run.spread": "ray"})


def unconnected(monkeypatch, init):
    """A package ray that is connected to no cluster, and connects so."""
    stub = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", stub)


def test_a_cluster_that_does_not_answer_is_named(monkeypatch):
    def init(**_):
        raise ConnectionError("timed out")

    unconnected(monkeypatch, init)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    with pytest.raises(EngineError, match=r"timed out.*RAY_ADDRESS is 10\.0\.0\.9:6379"):
        spread.connected()


def test_connecting_leaves_signals_as_they_are(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    unconnected(monkeypatch, lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    spread.connected()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_takes_its_threads_and_a_gpu():
    assert spread.resources(EngineSettings(device="cuda")) == {"num_cpus": 1, "num_gpus": 1}
    assert spread.resources(EngineSettings(threads=3)) == {"num_cpus": 3, "num_gpus": 0}


def test_doctor_knows_the_cluster(monkeypatch):
    asked = {**TINY, "run": {**TINY["run"], "spread": "ray"}}
    facts = dict(coterie.doctor(asked, method="fedavg").facts)
    assert f"ray {ray.__version__}" in facts["Ray"]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'coterie\[ray\]'"):
        coterie.doctor(asked, method="fedavg")


# ---- the runs of a comparison --------------------------------------------------------------------


def result(folder):
    """All that a run's folder says, but times and the environment."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    for part in (*lines, summary):
        part.pop("seconds")
    config["run"].pop("out")
    history = run_folder.read(folder)
    arrays = [part.tolist() for part in (*history.matrices, *history.outcomes[:4])]
    return lines, summary, config, (folder / "clients.csv").read_text(), arrays


def assert_same(out, expected, methods=COMPARED, seeds=(0,)):
    """Two comparisons with the same results."""
    for method in methods:
        for seed in seeds:
            own = f"{method}/seed-{seed}"
            assert result(out / own) == result(expected / own)
            models = "models.safetensors"
            if (expected / own / models).exists():
                assert (out / own / models).read_bytes() == (expected / own / models).read_bytes()
    assert all(wrong == [] for wrong in coterie.verify(out).values())
    assert not list(out.rglob(".lock"))


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """One run after the other."""
    out = tmp_path_factory.mktemp("serial") / "compared"
    coterie.compare(TINY, methods=COMPARED, seeds=[0, 1], out=str(out))
    return out


def test_the_board_starts_without_torch():
    board = ray.cloudpickle.dumps(spread.board_class())
    code = "import pickle, sys; pickle.load(sys.stdin.buffer); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], input=board, stdout=-1, check=True)
    assert told.stdout.strip() == b"False"


def test_a_spread_comparison_is_the_serial_one(cluster, serial, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = []
    found = coterie.compare(
        *(TINY,),
        methods=COMPARED,
        seeds=[0, 1],
        out="spread",  # relative: workers have another current directory
        set={"run.spread": "ray"},
        progress=told.append,
    )
    assert_same(tmp_path / "spread", serial, seeds=(0, 1))
    expected = coterie.resume(serial)
    assert str(found).replace("spread", "") == str(expected).replace(str(serial), "")
    assert {(step.method, step.seed) for step in told} == {
        (method, seed) for method in COMPARED for seed in (0, 1)
    }
    assert sum(step.more for step in told) == 3 * 2 * TINY["run"]["rounds"]
    where = json.loads((tmp_path / "spread/fedavg/seed-0/environment.json").read_text())
    assert where["argv"] == sys.argv  # the command, not that of a worker


@pytest.mark.slow
def test_without_a_folder_the_runs_come_back(cluster, serial):
    found = coterie.compare(TINY, methods=["fedavg"], set={"run.spread": "ray"})
    digests = {run.method: run.summary["digest"] for run in found.runs}
    for method, digest in digests.items():
        written = json.loads((serial / method / "seed-0" / "summary.json").read_text())
        assert digest == written["digest"]


@pytest.mark.slow
def test_a_stop_ends_all_runs_after_a_round_and_they_go_on(cluster, serial, tmp_path):
    out = tmp_path / "spread"
    config = coterie.api.configure(
        TINY, methods=COMPARED, seeds=[0, 1], out=str(out), set={"run.spread": "ray"}
    )
    stop = Stop(f"coterie resume {out}")

    def press(step):
        stop.asked = signal.SIGINT

    out.mkdir()
    comparison_folder.write_asked(out, canonical(config))
    setting = assemble(config)
    (cells,) = columns(Plan.comparison(setting.config, out).cells)
    with told_by(stop), pytest.raises(StoppedError, match="coterie resume"):
        list(spread.spread(setting, cells, [press]))
    assert sum(run_folder.is_finished(path) for path in out.glob("*/*")) < 6
    assert not list(out.rglob(".lock"))
    coterie.resume(out)
    assert_same(out, serial, seeds=(0, 1))


@pytest.mark.slow
def test_the_error_of_a_run_ends_the_comparison(cluster, tmp_path):
    with pytest.raises(EngineError, match=r"failed in local.* of round 0: no such ward"):
        coterie.compare(
            *(TINY,),
            methods=["test_spread:Failing"],
            code=str(TESTS),
            out=str(tmp_path / "spread"),
            set={"run.spread": "ray", "run.participation": 1.0},
        )
    assert run_folder.is_finished(tmp_path / "spread" / "local" / "seed-0")
    assert not list(tmp_path.rglob(".lock"))


def test_a_folder_that_the_nodes_do_not_share_is_refused(cluster, tmp_path):
    cell = Cell(None, None, 0, tmp_path / "elsewhere" / "local" / "seed-0")
    with pytest.raises(EngineError, match="on a disk that all nodes share"):
        spread._run(spread.Told.of(None), None, spread.Told.of(cell))


def test_spreading_is_not_part_of_the_experiment():
    asked = coterie.api.configure(TINY, set={"run.spread": "ray"})
    plain = coterie.api.configure(TINY)
    method = plain.method("fedavg")
    assert asked.single(method, 0) == plain.single(method, 0)
    assert "spread" not in canonical(plain)["run"]


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_goes_on(cluster, tmp_path):
    options = {
        "methods": ["mortal:Mortal"],
        "code": str(TESTS),
        "set": {"algorithm.mortal:Mortal": {"folder": str(tmp_path)}},
    }
    (tmp_path / "aggregate").touch()
    expected = coterie.compare(TINY, **options, out=str(tmp_path / "whole"))
    (tmp_path / "aggregate").unlink()
    options["set"] = {**options["set"], "run.spread": "ray"}
    found = coterie.compare(TINY, **options, out=str(tmp_path / "spread"))
    assert (tmp_path / "aggregate").exists()
    label = found.runs[-1].method
    assert label == expected.runs[-1].method != "local"
    where = json.loads((tmp_path / "spread" / label / "seed-0/environment.json").read_text())
    assert where["resumed"][0]["after_rounds"] == 1
    assert_same(tmp_path / "spread", tmp_path / "whole", methods=["local", label])


@pytest.mark.slow
def test_runs_whose_driver_is_killed_can_be_resumed_without_ray(serial, tmp_path):
    config, out = tmp_path / "config.json", tmp_path / "spread"
    config.write_text(json.dumps({**TINY, "run": {**TINY["run"], "spread": "ray"}}))
    named = ["compare", str(config), "--methods", ",".join(COMPARED), "--seeds", "0,1"]
    command = [sys.executable, "-m", "coterie", *named, "--out", str(out)]
    fault = {"COTERIE_FAULT": "compare.cell:2", "RAY_ADDRESS": "local", "RAY_AUTH_TOKEN": TOKEN}
    where = {**os.environ, **fault}
    killed = subprocess.run(command, env=where, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    for _ in range(60):  # until the workers have noticed that their driver is gone
        try:
            coterie.compare(TINY, methods=COMPARED, seeds=[0, 1], out=str(out))
            break
        except StoreError:
            time.sleep(0.5)
    assert_same(out, serial, seeds=(0, 1))
