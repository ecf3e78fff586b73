"""What engines promise beside the contract: memory, host state, errors, and what auto chose."""

import json

import pytest
import torch
from torch import nn

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedfomo import FedFomo
from coterie.algorithms.local import Local
from coterie.compiled.memory import roomy
from coterie.core.tree import Bank, count_bytes, row
from coterie.engines import ENGINES, auto, make_engine
from coterie.engines.vmap import VmapEngine
from coterie.engines.wire import pack, unpack
from coterie.errors import ConfigError, EngineError
from coterie.training.rounds import participants, run
from support import METHODS, assert_close, cnn, federation, last, mlp, predictors, task


def test_auto_chooses_remembers_and_says_so(monkeypatch):
    on = task(Local())
    first = make_engine("auto", on)
    assert first.choice["engine"] in ("vmap", "loop")
    (remembered,) = json.loads(auto.cache_file().read_text()).values()
    assert remembered["engine"] == first.choice["engine"]
    monkeypatch.setattr(auto, "measure", lambda *_: pytest.fail("measured again"))
    assert make_engine("auto", on).choice == first.choice


def test_auto_times_what_is_played_and_not_its_recording():
    engine = VmapEngine(task(Local()), chunk=5)
    one, known, taken = auto._Candidate(engine, {}, 1, 5), [], iter([60.0, 20.0, 30.0])
    timed = one._timed

    def noted():
        known.append(len(engine._executor._known))
        timed()
        return next(taken)

    one._timed = noted
    for _ in range(3):
        one.turn()
    assert known == [0, 1, 1]
    assert engine._executor.untraced == 0
    assert one.seconds == 20.0 / 5


class Timed:
    """A candidate that takes so many seconds, of which nobody knows before its turn."""

    def __init__(self, seconds, **choice):
        self.seconds, self._seconds, self.choice = float("inf"), seconds, choice

    def turn(self):
        self.seconds = self._seconds


@pytest.mark.parametrize(
    ("alone", "seconds", "chosen", "tried"),
    [
        (9.0, {1: 5.0, 5: 3.0, 10: 2.0, 20: 4.0, 50: 1.0}, 10, 4),
        (9.0, {1: 5.0, 5: 6.0, 10: 2.0}, 1, 2),
        (9.0, {1: 5.0, 5: 4.0}, 5, 2),
        (3.0, {1: 5.0, 5: 4.0, 10: 4.0}, None, 3),
        (3.0, {1: float("inf"), 5: 2.0, 10: 4.0}, 5, 3),
        (3.0, {}, None, 0),
    ],
)
def test_auto_tries_larger_chunks_as_long_as_they_are_faster(
    monkeypatch, alone, seconds, chosen, tried
):
    made = []

    def batched(_task, _how, sizes, *_):
        for size in sizes:
            made.append(size)
            yield Timed(seconds[size], engine="vmap", chunk=size)

    loop = Timed(alone, engine="loop")
    loop.turn()
    monkeypatch.setattr(auto, "_loop", lambda *_: loop)
    monkeypatch.setattr(auto, "_batched", batched)
    tries = auto.Tries(tuple(seconds), 50)
    found = auto.measure(task(Local()), auto.How(True, False), tries, None, None)
    assert found.get("chunk") == chosen
    assert found["seconds"] == seconds.get(chosen, alone)
    assert len(made) == tried


def test_what_auto_tries_is_small_beside_the_run():
    on = task(Local())
    everything = auto.CHUNKS["cpu"]
    assert auto.tries_of(on, 1, None) == (everything, everything[0])
    assert auto.tries_of(on, 10**6, None) == (everything, everything[-1])
    assert auto.tries_of(on, 1, 7) == ((7,), 7)
    for rounds in (10, 100, 1000):
        most = auto.tries_of(on, rounds, None).most
        assert most in everything
        assert most == everything[0] or auto._A_TRY * most <= 0.02 * rounds * auto.steps(on)


