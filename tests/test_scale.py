"""What a round may cost: laws on what is read, written and made, counted and not timed.

The counter sees every operation of torch: how many numbers its results have, views not counted.
"""

from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.sparse import csr_array
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coterie.algorithms import ALGORITHMS, attention
from coterie.algorithms.cfl import CFL
from coterie.algorithms.fedamp import FedAMP
from coterie.algorithms.fedavg import Update
from coterie.algorithms.fedfomo import Upload
from coterie.algorithms.local import Local
from coterie.core import metrics, tree
from coterie.core.algorithm import Mixture, mixture_digest, round_of
from coterie.core.mixing import count_larger
from coterie.core.optim import Recipe
from coterie.core.rows import RowTable, StateRows
from coterie.data.simulation import Simulation
from coterie.engines import simulator
from coterie.engines.evaluation import judge
from coterie.engines.simulator import StateStore, in_memory
from coterie.runs import checkpoint, collaboration, stored
from coterie.storage import archives, files
from coterie.training.rounds import train
from support import METHODS, engine_of, federation, last, predictors, task

CPU = torch.device("cpu")
LOOP = import_module("coterie.training.rounds")
PARTICIPANTS = 4
SMALL, LARGE = 60, 600  # populations
RESERVING = {torch.ops.aten.empty.memory_format}  # takes no memory until it is written


@dataclass
class Count(TorchDispatchMode):
    """Numbers made or written: in total, and by the largest single operation."""

    total: int = 0
    largest: int = 0
    names: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        size = 0 if func in RESERVING or func.is_view else sum(map(self._size, tree_leaves(result)))
        if func in (torch.ops.aten.index_copy_.default, torch.ops.aten.index_put_.default):
            size = self._size(args[-1])  # only these rows are written
        self.total, self.largest = self.total + size, max(self.largest, size)
        self.names[str(func)] = self.names.get(str(func), 0) + size
        return result

    @staticmethod
    def _size(value: Any) -> int:
        return value.numel() if isinstance(value, torch.Tensor) else 0


def wide() -> nn.Module:
    """A model with many more parameters than there are clients."""
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 60), nn.Tanh(), nn.Linear(60, 3))


def crowd(population: int, name: str) -> tuple[Any, Simulation]:
    method = Local("matched") if name == "local" else METHODS[name]()
    on = task(method, wide, federation(sizes=(4,) * population), Recipe(lr=0.1, batch=4))
    return method, on


def cost_of_a_round(name: str, population: int) -> tuple[Count, int]:
    """The second and third round, in which pools and states are in use; none is evaluated."""
    method, on = crowd(population, name)
    rounds = train(
        method,
        on.problem,
        engine_of("vmap", on, chunk=2),
        9,
        participation=PARTICIPANTS / population,
        evaluate_every=9,
    )
    next(rounds)
    with Count() as count:
        next(rounds), next(rounds)
    return count, len(on.problem.start)


@pytest.fixture
def no_matrix(monkeypatch):
    """Nobody looks at the collaboration matrix, which costs a number for each pair."""
    monkeypatch.setattr(LOOP, "MATRIX_EVERY_ROUND", 0)


KEEPING = ("fedavg", "local", "scaffold", "fedamp", "cfl", "apfl", "ifca")


@pytest.mark.parametrize("name", KEEPING)
def test_a_round_costs_the_same_whatever_the_population(name, no_matrix):
    few, P = cost_of_a_round(name, SMALL)
    many, _ = cost_of_a_round(name, LARGE)
    some_numbers_each = 100 * (LARGE - SMALL)  # who takes part is drawn among everybody
    assert some_numbers_each < (LARGE - SMALL) * P / 10
    assert many.total - few.total < some_numbers_each, many.names


def test_fedfomo_pays_for_preferences_and_for_no_more_models(no_matrix):
    few, P = cost_of_a_round("fedfomo", SMALL)
    many, _ = cost_of_a_round("fedfomo", LARGE)
    a_row_each = 2 * PARTICIPANTS * (LARGE - SMALL)
    assert many.total - few.total < 100 * a_row_each + 100 * (LARGE - SMALL)
    assert many.largest < PARTICIPANTS * 7 * P + PARTICIPANTS * LARGE


