"""What engines promise beside the contract: memory, host state, errors, and what auto chose."""

import json
import types
from dataclasses import replace

import pytest
import torch
from torch import nn

import coterie
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local import Local
from coterie.core.tree import Bank, count_bytes, row
from coterie.engines import EngineSettings, Length, auto, process
from coterie.engines.auto import PROBE_STEPS, Candidate, Tracing, forms
from coterie.engines.base import Work
from coterie.engines.codec import Message, decode, encode, vocabulary
from coterie.engines.loop import LoopBackend
from coterie.engines.settings import steps
from coterie.engines.simulator import Simulator
from coterie.engines.vmap import VmapBackend
from coterie.errors import ConfigError, EngineError
from coterie.training.rounds import participants, train
from support import (
    METHODS,
    assert_close,
    cnn,
    engine_of,
    federation,
    last,
    mlp,
    predictors,
    slower,
    task,
)


def work(on):
    return Work(on.problem, on.shards)


def test_auto_chooses_remembers_and_says_so():
    on = task(Local())
    first = engine_of("auto", on)
    assert first.choice["engine"] in ("vmap", "loop")
    (kept,) = json.loads(auto.cache_file().read_text()).values()
    assert kept["name"] == first.choice["engine"]
    written = auto.cache_file().stat().st_mtime_ns
    assert engine_of("auto", on).choice == first.choice
    assert auto.cache_file().stat().st_mtime_ns == written  # not measured again


@pytest.mark.compiled
def test_auto_times_the_replay_and_not_the_tracing():
    engine = VmapBackend(*task(Local())[:2], chunk=5)
    one, known, taken = Candidate(engine, EngineSettings(), 1, 5), [], iter([60.0, 20.0, 30.0])
    timed = one._timed

    def noted():
        known.append(len(engine._executor._known))
        timed()
        return next(taken)

    one._timed = noted
    for _ in range(3):
        one.turn()
    assert known == [0, 1, 1]
    assert not slower(engine)
    assert one.seconds == 20.0 / 5


class Timed:
    """A candidate whose steps and setup take so long; nothing is known before its turn."""

    def __init__(self, seconds, name, *, setup=0.0, clients=1, threads=1, **chosen):
        self.seconds, self._seconds = float("inf"), seconds
        self.chosen = EngineSettings(name, threads=threads, **chosen)
        self._setup, self.clients, self.turns = setup, range(clients), 0
        self.tracing = Tracing(0.0, 0.0)
        self.engine, self.together = types.SimpleNamespace(forms=()), clients

    def turn(self):
        self.seconds, self.turns = self._seconds, self.turns + 1

    @property
    def step(self):
        return self.seconds / PROBE_STEPS

    def setup(self, *_):
        return self._setup

    def total(self, on, length):
        return self.step * length.steps(on) + self._setup


def looped(seconds, threads=1):
    """A loop that was timed."""
    one = Timed(seconds, "loop", threads=threads)
    one.turn()
    return one


def fastest(alone, seconds, *, rounds, setup=0.0, trace=False, cores=1):
    """The candidate that is chosen, and the chunks that were tried."""
    others = [
        Timed(taken, "vmap", setup=setup, clients=size, chunk=size, trace=trace)
        for size, taken in seconds.items()
    ]
    on, one = work(task(Local())), Timed(alone, "loop")
    found = auto.fastest(on, Length(rounds), looped(alone, cores), others, one)
    return found, [other.chosen.chunk for other in others if other.turns]


@pytest.mark.parametrize(
    ("alone", "seconds", "chosen", "tried"),
    [
        (9.0, {1: 5.0, 5: 3.0, 10: 2.0, 20: 4.0, 50: 1.0}, 10, [1, 5, 10, 20]),
        (9.0, {1: 5.0, 5: 6.0, 10: 2.0}, 1, [1, 5]),
        (9.0, {1: 5.0, 5: 4.0}, 5, [1, 5]),
        (3.0, {1: 5.0, 5: 4.0, 10: 4.0}, None, [1, 5, 10]),
        (3.0, {1: float("inf"), 5: 2.0, 10: 4.0}, 5, [1, 5, 10]),
        (3.0, {1: 2.9, 5: 2.8}, None, [1, 5]),  # hardly faster is not faster
        (9.0, {1: 5.0, 5: 5.1, 10: 2.0}, 10, [1, 5, 10]),  # hardly slower may be noise
        (9.0, {1: 5.0, 5: 5.1, 10: 5.2, 20: 6.0, 50: 1.0}, 1, [1, 5, 10, 20]),
    ],
)
def test_auto_tries_larger_chunks_as_long_as_they_are_faster(alone, seconds, chosen, tried):
    found, made = fastest(alone, seconds, rounds=10**6)
    assert found.chosen.chunk == chosen
    assert found.seconds == seconds.get(chosen, alone)
    assert made == tried


