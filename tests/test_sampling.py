"""A trace is checked on a few steps of its loops: the same ones of the call and of its trace."""

import pytest
import torch
from torch.func import grad, vmap

from coterie.algorithms.fedavg import FedAvg
from coterie.compiled.trace import Trace, Tracer, replay, sampled
from coterie.compiled.trace.modes import ENDS, MOST, chosen
from coterie.core.calls import COMPILED, REPLAYED, WRITTEN, scan
from coterie.core.optim import Recipe
from coterie.engines.vmap import VmapBackend
from support import federation, mlp, task, whole_round, with_a_compiler

LONG = (5,) * 30 + (2,)  # thirty full batches and a short one


def numbers(kinds):
    """The numbers of the steps that a loop runs."""
    seen = []
    scan(lambda number, kind, carry: seen.append(number) or carry, kinds, torch.zeros(()))
    return seen


def test_all_steps_are_run_unless_they_are_sampled():
    assert numbers(LONG) == list(chosen(LONG)) == list(range(31))


def test_the_first_the_last_and_one_of_every_kind_are_sampled():
    kinds = [5] * 10 + [3] + [5] * 10
    with sampled():
        assert numbers(kinds) == [0, 1, 2, 10, 18, 19, 20]
        assert len(numbers(LONG)) <= MOST == 2 * ENDS + 1
        assert numbers((5, 5, 5, 2)) == [0, 1, 2, 3]
    assert len(numbers(kinds)) == 21


def test_loops_that_a_tracer_does_not_take_are_run_whole():
    inner = []

    def step(number, kind, carry):
        scan(lambda n, k, c: inner.append(n) or c, (1,) * 20, carry)
        return carry

    with sampled():
        scan(step, LONG, torch.zeros(()))
        slope = grad(lambda x: scan(lambda n, k, c: c * x, (1,) * 20, torch.ones(())))(
            torch.ones(())
        )
    assert inner == list(range(20)) * 6  # a loop within each of six steps, and all of it
    assert slope == 20  # a loop within a gradient


def test_a_trace_runs_the_steps_that_its_call_runs():
    def trained(w):
        return scan(lambda number, kind, v: v * 0.9 + (number + 1) * kind, LONG, w)

    w = torch.randn(3, 4, dtype=torch.float64)
    with Tracer([w]) as tracer:
        out = vmap(trained)(w)
    trace = Trace(tracer, [out])
    (whole,) = trace([w])
    with sampled():
        (few,), expected = trace([w]), vmap(trained)(w)
    assert torch.allclose(whole, vmap(trained)(w), rtol=1e-12, atol=0)
    assert torch.allclose(few, expected, rtol=1e-12, atol=0)
    assert not torch.allclose(few, whole)


def rounds(monkeypatch, broken=None):
    """The form of a round of sixty steps per client, and the number of steps of its check."""
    steps = []
    original = replay.LoopBody.__init__

    def counting(self, *args, **kwargs):
        original(self, *args, **kwargs)
        inside = self.replay
        self.replay = lambda *given: steps.append(1) or inside(*given)

    monkeypatch.setattr(replay.LoopBody, "__init__", counting)
    if broken:
        monkeypatch.setattr(*broken)
    recipe = Recipe(lr=0.01, epochs=20, batch=10, momentum=0.9)
    how = {"merge": False, "dtype": torch.float32}
    on = task(FedAvg(), mlp, federation((30,) * 3), recipe, **how)
    engine = VmapBackend(on.problem, on.shards, chunk=3)
    engine.local(FedAvg(), on.problem.start.expand(3, -1), (), whole_round(on))
    (form,) = engine.forms
    return form, len(steps)


def test_the_check_of_a_long_round_takes_few_steps(monkeypatch):
    form, steps = rounds(monkeypatch)
    assert form.way == REPLAYED
    assert steps < 60 + 5 * MOST  # the round itself, and a few short replays


def without_a_step(at):
    """A loop whose step of this number does nothing."""
    original = replay.TracedLoop.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        numbers = list(self._numbers)
        numbers[at] = numbers[at - 1]  # it trains on the batch before once more
        self._numbers = tuple(numbers)

    return replay.TracedLoop, "__init__", init


@pytest.mark.parametrize("at", [1, 2, -1, -2])
def test_a_wrong_batch_at_either_end_is_refused(at, monkeypatch):
    form, _ = rounds(monkeypatch, without_a_step(at))
    assert form.way == WRITTEN
    assert "gives something else" in form.why


@with_a_compiler
@pytest.mark.parametrize("lr", [0.3, 1.0])
def test_long_rounds_at_high_rates_are_compiled(lr):
    """Over 600 steps the last bits of float64 grow beyond what a comparison could allow."""
    recipe = Recipe(lr=lr, epochs=100, batch=5, momentum=0.9)
    on = task(FedAvg(), mlp, federation((30,) * 3), recipe, merge=False, dtype=torch.float32)
    engine = VmapBackend(on.problem, on.shards, chunk=3, compiled=True)
    engine.local(FedAvg(), on.problem.start.expand(3, -1), (), whole_round(on))
    (form,) = engine.forms
    assert (form.way, form.why) == (COMPILED, "")
