"""What the benchmark measures is what it says: never how long anything took."""

import json
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.federico import FedeRiCo
from coterie.algorithms.fedfomo import FedFomo
from coterie.algorithms.waffle import Waffle
from coterie.cli import main
from coterie.commands import bench
from coterie.commands.bench import ceiling, growth, peak_memory, turns
from coterie.commands.bench.ceiling import Bill, Machine
from coterie.commands.bench.clipped import ClippedFedAvg
from coterie.commands.bench.plain import fastest, plain_round
from coterie.commands.bench.steady import Steady, steady
from coterie.commands.bench.workloads import WORKLOADS, Workload
from coterie.engines import make_engine
from coterie.errors import ConfigError, EngineError
from support import assert_close, backend_of, one_client

CPU = torch.device("cpu")
FIELDS = {
    "workload",
    "engine",
    "seconds_per_round",
    "speedup_over_loop",
    "peak_mib",
    "share_of_ceiling",
    "precision",
    "device",
    "resolved",
}


def tiny(name: str) -> Workload:
    """The workload with few clients, all of whom can still be sent as many models as they ask."""
    work, clients = WORKLOADS[name], {"W4": 6, "W7": 4}.get(name, 3)
    side = 16 if name == "W5" else 8
    return work._replace(
        clients=clients,
        samples=13,
        batch=5,
        shape=(work.shape[0], side, side),
        trains=clients if name == "W8" else work.trains,
    )


def started(work: Workload, dtype: torch.dtype = torch.float64) -> Steady:
    return steady(work.method, work.simulation(CPU, dtype))


# ---- the workloads -----------------------------------------------------------------------------

ISSUE = {  # method, clients, samples, batch, parameters
    "W1": (FedAvg(), 100, 100, 10, 784 * 200 + 200 + 200 * 10 + 10),
    "W2": (FedAvg(), 100, 100, 10, 61_706),
    "W3": (FedAvg(), 20, 500, 50, 1_663_370),
    "W4": (FedFomo(downloads=5), 20, 500, 10, 61_706),
    "W5": (FedAvg(), 100, 640, 64, 2_432 + 51_264 + (5 * 5 * 64 * 512 + 512) + 5_130),
    "W6": (FedAvg(), 8, 500, 50, 11_173_962),
    "W7": (FedeRiCo(downloads=3), 8, 500, 50, 3_584 + 2 * 147_584 + (128 * 4 * 4 * 10 + 10)),
    "W8": (Waffle(requesters="all"), 10, 500, 32, 61_706),
    "W9": (ClippedFedAvg(), 100, 100, 10, 61_706),
}


@pytest.mark.parametrize("name", ISSUE)
def test_workloads_are_those_that_were_agreed(name):
    method, clients, samples, batch, parameters = ISSUE[name]
    work = WORKLOADS[name]
    assert (work.method, work.clients, work.samples, work.batch) == (
        method,
        clients,
        samples,
        batch,
    )
    few = work._replace(clients=1, samples=2).simulation(CPU).problem
    assert few.model.parameters == parameters
    assert (few.recipe.optimizer, few.recipe.epochs, few.recipe.momentum) == ("sgd", 1, 0)


def test_there_are_no_other_workloads():
    assert set(WORKLOADS) == set(ISSUE)


def test_in_a_steady_round_everybody_receives_all_the_models_it_asks_for():
    start = started(tiny("W4"))
    received = start.method.download(start.server, start.round)
    assert received.slot.shape == (6, 5)
    assert (received.slot >= 0).all()
    assert not torch.equal(start.states.theta, start.states.old)


# ---- the plain loop ----------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "W6"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
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


def test_the_plain_loop_takes_as_many_steps_as_the_method():
    start = started(tiny("W2"))
    plain, steps = plain_round(start, "contiguous"), Counter()
    for i, rule in enumerate(plain.clients.rules):
        rule.register_step_post_hook(lambda *_, i=i: steps.update([i]))
    plain()
    count = start.on.problem.recipe.count(13)
    assert count == tiny("W2").steps
    assert steps == Counter(dict.fromkeys(range(3), count))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_way_that_trains_fastest_is_taken(layout, monkeypatch):
    def seconds(clients, batches, threads):
        x, _ = clients.data["train"][0]
        last = x.is_contiguous(memory_format=torch.channels_last)
        return (last != (layout == "channels_last")) + 1 / threads

    monkeypatch.setattr("coterie.commands.bench.plain._step", seconds)
    monkeypatch.setattr("coterie.commands.bench.plain.TRIED_SECONDS", 0.0)
    _, chosen = fastest(started(tiny("W5")), 2)
    assert chosen == {"layout": layout, "threads": 2}