@pytest.mark.parametrize("rounds", [1, 3, 10, 30, 100, 1000, 10**5])
def test_what_auto_tries_is_small_beside_the_run(rounds):
    """Until something is faster than the loop, tries cost at most a small share of its run."""
    found, made = fastest(1.0, {1: 1.0, 5: 0.99, 10: 0.98, 20: 0.97, 50: 0.96}, rounds=rounds)
    assert found.chosen.name == "loop"
    run = rounds * steps(work(task(Local()))) / PROBE_STEPS
    assert sum(auto._TURNS * size for size in made) + 2.0 <= max(auto._SHARE * run, 2.0)
    assert (rounds < 10**5) or made == [1, 5, 10, 20, 50]


@pytest.mark.parametrize("rounds", [30, 1000])
def test_tracing_that_is_not_paid_back_within_the_run_is_not_done(rounds):
    run = 1000 * steps(work(task(Local()))) / PROBE_STEPS  # of the loop, in seconds
    found, made = fastest(1.0, {1: 0.5}, rounds=10 * rounds, setup=3 * run, trace=True)
    assert made == [1]
    assert found.chosen.name == ("vmap" if rounds == 1000 else "loop")


def test_a_comparison_shares_what_its_tries_cost():
    on = work(task(Local()))
    few, many = (
        auto.fastest(on, Length(3, runs=runs), looped(1.0), [Timed(0.1, "vmap", chunk=1)])
        for runs in (1, 100)
    )
    assert (few.chosen.name, many.chosen.name) == ("loop", "vmap")


@pytest.mark.parametrize(("setup", "tried"), [(0.0, 1), (1e9, 0)])
def test_a_larger_chunk_that_could_not_save_its_try_is_not_tried(setup, tried):
    best, larger = Timed(0.1, "vmap"), Timed(0.01, "vmap", setup=setup, trace=True)
    auto.fastest(work(task(Local())), Length(1000), looped(1.0), [best, larger])
    assert (best.turns > 0, larger.turns > 0) == (True, bool(tried))


def test_one_thread_is_preferred_where_all_are_hardly_faster():
    found, _ = fastest(1.0, {1: 2.0}, rounds=1000, cores=4)
    assert found.chosen.threads == 1
    found, _ = fastest(1.0, {1: 2.0}, rounds=1, cores=4)
    assert found.chosen.threads == 4  # no time to compare: as the loop engine itself


@pytest.mark.compiled
@pytest.mark.parametrize("sizes", [(31, 17, 24, 9, 40), (20, 20, 20, 30, 30, 30)])
@pytest.mark.parametrize("chunk", [1, 2])
def test_the_forms_of_a_run_are_foretold(sizes, chunk):
    on = task(Local(), federated=federation(sizes))
    engine = VmapBackend(on.problem, on.shards, chunk=chunk)
    list(train(Local(), on.problem, Simulator(engine), 2, participation=1.0))
    trained = [form for form in engine.forms if form.stage == "Local.local"]
    assert len(trained) == forms(engine, work(on), Length(2))


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


@pytest.mark.parametrize("other", [{"rounds": 5000}, {"factory": flat}])
def test_auto_measures_anew_for_a_run_of_another_length_and_for_another_model(other):
    for given in ({}, {}, other):
        on = task(Local(), given.get("factory", mlp))
        engine_of("auto", on, rounds=given.get("rounds", 5), trace=False)
    assert len(json.loads(auto.cache_file().read_text())) == 2


def test_auto_survives_a_cache_that_is_nonsense():
    auto.cache_file().parent.mkdir(parents=True)
    auto.cache_file().write_text("{not json")
    assert engine_of("auto", task(Local())).choice["engine"] in ("vmap", "loop")


class Unbatchable(nn.Module):
    """Its output depends on a number that vmap cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x):
        out = self.head(x.flatten(1))
        return out if float(out.detach().abs().sum()) > 0 else -out


def test_auto_falls_back_to_the_loop_where_vmap_cannot():
    assert engine_of("auto", task(Local(), Unbatchable), rounds=10**6).choice["engine"] == "loop"


def test_chunks_fit_the_memory_budget(monkeypatch):
    on = task(Local())
    one = process.footprint(work(on))
    monkeypatch.setattr(process, "_budget", lambda device: 1)
    assert engine_of("vmap", on).choice["chunk"] == max(1, min(20, 2**20 // one))
    assert engine_of("vmap", on, chunk=3).choice["chunk"] == 3


def test_a_full_gpu_is_an_error_that_says_what_to_do(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.69 GiB. GPU 0 has")

    monkeypatch.setattr(LoopBackend, "compute", full)
    with pytest.raises(EngineError, match=r"full \(CUDA out of memory\); compute fewer clients"):
        coterie.run(method="local", rounds=1, set={"engine.name": "loop"})


def test_an_unknown_engine_is_named():
    with pytest.raises(ConfigError, match="did you mean 'vmap'"):
        engine_of("vmpa", task(Local()))


class Fragile(nn.Module):
    """Fails on the third client's data only."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x):
        if len(x) == 4:  # 24 training samples in batches of 10
            raise ValueError("four is too few")
        return self.head(x.flatten(1))


