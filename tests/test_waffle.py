"""WAFFLE's and Weight Erosion's weights."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.algorithms import waffle
from coterie.algorithms.erosion import Erosion, erode, is_finite
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local import Local
from coterie.algorithms.scaffold import Scaffold
from coterie.algorithms.waffle import Kept, Waffle, Work, calc_weights, schedule, smooth
from coterie.algorithms.waffle_stable import WaffleStable
from coterie.core import tree
from coterie.errors import ConfigError
from coterie.training.guard import Guard, screen
from coterie.training.rounds import train
from support import (
    RAGGED,
    RECIPE,
    assert_close,
    backend_of,
    engine_of,
    federation,
    last,
    one_client,
    predictors,
    task,
    whole_round,
)

K = len(RAGGED)


def wide(values):
    return torch.tensor(values, dtype=torch.float64)


GOLDEN = wide([0, 1, 1.2, 2, 3])


# ---- WAFFLE's formulae ---------------------------------------------------------------------


def test_golden_schedule():
    values = [schedule(r, 100, 3.2) for r in (1, 25, 50, 75, 95, 100)]
    assert values == pytest.approx([0.958, 0.832, 0.5, 0.168, 0.053, 0.039], abs=6e-4)


def test_golden_weights():
    half = calc_weights(GOLDEN, 0, 0.5, 0.5)
    assert_close(half, wide([0.4430, 0.3165, 0.2405, 0, 0]), 1e-4)
    whole = calc_weights(GOLDEN, 0, 1.0, 1.0)
    assert_close(whole, wide([0.2941, 0.2941, 0.2647, 0.1471, 0]), 1e-4)
    assert_close(calc_weights(GOLDEN, 0, 0.5, 1e15), wide([0.2] * 5), 1e-9)
    assert calc_weights(wide([0, 7]), 0, 0.3, 0.3).tolist() == [0.5, 0.5]
    assert calc_weights(wide([0, 0, 0]), 1, 0.3, 0.3).tolist() == pytest.approx([1 / 3] * 3)
    assert calc_weights(wide([0]), 0, 0.3, 0.3).tolist() == [1]


def slow_weights(d, me, omega, psi):
    others = [float(d[j]) for j in range(len(d)) if j != me]
    most, least = max(others), min(others)
    own = least * (1 - (most - least) / most * (1 - omega)) if most else 0.0
    all_d = [own if j == me else float(d[j]) for j in range(len(d))]
    span = most - min(all_d)
    even = span < 1e-12 * max(1, most)
    a = [max(psi - (0 if even else (x - own) / span), 0) for x in all_d]
    return wide([x / sum(a) for x in a])


distances = st.integers(2, 6).flatmap(
    lambda n: st.tuples(
        arrays(float, n, elements=st.floats(0, 1e100)), st.integers(0, n - 1), st.floats(0.02, 1)
    )
)


@given(distances)
def test_weights_equal_a_slow_loop_and_form_a_simplex(case):
    d, me, turn = torch.from_numpy(case[0]), case[1], case[2]
    d[me] = 0
    found = calc_weights(d, me, turn, turn)
    assert_close(found, slow_weights(d, me, turn, turn))
    assert found.isfinite().all()
    assert (found >= 0).all()
    assert float(found.sum()) == pytest.approx(1)
    assert found[me] == found.max()  # Alice's is the largest
    order = torch.arange(len(d)).flip(0)
    flipped = calc_weights(d[order], len(d) - 1 - me, turn, turn)
    assert_close(flipped, found[order], 1e-12)


def test_raw_vectors_are_what_is_smoothed():
    a, b, c = wide([1, 0, 0]), wide([0, 1, 0]), wide([0, 0, 1])
    smoothed, raw = smooth(c, b, a, 10, 100, 0)
    assert_close(smoothed, wide([1 / 3] * 3))
    assert torch.equal(raw, c)


def test_one_hot_from_95_percent_and_smoothed_from_97():
    previous = before = wide([0.25, 0.25, 0.25, 0.25])
    kinds = {}
    for r in range(93, 101):
        smoothed, raw = smooth(wide([0.25] * 4), previous, before, r, 100, 2)
        kinds[r] = (raw.tolist() == [0, 0, 1, 0], smoothed.tolist() == [0, 0, 1, 0])
        previous, before = raw, previous
    assert [r for r, (raw, _) in kinds.items() if raw] == list(range(95, 101))
    assert [r for r, (_, smoothed) in kinds.items() if smoothed] == list(range(97, 101))


# ---- WAFFLE as a whole ---------------------------------------------------------------------


def forced(monkeypatch, weights):
    """Every requester's smoothed weights are these, for requester and population."""
    monkeypatch.setattr(
        waffle, "smooth", lambda raw, p, b, r, horizon, me: (weights(me, len(raw)), raw)
    )