def test_the_counter_sees_a_copied_pool(no_matrix, monkeypatch):
    monkeypatch.setattr(
        "coterie.algorithms.attention.updated", lambda rows, at, new: rows.index_copy(0, at, new)
    )
    few, P = cost_of_a_round("fedamp", SMALL)
    many, _ = cost_of_a_round("fedamp", LARGE)
    assert many.total - few.total > (LARGE - SMALL) * P


def matrices(population: int, evaluate_every: int) -> list[bool]:
    method, on = crowd(population, "fedamp")
    engine = engine_of("vmap", on, chunk=50)
    rounds = train(method, on.problem, engine, 2, participation=0.01, evaluate_every=evaluate_every)
    return [record.collaboration is not None for record in rounds]


def test_nobody_looks_at_a_large_matrix_between_evaluations():
    assert matrices(SMALL, 2) == [True, True]
    assert matrices(LARGE, 2) == [False, True]
    assert matrices(LARGE, 1) == [True, True]


# ---- the server's halves ---------------------------------------------------------------------


def told(method, on, round):
    """Uploads that are unlike each other, without any training."""
    K, generator = on.problem.population, torch.Generator().manual_seed(round.index)
    W = on.problem.start + torch.randn(
        K, len(on.problem.start), generator=generator, dtype=on.problem.dtype
    )
    if isinstance(method, FedAMP):
        return attention.Upload(W)
    if isinstance(method, CFL):
        return Update(W, on.problem.sizes)
    return Upload(W, torch.zeros(K, K, dtype=torch.int32))


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp", "fedfomo", "cfl"])
def test_servers_never_hold_a_model_a_pair(name):
    method, on = crowd(40, name)
    K, P = on.problem.population, len(on.problem.start)
    server, states = method.init(on.problem)
    with Count() as count:
        for index in range(8):
            round = round_of(on.problem, index, 9, torch.arange(K))
            method.download(server, round)
            uploads = told(FedAMP() if "amp" in name else method, on, round)
            server = method.aggregate(server, uploads, round)
            method.serve(server, round)
            method.collaboration(server, method.shown(states), round)
    assert K * P <= count.largest <= 2 * (K * P + K * K), count.names


# ---- tables and shelves ------------------------------------------------------------------------


def test_a_table_is_a_value():
    base = torch.arange(12.0).view(4, 3)
    first = RowTable(base)
    one = first.updated(torch.tensor([1, 3]), torch.ones(2, 3))
    other = first.updated(torch.tensor([3]), torch.full((1, 3), 7.0))
    both = one.updated(torch.tensor([0]), torch.zeros(1, 3))
    assert torch.equal(first.dense(), base)
    expected = base.clone()
    expected[[1, 3]] = 1.0
    assert torch.equal(one.dense(), expected)
    assert torch.equal(one[torch.tensor([3, 0])], expected[[3, 0]])
    assert torch.equal(one[torch.tensor([True, False, False, True])], expected[[0, 3]])
    assert torch.equal(other[torch.tensor([1, 3])], torch.stack([base[1], torch.full((3,), 7.0)]))
    expected[0] = 0.0
    assert torch.equal(both.dense(), expected)


def test_a_table_does_not_keep_what_it_was_given():
    given = torch.ones(1, 3)
    table = RowTable(torch.zeros(2, 3)).updated(torch.tensor([1]), given)
    given += 1
    assert torch.equal(table.dense()[1], torch.ones(3))


def test_a_shelf_reads_as_a_tensor_that_was_written():
    start = torch.arange(5.0).expand(6, 5)
    shelf, plain = StateRows(start, in_memory(CPU)), start.clone()
    for ids in ([4, 1], [1, 5], []):
        rows = torch.rand(len(ids), 5)
        shelf.write(torch.tensor(ids, dtype=torch.int64), rows)
        plain[ids] = rows
        for wanted in ([0, 1, 4], [5], [2, 3]):
            assert torch.equal(shelf[torch.tensor(wanted)], plain[wanted])
    assert shelf.written.tolist() == [1, 4, 5]
    assert torch.equal(shelf.dense(), plain)