def test_a_failure_names_client_round_and_stage():
    on = task(Local(), Fragile, merge=False)
    with pytest.raises(EngineError, match=r"'site 2' failed in local\(\) of round 0: four is too"):
        last(Local(), on, "loop", participation=1.0)


def test_participation_is_uniform_exact_and_skips_the_empty():
    on = task(FedAvg())
    counts = torch.zeros(5)
    for index in range(2000):
        chosen = participants(FedAvg(), on.problem, index, 0.5)
        assert len(chosen.unique()) == 2
        counts[chosen] += 1
    assert (counts - 800).abs().max() < 80
    counts = on.problem.counts._replace(train=(3, 0, 3, 3, 3))
    some = replace(on.problem, counts=counts)
    assert participants(FedAvg(), some, 0, 1.0).tolist() == [0, 2, 3, 4]
    assert len(participants(FedAvg(), some, 0, 0.01)) == 1
    assert len(participants(Local(budget="full"), some, 0, 0.01)) == 4


def test_bytes_are_what_the_messages_weigh():
    models = torch.zeros(7, 10)
    slots = torch.tensor([[0, 3, -1], [2, -1, -1]])
    assert count_bytes(Bank(models, slots, slots)) == 3 * (40 + 8)
    assert count_bytes((torch.zeros(2, 5), torch.zeros(2, dtype=torch.int32))) == 48
    assert count_bytes(()) == 0
    assert count_bytes(torch.zeros(5).expand(3, 5)) == 60


def test_a_packed_message_comes_back():
    models = torch.randn(7, 10)
    slots = torch.tensor([[5, -1, 3]])
    message = (Bank(models, slots, slots), torch.tensor([1.5]))
    data = encode(Message({}, row(message, 0)))
    bank, number = decode(data, vocabulary(FedAvg())).body
    assert bank.models.shape == (2, 10)  # the table did not travel
    found, present = bank.rows()
    assert present.tolist() == [True, False, True]
    assert torch.equal(found[present], models[[5, 3]])
    assert bank.owner.tolist() == [5, -1, 3]
    assert number == 1.5


@pytest.mark.compiled  # without it there is one thread
@pytest.mark.parametrize("clients", [1, 2, 5, 12, 30, 100])
@pytest.mark.parametrize("chunk", [1, 5, 20, 1000])
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_chunks_are_alike_and_the_same_for_every_thread(clients, chunk, threads):
    on = task(Local(), federated=federation((5,) * clients))
    chunks = VmapBackend(on.problem, on.shards, chunk=chunk, threads=threads).chunks(
        list(range(clients))
    )
    assert sorted(position for part in chunks for position in part) == list(range(clients))
    longest, *_ = lengths = sorted(map(len, chunks), reverse=True)
    assert longest <= chunk
    assert lengths[:-1] == [longest] * (len(chunks) - 1)  # of one form but for a rest
    turns = -(-clients // (chunk * threads))  # which nobody can do without
    assert len(chunks) <= turns * threads
    again = VmapBackend(on.problem, on.shards, chunk=longest, threads=threads)
    assert again.chunks(list(range(clients))) == chunks


@pytest.mark.compiled
def test_auto_tries_no_chunk_twice():
    on = task(Local(), federated=federation((5,) * 12))
    found = auto._batched(EngineSettings(threads=2, trace=True), work(on), rounds=1)
    assert [(one.chosen.chunk, len(one.clients)) for one in found] == [(1, 2), (5, 6), (10, 12)]


@pytest.mark.parametrize("name", ["fedavg", "fedfomo"])
def test_the_number_of_threads_changes_no_bit(name):
    method = METHODS[name]()
    on = task(method, cnn, dtype=torch.float32)
    one, two = (VmapBackend(on.problem, on.shards, chunk=2, threads=threads) for threads in (1, 2))
    assert one.chunks([0, 1, 2, 3, 4]) == two.chunks([0, 1, 2, 3, 4])
    models = [
        predictors(list(train(method, on.problem, Simulator(backend), 2))[-1]).models
        for backend in (one, two)
    ]
    assert torch.equal(*models)


def test_a_chunk_of_one_client_takes_its_models_one_at_a_time(monkeypatch):
    def mapped(*_):
        raise ZeroDivisionError

    method = METHODS["fedfomo"]()
    monkeypatch.setattr("coterie.core.client.vmap", mapped)
    last(method, task(method), chunk=1)
    with pytest.raises(ZeroDivisionError):
        last(method, task(method), chunk=2)


@pytest.mark.compiled
def test_rounds_are_traced_where_they_repay_it():
    on = task(Local())
    assert not engine_of("vmap", on, rounds=2).choice["trace"]
    assert engine_of("vmap", on, rounds=1000).choice["trace"]
    assert not engine_of("vmap", on, rounds=1000, trace=False).choice["trace"]


@pytest.mark.parametrize("name", ["fedavg", "fedfomo"])
def test_one_and_many_chunks_agree_in_float32(name):
    method = METHODS[name]()
    whole, parts = (
        predictors(last(method, task(method, mlp, dtype=torch.float32), chunk=chunk)).models
        for chunk in (5, 1)
    )
    assert_close(whole, parts, 1e-4)