def test_uniform_weights_are_scaffold(monkeypatch):
    forced(monkeypatch, lambda me, n: torch.full((n,), 1 / n, dtype=torch.float64))
    method = Waffle(requesters=(2,))
    found = last(method, task(method), rounds=4, participation=1.0)
    other = last(Scaffold(), task(Scaffold()), rounds=4, participation=1.0)
    assert_close(found.server.x[0], other.server.x, 1e-10)
    assert_close(found.server.c[0], other.server.c, 1e-10)


@pytest.mark.parametrize("method", [Waffle(), WaffleStable()])
def test_one_hot_weights_are_local(monkeypatch, method):
    forced(monkeypatch, lambda me, n: torch.eye(n, dtype=torch.float64)[me])
    found = last(method, task(method), rounds=4, participation=1.0)
    alone = Local(keep="last")
    other = last(alone, task(alone), rounds=4, participation=1.0)
    assert_close(predictors(found).models, predictors(other).models, 1e-9)


@pytest.mark.parametrize("kind", [Waffle, WaffleStable])
def test_the_control_in_the_local_phase(kind):
    """Of 60 rounds the raw weights are one-hot from 57 on, the smoothed ones from 59."""
    method = kind(requesters=(0,))
    on = task(method)
    apart = []
    for record in train(method, on.problem, engine_of("vmap", on), 60):
        apart.append(record.server.c[0] - record.states.c[0, 0])
    bias = [x.norm().item() for x in apart[-2:]]
    if kind is WaffleStable:
        assert max(bias) < 1e-12
    else:
        assert_close(apart[-1], apart[-2], 1e-12)
        assert min(bias) > 1e-3


def replies(method, on, index=0):
    server, states = method.init(on.problem)
    round = whole_round(on, index)
    received = method.download(server, round)
    uploads, _ = backend_of("vmap", on).local(method, received, states, round)
    return server, uploads, round


def test_absent_agents_have_no_weight():
    method = Waffle()
    on = task(method)
    server, uploads, round = replies(method, on)
    here = torch.tensor([0, 1, 3])
    some = Work(*(part[here] for part in uploads))
    new = method.aggregate(server, some, round._replace(clients=here))
    assert (new.weights[:, [2, 4]][here] == 0).all()
    assert (new.previous[:, [2, 4]][here] == 0).all()
    assert_close(new.weights[here].sum(1), torch.ones(3).double())
    for left in (2, 4):  # their own models wait for them
        for old, now in zip(server[:5], new[:5], strict=True):
            assert torch.equal(old[left], now[left])


def test_a_screened_outlier_stretches_nothing():
    plain, screened = WaffleStable(), WaffleStable(screen=3.0)
    on = task(plain)
    server, uploads, round = replies(plain, on)
    wild, fierce = uploads.dy.clone(), uploads.dc.clone()
    wild[4] *= 1000
    fierce[4] *= 1000
    attacked = uploads._replace(dy=wild, dc=fierce)
    here = torch.tensor([0, 1, 2, 3])
    honest = Work(*(part[here] for part in uploads))
    expected = plain.aggregate(server, honest, round._replace(clients=here))
    found = screened.aggregate(server, attacked, round)
    assert_close(found.weights[:4], expected.weights[:4])
    assert_close(found.x[:4], expected.x[:4])
    stretched = plain.aggregate(server, attacked, round)
    assert (stretched.weights[:4, :4] - expected.weights[:4, :4]).abs().max() > 0.01
    quiet = screened.aggregate(server, uploads, round)
    assert torch.equal(quiet.x, plain.aggregate(server, uploads, round).x)


