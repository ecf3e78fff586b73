"""What the benchmark measures is what it says: never how long anything took."""

import json
import statistics
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import growth
import run
import short
import timing
from coterie.algorithms import ALGORITHMS
from coterie.algorithms.federico import FedeRiCo
from coterie.algorithms.fedfomo import FedFomo
from coterie.algorithms.waffle import Waffle
from coterie.engines import EngineSettings, make_engine
from coterie.errors import EngineError
from coterie.runs.config.loading import load
from plain import plain_round
from support import assert_close, backend_of, one_client
from timing import Bill, Contestant, Machine
from workloads import WORKLOADS, Steady, Workload, steady

CPU = torch.device("cpu")


def tiny(name: str) -> Workload:
    """The workload with few clients, all of whom can still be sent as many models as they ask."""
    work, clients = WORKLOADS[name], {"W4": 6, "W6": 2, "W7": 4}.get(name, 3)
    side = 16 if name == "W5" else 8
    return work._replace(
        clients=clients,
        samples=2 if name == "W6" else 13,
        batch=5,
        shape=(work.shape[0], side, side),
        trains=clients if name == "W8" else work.trains,
    )


def started(work: Workload, dtype: torch.dtype = torch.float64) -> Steady:
    return steady(work.method, work.simulation(CPU, dtype))


# ---- the plain loop computes what the engines compute ------------------------------------------


def same_batches(start: Steady):
    return lambda i: one_client(start.on, i, start.round.index)._batches.orders[0]


def models_left(start: Steady, engine: str) -> Tensor:
    """The models after a round of the method on an engine."""
    method, round = start.method, start.round
    received = method.download(start.server, round)
    made = backend_of(engine, start.on)
    uploads, _ = made.local(method, received, start.states, round)
    if isinstance(method, FedFomo):
        return uploads.theta
    sent = method.download(method.aggregate(start.server, uploads, round), round)
    if isinstance(method, FedeRiCo):
        return sent.own.vectors.squeeze(1)
    return sent.x[0] if isinstance(method, Waffle) else sent[0]


@pytest.mark.parametrize(
    ("name", "layout"), [*((name, "contiguous") for name in WORKLOADS), ("W3", "channels_last")]
)
def test_the_plain_loop_leaves_the_models_that_the_method_does(name, layout):
    start = started(tiny(name))
    plain = plain_round(start, layout, same_batches(start))
    plain()
    assert_close(plain(), models_left(start, "vmap"), 1e-10)  # a second round, like the first


def test_the_plain_control_is_the_methods():
    start = started(tiny("W8"))
    plain = plain_round(start, "contiguous", same_batches(start))
    plain()
    received = start.method.download(start.server, start.round)
    engine = backend_of("loop", start.on)
    uploads, _ = engine.local(start.method, received, start.states, start.round)
    assert_close(plain.change.dc, uploads.dc, 1e-9)


def seen(module: nn.Module, counter: Counter) -> None:
    """Count the samples that pass through a module, apart for training and evaluation."""

    def hook(_module, inputs, output):
        counter["trained" if output.requires_grad or grad_level() else "judged"] += len(inputs[0])

    module.register_forward_hook(hook)


def grad_level() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


@pytest.mark.parametrize("name", ["W1", "W2", "W4", "W7", "W8"])
def test_plain_and_method_see_as_many_samples_as_the_table_says(name):
    work = tiny(name)
    start = started(work)
    expected = Counter(trained=work.clients * work.trains * work.samples)
    expected["judged"] = work.clients * work.judges * work.judged
    ours, theirs = Counter(), Counter()
    plain = plain_round(start, "contiguous")
    for module in plain.clients.modules:
        seen(module, theirs)
    plain()
    engine = backend_of("loop", start.on)
    for module in (start.on.problem.model.module, start.on.problem.model._training):
        seen(module, ours)
    received = start.method.download(start.server, start.round)
    engine.local(start.method, received, start.states, start.round)
    assert theirs == +expected
    assert ours == +expected


