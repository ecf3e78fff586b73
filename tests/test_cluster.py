"""The engine ``ray`` and ``run.spread``: as the loop, and as one run after the other."""

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

import numpy as np
import pytest
import torch

import coterie
from coterie.algorithms.fedavg import FedAvg
from coterie.commands import catalog
from coterie.core import tree
from coterie.core.messages import Rejection
from coterie.core.tree import Bank
from coterie.engines import EngineSettings
from coterie.engines import cluster as tasks
from coterie.engines.cluster import RayBackend, grouped
from coterie.engines.loop import LoopBackend
from coterie.errors import ConfigError, EngineError, StoppedError, StoreError
from coterie.runs import comparison_folder, run_folder, spread
from coterie.runs.assemble import assemble
from coterie.runs.config.loading import canonical
from coterie.runs.interrupt import Stop, told_by
from coterie.runs.plan import Cell, Plan
from coterie.training.rounds import train
from mortal import CLIENT, Mortal
from support import METHODS, RAGGED, cnn, engine_of, federation, predictors, task, whole_round

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


def records(method, on, engine, rounds=2, **options):
    """The records of a run; states are copied, because the next round overwrites them."""
    made = engine_of(engine, on, threads=1)
    found = []
    for record in train(method, on.problem, made, rounds, **options):
        states = tree.map_leaves(torch.clone, record.states)
        found.append((record, states))
    return found


