"""Whose models entered a client's: nobody else's data changes its bits, and the card names them."""

import html
import re
from dataclasses import replace

import numpy as np
import pytest

import coterie
from coterie.runs.config.loading import merge
from coterie.runs.run import Log, Roster, Run
from coterie.runs.summary import Predictors, finished
from coterie.training.rounds import train
from coterie.views import words
from coterie.views.comparison import Comparison
from coterie.views.page import page, run_page
from coterie.views.reliance import (
    collaborators,
    collaborators_of_mixture,
    provenance,
    reliance,
)
from coterie.views.site_page import site_page
from sites import FAST, write_tables
from support import METHODS, engine_of, federation, task
from synthetic import predictors, record, roster


def trained(method, federated, participation):
    """A run of a method on a federation, and the exported bits of every client."""
    algorithm = METHODS[method]()
    on, swaps = task(algorithm, federated=federated), algorithm.traits.models_change_hands
    log = Log(method, 0, "accuracy", Roster.of(federated), swaps=swaps)
    engine = engine_of("loop", on)
    for one in train(algorithm, on.problem, engine, 3, participation=participation):
        log.append(one)
    clients = zip(*one.mixture, strict=True)
    bits = [models[weights != 0].numpy().tobytes() for weights, models in clients]
    return finished(log, Predictors.of(one.mixture, None), {}, {}), bits


def with_other_data(federated, client):
    """The federation in which a client has other training samples."""
    x, own = federated.dataset.x.clone(), federated.train[client]
    x[own] = x[own].flip(0) * -0.5
    return replace(federated, dataset=replace(federated.dataset, x=x))


FULL = ("local", "fedavg", "fedfomo", "federico", "fedamp", "ifca")
SEPARATE = {("local", 1.0), ("ifca", 1.0)}


@pytest.mark.parametrize(("method", "participation"), [*((m, 1.0) for m in FULL), ("cfl", 0.6)])
def test_only_clients_that_are_named_change_the_bits_of_a_model(method, participation):
    """Clients without any weight might as well not be there."""
    sites, apart = federation(), 0
    before, bits = trained(method, sites, participation)
    after, others = trained(method, with_other_data(sites, 0), participation)
    for i in range(1, 5):
        named = any(provenance(run, i)[0][0] for run in (before, after))
        assert named or bits[i] == others[i], i
        apart += not named
    assert (apart > 0) == ((method, participation) in SEPARATE)


def weighted(*matrices, swaps=False, method="fedamp"):
    """A run with these weights in its rounds."""
    K = len(matrices[0])
    log = Log(method, 0, "accuracy", roster(K), swaps=swaps)
    for index, A in enumerate(matrices):
        log.append(record(index, np.full(K, 50.0), np.array(A))._replace(rejected=()))
    return finished(log, predictors(K), {}, {})


def test_a_weight_in_any_round_enters_and_what_entered_travels_on():
    """Client 2 takes half of 1, and then 0 takes half of 2: a quarter of 0 is from 1."""
    first = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 1]]
    second = [[0.5, 0, 0.5, 0], *np.eye(4)[1:]]
    run = weighted(first, second, np.eye(4))
    ever, parts = provenance(run, 0)
    assert ever.tolist() == [False, True, True, False]
    np.testing.assert_allclose(parts, [0.5, 0.25, 0.25, 0])
    one, other = collaborators(run, 0)
    assert (one.name, one.average, one.last, one.entered) == ("site-2", 1.0, 0.0, 0.25)
    assert (other.name, other.average, other.last, other.entered) == ("site-1", 0.0, 0.0, 0.25)
    assert collaborators(run, 3) == ()
    assert [one.entered for one in collaborators_of_mixture(run, np.array([1.0, 0, 0, 1.0]))] == [
        *(0.5, 0.25, 0.125, 0.125)
    ]
    made_of = np.array([0.25, 0.0, 0.0, 0.75])  # of more than the weights say, as with FedAMP
    found = collaborators_of_mixture(run, np.array([1.0, 0, 0, 0]), made_of)
    assert {one.name: (one.average, one.entered) for one in found} == {
        "site-0": (1.0, 0.125),
        "site-1": (0.0, 0.0625),
        "site-2": (0.0, 0.0625),
        "site-3": (0.0, 0.75),
    }


@pytest.mark.parametrize(("rounds", "said"), [(5, [1]), (3, [])])
def test_who_seldom_relied_on_anybody_is_told_of_nobody(rounds, said):
    """The only helper of client 0 in 5 or 3 of 20 rounds has all of its weight on others."""
    alone, helped = np.eye(4), np.eye(4)
    helped[0] = [0.2, 0.8, 0.0, 0.0]
    run = weighted(*[helped] * rounds, *[alone] * (20 - rounds))
    found = reliance([run])
    assert found.helpers(0) == said
    assert found.share[0, 1] == 1
    assert found.rounds[0] == rounds
    alone = weighted(*[np.eye(4)] * 20, method="local")
    compared = Comparison.of([alone, run])
    often = f"in {rounds} of 20 rounds"
    relies = f" You rely mostly on site-1 {often}."
    assert compared.client("site-0").sentence.endswith(relies) == bool(said)
    for text in (page(compared), run_page(run)):
        assert f"site-0: site-1 100 %, {often}" in text
        assert f"site-1 (100 %, {often})" in text or text != run_page(run)
    assert often in site_page(compared, "site-0")


