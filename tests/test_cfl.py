"""CFL: the cut, the thresholds, and clusters that stay clusters of clients."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.algorithms.cfl import CFL, bipartition, merged
from coterie.algorithms.cfl_mean import CFLMean, opposed
from coterie.algorithms.fedavg import Update
from coterie.core.mixing import cosines
from support import (
    assert_close,
    backend_of,
    federation,
    task,
    whole_round,
)


def random_similarity(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return cosines(torch.randn(n, 3, generator=generator, dtype=torch.float64))


def as_sets(part):
    return {
        frozenset(part.nonzero().flatten().tolist()),
        frozenset((~part).nonzero().flatten().tolist()),
    }


def cuts(n):
    """All ways to divide n things in two, the first thing always on the left."""
    for size in range(n - 1):
        for rest in combinations(range(1, n), size):
            part = torch.ones(n, dtype=torch.bool)
            part[[0, *rest]] = False
            yield part


# ---- the cut ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_single_linkage_is_the_optimal_cut(seed):
    """Of all cuts, the largest similarity across it is the smallest (the paper's Eq. 18)."""
    S = random_similarity(7, seed)
    best = min((float(S[c][:, ~c].max()), as_sets(c)) for c in cuts(7))
    found = bipartition(S)
    assert float(S[found][:, ~found].max()) == pytest.approx(best[0], abs=0)
    assert as_sets(found) == best[1]


@given(st.integers(3, 9), st.integers(0, 10**6))
def test_a_cut_has_two_parts_and_does_not_depend_on_the_order(n, seed):
    S = random_similarity(n, seed)
    part = bipartition(S)
    assert 0 < int(part.sum()) < n
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    again = bipartition(S[order][:, order])
    back = torch.empty_like(again)
    back[order] = again
    assert as_sets(back) == as_sets(part)


def test_merging_reports_its_levels_from_high_to_low():
    S = random_similarity(6, 3)
    levels = merged(S, 1, "single").levels
    assert levels == sorted(levels, reverse=True)
    assert levels[0] == pytest.approx(float(S.clone().fill_diagonal_(-2).max()))
    assert len(merged(S, 4, "single").group.unique()) == 4


def test_opposition_needs_opposite_pulls_and_allies():
    two = torch.tensor([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.1], [-1.0, -0.1]])
    part = torch.tensor([False, False, True, True])
    assert opposed(cosines(two), part, 0.25, 0.2)
    assert not opposed(cosines(two), torch.tensor([False, True, True, False]), 0.25, 0.2)
    alone = torch.eye(4) - 0.25  # everybody pulls against everybody: no groups
    assert not opposed(cosines(alone), part, 0.25, 0.2)
    assert not opposed(cosines(alone), part, -1.0, 0.2)
    assert opposed(cosines(alone), part, -1.0, 0.0)


def test_one_pair_that_agrees_across_does_not_hold_a_split_back():
    """Groups that share classes: one member of each leans towards the other."""
    leaning = unit(0, 10, 85, 180, 170, 105)
    S, part = cosines(leaning), torch.tensor([False, False, False, True, True, True])
    assert float(S[part][:, ~part].max()) > 0.5
    assert opposed(S, part, 0.25, 0.2)


