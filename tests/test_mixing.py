"""Weights, distances and choices against slow double loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.core.mixing import cosines, epsilon_greedy, mix, shares, squared_distances, sums_by
from support import assert_close


def models(rows=6, columns=11, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_shares():
    assert_close(shares(torch.tensor([1, 3])), torch.tensor([0.25, 0.75], dtype=torch.float64))
    assert_close(shares(torch.tensor([1, 3]), "uniform"), torch.full((2,), 0.5).double())


def test_mix_is_a_weighted_sum():
    W, p = models(3), torch.tensor([0.2, 0.3, 0.5])
    assert_close(mix(p, W), sum(p[i] * W[i] for i in range(3)), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_owner_with_only_its_own_vectors_gets_the_same_bits(dtype):
    count, many = 60, 300
    chance = torch.Generator().manual_seed(0)
    owner = torch.randint(count, (many,), generator=chance)
    vectors = torch.randn(many, 40, generator=chance, dtype=dtype)
    together = sums_by(owner, vectors, count)
    for k in range(count):
        mine = vectors[owner == k]
        alone = sums_by(torch.zeros(len(mine), dtype=torch.int64), mine, 1)
        assert torch.equal(together[k], alone[0])
    assert_close(together, mix(owner == torch.arange(count)[:, None], vectors), 1e-5)


def test_vectors_of_no_owner_are_left_out():
    owner, vectors = torch.tensor([0, -1, 2, 1 << 40, 1]), torch.ones(5, 2)
    assert sums_by(owner, vectors, 2).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_distances_equal_a_double_loop_even_far_from_zero(offset):
    W = models() + offset
    slow = torch.tensor([[float(((a.double() - b.double()) ** 2).sum()) for b in W] for a in W])
    assert_close(squared_distances(W), slow.double(), 1e-6)
    assert squared_distances(W).diagonal().abs().max() == 0


def test_cosines_equal_a_double_loop_and_zero_rows_count_nothing():
    W = models()
    W[2] = 0
    slow = torch.nn.functional.cosine_similarity(W[:, None].double(), W[None].double(), dim=-1)
    assert_close(cosines(W), slow, 1e-9)
    assert cosines(W)[2].abs().max() == 0


def test_distances_need_no_cube_of_memory():
    W = torch.zeros(200, 200_000)  # 200² × P would be 32 GB
    assert squared_distances(W).shape == (200, 200)


def draw(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, columns, generator=generator, dtype=torch.float64)


def test_greedy_takes_the_top():
    scores = torch.tensor([[0.1, 0.9, 0.5, -torch.inf, 0.7]], dtype=torch.float64)
    none = torch.zeros(1, 3, dtype=torch.bool)
    assert epsilon_greedy(scores, none, draw(1, 5, 0), 3).tolist() == [[1, 4, 2]]


def test_too_few_candidates_leave_slots_empty():
    scores = torch.tensor([[0.1, -torch.inf, -torch.inf]], dtype=torch.float64)
    for explore in (True, False):
        chosen = epsilon_greedy(scores, torch.full((1, 2), explore), draw(1, 3, 0), 2)
        assert chosen.tolist() == [[0, -1]]


def test_ties_are_broken_evenly():
    scores = torch.zeros(3000, 4, dtype=torch.float64)
    chosen = epsilon_greedy(scores, torch.zeros(3000, 1, dtype=torch.bool), draw(3000, 4, 1), 1)
    counts = torch.bincount(chosen.flatten(), minlength=4)
    assert (counts - 750).abs().max() < 110


def test_exploring_is_uniform_whatever_the_scores():
    scores = torch.arange(4, dtype=torch.float64).repeat(3000, 1)
    chosen = epsilon_greedy(scores, torch.ones(3000, 2, dtype=torch.bool), draw(3000, 4, 2), 2)
    counts = torch.bincount(chosen.flatten(), minlength=4)
    assert (counts - 1500).abs().max() < 150


@given(st.integers(1, 6), st.integers(1, 7), st.integers(0, 8), st.integers(0, 2**20))
def test_choices_are_distinct_candidates(rows, columns, count, seed):
    scores = draw(rows, columns, seed).masked_fill(draw(rows, columns, seed + 1) < 0.3, -torch.inf)
    explore = draw(rows, count, seed + 2) < 0.5
    chosen = epsilon_greedy(scores, explore, draw(rows, columns, seed + 3), count)
    assert chosen.shape == (rows, count)
    for row, allowed in zip(chosen.tolist(), (scores > -torch.inf).tolist(), strict=True):
        taken = [c for c in row if c >= 0]
        assert len(taken) == len(set(taken)) == min(count, sum(allowed))
        assert all(allowed[c] for c in taken)