@pytest.mark.parametrize(
    ("seconds", "most", "tried"),
    [(1e-4, 1, [1, 5, 10, 20, 50]), (100.0, 1, [1]), (100.0, 10, [1, 5, 10])],
)
def test_what_auto_tries_beyond_takes_but_a_moment(monkeypatch, seconds, most, tried):
    def batched(_task, _how, sizes, *_):
        assert sizes == tried
        return iter([Timed(seconds, engine="vmap", chunk=size) for size in sizes])

    loop = Timed(seconds, engine="loop")
    loop.turn()
    monkeypatch.setattr(auto, "_loop", lambda *_: loop)
    monkeypatch.setattr(auto, "_batched", batched)
    tries = auto.Tries((1, 5, 10, 20, 50), most)
    found = auto.measure(task(Local()), auto.How(True, False), tries, None, None)
    assert found == {"engine": "loop", "seconds": seconds}


def test_auto_measures_anew_for_a_run_that_is_worth_more_tries():
    on = task(Local())
    for rounds in (1, 2, 5000):
        make_engine("auto", on, rounds=rounds, play=False)
    assert len(json.loads(auto.cache_file().read_text())) == 2


def test_auto_goes_on_without_an_engine_that_fails(monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(VmapEngine, "local", fail)
    found = auto.measure(task(Local()), auto.How(False, False), auto.Tries((1, 5), 5), None, None)
    assert found["engine"] == "loop"


def test_rows_have_their_room_wherever_it_is():
    room = roomy(torch.Size((5, 300_000)), torch.float32, torch.device("cpu"))
    assert room.shape == (5, 300_000)
    room.fill_(1.0)
    assert room.sum() == room.numel()


def test_a_large_room_is_used_again_once_nobody_uses_it_any_more():
    def one():
        return roomy(torch.Size((3, 700_001)), torch.float32, torch.device("cpu"))

    room = one().fill_(1.0)
    part = room[1:]
    del room
    other = one().fill_(2.0)  # part of the first is still in use
    assert part.eq(1.0).all()
    place = other.data_ptr()
    del other
    assert one().data_ptr() == place


def test_auto_measures_anew_for_another_model():
    make_engine("auto", task(Local()))
    make_engine("auto", task(Local(), lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3))))
    assert len(json.loads(auto.cache_file().read_text())) == 2


def test_auto_survives_a_cache_that_is_nonsense():
    auto.cache_file().parent.mkdir(parents=True)
    auto.cache_file().write_text("{not json")
    assert make_engine("auto", task(Local())).choice["engine"] in ("vmap", "loop")