def test_clipped_samples_move_the_model_by_their_clipped_mean():
    start = started(tiny("W9"))
    client = one_client(start.on, 0)
    batch, w = client.batch(0), start.on.problem.start
    total = torch.zeros_like(w)
    for k in range(len(batch.y)):
        alone = batch._replace(x=batch.x[k : k + 1], y=batch.y[k : k + 1])
        g = client.gradient(w, alone)
        total += g * min(1.0, 0.5 / float(g.norm()))
    assert_close(ClippedFedAvg(clip=0.5).gradient(client, w, batch), total / len(batch.y))


def test_padding_counts_for_nothing_in_a_clipped_mean():
    start = started(tiny("W9"))
    client = one_client(start.on, 0)
    batch = client.batch(0)
    masked = batch._replace(mask=torch.tensor([1.0, 1, 1, 0, 0], dtype=torch.float64))
    short = batch._replace(x=batch.x[:3], y=batch.y[:3], position=batch.position[:3])
    method, w = ClippedFedAvg(), start.on.problem.start
    assert_close(method.gradient(client, w, masked), method.gradient(client, w, short))


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
    assert ceiling.bill(work, plain.clients) == Bill(2.0 * flops, 2.0 * 4 * moved)


def test_clipping_costs_no_arithmetic_that_training_does_not():
    bills = [
        ceiling.bill(tiny(n), plain_round(started(tiny(n)), "contiguous").clients)
        for n in ("W2", "W9")
    ]
    assert bills[0] == bills[1]


def test_evaluations_are_on_the_bill():
    work = tiny("W4")
    clients = plain_round(started(work), "contiguous").clients
    whole, training = (ceiling.bill(w, clients) for w in (work, work._replace(judges=0)))
    assert whole.flops > training.flops
    extra = ceiling.numbers_moved(work._replace(trains=0, judges=1), clients.on)
    assert whole.bytes - training.bytes == work.clients * 7 * 8 * extra


