"""An operator makes up models to read test rows from their scores; these are few and noisy."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coterie
from coterie.core import metrics, tree
from coterie.core.algorithm import round_of
from coterie.core.answers import Answers
from coterie.core.paired_tests import client_gain
from coterie.deploy import federated as sites_of
from coterie.deploy.documents import ScoresTable
from coterie.deploy.federated import federated
from coterie.deploy.holdings import Holdings
from coterie.deploy.protocol import setup_message
from coterie.deploy.scores import ToldScores, bounded, most_squares, one_row, squares
from coterie.engines.codec import Message, decode, encode, refused_by, vocabulary
from coterie.runs.alarms import raise_alarms, same_run
from coterie.runs.config.loading import merge
from coterie.runs.plan import Plan
from sites import (
    FAST,
    InProcess,
    executed,
    exported,
    handler_of,
    setting_of,
    signed,
    simulated,
    site_folders,
    write_tables,
)
from test_site_law import Attacker, edited

ROUNDS = 40
STEP = 1e6  # a slope so steep that a class follows from one comparison
ASKED = merge(FAST, {"algorithm.name": "fedavg", "run.rounds": ROUNDS})


@pytest.fixture
def folders(tmp_path):
    return site_folders(tmp_path / "fed", write_tables(tmp_path / "data"), consent=())


class Maker:
    """An operator with approvals who evaluates models of his own in the rounds of experiments."""

    def __init__(self, folders, asked=ASKED):
        self.attacker, self.asked = Attacker(folders), asked
        self.setting = setting_of(asked, InProcess({n: handler_of(f) for n, f in folders.items()}))
        self.attacker.restart()
        self.cell = Plan.single(self.setting.config, None).cells[0]
        self.begin()

    def begin(self):
        """Have the sites agree to one more experiment."""
        self.name, _, consents = self.setting.agreed(self.cell)
        self.state, self.round = consents["ash"].state, 0
        self.method = self.cell.method.build()
        self.problem = self.setting.prepare(self.method, self.setting.config).problem
        self.attacker.restart()

    def model(self, threshold):
        """Says 'ill' where the first column is above a threshold, in its own unit, else 'well'."""
        moments = self.setting._division().moments
        at = self.setting.schema.feature_names.index("a")
        mean, std = moments.mean[at], moments.std[at]
        module = self.problem.model.module
        first, last = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
        state = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
        of = {id(layer): name for name, layer in module.named_modules()}
        w, b = f"{of[id(first)]}.weight", f"{of[id(first)]}.bias"
        state[w][0, at], state[b][0] = STEP, -STEP * (threshold - mean) / std
        ill = self.setting.schema.target.classes.index("ill")
        state[f"{of[id(last)]}.weight"][ill, 0] = 1.0
        state[f"{of[id(last)]}.bias"][1 - ill] = 1e-3
        return torch.cat([state[name].flatten() for name, _ in module.named_parameters()])

    def score(self, threshold, *, last=False):
        """What the site says of a model; None if it refuses."""
        if self.round == ROUNDS or (last and self.round):
            self.begin()
        self.round = ROUNDS if last else self.round + 1
        last = self.round == ROUNDS
        server = self.method.init(self.problem)[0]
        round = round_of(self.problem, self.round, ROUNDS, torch.arange(3))
        row = tree.row(self.method.serve(server, round), 0)
        row = tree.map_leaves(lambda leaf: self.model(threshold).to(leaf), row)
        head = {"kind": "predict", "experiment": self.name, "round": self.round}
        head |= {"horizon": ROUNDS, "client": 0, "base": self.state, "last": last}
        head |= {"metric": self.setting.config.run.metric, "collect": False}
        self.sent = encode(Message(head, row))
        return self.scores(self.attacker.ask(self.sent))

    def scores(self, reply):
        if refused_by(reply) is not None:
            return None
        (scores, _) = decode(reply, vocabulary(self.method)).body
        return scores.tolist()


def bisected(maker, low, high, *, last=False):
    """Where a score changes, by halves: a value of a patient if scores are counts."""

    def asked(threshold):
        found = maker.score(threshold, last=last)
        return None if found is None else found[0]

    left = asked(low)
    while high - low > 1e-5:
        middle = (low + high) / 2
        found = asked(middle)
        if found is None:
            return None
        if np.isclose(found, left, equal_nan=True):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def values_of(folder):
    """The values of the first column in a site's test rows."""
    with Path(folder.data.name).open(newline="") as file:
        values = np.array([float(row["a"]) for row in csv.DictReader(file)])
    return values[Holdings(folder, folder.data.name, folder.data.options).parts.numpy() == 2]


