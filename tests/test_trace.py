"""A recorded call, played on other numbers, gives what the call gives on them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.func import grad, vmap
from torch.multiprocessing.reductions import StorageWeakRef

from coterie.algorithms.fedavg import FedAvg
from coterie.compiled.executor import Executor
from coterie.compiled.trace import Trace, Tracer
from coterie.compiled.trust import perturbed
from coterie.core import tree
from coterie.core.calls import scan
from coterie.core.optim import Recipe
from coterie.core.tree import Bank
from coterie.engines.vmap import VmapBackend
from coterie.errors import TraceError
from support import assert_close, cnn, federation, mlp, slower, task, whole_round

aten = torch.ops.aten
CLIENTS, LAYERS = 3, (12, 3)  # a layer of 4 × 3 weights, and its bias


def numbers(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def drawn(seed):
    """A vector for each client, and its data."""
    return numbers(seed, CLIENTS, sum(LAYERS)), numbers(seed + 50, CLIENTS, 5, 4)


def traced(call, inputs):
    with Tracer(inputs) as recording:
        result = call(*inputs)
    return Trace(recording, list(tree.leaves(result)))


def assert_replayed(call, draw=drawn):
    """The law; what is played leaves its inputs as they are, and does the same the next time."""
    trace = traced(call, draw(0))
    inputs = draw(1)
    before = [leaf.clone() for leaf in inputs]
    found = trace(inputs)
    for now, then in zip(inputs, before, strict=True):
        assert torch.equal(now, then)
    expected = list(tree.leaves(call(*inputs)))
    for a, b, again in zip(found, expected, trace(inputs), strict=True):
        assert_close(a, b)
        assert torch.equal(a, again)
    return trace


def slope(w, x):
    def loss(w):
        weight, bias = w.split(LAYERS)
        return ((x @ weight.view(4, 3) + bias).tanh() ** 2).sum()

    return grad(loss)(w)


def descended(w, g, rate=0.1):
    return torch.addcmul(w, torch.full_like(w[:1], rate), g, value=-1)


def trained(w, x, pull=0.0, kinds=(5,) * 4):
    def step(number, kind, v):
        g = slope(v, x[:kind] * (1 + number))
        return descended(v, g + pull * (v - w) if pull else g)

    return scan(step, kinds, w)


def targets(trace):
    return [node.target for part in trace.segments for node in part.module.graph.nodes]


# ---- loops -----------------------------------------------------------------------------------


def test_a_loop_is_noted_once_and_its_weights_are_moved_in_place():
    trace = assert_replayed(vmap(trained))
    (loop,) = [part for part in trace.parts if hasattr(part, "bodies")]
    assert len(loop.bodies) == 1
    assert aten.baddbmm_.default in targets(trace)


def test_what_never_changes_is_left_out():
    def call(w, x):
        placed = (w[:4] * (torch.arange(4) * 2 + 1)).sum()
        return placed + x.transpose(0, 1).transpose(0, 1).detach().view(5, 4).sum()

    left = targets(assert_replayed(vmap(call)))
    assert aten.arange.default not in left
    assert aten.transpose.int not in left
    assert sum(target is aten.mul.Tensor for target in left) == 1


def test_a_rate_for_every_weight():
    def call(w, x):
        def step(number, _, v):
            return torch.addcmul(v, w * 0.1, slope(v, x), value=-1)

        return scan(step, (0,) * 3, w)

    assert_replayed(vmap(call))


def test_steps_of_several_kinds():
    trace = assert_replayed(vmap(lambda w, x: trained(w, x, kinds=(5, 5, 2, 5, 5, 2))))
    assert len(trace.parts[-1].bodies) == 2


def test_what_a_loop_begins_with_is_not_overwritten():
    def call(w, x):
        end = trained(w, x, pull=0.3)
        return end, end - w

    assert_replayed(vmap(call))


def test_a_loop_within_a_loop_is_unrolled():
    def call(w, x):
        def outer(number, _, v):
            def inner(again, _, u):
                return u - 0.1 * slope(u, x * (1 + number + 2 * again))

            return scan(inner, (0, 0, 0), v)

        return scan(outer, (0,) * 4, w)

    trace = assert_replayed(vmap(call))
    assert sum(hasattr(part, "bodies") for part in trace.parts) == 1


def test_a_loop_below_a_gradient_is_unrolled():
    def call(w, x):
        return grad(lambda w: trained(w, x).sum())(w)

    assert not any(hasattr(part, "bodies") for part in assert_replayed(vmap(call)).parts)


def test_one_loop_after_another():
    def call(w, x):
        first = trained(w, x)
        return trained(first * 2, x), first

    assert_replayed(vmap(call))


def test_a_loop_over_models_of_each_client():
    def call(w, x):
        return vmap(lambda scale: trained(w * scale, x, pull=0.1))(x.mean(1))

    trace = assert_replayed(vmap(call))
    assert any(hasattr(part, "bodies") for part in trace.parts)


def test_a_loop_without_vmap():
    assert_replayed(lambda w, x: trained(w[0], x[0]))


def test_numbers_and_flags_are_carried_too():
    def call(w, x):
        def step(number, _, carry):
            v, count, seen = carry
            return v - 0.1 * slope(v, x), count + number, seen | (v > 0)

        return scan(step, (0,) * 3, (w, torch.zeros((), dtype=torch.int64), w > 1))

    assert_replayed(vmap(call))


# ---- memory ----------------------------------------------------------------------------------


def same_twice(a, b, c, x):
    new = a + x
    return new, new, c + b


def swapped(a, b, c, x):
    return b, a, c + a * b


def passed_on(a, b, c, x):
    return a + x, a, c * b


def halves_shared(a, b, c, x):
    first, second = a.split(LAYERS)
    return torch.cat([first, second + 1]), torch.cat([first, second - 1]), c + b


@pytest.mark.parametrize("change", [same_twice, swapped, passed_on, halves_shared])
def test_what_is_carried_shares_no_memory(change):
    def call(w, x):
        def step(number, _, carry):
            a, b, c = carry
            d, e, f = change(descended(a, slope(a, x)), b, c, w)
            return descended(d, slope(d, x)), e + 1, descended(f, slope(f, x))

        def bare(number, _, carry):
            return change(*carry, w)

        return scan(step, (0,) * 4, (w, w + 1, w - 1)), scan(bare, (0,) * 4, (w, w + 1, w - 1))

    assert_replayed(vmap(call))


def test_a_step_that_carries_on_what_it_captured():
    def call(w, x):
        def step(number, kind, v):
            return w if kind == "back" else descended(v, slope(v, x))

        return scan(step, ("on", "back", "on", "on"), w * 2)

    assert_replayed(vmap(call))


def test_a_sum_in_place():
    def call(w, x):
        def step(number, _, carry):
            v, total = carry
            g = slope(v, x)
            total.add_(g)
            return descended(v, g), total

        return scan(step, (0,) * 4, (w, torch.zeros_like(w)))

    assert_replayed(vmap(call))


def glued(w):
    both = torch.cat(w.split(LAYERS))
    both.mul_(2)
    return both * w


def glued_seen_otherwise(w):
    both = torch.cat(w.split(LAYERS))
    both.view(5, 3).add_(1)
    return both * w


def part_changed_later(w):
    first = w[: LAYERS[0]].clone()
    both = torch.cat([first, w[LAYERS[0] :]])
    first.zero_()
    return both + first.sum()


@pytest.mark.parametrize("change", [glued, glued_seen_otherwise, part_changed_later])
def test_a_vector_is_changed_in_place(change):
    def call(w, x):
        return scan(lambda number, _, v: v + 0.1 * change(v) + slope(v, x), (0,) * 3, w)

    assert_replayed(vmap(call))


def test_running_statistics_are_moved():
    def call(w, x):
        def step(number, _, carry):
            mean, var = (part.clone() for part in carry)
            torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False)
            return mean, var

        return scan(step, (0,) * 3, (x[0], x[1] ** 2))

    assert_replayed(vmap(call))


def test_what_a_call_is_done_with_is_let_go_while_it_is_recorded():
    made = []

    def call(x):
        for _ in range(5):
            x = (x * 2).tanh()
            made.append(StorageWeakRef(x.untyped_storage()))
        return x, torch.tensor([memory.expired() for memory in made])

    _, gone = call(numbers(0, 3, 4))
    made.clear()
    with Tracer([numbers(0, 3, 4)]) as recording:
        _, gone_meanwhile = call(numbers(0, 3, 4))
    assert gone.tolist() == gone_meanwhile.tolist() == [True] * 4 + [False]
    assert len(recording.ops) >= 10


def test_memory_that_was_let_go_is_not_taken_for_what_lay_there_before():
    def call(x):
        for k in range(20):
            x = x * torch.tensor(1 + 0.1 * k, dtype=torch.float64)
            x = x + torch.full_like(x, k).add_(1)
            x = x.tanh().t().contiguous()
        return x

    for _ in range(5):
        assert_replayed(call, lambda seed: (numbers(seed, 4, 4),))


def test_two_threads_play_at_once():
    trace = traced(vmap(trained), drawn(0))
    alone = [trace(drawn(seed)) for seed in range(8)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda seed: trace(drawn(seed)), range(8)))
    for (a,), (b,) in zip(alone, together, strict=True):
        assert torch.equal(a, b)


# ---- what cannot be recorded -----------------------------------------------------------------


def test_a_value_of_a_step_is_used_after_it():
    def call(w, x):
        seen = []

        def step(number, _, v):
            seen.append(slope(v, x))
            return v - seen[-1]

        return scan(step, (0,) * 3, w) + seen[-1]

    with pytest.raises(TraceError, match="after the step"):
        traced(vmap(call), drawn(0))


@pytest.mark.parametrize("look", [lambda v: v.sum().item(), lambda v: float(bool(v.sum() > 0))])
def test_a_number_is_looked_at(look):
    with pytest.raises(TraceError, match="a number to decide by"):
        traced(lambda w, x: w * look(x), drawn(0))


def test_an_input_is_written_into():
    with pytest.raises(TraceError, match="outlives"):
        traced(vmap(lambda w, x: w.add_(1)), drawn(0))


def test_what_was_there_before_is_written_into():
    held = torch.zeros(CLIENTS, sum(LAYERS), dtype=torch.float64)
    with pytest.raises(TraceError, match="outlives"):
        traced(lambda w, x: held.add_(w), drawn(0))


def test_a_step_writes_into_what_is_around_it():
    def call(w, x):
        total = torch.zeros_like(w)

        def step(number, _, v):
            total.add_(v)
            return v - slope(v, x)

        return scan(step, (0,) * 3, w) + total

    with pytest.raises(TraceError, match="outlives"):
        traced(vmap(call), drawn(0))


def test_a_step_changes_the_form_of_what_it_carries():
    def call(w, x):
        return scan(lambda number, _, v: torch.cat([v, v]), (0, 0), w)

    with pytest.raises(TraceError, match="changes the shape"):
        traced(vmap(call), drawn(0))


# ---- the executor ------------------------------------------------------------------------------


def executor_agrees(call, draw=drawn):
    """Whether the call was played; the results must be right in any case."""
    executor = Executor(capture=False)
    for seed in range(3):
        found, expected = executor("some", call, draw(seed)), call(*draw(seed))
        for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
            assert_close(a, b)
    return not slower(executor)


def test_a_call_is_played():
    assert executor_agrees(vmap(trained))


def test_what_cannot_be_recorded_is_done_as_it_is_written():
    assert not executor_agrees(lambda w, x: w * (1.0 if bool((w - x.sum()).mean() > 0) else 2.0))


@pytest.mark.parametrize("factors", [(1, 2, 3, 4, 5), (torch.inf, 1, 2, 3, 4)])
def test_a_constant_that_is_another_in_every_call_is_noticed(factors):
    left, executor = list(factors), Executor(capture=False)

    def call(w, x):
        return w * torch.tensor(left.pop(0), dtype=w.dtype)

    w, x = drawn(0)
    for factor in factors[3:]:  # three calls are made to record and to compare
        assert torch.equal(executor("some", call, (w, x)), w * factor)
    assert len(slower(executor)) == 1


def test_a_constant_that_stands_for_the_clients_is_noticed():
    executor, (w, x) = Executor(capture=False), drawn(0)
    executor("some", lambda a, b: a * torch.tensor([1.0, 2.0, 3.0])[:, None], (w, x))
    assert len(slower(executor)) == 1


def test_a_constant_that_stands_for_what_all_clients_share_is_noticed():
    executor, (w, _) = Executor(capture=False), drawn(0)
    slot = torch.tensor([[0], [1], [2]])
    table = w.clone()  # not an input: the bank's is read where the recording does not look
    executor("some", lambda bank: table[bank.slot[:, 0]], (Bank(w, slot, slot),))
    assert not slower(executor)  # nothing is wrong with it
    executor("other", lambda bank: hidden(bank.models)[bank.slot[:, 0]], (Bank(w, slot, slot),))
    assert len(slower(executor)) == 1


def test_what_is_alike_is_shaken_differently():
    alike = torch.ones(3, 4, dtype=torch.float64)
    first, (second, whole) = perturbed((alike, (alike, torch.arange(3))), 0.01)
    numbers = torch.cat([first, second])
    assert whole.tolist() == [0, 1, 2]
    assert not (first == second).any()
    assert (numbers != 1).all()
    assert ((numbers - 1).abs() < 0.05).all()
    assert len(numbers[:3].unique()) == 12
    long = torch.ones(2, 70_000)
    (rows,) = perturbed((long,), 0.01)
    assert (rows[0] != rows[1]).double().mean() > 0.99


def hidden(models):
    """The same numbers by a way that no recording sees."""
    return torch.tensor(models.tolist(), dtype=models.dtype)


def test_a_table_that_all_clients_share():
    def draw(seed):
        slot = torch.tensor([[0, 1], [3, -1], [2, 2]]).roll(seed, 0)
        return Bank(numbers(seed, 4, 15), slot, slot), numbers(seed, CLIENTS, 15)

    def one(bank, w):
        models, here = bank.rows()
        return w + (models * here[:, None]).sum(0), bank.owner

    assert executor_agrees(vmap(one, in_dims=(Bank(None, 0, 0), 0)), draw)


def test_one_tensor_may_be_two_inputs_and_later_two():
    executor, (w, _) = Executor(capture=False), drawn(0)
    other = w + 1
    executor("some", lambda a, b: a - b, (w, w))
    assert_close(executor("some", lambda a, b: a - b, (w, other)), w - other)
    assert not slower(executor)


def test_inputs_may_lie_otherwise_in_memory():
    executor, call = Executor(capture=False), vmap(lambda w, x: w * x.flatten()[:15])
    w, x = drawn(0)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    for one in (x, x[:1].expand(CLIENTS, -1, -1), turned):
        assert_close(executor("some", call, (w, one)), call(w, one))
    assert not slower(executor)


# ---- training --------------------------------------------------------------------------------


def test_what_tracing_relies_on_in_the_core():
    """One split in the flat model gives the layers, one addcmul in SGD the fused descent."""
    on = task(FedAvg(), mlp, federation((20,) * 3), Recipe(lr=0.1, batch=10), merge=False)
    engine = VmapBackend(on.problem, on.shards, chunk=3)
    engine.local(FedAvg(), on.problem.start.expand(3, -1), (), whole_round(on))
    (known,) = engine._executor._known.values()
    (loop,) = known.replay._trace.loops
    assert tuple(slot.shape.numel() for slot in on.problem.model.slots) in loop.sizes
    assert aten.baddbmm_.default in targets(known.replay._trace)


RECIPES = {
    "plain": Recipe(lr=0.1, epochs=2, batch=10),
    "momentum": Recipe(lr=0.1, epochs=2, batch=10, momentum=0.9),
    "decay": Recipe(lr=0.1, epochs=2, batch=10, weight_decay=0.1),
    "adam": Recipe(lr=0.01, epochs=2, batch=10, optimizer="adam"),
    "steps": Recipe(lr=0.1, steps=7, batch=10),
}
# alike: the last batch is short; uneven: the second and third are padded, too little to be cut off
SIZES = {"alike": (17,) * 3, "uneven": (39, 29, 22)}


@pytest.mark.parametrize("network", [mlp, cnn])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_played(recipe, sizes, network):
    method = FedAvg()
    on = task(method, network, federation(SIZES[sizes]), RECIPES[recipe], merge=False)
    played, plain = (
        VmapBackend(on.problem, on.shards, chunk=3),
        VmapBackend(on.problem, on.shards, chunk=3, trace=False),
    )
    for index in range(2):
        round = whole_round(on, index)
        start = on.problem.start + 0.1 * numbers(index, 3, on.problem.model.size)
        found, expected = (e.local(method, start, (), round)[0] for e in (played, plain))
        assert_close(found.w, expected.w)
    (form,) = played._executor._known.values()
    in_place = aten.baddbmm_.default in targets(form.replay._trace)
    assert in_place == (recipe in ("plain", "steps") and sizes == "alike")


def test_zeros_that_are_written_into_are_no_zeros():
    """What is added to by zeros alone is the same, and is not computed."""

    def one(w, x):
        marked = torch.zeros_like(w)
        marked[0] = x.sum()
        return w * 2.0 + marked

    assert_replayed(vmap(one))