def test_in_a_steady_round_everybody_receives_all_the_models_it_asks_for():
    start = started(tiny("W4"))
    received = start.method.download(start.server, start.round)
    assert received.slot.shape == (6, 5)
    assert (received.slot >= 0).all()
    assert not torch.equal(start.states.theta, start.states.old)


# ---- the ceiling -------------------------------------------------------------------------------


def test_the_ceiling_is_the_slower_of_arithmetic_and_traffic():
    assert Bill(100.0, 10.0).seconds(Machine(gemm=10.0, copy=10.0)) == 10
    assert Bill(100.0, 10.0).seconds(Machine(gemm=1000.0, copy=2.0)) == 5


def test_operations_and_bytes_of_a_known_network():
    work = WORKLOADS["W1"]._replace(clients=2, samples=20, batch=10)
    plain = plain_round(started(work, torch.float32), "contiguous")
    # products: forward and the weights' gradient of both layers, the inputs' of the second
    flops = 2 * 20 * (2 * 784 * 200 + 3 * 200 * 10)
    moved = 2 * 3 * 159_010 + 20 * (784 + 2 * (200 + 200 + 10))
    assert timing.bill(work, plain.clients) == Bill(2.0 * flops, 2.0 * 4 * moved)


def test_evaluations_are_on_the_bill():
    work = tiny("W4")
    clients = plain_round(started(work), "contiguous").clients
    whole, training = (timing.bill(w, clients) for w in (work, work._replace(judges=0)))
    assert whole.flops > training.flops
    extra = timing.numbers_moved(work._replace(trains=0, judges=1), clients.on)
    assert whole.bytes - training.bytes == work.clients * 7 * 8 * extra


# ---- turns and memory --------------------------------------------------------------------------


def test_who_fails_in_a_round_is_out_of_the_race():
    calls = Counter()

    def fails():
        calls["bad"] += 1
        if calls["bad"] == 2:
            raise RuntimeError("out of memory\nlong trace")

    field = {
        "good": Contestant(lambda: calls.update(["good"]), 1, "one"),
        "bad": Contestant(fails, 1, "two"),
    }
    told = []
    laps = timing.race(field, CPU, 4, told.append)
    good, bad = laps["good"], laps["bad"]
    assert calls == Counter(good=2 + 4, bad=2)
    assert ["bad" in line for line in told] == [True] + [False] * 5
    assert told[-1].startswith("turn 4 of 4: good")
    assert (bad.failed, bad.resolved) == ("RuntimeError: out of memory", "")
    assert (bad.seconds, bad.peak_mib, bad.repeats) == (None, None, 0)
    assert (good.repeats, good.failed, good.resolved) == (4, "", "one")
    assert good.seconds == statistics.median(good.times[2:])


def test_long_rounds_are_timed_less_often_but_three_times():
    found = [timing.turns_within(10, seconds, budget=120) for seconds in (0.0, 12.0, 30.0, 1e6)]
    assert found == [10, 10, 4, 3]
    assert timing.turns_within(2, 1e6) == 2


def test_memory_is_what_the_work_takes_beyond_what_there_was():
    kept = torch.ones(2**22)
    with timing.watched(CPU) as peak:
        once = torch.ones(2**25).sum()  # 128 MiB
    if peak.mib is None:
        pytest.skip("this kernel keeps no high-water mark")
    assert 127 < peak.mib < 160
    with timing.watched(CPU) as little:
        once = kept.sum()
    assert once == 2**22
    assert little.mib < 8


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """A tiny W1 and growth on a machine of known rates, where engine 'vmap' fails."""

    def made(settings, work, length):
        if settings.name == "vmap":
            raise EngineError("no such thing here")
        return make_backend(EngineSettings("loop"), work, length)

    make_backend = run.make_backend
    monkeypatch.setitem(WORKLOADS, "W1", tiny("W1"))
    monkeypatch.setattr(run, "make_backend", made)
    monkeypatch.setattr(run, "machine", lambda *_: Machine(1e9, 1e9))
    monkeypatch.setattr("plain.TRIED_SECONDS", 0.0)


