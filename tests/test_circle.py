"""Circle: exact groups from noisy moves, FedAvg where all are alike, and nothing from strangers."""

import csv
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import binom, norm

from coterie.algorithms import agreement
from coterie.algorithms.agreement import circles
from coterie.algorithms.circle import Circle, Up
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.lgfedavg import parts
from coterie.algorithms.local import Local
from coterie.core.optim import Recipe
from coterie.core.tree import count_bytes
from coterie.data.federation import Federation
from support import (
    assert_close,
    backend_of,
    federation,
    images,
    last,
    one_client,
    predictors,
    task,
    whole_round,
)

WHOLE = Recipe(lr=0.1, batch=200)  # every batch has all samples of a client


def moves(groups, noise=0.3, width=60, seed=0):
    """Moves of clients in groups of one direction each, of unlike lengths, and their noise v."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(max(groups) + 1, width, generator=generator).double()
    length = 0.2 + 5 * torch.rand(len(groups), 1, generator=generator).double()
    chance = noise * torch.randn(len(groups), width, generator=generator).double()
    D = length * (centre[list(groups)] + chance)
    return D, noise**2 * width * length.squeeze(1) ** 2


def same(groups):
    group = torch.tensor(groups)
    return group == group[:, None]


def slow_circles(D, v):
    """The clustering as its formulae are printed, over lists of members."""
    size = (D**2).sum(1)
    signal = torch.maximum(size - v, size / 4)
    x, noise = D / signal.sqrt()[:, None], torch.minimum(v, size) / signal
    clusters = [((i,), x[i], float(noise[i])) for i in range(len(D))]

    def tried(one, other):
        (S, M, V), (T, N, W) = one, other
        s, t = len(S), len(T)
        delta = max(0.0, float(((M - N) ** 2).sum()) - V - W)
        both = (s**2 * V + t**2 * W) / (s + t) ** 2
        gain = s * V + t * W - (s + t) * both - s * t / (s + t) * delta
        merged = (S + T, (s * M + t * N) / (s + t), both)
        return (float(M @ N / M.norm() / N.norm()) if gain > 0 else -2.0), merged, one, other

    while len(clusters) > 1:
        cosine, merged, *gone = max(
            itertools.starmap(tried, itertools.combinations(clusters, 2)), key=lambda one: one[0]
        )
        if cosine == -2.0:
            break
        clusters = [one for one in clusters if not any(one is old for old in gone)] + [merged]
    found = torch.zeros(len(D), len(D), dtype=torch.bool)
    for members, *_ in clusters:
        found[torch.tensor(members)[:, None], torch.tensor(members)] = True
    return found


@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0, 4.0])
def test_circles_are_those_of_the_printed_formulae(noise):
    for seed in range(4):
        D, v = moves((0, 1, 2, 0, 1, 2, 0, 3, 0, 1), noise, seed=seed)
        assert torch.equal(circles(D @ D.T, v), slow_circles(D, v))


def test_separated_groups_are_found_exactly_in_any_order():
    groups = (0, 1, 0, 2, 1, 0, 3, 0, 2, 1)
    D, v = moves(groups, noise=1.0)
    assert torch.equal(circles(D @ D.T, v), same(groups))
    order = torch.randperm(len(D), generator=torch.Generator().manual_seed(1))
    found = circles(D[order] @ D[order].T, v[order])
    assert torch.equal(found, same(groups)[order][:, order])


def test_many_clients_are_merged_in_blocks_first(monkeypatch):
    groups = tuple(i % 4 for i in range(23))
    D, v = moves(groups, noise=0.7)
    monkeypatch.setattr(agreement, "BLOCK", 5)
    assert torch.equal(circles(D @ D.T, v), same(groups))


def test_a_false_noise_or_a_huge_move_leaves_the_others_circles_as_they_are():
    groups = (0, 0, 0, 1, 1, 2)
    D, v = moves(groups, noise=0.5)
    for factor, false in itertools.product((1.0, 1e6), (0.0, float(v[5]), 1e30)):
        stretched, lied = D.clone(), v.clone()
        stretched[5], lied[5] = factor * D[5], false
        assert torch.equal(circles(stretched @ stretched.T, lied)[:5, :5], same(groups)[:5, :5])
    lied[5] = 2 * (stretched[5] ** 2).sum()  # what the length allows, and more, is one
    most = lied.clone()
    most[5] = (stretched[5] ** 2).sum()
    products = stretched @ stretched.T
    assert torch.equal(circles(products, lied), circles(products, most))


def test_without_clients_and_without_moves_there_are_no_circles():
    assert circles(torch.zeros(0, 0), torch.zeros(0)).shape == (0, 0)
    assert torch.equal(circles(torch.zeros(3, 3), torch.zeros(3)), torch.eye(3).bool())


# ---- the method ----------------------------------------------------------------------------------


def alike(clients, labels=1, samples=60, *, test=10, by_class=False):
    """Clients that hold samples of one kind, with ``labels`` ways to read the classes."""
    data = images(clients * (samples + 10 + test))
    order = data.y.argsort(stable=True) if by_class else torch.arange(len(data.y))
    cuts = [part.split([samples, 10, test]) for part in order.split(samples + 10 + test)]
    group = torch.arange(clients) % labels
    relabel = torch.stack([torch.arange(3).roll(int(g)) for g in group])
    names = tuple(f"site {i}" for i in range(clients))
    splits = (tuple(cut[i] for cut in cuts) for i in range(3))
    return Federation(data, "alike", names, *splits, groups=group, relabel=relabel)


def test_clients_that_are_alike_are_one_circle_with_fedavg_s_model():
    on = task(Circle(), federated=alike(5), recipe=WHOLE)
    found = last(Circle(), on, rounds=3, participation=1.0)
    usual = last(FedAvg(), on, participation=1.0)
    assert found.server.circle.all()
    assert_close(predictors(found).models[:, 0], predictors(usual).models[:, 0], 1e-10)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_groups_that_contradict_each_other_are_circles_and_give_each_other_nothing(participation):
    federated = alike(8, labels=2)
    on = task(Circle(), federated=federated)
    record = last(Circle(), on, rounds=8, participation=participation)
    assert torch.equal(record.server.circle, same(federated.groups.tolist()))
    applied = record.server.applied.dense()
    assert (applied[~record.server.circle] == 0).all()


def test_tiny_clients_and_clients_of_one_class_end_with_finite_models():
    federated = federation((2, 1, 3, 2, 40))
    record = last(Circle(), task(Circle(), federated=federated), rounds=4)
    assert predictors(record).models.isfinite().all()
    assert predictors(record).weights.sum(1).sub(1).abs().max() < 1e-9


def test_an_upload_that_is_not_finite_or_outsized_counts_as_absent():
    method, on = Circle(), task(Circle())
    backend, round = backend_of("loop", on), whole_round(on, 0)
    server, states = method.init(on.problem)
    received = method.download(server, round)
    up, _ = backend.local(method, received, states, round)
    fine = method.aggregate(
        server, Up(*(leaf[:4] for leaf in up)), round._replace(clients=round.clients[:4])
    )
    for leaf, harm in itertools.product(range(3), (torch.nan, torch.inf, 20.0)):
        if (leaf, harm) == (2, 20.0):  # a finite v counts at most as a move that is all noise
            continue
        spoilt = Up(*(one.clone() for one in up))
        spoilt[leaf][4] *= harm
        found = method.aggregate(server, spoilt, round)
        assert_close(method.serve(found, round)[:4], method.serve(fine, round)[:4], 0)


def test_rounds_without_evidence_cost_as_much_as_fedavg():
    method, on = Circle(every=5), task(Circle())
    server, _ = method.init(on.problem)
    usual = count_bytes(FedAvg().download(on.problem.start, whole_round(on, 1)))
    assert count_bytes(method.download(server, whole_round(on, 1))) == usual
    assert count_bytes(method.download(server, whole_round(on, 5))) == 2 * usual


def kinds():
    """Federations in which joining helps, harms or changes nothing; 60 of 100 samples test."""
    sizes = {"few rows": 12, "many rows": 40}
    for rows, samples in sizes.items():
        for name, readings in (("alike", 1), ("two groups", 2), ("each its own way", 6)):
            yield pytest.param(alike(6, readings, samples, test=60), id=f"{name}, {rows}")
    yield pytest.param(alike(2, 2, test=60), id="two who contradict each other")
    stranger = alike(7, test=60)
    relabel = stranger.relabel.clone()
    relabel[6] = relabel[6].roll(1)
    yield pytest.param(replace(stranger, relabel=relabel), id="a stranger")
    yield pytest.param(alike(6, test=60, by_class=True), id="one class each")


def worse(found, alone):
    """How many clients are below ``alone`` by an exact test of their own samples, at 2.5 %."""
    right = [
        [torch.as_tensor(client.values == client.targets) for client in record.outcomes.clients()]
        for record in (found, alone)
    ]
    lost = [(int((~a & b).sum()), int((a != b).sum())) for a, b in zip(*right, strict=True)]
    return sum(n > 0 and binom.sf(down - 1, n, 0.5) < 0.025 for down, n in lost)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("federated", [*kinds()])
def test_no_more_clients_end_below_training_alone_than_chance_puts_there(federated, merge):
    """With data for validation, and with all data in training, where the halves decide."""
    found, alone = (
        last(method, task(method, federated=federated, merge=merge), rounds=10, participation=1.0)
        for method in (Circle(), Local())
    )
    assert worse(found, alone) <= binom.ppf(0.999, len(federated), 0.025)


def test_in_the_first_half_all_start_from_common_lower_layers_and_later_from_their_circle_s():
    still = replace(WHOLE, lr=0.0)
    method, on = Circle(), task(Circle(), federated=alike(6, labels=3), recipe=still)
    server, states = method.init(on.problem)
    w = torch.randn(server.w.shape, generator=torch.Generator().manual_seed(0)).double()
    apart = server._replace(w=w, last=torch.zeros_like(server.last), circle=torch.eye(6).bool())
    body = parts(on.problem.model, 1)
    for index, lower in ((4, w.mean(0).expand_as(w)), (5, w)):  # of ten rounds
        round = whole_round(on, index)
        up, _ = backend_of("loop", on).local(method, method.download(apart, round), states, round)
        assert_close(up.w[:, body.upper], w[:, body.upper], 0)
        assert_close(up.w[:, body.lower], lower[:, body.lower])


def test_in_the_second_half_each_client_also_goes_on_alone_and_averages_its_own_models():
    method, on = Circle(), task(Circle(), federated=alike(4))
    server, states = method.init(on.problem)
    backend, seen = backend_of("loop", on), []
    for index in (0, 5, 6):
        round, before = whole_round(on, index), states
        received = method.download(server, round)
        up, states = backend.local(method, received, states, round)
        server = method.aggregate(server, up, round)
        seen = [*seen, up.w] if index else []
        assert_close(states.w, torch.stack(seen or [up.w]).mean(0))  # of the second half alone
        if index == 0:
            assert torch.equal(states.p, up.w)
        for i in range(4 if index else 0):
            assert_close(states.p[i], one_client(on, i, index).train(before.p[i]))
    up, joined = backend.local(
        method, method.download(server, round), method.init(on.problem)[1], round
    )
    assert torch.equal(joined.p, up.w)  # a client that joins late has stood nowhere


def test_in_the_arena_no_more_clients_are_below_their_own_local_than_chance_puts_there():
    page = Path(__file__).parents[1] / "docs" / "results" / "arena.csv"
    rows = csv.DictReader(page.read_text("utf-8").splitlines())
    mine = [row for row in rows if row["method"] == "circle"]
    clients = sum(int(row["clients"]) for row in mine)
    beyond = norm.sf(2)  # two standard errors on one side
    assert sum(int(row["worse"]) for row in mine) <= binom.ppf(0.99, clients, beyond)


def test_halves_are_disjoint_and_hold_every_sample():
    on = task(Circle())
    for i, size in enumerate(on.problem.sizes.tolist()):
        client = one_client(on, i)
        one, two = (half._view.train for half in client.halves())
        kept = torch.cat([half.samples[: int(half.size)] for half in (one, two)])
        assert sorted(kept.tolist()) == sorted(client._view.train.samples[:size].tolist())
