"""The section on who helps whom: groups are found, numbers are those of the runs, it is small."""

import base64
import json
import re

import numpy as np
import pytest

from coterie.runs.run import Log
from coterie.runs.summary import finished
from coterie.views import helping
from coterie.views.helping import discovered
from coterie.views.page import run_page
from coterie.views.reliance import Reliance, reliance
from synthetic import CLIENTS, GROUPS, grouped, predictors, record, roster, run_of


def shares(A):
    others = np.where(np.eye(len(A), dtype=bool), 0.0, A)
    return others / np.maximum(others.sum(1, keepdims=True), 1e-12)


def test_planted_groups_are_found_and_stand_together():
    found = discovered(shares(grouped(0.8)))
    pairs = found.groups[:, None] == found.groups
    assert (pairs == (GROUPS[:, None] == GROUPS)).all()
    assert (np.diff(found.groups[found.order]) >= 0).all()
    assert sorted(found.order.tolist()) == list(range(CLIENTS))


def test_pairs_inside_a_group_do_not_hide_the_group():
    A = grouped(0.95)
    for i in range(0, CLIENTS, 6):  # i and i + 3 are of one group
        A[i, i + 3] = A[i + 3, i] = 0.5
    found = discovered(shares(A))
    assert ((found.groups[:, None] == found.groups) == (GROUPS[:, None] == GROUPS)).all()


@pytest.mark.parametrize("A", [np.ones((5, 5)), np.eye(4), np.ones((2, 2)), np.ones((1, 1))])
def test_weights_that_tell_nothing_give_one_group(A):
    found = discovered(shares(A))
    assert set(found.groups.tolist()) == {0}
    assert sorted(found.order.tolist()) == list(range(len(A)))


def test_noise_gives_one_group():
    rng = np.random.default_rng(0)
    for _ in range(20):
        noise = rng.dirichlet(np.ones(20), (5, 20)).mean(0)  # of five rounds
        assert set(discovered(shares(noise)).groups.tolist()) == {0}


def test_a_link_is_as_wide_as_its_weight_and_dashed_where_it_is_not_clear():
    share = np.array([[0, 0.8, 0.2], [0.6, 0, 0.4], [0.55, 0.45, 0]])
    clear = np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0]], dtype=bool)
    relied = Reliance(share, clear, np.full(3, 5), np.full(3, 5))
    drawn = str(helping.graph(relied, roster(3), discovered(share), "graph"))
    links = re.findall(r'<path d="M([\d.]+) ([\d.]+)Q.*? ([\d.]+) ([\d.]+)Z" class="(.*?)"', drawn)
    ends = re.findall(r'data-to="(\d)" data-from="(\d)"', drawn)
    assert ends == [("0", "1"), ("1", "0"), ("2", "0")]  # 0.2, 0.4 and 0.45 are below uniform
    width = [np.hypot(float(a) - float(c), float(b) - float(d)) for a, b, c, d, _ in links]
    assert width == pytest.approx([11.0, 11.0 * 0.75, 11.0 * 0.6875], abs=0.2)
    assert [link[4] for link in links] == ["link", "link unsure", "link unsure"]


def test_the_matrix_has_names_true_groups_and_cuts_between_found_ones():
    run = run_of("fedfomo")
    relied = reliance([run])
    found = discovered(relied.share)
    drawn = str(helping.matrix(relied, run.roster, found, "matrix"))
    names = re.findall(r'data-site="(\d+)"><title>(site-\d+)', drawn)
    assert [int(i) for i, _ in names] == found.order.tolist()
    assert drawn.count('class="cut"') == 4  # two cuts, each across and down
    assert drawn.count("true group") == 6


def test_the_frames_are_the_shares_of_the_rounds():
    run = run_of("fedfomo", rounds=5)
    relied = reliance([run])
    made = helping.helping({"fedfomo": relied}, {"fedfomo": run}, 10**6)
    (card,) = made.cards
    assert json.loads(made.rounds) == [1, 2, 3, 4, 5]
    order = json.loads(card.order)
    packed = np.frombuffer(base64.b64decode(card.frames), np.uint8).reshape(7, CLIENTS, CLIENTS)
    step = card.largest / 255
    here = np.ix_(order, order)
    assert (packed[0] > 0).tolist() == relied.clear[here].tolist()
    assert np.abs(packed[1] * step - relied.share[here]).max() <= step
    last = shares(run.matrices[4])
    assert np.abs(packed[6] * step - last[here]).max() <= step
    third = np.abs(packed[4] * step - shares(run.matrices[2])[here]).max(1)
    assert third[order.index(1)] > step  # its upload was rejected in round 3
    assert np.delete(third, order.index(1)).max() <= step


@pytest.mark.parametrize(("most", "kept"), [(10**6, 20), (2_500, 4), (1_200, 1), (700, 0)])
def test_rounds_are_stored_as_far_as_there_is_room(most, kept):
    run = run_of("fedfomo", rounds=25)
    relied = dict.fromkeys("ab", reliance([run]))
    runs = dict.fromkeys(relied, run)
    made = helping.helping(relied, runs, most)
    rounds = json.loads(made.rounds)
    assert len(rounds) == kept
    assert kept < 2 or (rounds[0], rounds[-1]) == (1, 25)
    assert sum(len(card.frames) for card in made.cards) <= most


def test_the_page_of_a_run_of_many_clients_is_small():
    rng, K = np.random.default_rng(0), 450
    log = Log("fedamp", 0, "accuracy", roster(K))
    log.append(record(0, np.full(K, 50.0), rng.dirichlet(np.ones(K), K)))
    text = run_page(finished(log, predictors(K), {}, {}))
    assert "Who helps whom" in text
    assert 'data-frames=""' in text
    assert len(text.encode()) < 1_000_000
