"""What engines promise beside the contract: memory, host state, errors, and what auto chose."""

import json

import pytest
import torch
from torch import nn

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedfomo import FedFomo
from coterie.algorithms.local import Local
from coterie.engines import ENGINES, auto, make_engine
from coterie.engines.heap import roomy
from coterie.engines.vmap import VmapEngine
from coterie.engines.wire import pack, unpack
from coterie.errors import ConfigError, EngineError
from coterie.run import participants, run
from coterie.tree import Bank, count_bytes, row
from support import METHODS, assert_close, cnn, last, mlp, predictors, task


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
    one = auto._Candidate(engine, {}, 1, 5)
    one.turn(counts=False)
    assert len(engine._player._known) == 1
    assert one.seconds == float("inf")
    one.turn(counts=True)
    assert len(engine._player._known) == 1
    assert engine._player.unplayed == 0
    assert 0 < one.seconds < float("inf")


def test_auto_goes_on_without_an_engine_that_fails(monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(VmapEngine, "local", fail)
    found = auto.measure(task(Local()), auto.How(False, False), None, None, None)
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
    monkeypatch.setattr("coterie.client.vmap", mapped)
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