def test_a_shelf_begins_with_rows_of_their_own():
    own = torch.rand(3, 2)
    assert torch.equal(StateRows(own, in_memory(CPU)).dense(), own)
    table = RowTable(own[:1].expand(3, 2)).updated(torch.tensor([2]), own[2:])
    shelf = StateRows(table, in_memory(CPU))
    assert shelf.written.tolist() == [2]
    assert torch.equal(shelf.dense(), own[[0, 0, 2]])


def test_shelving_writes_only_who_differs():
    states = (torch.zeros(1).expand(1000, 500), torch.zeros(1000, 1))
    with Count() as count:
        store = StateStore(states, in_memory(CPU))
        store.put(torch.tensor([7]), (torch.ones(1, 500), torch.ones(1, 1)))
        rows = store.rows(torch.tensor([6, 7]))
    assert rows[0].sum() == 500
    assert count.total < 20_000


@pytest.mark.parametrize("name", ["fedamp", "ditto", "fedfomo", "cfl"])
def test_a_checkpoint_holds_the_rows_that_changed(name, tmp_path):
    method, on = crowd(SMALL, name)
    engine = engine_of("vmap", on, chunk=4)
    records = train(method, on.problem, engine, 3, participation=0.1, evaluate_every=3)
    record = next(records)
    made = checkpoint.write(tmp_path, 1, record.server, record.snapshot(), {})
    size = sum(path.stat().st_size for path in made.glob("*.safetensors"))
    models = 8 * len(on.problem.start) * SMALL
    assert size < models / 2 + 3 * 8 * SMALL**2
    found, _ = checkpoint.newest(tmp_path)
    server, states = checkpoint.restore(found, *method.init(on.problem))
    pairs = ((server, record.server), (states, record.states))
    for back, kept in pairs:
        for a, b in zip(tree.leaves(back), tree.leaves(kept), strict=True):
            assert torch.equal(a, b)


def test_predictors_are_written_without_another_copy_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "BLOCK", 4 * 3000 * 4)
    models = torch.rand(40, 1, 3000)
    models[10:20] = models[0]
    mixture = Mixture(torch.ones(40, 1), models)
    with Count() as count:
        stored.write_models(tmp_path / "models.safetensors", mixture)
    assert count.largest <= 4 * 3000
    found = load_file(tmp_path / "models.safetensors")
    assert found["models"].shape == (30, 3000)
    back = stored.read_models(tmp_path / "models.safetensors")
    assert torch.equal(back.models, models)
    assert torch.equal(back.weights, mixture.weights)


def test_a_predictor_that_all_have_is_written_once(tmp_path):
    models = torch.rand(1, 2, 5).expand(4, 2, 5)
    mixture = Mixture(torch.rand(4, 2), models)
    stored.write_models(tmp_path / "models.safetensors", mixture)
    back = stored.read_models(tmp_path / "models.safetensors")
    assert torch.equal(back.models, models)
    assert mixture_digest(back) == mixture_digest(mixture)


@pytest.mark.parametrize("dtype", list(archives.DTYPES))
def test_arrays_are_read_as_they_were_written(dtype, tmp_path):
    arrays = {
        "a": torch.arange(6).to(dtype).view(2, 3),
        "none": torch.zeros(0, 4, dtype=dtype),
        "one": torch.ones((), dtype=dtype),
        "odd": torch.ones(3, dtype=torch.bool),
    }
    said = archives.write_arrays(tmp_path / "file", arrays)
    found = load_file(tmp_path / "file")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert torch.equal(found[name], array)
    assert said == files.describe(tmp_path / "file")


# ---- evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "local", "fedfomo", "federico"])
def test_predictors_judged_in_blocks_are_the_same(name, monkeypatch):
    method = ALGORITHMS[name]()
    on = task(method)
    usual = last(method, on, "loop")
    monkeypatch.setattr(simulator, "JUDGED_BYTES", 0)
    monkeypatch.setattr(simulator, "JUDGED_CLIENTS", 2)
    parts = last(method, on, "loop")
    assert torch.equal(predictors(parts).models, predictors(usual).models)
    assert torch.equal(predictors(parts).weights, predictors(usual).weights)
    for a, b in zip(parts.evaluation, usual.evaluation, strict=True):
        np.testing.assert_array_equal(a, b)
    if name == "fedavg":  # one model for all is held once
        assert predictors(parts).models.stride(0) == 0