def test_two_agents_are_warned():
    method = Waffle()
    with pytest.warns(UserWarning, match="two agents"):
        method.init(task(method, federated=federation(sizes=(20, 30))).problem)


# ---- Weight Erosion ------------------------------------------------------------------------


def test_erosion_equals_its_formula():
    weights, d = wide([1, 0.9, 0.1]), wide([0, 0.5, 2.0])
    sizes = torch.tensor([100, 10, 33])
    found = erode(weights, d, 0.03, 2.0, 5, 32, sizes)
    for i in range(3):
        passes = ((5 - 1) * 32) // int(sizes[i])
        expected = max(0.0, float(weights[i]) - (1 + 2 * passes) * 0.03 * float(d[i]))
        assert float(found[i]) == pytest.approx(expected)


@given(
    arrays(float, 4, elements=st.floats(0, 1)),
    arrays(float, 4, elements=st.floats(0, 1e100)),
    st.floats(0, 1e30),
    st.integers(1, 1000),
)
def test_erosion_only_takes(weights, d, p_d, r):
    weights, d = torch.from_numpy(weights), torch.from_numpy(d)
    d[0] = 0
    found = erode(weights, d, p_d, 2.0, r, 32, torch.tensor([5, 50, 500, 5000]))
    assert (found >= 0).all()
    assert (found <= weights).all()
    assert found[0] == weights[0]


def test_a_round_of_erosion_equals_a_slow_loop():
    method = Erosion(requesters=(2,), p_s=1.0)
    on = task(method)
    server, uploads, round = replies(method, on)
    dy = uploads.dy[:, 0]
    d = [float((dy[i] - dy[2]).norm() / dy[2].norm()) for i in range(K)]
    p_d = 1 / (0.8 * round.horizon * sum(d) / (K - 1))
    alpha = [max(0, 1 - p_d * x) for x in d]
    new = method.aggregate(server, uploads, round)
    assert_close(new.alpha[0], wide(alpha))
    assert float(new.p_d[0]) == pytest.approx(p_d)
    moved = sum(a * dy[i] for i, a in enumerate(alpha)) / sum(alpha)
    assert_close(new.x[0], on.problem.start + moved)
    later = method.aggregate(new, uploads, round._replace(index=1))
    assert later.p_d[0] == new.p_d[0]  # found once


def test_without_penalty_erosion_is_uniform_fedavg():
    found, other = (
        predictors(last(m, task(m), participation=1.0)).models
        for m in (Erosion(p_d=0.0), FedAvg("uniform"))
    )
    assert_close(found, other, 1e-9)


def test_weights_fade_and_the_requesters_stays():
    method = Erosion(samples_per_round="epoch")
    on = task(method)
    before = torch.ones(K, K).double()
    for record in train(method, on.problem, engine_of("vmap", on), 4):
        alpha = record.server.alpha
        assert (alpha <= before).all()
        assert (alpha.diagonal() == 1).all()
        before = alpha
    assert (before < 0.99).any()