class Unbatchable(nn.Module):
    """Its output depends on a number that vmap cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x):
        out = self.head(x.flatten(1))
        return out if float(out.detach().abs().sum()) > 0 else -out


def test_auto_falls_back_to_the_loop_where_vmap_cannot():
    assert make_engine("auto", task(Local(), Unbatchable)).choice["engine"] == "loop"


def test_chunks_fit_the_memory_budget():
    on = task(Local())
    one = auto.footprint(on)
    assert make_engine("vmap", on, memory_mib=1).choice["chunk"] == max(1, min(20, 2**20 // one))
    assert make_engine("vmap", on, chunk=3).choice["chunk"] == 3


@pytest.mark.parametrize("engine", ["vmap", "loop", "wire"])
def test_state_may_stay_in_host_memory(engine):
    method = FedFomo()
    on = task(method)
    *_, record = run(method, on, make_engine(engine, on, state="host"), 3)
    assert make_engine(engine, on, state="host").state_device == torch.device("cpu")
    assert_close(predictors(record).models, predictors(last(method, on, participation=1.0)).models)


def test_an_unknown_engine_is_named():
    with pytest.raises(ConfigError, match="did you mean 'vmap'"):
        make_engine("vmpa", task(Local()))
    assert set(ENGINES) == {"auto", "vmap", "loop", "wire"}


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
        chosen = participants(FedAvg(), on, index, 0.5)
        assert len(chosen.unique()) == 2
        counts[chosen] += 1
    assert (counts - 800).abs().max() < 80
    on.sizes = torch.tensor([3, 0, 3, 3, 3])
    assert participants(FedAvg(), on, 0, 1.0).tolist() == [0, 2, 3, 4]
    assert len(participants(FedAvg(), on, 0, 0.01)) == 1
    assert len(participants(Local(budget="full"), on, 0, 0.01)) == 4


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
    data = pack(row(message, 0))
    bank, number = unpack(data, row(message, 0))
    assert bank.models.shape == (2, 10)  # the table did not travel
    found, present = bank.rows()
    assert present.tolist() == [True, False, True]
    assert torch.equal(found[present], models[[5, 3]])
    assert bank.owner.tolist() == [5, -1, 3]
    assert number == 1.5


@pytest.mark.parametrize("clients", [1, 2, 5, 12, 30, 100])
@pytest.mark.parametrize("chunk", [1, 5, 20, 1000])
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_chunks_are_alike_and_the_same_for_every_thread(clients, chunk, threads):
    on = task(Local(), federated=federation((5,) * clients))
    chunks = VmapEngine(on, chunk=chunk, threads=threads).chunks(list(range(clients)))
    assert sorted(position for part in chunks for position in part) == list(range(clients))
    longest, *_ = lengths = sorted(map(len, chunks), reverse=True)
    assert longest <= chunk
    assert lengths[:-1] == [longest] * (len(chunks) - 1)  # of one form but for a rest
    turns = -(-clients // (chunk * threads))  # which nobody can do without
    assert len(chunks) <= turns * threads
    again = VmapEngine(on, chunk=longest, threads=threads)
    assert again.chunks(list(range(clients))) == chunks


def test_auto_tries_no_chunk_twice():
    on = task(Local(), federated=federation((5,) * 12))
    found = auto._batched(on, auto.How(True, False), [1, 5, 10, 20, 50], None, 2)
    assert [(one.choice["chunk"], len(one._able)) for one in found] == [(1, 2), (5, 6), (10, 12)]


@pytest.mark.parametrize("name", ["fedavg", "fedfomo"])
def test_the_number_of_threads_changes_no_bit(name):
    method = METHODS[name]()
    on = task(method, cnn, dtype=torch.float32)
    one, two = (VmapEngine(on, chunk=2, threads=threads) for threads in (1, 2))
    assert one.chunks([0, 1, 2, 3, 4]) == two.chunks([0, 1, 2, 3, 4])
    models = [predictors(list(run(method, on, engine, 2))[-1]).models for engine in (one, two)]
    assert torch.equal(*models)


def test_a_chunk_of_one_client_takes_its_models_one_at_a_time(monkeypatch):
    def mapped(*_):
        raise ZeroDivisionError

    method = METHODS["fedfomo"]()
    monkeypatch.setattr("coterie.core.client.vmap", mapped)
    last(method, task(method), chunk=1)
    with pytest.raises(ZeroDivisionError):
        last(method, task(method), chunk=2)


def test_rounds_are_played_where_they_repay_it():
    on = task(Local())
    assert not make_engine("vmap", on, rounds=2).choice["play"]
    assert make_engine("vmap", on, rounds=1000).choice["play"]
    assert not make_engine("vmap", on, rounds=1000, play=False).choice["play"]


@pytest.mark.parametrize("name", ["fedavg", "fedfomo"])
def test_one_and_many_chunks_agree_in_float32(name):
    method = METHODS[name]()
    whole, parts = (
        predictors(last(method, task(method, mlp, dtype=torch.float32), chunk=chunk)).models
        for chunk in (5, 1)
    )
    assert_close(whole, parts, 1e-4)