def slow_judge(on, metric, ids, name, predicted):
    """Client by client, as a reader would."""
    table = []
    for i, k in enumerate(ids):
        n, at = on.shards.splits[name].sizes[k], on.shards.splits[name].rows([k]).samples[0]
        y = on.shards.relabel[k][on.shards.y[at]][:n].numpy()
        p = predicted[i, :n].double().numpy()
        chosen = np.maximum(p[np.arange(n), y], 1e-300)
        loss = np.mean(-np.log(chosen)) if n else np.nan
        table.append((metrics.score(metric, p, y), loss))
    return np.array(table).T


@pytest.mark.parametrize("metric", ["accuracy", "f1"])
def test_clients_are_judged_together_as_alone(metric):
    on = task(ALGORITHMS["fedavg"](), federated=federation(sizes=(31, 17, 0)))
    ids = [2, 0, 1]
    width = max(on.shards.splits["train"].sizes)
    predicted = torch.rand(3, width, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    right = on.shards.relabel[0][on.shards.y[on.shards.splits["train"].rows([0]).samples[0, 3]]]
    predicted[1, 3, right] = torch.nan  # a model that diverged is wrong, not missing
    predicted[2, 4] = torch.tensor([0.0, 1.0, 0.0])  # a chance of zero has a finite loss
    found = judge(on.shards, metric, ids, "train", predicted)
    np.testing.assert_allclose(np.array(found), slow_judge(on, metric, ids, "train", predicted))


def test_who_has_nothing_to_be_judged_on_has_no_score():
    few = federation(sizes=(31, 17))
    empty = torch.zeros(0, dtype=torch.int64)
    on = task(ALGORITHMS["fedavg"](), federated=replace(few, test=(few.test[0], empty)))
    scores, losses = judge(on.shards, "accuracy", [0, 1], "test", torch.rand(2, 7, 3))
    assert np.isnan([scores[1], losses[1]]).all()
    assert np.isfinite([scores[0], losses[0]]).all()


def test_counting_who_is_larger():
    scores = torch.tensor([0.5, -torch.inf, 2.0, 0.5, torch.inf, torch.inf, -torch.inf])
    expected = (scores[None, :] > scores[:, None]).sum(1).to(torch.int32)
    assert torch.equal(count_larger(scores), expected)
    rows = torch.randint(4, (5, 9)).double()
    found = torch.func.vmap(count_larger)(rows)
    assert torch.equal(found, (rows[:, None, :] > rows[:, :, None]).sum(2).to(torch.int32))
    with Count() as count:
        count_larger(torch.rand(1000))
    assert count.largest <= 2000


@pytest.mark.parametrize("swaps", [False, True])
def test_a_sparse_matrix_says_what_the_dense_one_says(swaps):
    generator = np.random.default_rng(0)
    groups, clients = np.arange(12) % 3, [0, 3, 4, 9]
    varied = generator.random((12, 12)) * (generator.random((12, 12)) < 0.4) - 0.1
    for A in (varied, np.eye(12), np.full((12, 12), 1 / 12), np.zeros((12, 12))):
        sparse = csr_array(A)
        assert collaboration.any_others(A) == collaboration.any_others(sparse)
        assert collaboration.off_diagonal(A, clients) == collaboration.off_diagonal(sparse, clients)
        found, expected = (
            collaboration.in_group_weight(collaboration.kinship(M, swaps), groups)
            for M in (sparse, A)
        )
        assert found == pytest.approx(expected)
    assert collaboration.any_others(varied)
    assert not collaboration.any_others(np.eye(12))


def test_many_clients_matrix_is_never_copied_whole():
    A = torch.eye(600, dtype=torch.float32)
    with Count() as count:
        found = LOOP._matrix(A)
    assert count.largest <= 256 * 600
    assert np.array_equal(found.toarray(), A.numpy())
