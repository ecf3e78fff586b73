"""Nothing poisonous enters an aggregation, on any engine, and a clean run is not touched."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coterie
from coterie.algorithms.fedavg import Update
from coterie.attacking.attacks import CHANGES, changed
from coterie.core import tree
from coterie.core.algorithm import round_of
from coterie.core.messages import REASONS, Reply, admit
from coterie.testing.whole_runs import BAD, Scaled, Spoilt, WithValue
from coterie.training.guard import Guard, aggregate, screen
from coterie.training.rounds import train
from faulty import MISSHAPEN, Claiming, Misshapen
from support import METHODS, backend_of, engine_of, predictors, task, whole_round

FOUR = ("fedavg", "scaffold", "fedfomo", "fedamp")  # of different state
ENGINES = ("vmap", "loop", "wire")
ROUNDS = 2


def records_of(algorithm, engine="loop", **options):
    on = task(algorithm)
    return list(train(algorithm, on.problem, engine_of(engine, on), ROUNDS, **options))


def without(name, left_out):
    """The same rounds by hand for everybody but some clients, and their states at the end."""
    algorithm = METHODS[name]()
    on = task(algorithm)
    engine = backend_of("loop", on)
    server, states = algorithm.init(on.problem)
    states = tree.map_leaves(torch.clone, states)
    clients = torch.tensor([i for i in range(on.problem.population) if i not in left_out])
    for index in range(ROUNDS):
        round = round_of(on.problem, index, ROUNDS, clients)
        received = algorithm.download(server, round)
        uploads, after = engine.local(algorithm, received, tree.take(states, clients), round)
        server = algorithm.aggregate(server, uploads, round)
        tree.map_leaves(lambda old, new: old.index_copy_(0, clients, new), states, after)
    return server, states


def assert_same(found, expected):
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FOUR)
def test_who_sends_no_number_is_left_out_and_nobody_else_is_affected(name, value):
    spoilt = Spoilt(METHODS[name](), WithValue(value))
    records = records_of(spoilt)
    assert [record.rejected for record in records] == [((BAD, "not_finite"),)] * ROUNDS
    server, states = without(name, {BAD})
    assert_same(records[-1].server, server)
    assert_same(records[-1].states, states)


@pytest.mark.parametrize("factor", [1e30, 1e4])
@pytest.mark.parametrize("name", FOUR)
def test_one_huge_finite_upload_is_left_out_and_named(name, factor):
    """A number that would end the federation blames no honest client."""
    records = records_of(Spoilt(METHODS[name](), Scaled(factor)))
    for record in records:
        assert {client for client, _ in record.rejected} == {BAD}
        assert {reason for _, reason in record.rejected} == {"outsized"}
    assert_same(records[-1].server, without(name, {BAD})[0])
    assert np.isfinite(records[-1].evaluation.test_loss).all()


def test_a_client_alone_is_compared_with_what_it_had():
    on = task(METHODS["fedavg"]())
    round = round_of(on.problem, 0, 1, torch.tensor([1]))
    sent, reply = torch.ones(1, 8), Update(torch.full((1, 8), 3e20), on.problem.sizes[1:2])
    assert screen(reply, round, on.problem.sizes, Guard(), sent)[1] == ((1, "outsized"),)
    honest = reply._replace(w=torch.full((1, 8), 90.0))
    assert screen(honest, round, on.problem.sizes, Guard(), sent)[1] == ()


def test_a_huge_single_number_is_left_out():
    on = task(METHODS["fedavg"]())
    losses = torch.tensor([0.1, 1e30, 2.0, 1e-9, 90.0])
    assert screen(losses, whole_round(on), on.problem.sizes, Guard())[1] == ((1, "outsized"),)


def test_an_aggregate_that_overflows_is_refused_and_the_longest_upload_is_named():
    on, method = task(METHODS["fedavg"]()), METHODS["fedavg"]()
    server = torch.full((4,), -3e38)
    models = torch.full((5, 4), -3e38)
    models[BAD] = 3.4e38  # the difference to the server is infinite
    models[BAD - 1] = 1.0
    uploads = Update(models, on.problem.sizes)
    new, kept, rejected = aggregate(method, server, uploads, whole_round(on), Guard(bound=None))
    assert new.isfinite().all()
    assert (BAD, "overflow") in rejected
    assert sorted([*kept.tolist(), *(r.client for r in rejected)]) == list(range(5))
    bare, *_ = aggregate(method, server, uploads, whole_round(on), Guard(on=False))
    assert not bare.isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FOUR)
def test_every_engine_is_guarded(name, engine):
    last = records_of(Spoilt(METHODS[name](), WithValue(math.nan)), engine)[-1]
    assert last.rejected == ((BAD, "not_finite"),)
    assert predictors(last).models.isfinite().all()
    _, fresh = METHODS[name]().init(task(METHODS[name]()).problem)
    for now, then in zip(tree.leaves(last.states), tree.leaves(fresh), strict=True):
        assert torch.equal(now[BAD], then[BAD])


@pytest.mark.parametrize("name", FOUR)
def test_unguarded_one_nan_enters(name):
    spoilt = Spoilt(METHODS[name](), WithValue(math.nan))
    last = records_of(spoilt, guard=Guard(on=False))[-1]
    assert last.rejected == ()
    assert not all(leaf.isfinite().all() for leaf in tree.leaves(last.server))


@pytest.mark.parametrize("name", FOUR)  # of every method: the law "guard"
def test_a_clean_run_is_not_changed_by_a_bit(name):
    guarded, bare = (
        records_of(METHODS[name](), "vmap", guard=Guard(on=on)) for on in (True, False)
    )
    assert all(record.rejected == () for record in guarded)
    assert_same(predictors(guarded[-1]), predictors(bare[-1]))
    assert_same(guarded[-1].server, bare[-1].server)


def test_finite_numbers_whose_sum_overflows_may_enter():
    on = task(METHODS["fedavg"]())
    huge = torch.full((5, 4), 3e38)
    assert screen(huge, whole_round(on), on.problem.sizes, Guard())[1] == ()


READ_AS_BYTES = ("a number too few", "another precision", "a field too many", "nothing")


@pytest.mark.parametrize(
    ("what", "engine"),
    [*((what, "loop") for what in MISSHAPEN), *((what, "wire") for what in READ_AS_BYTES)],
)
def test_messages_of_another_form_are_left_out(what, engine):
    _, reason = MISSHAPEN[what]
    if engine == "wire" and what == "a field too many":
        reason = "unreadable"  # of a type that is none of the method's
    spoilt = Spoilt(METHODS["fedavg"](), Misshapen(what), apart=True)
    records = records_of(spoilt, engine)
    assert [record.rejected for record in records] == [((BAD, reason),)] * ROUNDS
    assert_same(records[-1].server, without("fedavg", {BAD})[0])


def test_where_no_form_is_usual_nobody_is_believed():
    on = task(METHODS["fedavg"]())
    round = round_of(on.problem, 0, 1, torch.tensor([0, 1]))
    replies = [Reply(0, 0, torch.ones(3)), Reply(1, 0, torch.ones(1))]
    assert admit(replies, round)[0] == ()
    kept, rejected = admit(replies, round, like=(torch.zeros(3), ()))
    assert [reply.client for reply in kept] == [0]
    assert rejected == ((1, "shape"),)


@pytest.mark.parametrize("samples", [0, -9, 10**12])
def test_a_sample_count_that_cannot_be_true_is_left_out(samples):
    records = records_of(Spoilt(METHODS["fedavg"](), Claiming(samples)))
    assert [record.rejected for record in records] == [((BAD, "samples"),)] * ROUNDS
    assert_same(records[-1].server, without("fedavg", {BAD})[0])


def test_nan_with_no_samples_is_left_out_once():
    def both(upload, bad):
        return Claiming(0)(WithValue(math.nan)(upload, bad), bad)

    assert records_of(Spoilt(METHODS["fedavg"](), both))[0].rejected == ((BAD, "not_finite"),)


@pytest.mark.parametrize("claim", [math.nan, math.inf, 0.0, -9.0, 1e12, 24.0])
def test_sample_counts_as_fractions_are_judged_alike(claim):
    on = task(METHODS["fedavg"]())
    sizes = on.problem.sizes.double()
    sizes[BAD] = claim
    _, rejected = screen(
        Update(torch.zeros(5, 3), sizes), whole_round(on), on.problem.sizes, Guard()
    )
    possible = 0 < claim <= on.problem.sizes[BAD]
    assert [rejection.client for rejection in rejected] == ([] if possible else [BAD])


@pytest.mark.parametrize("engine", ENGINES)
def test_where_everybody_is_left_out_nothing_changes(engine):
    spoilt = Spoilt(METHODS["fedavg"](), Claiming(0, everybody=True))
    records = records_of(spoilt, engine)
    start = task(METHODS["fedavg"]()).problem.start
    for record in records:
        assert {reason for _, reason in record.rejected} == {"samples"}
        assert len(record.rejected) == len(record.clients)
        assert torch.equal(record.server, start)
    assert np.isfinite(records[-1].evaluation.test).all()


def test_forged_late_and_repeated_messages_are_left_out():
    on = task(METHODS["fedavg"]())
    round = round_of(on.problem, 3, 9, torch.tensor([0, 1, 4]))
    good = torch.ones(2)
    replies = [
        Reply(4, 3, good),
        Reply(0, 3, good),
        Reply(0, 3, 9 * good),  # again
        Reply(1, 2, good),  # of the round before
        Reply(2, 3, good),  # not asked
        Reply(99, 3, good),  # nobody
    ]
    kept, rejected = admit(replies, round)
    assert [reply.client for reply in kept] == [0, 4]
    assert torch.equal(kept[0].upload, good)
    assert rejected == (
        (0, "duplicate"),
        (1, "wrong_round"),
        (2, "wrong_client"),
        (99, "wrong_client"),
    )
    assert {reason for _, reason in rejected} <= set(REASONS)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedamp"])
def test_an_outsized_step_is_left_out_where_that_is_asked_for(name):
    spoilt = Spoilt(METHODS[name](), Scaled(50))
    assert records_of(spoilt)[0].rejected == ()
    for record in records_of(spoilt, guard=Guard(norm=3.0)):
        assert (BAD, "norm") in record.rejected
        assert len(record.rejected) < len(record.clients) / 2


def test_a_step_is_measured_from_what_the_client_had():
    """Models far from zero that have moved little are no outliers, whatever their length."""
    on = task(METHODS["fedavg"]())
    sent = torch.arange(5.0)[:, None] * 100 + torch.zeros(5, 8)
    moved = sent + torch.tensor([1.0, 1.1, 4.0, 0.9, 1.0])[:, None]
    _, rejected = screen(moved, whole_round(on), on.problem.sizes, Guard(norm=3.0), sent)
    assert rejected == ((2, "norm"),)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedamp", "federico"])
def test_who_returns_what_it_was_sent_is_left_out_with_a_norm_and_nobody_else_is(name):
    algorithm = METHODS[name]()
    on = task(algorithm)
    server, states = algorithm.init(on.problem)
    round = whole_round(on)
    sent = algorithm.download(server, round)
    uploads, _ = backend_of("loop", on).local(algorithm, sent, states, round)
    bad = torch.arange(5) == 3
    lazy = changed(uploads, sent, bad, CHANGES["free"], 0)
    strict = Guard(norm=1e9)
    for sent_up, expected in ((uploads, ()), (lazy, ((3, "idle"),))):
        assert screen(sent_up, round, on.problem.sizes, strict, sent)[1] == expected
    assert screen(lazy, round, on.problem.sizes, Guard(), sent)[1] == ()


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=5, max_size=5),
    st.lists(st.integers(-5, 60), min_size=5, max_size=5),
)
def test_what_enters_is_finite_and_weighs_something(rows, counts):
    on = task(METHODS["fedavg"]())
    upload = Update(torch.tensor(rows), torch.tensor(counts))
    kept, rejected = screen(upload, whole_round(on), on.problem.sizes, Guard())
    assert torch.isfinite(upload.w[kept]).all()
    assert (upload.size[kept] > 0).all()
    assert (upload.size[kept] <= on.problem.sizes[kept]).all()
    assert sorted([*kept.tolist(), *(r.client for r in rejected)]) == list(range(5))


def test_a_rejection_is_in_the_log_the_summary_and_the_report(tmp_path):
    told = []
    coterie.compare(
        {
            "data": {"name": "digits"},
            "partition": {"name": "iid", "clients": 4},
            "model": {"name": "linear"},
            "engine": {"name": "loop"},
            "run": {"rounds": 2, "methods": ["faulty:Poisonous"], "out": str(tmp_path)},
        },
        progress=told.append,
        code=Path(__file__).parent,
    )
    place = tmp_path / "poisonous" / "seed-0"
    lines = [json.loads(line) for line in (place / "rounds.jsonl").read_text().splitlines()]
    (event,) = lines[0]["rejected"]
    assert event["reason"] == "not_finite"
    assert lines[1]["rejected"] == [event]
    assert json.loads((place / "summary.json").read_text())["rejected"] == {"not_finite": 2}
    assert "left out as not finite" in (tmp_path / "report.html").read_text()
    assert [step.rejected for step in told if step.rejected] == [(tuple(event.values()),)]
