"""Attacks: what liars send, whom they hurt, and that without liars nothing changes."""

import json
from typing import NamedTuple

import pytest
import torch

from coterie.algorithms.fedavg import Update
from coterie.api import compare, configure
from coterie.attacking.attacks import (
    ATTACKS,
    BELOW,
    CHANGES,
    TARGET,
    changed,
    flipped,
    of_method,
    with_door,
)
from coterie.attacking.robustness import (
    ROWS,
    MultiKrum,
    Threat,
    TrimmedMean,
    _Rows,
    _rows,
    attack,
    attackers,
)
from coterie.errors import ConfigError, StoreError
from coterie.runs.assemble import assemble

SMALL = {"methods": ["fedavg"], "rounds": 2, "seeds": 1, "set": {"partition.clients": 6}}


class Sent(NamedTuple):
    w: torch.Tensor
    losses: torch.Tensor
    size: torch.Tensor


def uploads(m=6, differences=False):
    drawn = torch.Generator().manual_seed(0)
    start = 5 + torch.randn(m, 9, generator=drawn)
    step = 0.1 * torch.randn(m, 9, generator=drawn)
    w = step if differences else start + step
    return start, step, Sent(w, torch.rand(m, 1), torch.arange(m, dtype=torch.float32))


BAD = torch.tensor([True, False, False, True, False, False])