def test_json_is_a_list_of_results_and_who_fails_says_why(quick, capsys):
    run.main(["W1", "--force", "--json", "--repeats", "1"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [(r["workload"], r["engine"]) for r in found] == [
        ("W1", engine) for engine in ("plain", "auto", "loop", "vmap")
    ]
    for result in found[:3]:
        assert not result["failed"]
        least = max(result["gflop"] / result["gemm_gflops"], result["gbytes"] / result["copy_gbs"])
        share = least / result["seconds_per_round"]
        assert result["share_of_ceiling"] == pytest.approx(share)
        ratio = found[0]["seconds_per_round"] / result["seconds_per_round"]
        assert result["speedup_over_loop"] == ratio
    assert found[3]["failed"] == "EngineError: no such thing here"
    assert found[3]["seconds_per_round"] is None
    assert "W1" in err


def test_the_table_has_a_line_per_engine(quick, capsys):
    run.main(["W1", "--force", "--repeats", "1"])
    first, titles, *lines = capsys.readouterr().out.splitlines()
    assert first == "cpu, float32: GEMM 1 GFLOP/s, copy 1.0 GB/s"
    assert titles.split()[:2] == ["engine", "s/round"]
    assert [line.split()[1] for line in lines] == ["plain", "auto", "loop", "vmap"]
    assert lines[-1].endswith("failed: EngineError: no such thing here")


def test_methods_are_measured_beside_fedavg_and_who_fails_says_why(monkeypatch, capsys):
    make_backend = run.make_backend
    monkeypatch.setitem(WORKLOADS, "W1", tiny("W1"))
    monkeypatch.setattr(
        run, "make_backend", lambda _, *rest: make_backend(EngineSettings("loop"), *rest)
    )
    few = {name: ALGORITHMS[name] for name in ("fedavg", "fedavg_data", "ditto")}
    monkeypatch.setattr(run, "ALGORITHMS", few)
    run.main(["W1", "--methods", "all", "--force", "--json", "--repeats", "1"])
    fedavg, data, ditto = json.loads(capsys.readouterr().out)
    assert fedavg["over_fedavg"] > 0
    assert data["cpu_seconds"] is None
    assert "shared samples" in data["told"]
    assert ditto["over_fedavg"] > 0
    assert ditto["told"].startswith("engine loop")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["W11"], "found W11; expected W1, W2"),
        (["W1", "--methods", "fedavgg"], "found fedavgg"),
        (["W1", "--short"], "found W1; expected lenet5, fedavg_cnn"),
        (["W1", "--precision", "tf32"], "'tf32' is a GPU's"),
        (["--scale", "--population"], "not allowed with"),
        (["--scale"], "the machine is busy: load 64.0 on 2 cores"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (64.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(SystemExit) as ended:
        run.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_scale_and_population_have_a_row_for_every_size_and_evaluate_nothing(monkeypatch):
    def looping(_settings, problem, shards, _length):
        engine = make_engine(EngineSettings("loop"), problem, shards)
        engine.evaluate = lambda *_: pytest.fail("evaluated")
        return engine

    monkeypatch.setattr(growth, "make_engine", looping)
    monkeypatch.setattr(growth, "LENET", growth.LENET._replace(samples=4, batch=4))
    rows = list(growth.scale(CPU, 1, (2, 3)))
    assert [(r.registered, r.clients) for r in rows] == [(2, 2), (3, 3)]
    assert all(r.seconds_per_client == r.seconds_per_round / r.clients for r in rows)
    rows = list(growth.population(CPU, 1, (2, 5)))
    assert [(r.method, r.registered, r.clients) for r in rows] == [
        (method, size, 2) for method in ("FedAvg", "Ditto") for size in (2, 5)
    ]


def test_a_short_run_says_what_it_took_and_on_which_engine():
    config = load({"model": {"name": "linear"}, "engine": {"name": "loop"}, "run": {"rounds": 1}})
    found = short.timed(config)
    assert found["resolved"] == "engine loop"
    assert found["seconds"] > 0
    assert found["cpu"] > 0
