"""Clients that take similarly many steps share a chunk: the cheapest cut, and no client is lost."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.algorithms.local import Local
from coterie.engines.vmap import (
    VmapBackend,
    forward_operations,
    gpu_overhead,
    overhead_of,
    runs_of_similar,
)
from support import RECIPE, federation, mlp, normed, task


def cost(steps, runs, overhead):
    """What the runs cost: the longest client's steps, for all clients and the overhead."""
    return sum(max(steps[a:b]) * (overhead + b - a) for a, b in runs)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=8).map(sorted).map(tuple),
    st.integers(1, 9),
    st.sampled_from([0, 1, 2, 5, 64]),
)
def test_every_client_is_in_one_run_and_no_cut_between_different_clients_is_cheaper(
    steps, most, overhead
):
    runs = runs_of_similar(steps, most, overhead)
    assert [at for a, b in runs for at in range(a, b)] == list(range(len(steps)))
    assert all(0 < b - a <= most for a, b in runs)
    if most < len(steps):
        return  # equal clients are cut where a run is too long, wherever that is
    between = [at for at in range(1, len(steps)) if steps[at - 1] != steps[at]]
    for count in range(len(between) + 1):
        for cuts in combinations(between, count):
            edges = (0, *cuts, len(steps))
            other = list(pairwise(edges))
            assert cost(steps, runs, overhead) <= cost(steps, other, overhead)


def test_equal_clients_are_cut_only_into_about_equally_long_pieces():
    assert runs_of_similar((7,) * 10, 20, 2) == ((0, 10),)
    assert runs_of_similar((7,) * 10, 4, 2) == ((0, 4), (4, 8), (8, 10))
    assert runs_of_similar((7,) * 9, 8, 2) == ((0, 5), (5, 9))


SIZES = (5, 5, 5, 5, 5, 5, 5, 5, 400, 400)


@pytest.mark.parametrize("chunk", [3, 20])
def test_large_clients_have_chunks_of_their_own_if_all_clients_take_part(chunk):
    on = task(Local(), federated=federation(SIZES))
    backend = VmapBackend(on.problem, on.shards, chunk=chunk)
    chunks = backend.chunks(list(range(10)))
    assert sorted(at for part in chunks for at in part) == list(range(10))
    assert sorted(chunks[0]) == [8, 9]  # the most work first, for threads to share the rest
    assert all(len(part) <= chunk for part in chunks)
    drawn = [0, 2, 4, 8]  # other clients in every round: few forms matter more than padding
    assert len(backend.chunks(drawn)) == -(-4 // chunk)


def test_few_and_slightly_larger_clients_are_not_worth_a_chunk():
    on = task(Local(), federated=federation((20, 20, 20, 30)))
    assert len(VmapBackend(on.problem, on.shards, chunk=20).chunks([0, 1, 2, 3])) == 1


def test_a_forward_pass_has_two_operations_per_weight_of_a_dense_layer_and_sample():
    on = task(Local(), mlp).problem
    dense = sum(slot.shape.numel() for slot in on.model.slots if len(slot.shape) == 2)
    assert forward_operations(on) == 2 * dense * on.recipe.batch
    few = task(Local(), mlp, recipe=replace(RECIPE, batch=10**9)).problem  # no more than there are
    assert forward_operations(few) == 2 * dense * int(few.sizes.max())


def test_on_a_gpu_clients_of_large_models_are_cut_apart_and_those_of_small_ones_stay_together():
    on = task(Local(), mlp).problem
    small, large = gpu_overhead(3 * forward_operations(on)), gpu_overhead(5_300_000_000)
    assert small > overhead_of(on) > 0  # a GPU pays for its steps, not for its clients
    assert large < small
    assert gpu_overhead(10**15) == 1
    assert [gpu_overhead(10**n) for n in range(16)] == sorted(
        (gpu_overhead(10**n) for n in range(16)), reverse=True
    )
    steps = (80,) * 3 + (107,) * 3 + (133,) * 3 + (160,) * 3 + (853,) * 3
    assert len(runs_of_similar(steps, 15, small)) == 1
    assert runs_of_similar(steps, 15, large)[-1] == (12, 15)


def test_with_batch_norm_chunks_have_equal_clients_as_before():
    on = task(Local(), normed, federated=federation((20, 20, 20, 30)))
    chunks = VmapBackend(on.problem, on.shards, chunk=20).chunks([0, 1, 2, 3])
    assert sorted(map(sorted, chunks)) == [[0, 1, 2], [3]]