@pytest.mark.parametrize("differences", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_only_attackers_vectors_change_and_by_their_formula(name, differences):
    start, step, sent = uploads(differences=differences)
    found = changed(sent, start[:, None].flatten(1), BAD, CHANGES[name], seed=1)
    assert torch.equal(found.size, sent.size)
    assert torch.equal(found.losses, sent.losses)
    assert torch.equal(found.w[~BAD], sent.w[~BAD])
    base = torch.zeros_like(start) if differences else start
    got, honest = (found.w - base)[BAD], step[~BAD]
    mean, spread = honest.mean(0), honest.std(0, correction=0)
    longest = BELOW * honest.norm(dim=1).median()
    exact = {
        "sign": -step[BAD],
        "sign3": -3 * step[BAD],
        "outlier": 100 * step[BAD],
        "alie": (mean - 1.5 * spread).expand(2, -1),
        "inner": (-2 * mean).expand(2, -1),
        "free": torch.zeros(2, 9),
        "push": -step[BAD] / step[BAD].norm(dim=1, keepdim=True) * longest,
    }
    if name in exact:
        assert torch.allclose(got, exact[name], atol=1e-5)
    elif name == "nan":
        assert found.w[BAD].isnan().all()
    elif name == "mimic":
        assert torch.equal(found.w[BAD], sent.w[~BAD][:1].expand(2, -1))
    elif name == "hug":
        halves = base[~BAD] + honest / 2
        assert all((row - halves).norm(dim=1).min() < 1e-5 for row in found.w[BAD])
    else:  # noise of a stated length
        wanted = longest.expand(2) if name == "ruler" else step[BAD].norm(dim=1)
        assert torch.allclose(got.norm(dim=1), wanted, rtol=1e-3)


def test_without_liars_or_without_honest_clients_uploads_stay():
    start, _, sent = uploads()
    for bad in (torch.zeros(6, dtype=torch.bool), torch.ones(6, dtype=torch.bool)):
        assert changed(sent, start, bad, CHANGES["nan"], 0) is sent


@pytest.fixture(scope="module")
def federation():
    inner = assemble(configure(None, **SMALL))
    method = inner.config.methods()[1]
    asked = inner.config.single(method, 0)
    return inner, inner.prepare(method.build(), asked)


def test_flipped_labels_are_those_of_attackers_alone_and_turned_twice_they_are_as_before(
    federation,
):
    _, on = federation
    once = flipped(on.shards, frozenset({1}), on.problem.classes)
    read = once.relabel[1][torch.arange(on.problem.classes)]
    before = on.shards.relabel[1] if on.shards.relabel.shape[1] else torch.arange(10)
    assert torch.equal(read, on.problem.classes - 1 - before)
    twice = flipped(once, frozenset({1}), on.problem.classes)
    assert torch.equal(twice.relabel[1], before)
    assert torch.equal(once.relabel[0], twice.relabel[0])


def test_a_backdoor_shows_its_trigger_in_a_share_of_the_attackers_samples(federation):
    _, on = federation
    made = with_door(on.shards, frozenset({2}), 0.5)
    old, new = (s.splits["train"] for s in (on.shards, made))
    assert old.sizes == new.sizes
    for client in (0, 1):
        assert torch.equal(old.of(client), new.of(client))
    fresh = new.of(2)[new.of(2) >= len(on.shards.y)]
    assert len(fresh) == round(0.5 * old.sizes[2])
    assert (made.x[fresh][..., -2:, -2:] == on.shards.x.max()).all()
    assert (made.y[fresh] == TARGET).all()
    assert made.literal == len(on.shards.y)  # no client reads the trigger's class as another


@pytest.fixture(scope="module")
def attacked(federation):
    """The rows of FedAvg's runs under an attack, after those of runs without attackers."""
    inner, _ = federation
    done = _Rows(inner.config)

    def rows(*threat):
        return {row.method: row for row in _rows(inner, Threat(*threat), done, ())}

    return rows, rows("A0", 0.0, False), inner.config.run.rounds


def test_without_attackers_a_run_is_that_of_compare(attacked):
    rows = attacked[1]
    found = compare(None, **SMALL)
    for label in ("local", "fedavg"):
        (run,) = [run for run in found.runs if run.method == label]
        assert rows[label].mean == pytest.approx(run.last.mean())


def test_what_is_not_finite_is_refused_and_nobody_else_is(attacked):
    rows, _, rounds = attacked
    row = rows("A9", 0.34, False)["fedavg"]
    assert len(attackers(6, 0.34, 0)) == 2
    assert (row.rejected, row.refused) == (2 * rounds, 0)


def test_a_guard_refuses_outliers_and_without_it_they_are_taken(attacked):
    rows, _, rounds = attacked
    plain, guarded = (rows("A3x100", 0.34, guarded)["fedavg"] for guarded in (False, True))
    assert [plain.rejected, guarded.rejected] == [0, 2 * rounds]
    assert guarded.mean > plain.mean


def loop_trimmed(w, out):
    return torch.stack(
        [torch.tensor(sorted(column.tolist())[out : len(column) - out]).mean() for column in w.T]
    )


def loop_krum(w, out):
    m = len(w)
    apart = {
        i: sorted(float((w[i] - w[j]).square().sum()) for j in range(m) if j != i) for i in range(m)
    }
    scores = {i: sum(found[: m - out - 2]) for i, found in apart.items()}
    kept = sorted(scores, key=scores.get)[: m - out]
    return torch.stack([w[i] for i in kept]).mean(0)


@pytest.mark.parametrize("m", [4, 7, 10])
def test_the_robust_averages_equal_slow_loops(m):
    w = torch.randn(m, 5, generator=torch.Generator().manual_seed(m))
    sent = Update(w, torch.ones(m))
    for method, loop in ((TrimmedMean(), loop_trimmed), (MultiKrum(), loop_krum)):
        found = method.aggregate(torch.zeros(5), sent, None)
        assert torch.allclose(found, loop(w, int(0.2 * m)), atol=1e-5)


def test_rows_are_kept_and_not_run_again_and_honest_numbers_are_honest_clients(tmp_path):
    given = {**SMALL, "methods": ["fedfomo"], "out": tmp_path}
    seen = []
    first = attack(None, ["A7"], [0.34], progress=seen.append, **given)
    assert {(row.method, row.attack) for row in first.rows} >= {
        ("fedfomo", "A7"),
        ("fedavg@multi_krum", "A7"),
        ("local", "A0"),
    }
    assert all((row.backdoor is None) == (row.attack != "A7") for row in first.rows)
    weights = [row.on_attackers for row in first.rows if row.method == "fedfomo" and row.share]
    assert all(0 <= weight <= 100 for weight in weights)
    count = len(seen)
    again = attack(None, ["A7"], [0.34], progress=seen.append, **given)
    assert again.rows == first.rows
    assert len(seen) == count
    assert "2 of 6 clients attack" in str(again)
    (tmp_path / ROWS).write_text(json.dumps({"rows": [{"method": 1}], "alone": {}}))
    with pytest.raises(StoreError, match="holds no rows"):
        attack(None, ["A2"], **given)


def test_wrong_names_and_shares_are_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="there is no 'A77'; did you mean 'A7'"):
        attack(None, ["A77"], **SMALL)
    with pytest.raises(ConfigError, match="expected shares between 0 and 1"):
        attack(None, ["A1"], [1.0], **SMALL)


def test_every_attack_has_a_form_for_every_method():
    for name, method in ((a, m) for a in ATTACKS for m in ("fedfomo@5", "waffle", "own")):
        form = of_method(name, method)
        assert form in {*CHANGES, "none", "flip", "door", "bait"}
    assert of_method("A10", "fedamp@own") == "hug"
    assert of_method("A10", "federico") == "push"