@pytest.mark.parametrize("last", [False, True])
def test_no_value_of_a_test_row_is_found_by_halves(folders, last):
    """Between two models of different scores stands a patient: 18 questions gave his value."""
    found = bisected(Maker(folders), 0.0, 3.0, last=last)
    assert found is None or np.abs(values_of(folders["ash"]) - found).min() > 1e-4


def test_an_answer_is_the_same_for_ever_and_another_experiment_has_another(folders):
    folders["ash"] = edited(folders["ash"], ("noise = 2.0", "noise = 0.2"))  # far from 0 and 100 %
    maker = Maker(folders)
    first = maker.score(-9.0, last=True)
    sent = maker.sent
    assert np.isnan(first[2:]).all()
    for path in folders["ash"].experiments.glob("*/reply.bin"):
        path.unlink()
    path = Path(folders["ash"].data.name)
    path.write_text(path.read_text() + "0.1,0.2,x,ill\n")
    maker.attacker.restart()
    assert maker.scores(maker.attacker.ask(sent))[:2] == first[:2]
    others = [maker.score(-9.0, last=True)[0] for _ in range(5)]
    assert len({first[0], *others}) > 3


def test_answers_about_test_rows_come_to_an_end(folders):
    folders["ash"] = edited(folders["ash"], ("most = 100 ", "most = 2 "))
    maker = Maker(folders)
    assert maker.score(0.3, last=True) is not None
    assert maker.score(0.4, last=True) is not None
    with pytest.raises(
        coterie.EngineError, match=r"0 of 2 answers about test rows may still leave"
    ):
        maker.begin()


def test_an_experiment_is_continued_after_the_last_answer(folders):
    """Its own answer is written down; a resumed run asks the sites to agree again."""
    folders["ash"] = edited(folders["ash"], ("most = 100 ", "most = 1 "))
    maker = Maker(folders)
    first, sent, name = maker.score(0.3, last=True), maker.sent, maker.name
    nonce = maker.setting._nonces[maker.cell.name]
    assert maker.setting.agreed(maker.cell, nonce)[0] == name
    maker.attacker.restart()
    assert maker.scores(maker.attacker.ask(sent))[:2] == first[:2]


def test_gains_tell_no_more_than_noisy_scores(folders):
    """Wins and losses of two models of the operator's choice were exact counts too."""
    maker = Maker(folders)
    names, told = [], []
    for threshold in (-9.0, 0.3):
        told.append(maker.score(threshold, last=True)[0])
        names.append(maker.name)
    asked = {"metric": "accuracy", "pairs": [names]}
    answer = maker.attacker.ask(setup_message("judge", asked))
    found = json.loads(bytes(decode(answer, {}).body[0].numpy()))
    assert found["each"][0]["counts"] is None
    assert found["each"][0]["gain"] == pytest.approx(told[0] - told[1])
    maker.attacker.restart()
    assert maker.attacker.ask(setup_message("judge", asked)) == answer


def test_a_metric_that_one_row_decides_needs_a_consent(folders):
    for metric in ("f1", "log_loss"):
        with pytest.raises(coterie.EngineError, match=r"a single row may decide a score"):
            Maker(folders, merge(ASKED, {"run.metric": metric}))


