"""pFedGraph's projection on the simplex, its graph, and the pull."""

import itertools
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.algorithms.pfedgraph import PFedGraph, Sent, graph, simplex
from coterie.core.optim import Recipe
from support import assert_close, one_client, task


def by_brute_force(v):
    """The nearest of all projections on faces of the simplex that lie inside it."""
    n, best = len(v), None
    for size in range(1, n + 1):
        for face in itertools.combinations(range(n), size):
            a = torch.zeros(n).double()
            at = list(face)
            a[at] = v[at] + (1 - v[at].sum()) / size
            if (a >= 0).all() and (best is None or (a - v).norm() < (best - v).norm()):
                best = a
    return best


@given(st.integers(1, 5).flatmap(lambda n: arrays(float, n, elements=st.floats(-9, 9))))
def test_the_projection_is_the_nearest_point_of_the_simplex(values):
    v = torch.from_numpy(values)
    found = simplex(v[None])[0]
    assert_close(found, by_brute_force(v))
    assert_close(found.sum(), torch.tensor(1.0).double())
    assert (found >= 0).all()


def test_the_graph_minimises_the_printed_objective():
    W = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).double()
    p, alpha = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), 0.8
    W[1] = 3 * W[0] + 0.01
    A = graph(W, p, alpha)
    grid = [
        torch.tensor(c).double() / 40
        for c in itertools.product(range(41), repeat=4)
        if sum(c) == 40
    ]
    for i in range(4):
        d = torch.stack([-torch.cosine_similarity(W[i], W[j], dim=0) for j in range(4)])
        d = torch.where(d < -0.9, -1.0, d)

        def objective(a, d=d):
            return float(alpha * ((a - p) ** 2).sum() + d @ a)

        least = min(map(objective, grid))
        assert objective(A[i]) <= least + 1e-9
        assert objective(A[i]) >= least - 0.01  # of a grid of 1/40
    assert_close(A[0], A[1] + (A[0] - A[1]))  # alike clients see the others alike
    assert A[0, 1] > p[1]


def test_the_pull_is_towards_the_collaborators_direction():
    plain = Recipe(lr=0.1, epochs=1, batch=50)
    method = PFedGraph(lam=1.0)
    on = task(method, recipe=plain)
    client, start = one_client(on, 0), on.problem.start
    v = torch.randn(start.shape, generator=torch.Generator().manual_seed(1)).double()
    v = v / v.norm()
    pulled, own = (
        how.local(client, Sent(start, v), ())[0].w for how in (method, replace(method, lam=0.0))
    )
    cos = [float(torch.cosine_similarity(w, v, dim=0)) for w in (pulled, own)]
    assert cos[0] > cos[1]
    gradient = (v - (start @ v) * start / (start @ start)) / start.norm()
    assert_close(pulled - own, 0.1 * gradient)