# ---- the measurement ---------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Tiny workloads on a machine of known rates."""
    for name in ("W1", "W4"):
        monkeypatch.setitem(WORKLOADS, name, tiny(name))
    monkeypatch.setattr(bench, "machine", lambda *_: Machine(1e9, 1e9))
    monkeypatch.setattr("coterie.commands.bench.plain.TRIED_SECONDS", 0.0)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def test_json_is_a_list_of_results(quick, capsys):
    main_ends(["bench", "W1", "--force", "--json", "--repeats", "1"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [(r["workload"], r["engine"]) for r in found] == [
        ("W1", engine) for engine in ("plain", "auto", "vmap", "loop")
    ]
    for result in found:
        assert set(result) >= FIELDS
        assert not result["failed"]
        assert result["seconds_per_round"] > 0
        least = max(result["gflop"] / result["gemm_gflops"], result["gbytes"] / result["copy_gbs"])
        share = least / result["seconds_per_round"]
        assert result["share_of_ceiling"] == pytest.approx(share)
    assert [r["speedup_over_loop"] for r in found if r["engine"] == "plain"] == [1]
    assert "W1" in err


def main_ends(arguments: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code


def test_an_engine_that_fails_says_why_and_the_others_go_on(quick, monkeypatch, capsys):
    def made(name, on):
        if name == "vmap":
            raise EngineError("no such thing here")
        return backend_of("loop", on)

    monkeypatch.setattr(bench, "backend_of", made)
    main_ends(["bench", "W1", "--force", "--repeats", "1"])
    out, _ = capsys.readouterr()
    lines = {line.split()[1]: line for line in out.splitlines()[2:]}
    assert "failed: EngineError: no such thing here" in lines["vmap"]
    assert "threads" in lines["loop"]
    assert "GEMM 1 GFLOP/s, copy 1.0 GB/s" in out


def test_who_fails_in_a_round_is_out_of_the_race():
    calls = Counter()

    def fails():
        calls["bad"] += 1
        if calls["bad"] == 2:
            raise RuntimeError("out of memory\nlong trace")

    field = {
        "good": turns.Contestant(lambda: calls.update(["good"]), 1, "one"),
        "bad": turns.Contestant(fails, 1, "two"),
    }
    told = []
    laps = turns.race(field, CPU, 4, told.append)
    assert calls == Counter(good=2 + 4, bad=2)
    assert ["bad" in line for line in told] == [True] + [False] * 5
    assert all("good" in line for line in told)
    assert told[-1].startswith("turn 4 of 4:")
    assert laps["bad"].failed == "RuntimeError: out of memory"
    assert (laps["good"].repeats, laps["good"].failed, laps["good"].resolved) == (4, "", "one")


def test_long_rounds_are_timed_less_often_but_three_times():
    found = [turns.turns_within(10, seconds, budget=120) for seconds in (0.0, 12.0, 30.0, 1e6)]
    assert found == [10, 10, 4, 3]
    assert turns.turns_within(2, 1e6) == 2


def test_memory_is_what_the_work_takes_beyond_what_there_was():
    kept = torch.ones(2**22)
    with peak_memory.watched(CPU) as peak:
        once = torch.ones(2**25).sum()  # 128 MiB
    if peak.mib is None:
        pytest.skip("this kernel keeps no high-water mark")
    assert 127 < peak.mib < 160
    with peak_memory.watched(CPU) as little:
        once = kept.sum()
    assert once == 2**22
    assert little.mib < 8


def test_where_the_kernel_keeps_no_mark_memory_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "RESET", tmp_path / "no" / "such file")
    with peak_memory.watched(CPU) as peak:
        pass
    assert peak.mib is None


def test_a_busy_machine_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (64.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for option in ("W1", "--scale", "--population"):
        main_ends(["bench", option], 2)
        assert "the machine is busy: load 64.0 on 2 cores" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "device", "precision", "message"),
    [
        (["W11"], "cpu", "float32", "workload 'W11' is unknown; did you mean 'W1'"),
        (["W1"], "cpu", "float16", "precision 'float16' is unknown"),
        (["W1"], "cpu", "tf32", "'tf32' is a GPU's"),
    ],
)
def test_what_cannot_be_measured_is_refused(names, device, precision, message):
    with pytest.raises(ConfigError, match=message):
        bench.measure(names, device, precision, 1, force=True)


# ---- growth ------------------------------------------------------------------------------------


def looping(_name, problem, shards, **_options):
    return make_engine("loop", problem, shards)


def test_scale_and_population_report_a_row_for_every_size(monkeypatch, capsys):
    monkeypatch.setattr(growth, "make_engine", looping)
    monkeypatch.setattr(growth, "LENET", growth.LENET._replace(samples=4, batch=4))
    rows = list(growth.scale("cpu", 1, (2, 3), force=True))
    assert [(r.registered, r.clients) for r in rows] == [(2, 2), (3, 3)]
    assert all(r.seconds_per_client == r.seconds_per_round / r.clients for r in rows)
    rows = list(growth.population("cpu", 1, (2, 5), force=True))
    assert [(r.method, r.registered, r.clients) for r in rows] == [
        (method, size, 2) for method in ("FedAvg", "Ditto") for size in (2, 5)
    ]


def test_growth_times_no_evaluation(monkeypatch):
    engines = []

    def made(*arguments, **options):
        engines.append(looping(*arguments, **options))
        engines[-1].evaluate = lambda *_: pytest.fail("evaluated")
        return engines[-1]

    monkeypatch.setattr(growth, "make_engine", made)
    monkeypatch.setattr(growth, "LENET", growth.LENET._replace(samples=4, batch=4))
    list(growth.scale("cpu", 2, (2,), force=True))
    assert len(engines) == 1


def test_both_kinds_of_growth_at_once_are_refused(capsys):
    main_ends(["bench", "--scale", "--population"], 2)
    assert "give one of them" in capsys.readouterr().err
