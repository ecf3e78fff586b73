"""The seam: a server that holds no data, and engines that own their clients."""

import contextlib
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.algorithms.fedavg import Update
from coterie.core import tree
from coterie.core.messages import Rejection
from coterie.engines.codec import Message, decode, encode, vocabulary
from coterie.engines.site import STATES
from coterie.errors import EngineError
from coterie.training.guard import Guard, remember, screen
from coterie.training.rounds import Begin, train
from support import METHODS, assert_close, engine_of, last, predictors, task, whole_round


def begun(name="fedfomo"):
    """A wire engine, and a round for everybody."""
    method = METHODS[name]()
    on = task(method)
    engine = engine_of("wire", on)
    server, states = method.init(on.problem)
    engine.begin(on.problem, method, states)
    round = whole_round(on)
    return engine, method, method.download(server, round), round, on


# ---- who knows what ------------------------------------------------------------------------------


def held_by(value, seen=None):
    """Every tensor that can be reached from an object."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from held_by(part, seen)
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from held_by(part, seen)
    elif hasattr(value, "__dict__"):
        yield from held_by(vars(value), seen)


def test_a_problem_holds_nobodys_samples():
    on = task(METHODS["fedavg"]())
    samples = on.shards.x.flatten(1)
    for tensor in held_by(on.problem):
        if tensor.is_floating_point() and tensor.numel() >= samples.shape[1]:
            windows = tensor.flatten().to(samples.dtype).unfold(0, samples.shape[1], 1)
            assert not (windows[:, None] == samples[None]).all(-1).any()
    assert len(pickle.dumps(on.problem)) < samples.nbytes  # and it travels without them


@pytest.mark.parametrize("client", range(5))
def test_a_site_holds_one_clients_samples(client):
    engine, _, _, _, on = begun()
    shard = engine._sites.named[on.problem.clients[client]].shards()
    parts = on.federation
    own = torch.cat([part[client] for part in (parts.train, parts.val, parts.test)])
    others = [i for i in range(len(on.shards.x)) if i not in own.tolist()]
    assert len(shard.x) == len(own.unique())
    found = shard.x.flatten(1)
    assert not (found[:, None] == on.shards.x[others].flatten(1)[None]).all(-1).any()
    for name in ("train", "val", "test"):
        mine = on.shards.splits[name].of(client)
        assert torch.equal(shard.x[shard.splits[name].of(client)], on.shards.x[mine])
        assert sum(shard.splits[name].sizes) == len(mine)


# ---- states change when replies are accepted -----------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
def test_nothing_changes_before_a_commit_and_only_who_was_accepted(engine):
    method = METHODS["scaffold"]()
    on = task(method)
    made = engine_of(engine, on)
    server, states = method.init(on.problem)
    made.begin(on.problem, method, states)
    before = tree.map_leaves(torch.clone, made.snapshot())
    round = whole_round(on)
    made.exchange(method, method.download(server, round), round)
    for now, then in zip(tree.leaves(made.snapshot()), tree.leaves(before), strict=True):
        assert torch.equal(now, then)
    made.commit(torch.tensor([1, 3]))
    for now, then in zip(tree.leaves(made.snapshot()), tree.leaves(before), strict=True):
        moved = [i for i in range(5) if not torch.equal(now[i], then[i])]
        assert moved == [1, 3]


def test_wire_goes_on_from_a_snapshot():
    method = METHODS["ditto"]()
    on = task(method)
    whole = last(method, on, "loop", 4)
    records = train(method, on.problem, engine_of("wire", on), 4, participation=0.5)
    next(records)
    second = next(records)
    kept = tree.map_leaves(torch.clone, second.states)
    begin = Begin(2, second.server, kept, second.accepted)
    made = engine_of("wire", on)
    *_, again = train(method, on.problem, made, 4, participation=0.5, begin=begin)
    assert_close(predictors(again).models, predictors(whole).models, 0)


# ---- what goes wrong on the way ------------------------------------------------------------------


@pytest.mark.parametrize("how", ["rolled back", "flipped", "cut short"])
def test_another_state_than_the_accepted_one_is_never_used(how):
    engine, method, received, round, _ = begun()
    (file,) = (engine.home / "client-000002" / STATES).iterdir()
    first = file.read_bytes()
    replies = engine.exchange(method, received, round)
    engine.commit(replies.clients)
    (file,) = set((engine.home / "client-000002" / STATES).iterdir()) - {file}
    now = file.read_bytes()
    flipped = bytes([now[-1] ^ 1])
    file.write_bytes(
        {"rolled back": first, "flipped": now[:-1] + flipped, "cut short": now[:9]}[how]
    )
    replies = engine.exchange(method, received, round._replace(index=1))
    assert Rejection(2, "stale_state") in replies.rejected
    assert 2 not in replies.clients.tolist()


def test_a_request_that_comes_twice_is_answered_alike():
    engine, method, received, round, _ = begun()
    once = engine.exchange(method, received, round)
    twice = engine.exchange(method, received, round)
    for a, b in zip(tree.leaves(once.uploads), tree.leaves(twice.uploads), strict=True):
        assert torch.equal(a, b)


@given(data=st.data())
@settings(max_examples=200)
def test_bytes_that_are_no_message_are_refused(data):
    method = METHODS["fedavg"]()
    good = encode(Message({"kind": "local"}, Update(torch.ones(3), torch.tensor(4))))
    at = data.draw(st.integers(0, len(good) - 1))
    kind = data.draw(st.sampled_from(["cut", "flip", "noise"]))
    spoilt = {
        "cut": good[:at],
        "flip": good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :],
        "noise": data.draw(st.binary(max_size=200)),
    }[kind]
    with contextlib.suppress(EngineError):  # and no other error
        found = decode(spoilt, vocabulary(method))
        assert isinstance(found.body, Update)  # a flipped number is still a message


def test_only_the_methods_own_types_are_built():
    foreign = encode(Message({}, Rejection(torch.ones(1), torch.ones(1))))
    with pytest.raises(EngineError, match="the method's own types"):
        decode(foreign, vocabulary(METHODS["fedavg"]()))
    with pytest.raises(EngineError, match="made of tensors and tuples; found list"):
        encode(Message({}, [torch.ones(1)]))


# ---- the guard knows what a server knows ---------------------------------------------------------


def test_a_client_may_send_what_it_was_accepted_with_before():
    on = task(METHODS["fedavg"]())
    sizes, round = on.problem.sizes, whole_round(on)
    sent = torch.ones(5, 8)
    large = torch.ones(5, 8)
    large[2] = 1e4  # 10,000 times the others, and what it was sent
    uploads = Update(large, sizes)
    assert screen(uploads, round, sizes, Guard(), sent)[1] == ((2, "outsized"),)
    accepted = torch.zeros(5, dtype=torch.float64)
    after = remember(accepted, Update(large / 50, sizes), round.clients)
    assert torch.equal(accepted, torch.zeros(5, dtype=torch.float64))  # a value, not a place
    assert screen(uploads, round, sizes, Guard(), sent, after)[1] == ()