def assert_equal(found, expected):
    """Bit for bit: models, states, scores, answers, bytes and the matrix of every round."""
    assert len(found) == len(expected)
    for (ours, ours_after), (theirs, theirs_after) in zip(found, expected, strict=True):
        assert ours.traffic == theirs.traffic
        assert (ours.clients, ours.rejected) == (theirs.clients, theirs.rejected)
        for a, b in zip(tree.leaves(ours_after), tree.leaves(theirs_after), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(ours.evaluation, theirs.evaluation, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(ours.collaboration, theirs.collaboration)
    ours, theirs = found[-1][0], expected[-1][0]
    assert torch.equal(predictors(ours).models, predictors(theirs).models)
    assert torch.equal(predictors(ours).weights, predictors(theirs).weights)
    for a, b in zip(ours.outcomes, theirs.outcomes, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


# ---- the numbers of the loop ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedfomo", "federico", "ditto"])
def test_a_round_over_workers_is_the_loops(name, cluster):
    method = METHODS[name]()
    on = task(method, cnn, dtype=torch.float32)  # rounds differently with another sum's order
    expected = records(method, on, "loop", participation=0.5)
    assert_equal(records(method, on, "ray", participation=0.5), expected)


@pytest.mark.slow
@pytest.mark.parametrize("participation", [0.5, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_over_workers_is_the_loops(name, participation, cluster):
    method = METHODS[name]()
    on = task(method, cnn, dtype=torch.float32)
    options = {"rounds": 3, "participation": participation}
    assert_equal(records(method, on, "ray", **options), records(method, on, "loop", **options))


def test_a_group_has_its_own_samples_and_computes_the_same():
    method = METHODS["ditto"]()
    on = task(method)
    server, states = method.init(on.problem)
    round = whole_round(on)._replace(clients=torch.tensor([1, 3]))
    rows = method.download(server, round), tree.take(states, round.clients), round
    group = on.shards.of(1, 3)
    own = [part.of(k) for part in on.shards.splits.values() for k in (1, 3)]
    assert len(group.x) == len(torch.cat(own).unique())
    found = LoopBackend(on.problem, group).local(method, *rows)
    expected = LoopBackend(on.problem, on.shards).local(method, *rows)
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        assert torch.equal(a, b)


def test_every_client_is_in_one_group_and_groups_are_about_equal():
    groups = grouped(RAGGED, 2)
    assert sorted(k for group in groups for k in group) == list(range(5))
    assert len(grouped(RAGGED, 99)) == 5
    sizes = [*range(100)]
    totals = [sum(sizes[k] for k in group) for group in grouped(sizes, 7)]
    assert max(totals) - min(totals) <= max(sizes)


def test_a_task_is_sent_only_the_models_of_its_slots():
    on = task(METHODS["fedfomo"]())
    round = whole_round(on)
    slot = torch.tensor([[4, -1], [0, 3], [1, 1], [-1, -1], [2, 0]])
    bank = Bank(torch.arange(10.0).view(5, 2), slot, slot + 10)
    message = tasks.Rows.at([1, 2], bank, (), round).message.load()
    assert message.models.tolist() == [[0, 1], [2, 3], [6, 7]]
    assert torch.equal(message.models[message.slot], bank.models[slot[[1, 2]]])
    assert torch.equal(message.owner, slot[[1, 2]] + 10)
    empty = tasks.Rows.at([3], bank, (), round).message.load()
    assert empty.slot.tolist() == [[-1, -1]]


def test_a_row_travels_without_the_rows_beside_it():
    rows = torch.zeros(1000, 500, dtype=torch.bfloat16), torch.zeros(1000, 500)
    packed = tasks.Packed.of(tree.take(rows, torch.tensor([3])))
    assert len(ray.cloudpickle.dumps(packed)) < 20_000
    for a, b in zip(packed.load(), rows, strict=True):
        assert torch.equal(a, b[3:4])
        assert a.dtype == b.dtype
    one = tasks.arrays(tuple(leaf[3] for leaf in rows))
    assert len(ray.cloudpickle.dumps(one)) < 20_000


# ---- threads, and what is written of the choice --------------------------------------------------


@dataclass(frozen=True)
class Threads(FedAvg):
    """Uploads how many threads of torch a client has."""

    def local(self, client: Any, received: Any, state: Any) -> Any:
        upload, state = super().local(client, received, state)
        return upload._replace(w=torch.full_like(upload.w, torch.get_num_threads())), state


@pytest.mark.parametrize("threads", [None, 2])
def test_a_task_has_the_threads_of_the_choice(threads, cluster):
    method = Threads()
    on = task(method)
    made = engine_of("ray", on, threads=threads)
    assert made.choice == {"engine": "ray", "threads": threads or 1}
    made.begin(on.problem, method)
    round = whole_round(on)
    replies = made.exchange(method, method.download(method.init(on.problem)[0], round), round)
    assert set(replies.uploads.w.flatten().tolist()) == {float(threads or 1)}


def test_a_folder_says_enough_to_repeat_the_run(cluster, tmp_path):
    asked = {**TINY, "engine": {"name": "ray"}}
    found = coterie.run(asked, method="fedfomo", out=str(tmp_path / "run"))
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["resolved"] == {"engine": "ray", "threads": 1}
    assert written["engine"]["threads"] == 1
    again = coterie.run(TINY, method="fedfomo")  # loop, one thread
    assert again.summary["digest"] == found.summary["digest"]


# ---- lost workers --------------------------------------------------------------------------------


def test_clients_of_a_killed_worker_are_computed_again(cluster, tmp_path):
    on = task(FedAvg())
    (tmp_path / "predictor").touch()
    found = records(Mortal(folder=str(tmp_path)), on, "ray", 1)
    assert (tmp_path / "local").exists()  # it was killed
    assert_equal(found, records(FedAvg(), on, "loop", 1))


@pytest.mark.slow
def test_a_predictor_whose_worker_is_killed_is_evaluated_again(cluster, tmp_path):
    on = task(FedAvg())
    (tmp_path / "local").touch()
    found = records(Mortal(folder=str(tmp_path)), on, "ray", 1)
    assert (tmp_path / "predictor").exists()
    assert_equal(found, records(FedAvg(), on, "loop", 1))


@pytest.mark.slow
def test_a_client_that_always_ends_its_worker_is_lost_alone(cluster, tmp_path):
    method = Mortal(folder=str(tmp_path), once=False)
    # on one worker, the five clients are four groups: client 2 shares its task with another
    on = task(method, federated=federation((20,) * 12))
    made = engine_of("ray", on, threads=2)
    assert any(len(group) > 1 and CLIENT in group for group in made.backend._groups)
    *_, record = train(method, on.problem, made, 1)
    assert record.rejected == (Rejection(CLIENT, "lost"),)
    made.begin(on.problem, method)
    with pytest.raises(EngineError, match="'site 2' of round 0 was lost 4 times"):
        made.backend.local(
            method,
            method.download(method.init(on.problem)[0], whole_round(on)),
            (),
            whole_round(on),
        )


# ---- what cannot be run --------------------------------------------------------------------------


@dataclass(frozen=True)
class Failing(FedAvg):
    """Raises an error at one client."""

    def local(self, client: Any, received: Any, state: Any) -> Any:
        if int(client.id) == CLIENT:
            raise ValueError("no such ward")
        return super().local(client, received, state)


def test_an_error_of_a_client_is_named_as_in_the_loop(cluster):
    method = Failing()
    on = task(method)
    said = []
    for engine in ("loop", "ray"):
        with pytest.raises(EngineError) as caught:
            list(train(method, on.problem, engine_of(engine, on), 1))
        said.append(str(caught.value))
    assert said[0] == said[1] == "client 'site 2' failed in local() of round 0: no such ward"


def test_a_class_of_a_function_is_sent_and_a_lock_is_refused(cluster):
    @dataclass(frozen=True)
    class Inner(FedAvg):
        def local(self, client: Any, received: Any, state: Any) -> Any:
            return super().local(client, received, state)

    on = task(Inner())
    *_, record = train(Inner(), on.problem, engine_of("ray", on), 1)
    *_, expected = train(FedAvg(), on.problem, engine_of("loop", on), 1)
    assert torch.equal(predictors(record).models, predictors(expected).models)

    locked = Inner()
    object.__setattr__(locked, "lock", threading.Lock())
    with pytest.raises(EngineError, match=r"cannot be told of this method.*engine\.name = 'loop'"):
        list(train(locked, on.problem, engine_of("ray", on), 1))


def test_code_from_a_folder_is_found_by_workers(cluster, tmp_path):
    (tmp_path / "ours_in_a_folder.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import NamedTuple\n"
        "import torch\n"
        "from coterie.algorithms.fedavg import FedAvg\n"
        "class Kept(NamedTuple):\n"
        "    rounds: torch.Tensor\n"
        "@dataclass(frozen=True)\n"
        "class Ours(FedAvg):\n"
        "    def init(self, problem):\n"
        "        return problem.start, Kept(torch.zeros(problem.population))\n"
        "    def local(self, client, received, state):\n"
        "        upload, _ = super().local(client, received, ())\n"
        "        return upload, Kept(state.rounds + 1)\n"
    )
    options = {"method": "ours_in_a_folder:Ours", "code": str(tmp_path)}
    found = coterie.run(TINY, engine="ray", **options)
    assert found.summary["digest"] == coterie.run(TINY, method="fedavg").summary["digest"]


def test_what_a_worker_cannot_import_is_named():
    told = tasks.Told([], sys.argv, b"cnowhere_at_all\nThing\n.")
    with pytest.raises(EngineError, match=r"nowhere_at_all.*importable on every node"):
        told.load()


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'coterie\[ray\]'"):
        engine_of("ray", task(FedAvg()))
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
        tasks.connected()


def test_connecting_leaves_signals_as_they_are(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    unconnected(monkeypatch, lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    tasks.connected()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_gpu_is_refused_for_clients_and_taken_by_whole_runs():
    with pytest.raises(ConfigError, match=r"engine\.device: found 'cuda'"):
        RayBackend(SimpleNamespace(device=torch.device("cuda")), None)
    assert spread.resources(EngineSettings(device="cuda")) == {"num_cpus": 1, "num_gpus": 1}
    assert spread.resources(EngineSettings(threads=3)) == {"num_cpus": 3, "num_gpus": 0}


def test_the_engine_is_listed_and_doctor_knows_it(monkeypatch):
    assert "ray" in catalog.listing("engines")
    facts = dict(coterie.doctor({**TINY, "engine": {"name": "ray"}}, method="fedavg").facts)
    assert f"ray {ray.__version__}" in facts["Ray"]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'coterie\[ray\]'"):
        coterie.doctor({**TINY, "engine": {"name": "ray"}}, method="fedavg")


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
    plan = Plan.comparison(setting.config, out)
    with told_by(stop), pytest.raises(StoppedError, match="coterie resume"):
        list(spread.spread(setting, plan.cells, [press]))
    assert sum(run_folder.is_finished(path) for path in out.glob("*/*")) < 6
    assert not list(out.rglob(".lock"))
    coterie.resume(out)
    assert_same(out, serial, seeds=(0, 1))


@pytest.mark.slow
def test_the_error_of_a_run_ends_the_comparison(cluster, tmp_path):
    with pytest.raises(EngineError, match=r"failed in local.* of round 0: no such ward"):
        coterie.compare(
            *(TINY,),
            methods=["test_cluster:Failing"],
            code=str(TESTS),
            out=str(tmp_path / "spread"),
            set={"run.spread": "ray", "run.participation": 1.0},
        )
    assert run_folder.is_finished(tmp_path / "spread" / "local" / "seed-0")
    assert not list(tmp_path.rglob(".lock"))


def test_a_folder_that_the_nodes_do_not_share_is_refused(cluster, tmp_path):
    cell = Cell(None, None, 0, tmp_path / "elsewhere" / "local" / "seed-0")
    with pytest.raises(EngineError, match="on a disk that all nodes share"):
        spread._run(tasks.Told.of(None), None, tasks.Told.of(cell))


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
        "set": {"algorithm.mortal:Mortal": {"aggregating": True, "folder": str(tmp_path)}},
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


@pytest.mark.slow
def test_spread_runs_may_spread_their_clients(cluster, serial, tmp_path):
    asked = {**TINY, "engine": {"name": "ray", "threads": 1}}
    out = tmp_path / "spread"
    coterie.compare(asked, methods=COMPARED, out=str(out), set={"run.spread": "ray"})
    for method in COMPARED:
        ours, theirs = (
            json.loads((home / method / "seed-0" / "summary.json").read_text())
            for home in (out, serial)
        )
        assert ours["digest"] == theirs["digest"]