def test_samples_a_round():
    by_batch, by_epoch = Erosion(p_d=0.01), Erosion(p_d=0.01, samples_per_round="epoch")
    on = task(by_batch)
    server, uploads, round = replies(by_batch, on)
    late = round._replace(index=4)
    for method, b in ((by_batch, RECIPE.batch), (by_epoch, RECIPE.epochs * uploads.size)):
        passes = ((4 * b) // uploads.size).double()
        dy = uploads.dy[:, 0]
        d = (dy - dy[0]).norm(dim=1) / dy[0].norm()
        expected = (1 - (1 + 2 * passes) * 0.01 * d).clamp(min=0)
        assert_close(method.aggregate(server, uploads, late).alpha[0], expected)


def test_a_requester_that_stands_still_erodes_nobody():
    method = Erosion(requesters=(0,))
    on = task(method)
    server, uploads, round = replies(method, on)
    still = uploads.dy.clone()
    still[0] = 0
    new = method.aggregate(server, uploads._replace(dy=still), round)
    assert (new.alpha == 1).all()
    assert_close(new.x[0], on.problem.start + still[:, 0].mean(0))


# ---- requesters ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Waffle, Erosion])
def test_who_did_not_ask_has_no_predictor(kind):
    method = kind(requesters=(1, 3))
    on = task(method)
    record = last(method, on, rounds=2, participation=1.0)
    absent = torch.from_numpy(record.evaluation.test).isnan()
    assert absent.tolist() == [True, False, True, False, True]
    everybody = kind()
    other = last(everybody, task(everybody), rounds=2, participation=1.0)
    assert_close(predictors(record).models[[1, 3]], predictors(other).models[[1, 3]])
    assert record.traffic.serve == 2 * (8 * on.problem.model.size + 8)


@pytest.mark.parametrize("wrong", [(), (5,), (1, 1), (-1,)])
@pytest.mark.parametrize("kind", [Waffle, Erosion])
def test_wrong_requesters_are_refused(kind, wrong):
    with pytest.raises(ConfigError, match="requesters"):
        kind(requesters=wrong).check(task(kind()).problem, 10)


def test_momentum_does_not_shake_it():
    recipe = replace(RECIPE, momentum=0.9, lr=0.05)
    record = last(WaffleStable(), task(WaffleStable(), recipe=recipe), rounds=10)
    assert (torch.from_numpy(record.evaluation.test_loss) < 2).all()


# ---- agents without weight, copies that diverge --------------------------------------------


def met(method, on, weights=None, seed=3):
    """A server and states as after some rounds: random controls, and weights where given."""
    server, _ = method.init(on.problem)
    generator = torch.Generator().manual_seed(seed)
    noise = 0.1 * torch.randn(server.controls.shape, generator=generator, dtype=torch.float64)
    server = server._replace(controls=noise, c=noise.mean(0))
    return server._replace(weights=server.weights if weights is None else weights), Kept(noise)


def test_an_agent_without_weight_is_not_corrected():
    """It trains as FedAvg would, so that nothing it sends feeds on what it sent before."""
    method = WaffleStable(requesters=(0, 2))
    on = task(method)
    weights = wide([[0.5, 0.5, 0, 0, 0], [0.2, 0.2, 0.2, 0.2, 0.2]])
    server, states = met(method, on, weights)
    received = method.download(server, whole_round(on))
    assert torch.equal(received.c[3, 0], server.controls[3, 0])
    assert torch.equal(received.c[3, 1], server.c[1])
    for engine in ("loop", "vmap"):
        work, _ = backend_of(engine, on).local(method, received, states, whole_round(on))
        plain = one_client(on, 3).train(on.problem.start) - on.problem.start
        assert_close(work.dy[3, 0], plain)
        assert (work.dy[3, 1] - plain).abs().max() > 1e-3
        assert (
            work.dy[1, 0] - one_client(on, 1).train(on.problem.start) + on.problem.start
        ).abs().max() > 1e-3


def test_the_control_of_an_agent_without_weight_does_not_feed_on_itself():
    """Its new control is the mean gradient from x, whatever control it had."""
    method = WaffleStable(requesters=(0,))
    on = task(method)
    server, states = met(method, on, wide([[1, 0, 0, 0, 0]]))
    found = []
    for factor in (1.0, 1000.0):
        larger = server._replace(controls=factor * server.controls)
        received = method.download(larger, whole_round(on))
        engine = backend_of("vmap", on)
        found.append(engine.local(method, received, Kept(factor * states.c), whole_round(on))[1].c)
    assert_close(found[0][1:], found[1][1:])


@pytest.mark.parametrize("entry", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_is_too_large_to_be_measured_is_not_finite(entry):
    good = torch.ones(4)
    bad = torch.tensor([1.0, entry, 0.0, 2.0])
    assert is_finite(good, good)
    assert not is_finite(bad, good)
    assert not is_finite(good, bad)
    assert torch.vmap(is_finite)(torch.stack([good, bad])).tolist() == [True, False]


def diverging(method, on, k, agent):
    """A round in which one agent's copy for requester k overflows, and the same round without."""
    server, states = method.init(on.problem)
    round = whole_round(on)
    received = method.download(server, round)
    wrong = tree.map_leaves(torch.clone, received)
    (wrong.x if isinstance(method, Waffle) else wrong)[agent, k] = torch.inf
    made = {}
    for engine in ("loop", "vmap"):
        found, kept = backend_of(engine, on).local(method, wrong, states, round)
        made[engine] = found, kept
    clean, _ = backend_of("loop", on).local(method, received, states, round)
    return server, clean, made, round


@pytest.mark.parametrize("kind", [Waffle, Erosion])
def test_one_copy_that_diverges_costs_no_other_requester(kind):
    method, k, agent = kind(), 1, 4
    on = task(method)
    server, clean, made, round = diverging(method, on, k, agent)
    others = [i for i in range(K) if i != k]
    here = [i for i in range(K) if i != agent]
    expected = method.aggregate(server, clean, round)
    without = method.aggregate(
        server,
        type(clean)(*(part[here] for part in clean)),
        round._replace(clients=torch.tensor(here)),
    )
    for uploads, _ in made.values():
        assert uploads.valid.logical_not().nonzero().tolist() == [[agent, k]]
        kept, rejected = screen(uploads, round, on.problem.sizes, Guard())
        assert len(kept) == K
        assert rejected == ((agent, "copies"),)
        found = method.aggregate(server, uploads, round)
        assert_close(found.x[others], expected.x[others])
        assert_close(found.x[k], without.x[k])
        assert all(part.isfinite().all() for part in found)


def test_the_control_of_a_diverged_copy_is_reset():
    method = Waffle()
    on = task(method)
    server, states = met(method, on)
    round = whole_round(on)
    received = method.download(server, round)
    received = received._replace(x=received.x.clone())
    received.x[4, 1] = torch.inf
    work, kept = backend_of("vmap", on).local(method, received, states, round)
    new = method.aggregate(server, work, round)
    assert (kept.c[4, 1] == 0).all()
    assert torch.equal(new.controls, kept.c)
    assert (kept.c[4, 0] != 0).any()


@pytest.mark.parametrize("kind", [Waffle, Erosion])
def test_a_requesters_model_waits_where_its_own_copy_diverged(kind):
    method = kind()
    on = task(method)
    server, _, made, round = diverging(method, on, k=2, agent=2)
    uploads, _ = made["loop"]
    if kind is Waffle:
        server = server._replace(c=torch.ones_like(server.c))
    found = method.aggregate(server, uploads, round)
    for name in set(server._fields) - {"controls", "c"}:
        assert torch.equal(getattr(found, name)[2], getattr(server, name)[2])
        if name in ("x", "weights", "alpha"):
            assert not torch.equal(getattr(found, name)[1], getattr(server, name)[1])
    if kind is Waffle:
        assert (found.c[2] == 0).all()  # it begins again without a correction


@pytest.mark.parametrize("kind", [Waffle, Erosion])
def test_a_run_that_blows_up_leaves_only_finite_numbers(kind):
    method = kind()
    on = task(method, recipe=replace(RECIPE, lr=1e6), dtype=torch.float32)
    reasons = set()
    for record in train(method, on.problem, engine_of("vmap", on), 6, evaluate_every=6):
        assert all(leaf.isfinite().all() for leaf in record.server)
        reasons |= {reason for _, reason in record.rejected}
    assert "copies" in reasons
    assert reasons <= {"copies", "outsized"}


def test_the_schedule_turns_the_weights():
    method = Waffle(requesters=(1,), slope=2.0)
    on = task(method)
    server, uploads, round = replies(method, on)
    d = wide([float((uploads.dy[i, 0] - uploads.dy[1, 0]).norm()) for i in range(K)])
    turn = schedule(1, 10, 2.0)
    expected = (slow_weights(d, 1, turn, turn) + 2 / K) / 3
    assert_close(method.aggregate(server, uploads, round).weights[0], expected)


def test_the_schedule_never_ends_and_never_overflows():
    assert schedule(10, 10, 1e6) > 0
    assert schedule(1, 10, 1e6) == 1
    assert calc_weights(GOLDEN, 0, 1e-304, schedule(10, 10, 1e6)).tolist() == [1, 0, 0, 0, 0]