def test_numbers_are_judged_by_a_metric_that_no_row_decides(tmp_path):
    draws = np.random.default_rng(0)
    for path in write_tables(tmp_path / "data").glob("*.csv"):
        head, *lines = path.read_text().splitlines()
        told = [f"{line.rpartition(',')[0]},{draws.normal():.3f}" for line in lines]
        path.write_text("\n".join([head, *told]) + "\n")
    made = site_folders(tmp_path / "fed", tmp_path / "data", consent=())
    made = {n: edited(one, ('label = "named"\n', "")) for n, one in made.items()}
    handlers = {name: handler_of(folder) for name, folder in made.items()}
    run = executed(setting_of(merge(FAST, {"algorithm.name": "fedavg"}), InProcess(handlers)))
    assert run.metric == "mae"
    assert np.isfinite(run.last).all()
    assert np.isnan(run.val).all()


BOUNDED = [name for name, row in metrics.METRICS.items() if row.one_row is not None]


@pytest.mark.parametrize("metric", BOUNDED)
@given(st.integers(0, 10**6))
def test_no_patient_changes_a_score_by_more_than_noise_is_measured_in(metric, seed):
    """Whatever the other rows are: also where all of them are wrong, or have one class."""
    draws = np.random.default_rng(seed)
    n, deviation = int(draws.integers(1, 30)), 1.5
    units = draws.integers(0, max(1, n // 2), n)
    y = draws.integers(0, 3 if metric == "balanced_accuracy" else 2, n)
    classes = draws.integers(-1, 2, n)
    values = {"errors": draws.standard_normal(n) * 10.0 ** draws.integers(-3, 9)}.get(
        metrics.METRICS[metric].one_row, classes
    )
    if metric == "share_weighted_accuracy":  # as for a client with equal shares of its classes
        weights = 1.0 / np.bincount(y)[y]
        values = np.where(classes == y, weights, -weights)
    if metric == "auc":
        values = draws.random((n, 2)).round(1)
    if metric == "mae":
        y = draws.standard_normal(n)
        values[draws.random(n) < 0.2] = draws.choice([np.nan, np.inf])
    other = values.copy()
    whose = units == units[0]
    other[whose] = -other[whose] if metric == "share_weighted_accuracy" else 0.0
    told = [bounded(metric, Answers(one, y, units), deviation) for one in (values, other)]
    a, b = (metrics.score(metric, one.values, one.targets) for one in told)
    most = one_row(metric, y, units, deviation)
    assert (np.isnan(a) and np.isnan(b)) or abs(a - b) <= most * (1 + 1e-9)


@pytest.mark.parametrize("metric", BOUNDED)
@given(st.integers(0, 10**6))
def test_no_patient_changes_a_variance_by_more_than_noise_is_measured_in(metric, seed):
    draws = np.random.default_rng(seed)
    units = np.repeat(np.arange(30), draws.integers(1, draws.choice([2, 5]), 30))
    n, deviation = len(units), 1.5
    y = draws.permutation(np.arange(n) % 2)

    def said():
        """The answers of a model that is always wrong, always right, or sometimes."""
        right = draws.random(n) < draws.choice([0.0, 0.1, 0.5, 1.0])
        if metric == "mae":
            return np.where(right, y, y + 1e9)
        if metric == "auc":
            return np.eye(2)[np.where(right, y, 1 - y)]
        if metric == "share_weighted_accuracy":
            return np.where(right, 1.0, -1.0) / np.bincount(y)[y]
        return np.where(right, y, 1 - y)

    def found(pair):
        answers = [bounded(metric, Answers(one, y, units), deviation) for one in pair]
        return squares(client_gain(metric, [tuple(answers)]))

    a, b = said(), said()
    whose = units == draws.integers(30)
    other = [one.copy() for one in (a, b)]
    for one in other:
        one[whose] = said()[whose]
    most = most_squares(units) * one_row(metric, y, units, deviation) ** 2
    assert abs(found((a, b)) - found(other)) <= most * (1 + 1e-9)


def test_no_deviation_of_the_operators_tells_where_a_target_stands(tmp_path):
    """By a tiny one a target far from the operator's mean became infinite, and so its error."""
    told = ToldScores(tmp_path / "scores.json", ScoresTable())
    for at, spread in enumerate((1e-39, 1e-9, 1.0)):
        y = (np.array([3.1, 4.9, 5.2]) - 4.0) / spread
        with np.errstate(over="ignore"):
            y = y.astype(np.float32).astype(np.float64) * spread + 4.0
        answers = Answers(np.full(3, 4.0), y, np.arange(3))
        val = np.nan, y[:0], np.arange(0)
        found = told.score(str(at), "mae", answers, val, spread)[0]
        assert 0 <= found < 20 * spread


def test_noise_is_of_the_size_that_the_owner_wrote(tmp_path):
    draws = np.random.default_rng(0)
    y, said = draws.integers(0, 2, (2, 100))
    answers = Answers(said, y, np.arange(100))
    told = ToldScores(tmp_path / "scores.json", ScoresTable(noise=3.0, most=400))
    val = 50.0, y[:50], np.arange(50)
    exact = metrics.score("accuracy", said, y)
    found = [told.score(str(at), "accuracy", answers, val, 0.0)[:2] for at in range(400)]
    test, held = np.transpose(found) - [[exact], [50.0]]
    assert test.std() == pytest.approx(3.0, rel=0.15)
    assert held.std() == pytest.approx(6.0, rel=0.15)
    assert abs(test.mean()) < 0.6
    assert told.left == 0


def test_a_comparison_has_its_verdict_from_what_sites_tell(folders, tmp_path, monkeypatch):
    def connect(config, _):
        handlers = {name: handler_of(folder) for name, folder in folders.items()}
        return federated(config, signed(InProcess(handlers)), "in_process", "fed")

    monkeypatch.setattr(sites_of, "federation_of", connect)
    asked = merge(FAST, {"run.methods": ["local", "fedavg", "ditto"], "run.seeds": 2})
    found = coterie.compare(asked, federation="fed", out=tmp_path / "out")
    assert found.runs
    here = simulated(
        exported(folders, tmp_path / "exported"), merge(FAST, {"algorithm.name": "ditto"})
    )
    (there,) = (r for r in found.runs if r.method == "ditto" and r.seed == here.seed)
    assert there.summary["digest"] == here.summary["digest"]
    assert np.isfinite([run.last for run in found.runs]).all()
    assert found.judgements["ditto"].these_sites is not None
    assert found.choice.on == "validation"
    told = json.loads((folders["ash"].path / "division" / "scores.json").read_text())
    assert sum(one["answers"] for one in told.values()) == 6 + 2 * 3


def test_sites_that_tell_no_losses_raise_no_alarm(folders):
    """A loss that is no number is that of a model that diverged, or one that was not told."""
    handlers = {name: handler_of(folder) for name, folder in folders.items()}
    run = executed(setting_of(merge(FAST, {"algorithm.name": "fedavg"}), InProcess(handlers)))
    assert np.isnan(run.test_loss).all()
    assert not [alarm for alarm in raise_alarms(run, {}) if alarm.code == "diverged"]
    assert not same_run(run, run)


def test_the_size_of_the_noise_does_not_tell_the_rows_of_a_class_or_of_a_patient():
    def size(positive, of_one):
        units = np.maximum(np.arange(60) - of_one + 1, 0)
        return one_row("auc", (np.arange(60) < positive).astype(int), units, 0.0)

    assert size(9, 1) == size(15, 1)
    assert size(9, 3) == size(9, 4)
    assert size(9, 1) < size(7, 1)