@given(st.integers(4, 30), st.integers(0, 10**6))
def test_noise_around_a_resting_average_is_not_two_groups(n, seed):
    """Changes without a common direction, of which nothing is left on average."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, 100, generator=generator, dtype=torch.float64)
    S, usual = cosines(noise - noise.mean(0)), CFLMean()
    assert not opposed(S, bipartition(S), usual.allies, usual.gap)


# ---- the server ------------------------------------------------------------------------------


def served(method, directions, rounds, index=5, sizes=None, clients=None):
    """The server after some rounds in which clients always send these changes."""
    on = task(method, federated=federation(sizes=(20,) * len(directions)))
    server, _ = method.init(on.problem)
    uploads = torch.zeros(len(directions), on.problem.model.size, dtype=torch.float64)
    uploads[:, : directions.shape[1]] = directions
    for t in range(rounds):
        round = whole_round(on, index + t)
        who = torch.arange(len(directions)) if clients is None else clients[t]
        size = torch.full((len(who),), 20) if sizes is None else sizes[who]
        server = method.aggregate(server, Update(uploads[who], size), round._replace(clients=who))
    return server


def unit(*angles):
    a = torch.tensor(angles, dtype=torch.float64).deg2rad()
    return torch.stack([a.cos(), a.sin()], 1)


def clusters(server):
    return {
        frozenset((server.member == c).nonzero().flatten().tolist()) for c in server.member.unique()
    }


OPPOSITE = unit(0, 180, 5, 175, 2, 178)  # odd and even clients pull against each other


@pytest.mark.parametrize(
    "method", [CFL(), CFL(eps_mode="absolute", eps1=0.4, eps2=0.9), CFLMean()], ids=str
)
def test_opposite_groups_split_exactly(method):
    server = served(method, OPPOSITE, rounds=1)
    assert clusters(server) == {frozenset([0, 2, 4]), frozenset([1, 3, 5])}


def test_new_clusters_move_by_their_own_mean():
    server = served(CFL(), OPPOSITE, rounds=1)
    for c in server.member.unique().tolist():
        mean = OPPOSITE[server.member == c].mean(0)
        moved = server.models[c] - server.models[0]
        assert_close(moved[:2], mean, 1e-12)
        assert server.parent[c] == 0


def test_the_mean_of_a_cluster_counts_samples():
    sizes = torch.tensor([10, 20, 30])
    server = served(CFL(eps1=0.0, eps_mode="absolute"), unit(0, 90, 45), rounds=1, sizes=sizes)
    expected = (sizes[:, None] * unit(0, 90, 45)).sum(0) / 60
    start = task(CFL(), federated=federation(sizes=(20,) * 3)).problem.start
    assert_close((server.models[0] - start)[:2], expected, 1e-12)


FOUR = torch.cat([unit(0, 10, 180, 190), unit(5, 12, 183, 195)])
FOUR = torch.cat([FOUR, torch.tensor([[3.0], [3], [3], [3], [-3], [-3], [-3], [-3]])], 1)[
    torch.tensor([4, 0, 6, 2, 5, 1, 7, 3])
]  # first by the sign of the third entry, then by the angle


def test_ids_survive_the_second_split():
    method = CFLMean()
    first = served(method, FOUR.double(), rounds=1)
    assert clusters(first) == {frozenset([0, 2, 4, 6]), frozenset([1, 3, 5, 7])}
    # each half now disagrees within itself: only the angle is left
    within = FOUR.double().clone()
    within[:, 2] = 0
    on = task(method, federated=federation(sizes=(20,) * 8))
    uploads = torch.zeros(8, on.problem.model.size, dtype=torch.float64)
    uploads[:, :3] = 3 * within
    second = method.aggregate(
        first, Update(uploads, torch.full((8,), 20)), whole_round(on, index=6)
    )
    assert clusters(second) == {
        frozenset([0, 4]),
        frozenset([2, 6]),
        frozenset([1, 5]),
        frozenset([3, 7]),
    }
    assert len(second.models) == 7
    assert sorted(second.parent.tolist()) == [-1, 0, 0, 1, 1, 2, 2]


@settings(max_examples=30)
@given(st.integers(4, 9), st.integers(0, 10**6))
def test_clusters_are_always_disjoint_and_cover_everybody(n, seed):
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    method = CFL(eps_mode="absolute", eps1=1e9, eps2=0.0)  # split whenever three are left
    server = served(method, directions, rounds=9)
    parts = clusters(server)
    assert sum(map(len, parts)) == n
    assert frozenset.union(*parts) == frozenset(range(n))
    assert all(len(part) < 3 for part in parts)


@pytest.mark.parametrize(
    ("method", "directions"),
    [
        (CFL(), unit(0, 10, 20, 30)),  # all agree
        (CFLMean(), unit(0, 10, 20, 30)),
        (CFLMean(), unit(0, 20, 80, 100)),  # two groups that still pull together
        (CFLMean(), unit(0, 120, 240)),  # everybody pulls apart, nobody has an ally
        (CFL(t_min=9), OPPOSITE),  # too early
        (CFL(), OPPOSITE[:2]),  # two are not a cluster to split
        (CFL(eps2=1.1), OPPOSITE),  # at rest
        (CFL(), unit(0, 10, 100, 110)),  # the average still moves
        (CFL(eps_mode="absolute", eps1=0.4, eps2=1.6), OPPOSITE),  # public numbers, small updates
    ],
)
def test_what_does_not_split(method, directions):
    assert len(served(method, directions, rounds=1).models) == 1


def test_thresholds_are_in_units_of_the_first_round():
    for scale in (1e-4, 1.0, 1e4):
        for method in (CFL(), CFLMean()):
            assert len(served(method, scale * OPPOSITE, rounds=1).models) == 3
    server = served(CFL(t_min=99), OPPOSITE, rounds=1)
    assert server.scale == pytest.approx(1.0)


def test_t_min_is_a_fifth_of_the_run():
    method = CFL()
    assert len(served(method, OPPOSITE, rounds=1, index=1).models) == 1  # horizon 10
    assert len(served(method, OPPOSITE, rounds=1, index=2).models) == 3


# ---- who is absent ---------------------------------------------------------------------------


def test_a_cluster_waits_until_all_its_members_were_heard():
    halves = [torch.tensor([0, 1, 2]), torch.tensor([3, 4]), torch.tensor([0, 5])]
    waiting = served(CFL(), OPPOSITE, rounds=2, clients=halves)
    assert len(waiting.models) == 1
    server = served(CFL(), OPPOSITE, rounds=3, clients=halves)
    assert clusters(server) == {frozenset([0, 2, 4]), frozenset([1, 3, 5])}
    assert not server.heard.any()  # the new clusters start to listen anew


def test_only_those_who_replied_move_the_models():
    halves = [torch.tensor([0, 1, 2, 3, 4]), torch.tensor([1, 5])]
    before = served(CFL(), OPPOSITE, rounds=1, clients=halves)
    after = served(CFL(), OPPOSITE, rounds=2, clients=halves)
    evens, odds = after.member[0], after.member[1]
    assert_close(after.models[evens], before.models[0], 0)
    moved = (after.models[odds] - before.models[0])[:2]
    assert_close(moved, OPPOSITE[[1, 5]].mean(0), 1e-12)


def test_members_without_data_go_with_the_larger_part():
    method = CFL()
    on = task(method, federated=federation(sizes=(20,) * 6))
    server, _ = method.init(on.problem)
    server = server._replace(sizes=torch.tensor([20, 20, 20, 20, 20, 0]))
    uploads = torch.zeros(5, on.problem.model.size, dtype=torch.float64)
    uploads[:, :2] = unit(0, 180, 5, 3, 178)
    round = whole_round(on, 5)._replace(clients=torch.arange(5))
    server = method.aggregate(server, Update(uploads, torch.full((5,), 20)), round)
    assert clusters(server) == {frozenset([0, 2, 3, 5]), frozenset([1, 4])}


# ---- prediction and the matrix ---------------------------------------------------------------


def test_validation_chooses_on_the_way():
    method = CFL(predict_with="validation")
    assert method.traits.uses_validation
    server = served(CFL(), OPPOSITE, rounds=1)
    on = task(method, federated=federation(sizes=(20,) * 6))
    bank = method.serve(server, whole_round(on))
    assert bank.slot[0].tolist() == [int(server.member[0]), 0, -1]
    mixture = backend_of("vmap", on).predict(method, bank, (), whole_round(on), "accuracy")[1]
    for i in range(6):
        path = server.models[[int(server.member[i]), 0]]
        assert any(torch.equal(mixture.models[i, 0], w) for w in path)