def test_parts_are_the_product_of_all_rounds_and_name_everybody_who_has_one():
    rng = np.random.default_rng(0)
    rounds = [rng.dirichlet(np.full(6, 0.3), 6) * (rng.random((6, 6)) < 0.4) for _ in range(4)]
    run, product = weighted(*rounds), np.eye(6)
    for A in rounds:
        product = (A + np.diag(1 - A.sum(1))) @ product
    for i in range(6):
        ever, parts = provenance(run, i)
        np.testing.assert_allclose(parts, product[i], atol=1e-6)
        assert ((product[i] > 0) & (np.arange(6) != i) <= ever).all()


def test_a_model_that_changes_hands_descends_from_those_that_trained_it():
    """Client 0 uses model 1, which 1 and 2 trained; 3 trained another."""
    run = weighted(np.eye(4)[[1, 1, 1, 3]], np.eye(4)[[1, 1, 2, 3]], swaps=True)
    ever, parts = provenance(run, 0)
    assert ever.tolist() == [False, True, True, False]
    np.testing.assert_allclose(parts, [0.4, 0.4, 0.2, 0])


# ---- every output says the same ------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A comparison, the run in it, and the card of one client."""
    place = tmp_path_factory.mktemp("facts")
    asked = merge(FAST, {"data.target": "label", "data.name": str(write_tables(place / "data"))})
    made = coterie.compare(asked, methods=["fedamp"], engine="loop", out=place / "runs")
    run = Run.read(place / "runs" / "fedamp" / "seed-0")
    card = coterie.export(run.path, "cedar", place / "cedar") / "README.md"
    return made, run, card.read_text()


def cells(text, *first):
    """The rows of a page's or a card's tables that begin with these cells, without their marks."""
    rows = [re.sub(r"<[^>]*>", "|", row) for row in re.findall(r"<tr.*?</tr>", text, re.DOTALL)]
    rows += [line for line in text.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in row.split("|") if cell.strip()] for row in rows]
    return [row for row in split if row[: len(first)] == list(first)]


def test_collaborators_are_the_same_in_every_output(found):
    made, run, card = found
    at = run.roster.clients.index("cedar")
    known = collaborators(run, at)
    assert known
    assert not any(cells(card, name) for name in {*run.roster.clients} - {k.name for k in known})
    share = {one.name: words.part(one.average) for one in known}
    for one in known:
        (row,) = cells(card, one.name)
        assert row[1:] == [share[one.name], words.part(one.last), words.part(one.entered)]
    (row,) = cells(run_page(run), "cedar", str(run.roster.n_train[at]))
    often = reliance([run]).seldom(at)
    assert f"{known[0].name} ({share[known[0].name]}{f', {often}' if often else ''})" in row
    peers = [
        html.unescape(row[1])
        for row in cells(site_page(made, "cedar"))
        if row[0].startswith("peer ")
    ]
    assert peers == [*share.values(), *["0 %"] * (len(run.roster) - 1 - len(share))]
    answer = made.client("cedar")
    assert {*answer.helpers} <= {*share}
    (site,) = (one for one in made.to_dict()["sites"] if one["client"] == "cedar")
    assert site["helpers"] == list(answer.helpers)


def gain_of(answer):
    return words.number(answer.gain.gain, "accuracy", sign=True)


def test_scores_gains_and_rows_are_the_same_in_every_output(found):
    made, run, card = found
    at = run.roster.clients.index("cedar")
    score, answer = f"{run.last[at]:.1f}", made.client("cedar")
    test, train = str(run.roster.n_test[at]), str(run.roster.n_train[at])
    assert f"accuracy {score} %**" in card
    assert f"own {test} test samples" in card
    assert f"trained on {train} samples" in card
    whole, own = page(made), site_page(made, "cedar")
    (row,) = cells(whole, "cedar", train)
    low, high = (f"{end:.1f}".replace("-", "−") for end in (answer.gain.low, answer.gain.high))
    assert score in row
    assert f"{gain_of(answer)} ({low} to {high})" in row
    ((_, mine, gain, claim),) = cells(own, "FedAMP", score)
    assert (mine, claim) == (score, answer.claim)
    assert gain == f"{gain_of(answer)} ({low} to {high})"
    assert f"<dt>test rows</dt><dd>{test}</dd>" in own
    assert answer.test_rows == int(test)
    for text in (repr(answer), made.to_dict()["sites"][at]["sentence"], own, whole):
        assert answer.sentence.replace("'", "&#39;") in text.replace("\N{NO-BREAK SPACE}", " ")
    mean = f"{np.nanmean(run.last):.1f}"
    assert all(mean in text for text in (repr(made), repr(run), whole, run_page(run)))
