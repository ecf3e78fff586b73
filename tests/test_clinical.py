"""Calibration, sensitivity at a chosen specificity, and results by subgroup."""

import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import scipy.stats
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, roc_curve

import coterie
from coterie.core.answers import Answers
from coterie.data.datasets import load
from coterie.engines.evaluation import FEW_CLASSES
from coterie.errors import ConfigError, DataError, StoreError
from coterie.exporting.calibration import cooled, recalibrated
from coterie.runs.run import JudgedRows, Run
from coterie.runs.run_folder import PREDICTIONS
from coterie.views import clinical as formulas
from coterie.views.clinical import (
    FEWEST,
    ClinicalChoice,
    clinical_run,
    scarce_class,
    site_clinical,
)
from coterie.views.clinical_page import clinical_view
from coterie.views.page import page, run_page
from coterie.views.site_page import site_page


def predicted(seed: int, n: int = 300, places: int = 2):
    """Probabilities with ties, and outcomes that are roughly as probable."""
    rng = np.random.default_rng(seed)
    p = rng.beta(1.5, 2.5, n).round(places)
    return p, rng.random(n) < p


# ---- the formulas --------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "bins"), [(300, formulas.BINS), (60, formulas.FEW_BINS)])
def test_calibration_is_scikit_learns(n, bins, monkeypatch):
    monkeypatch.setattr(formulas, "FEWEST", 1)  # no bin is merged
    p, truth = predicted(1, n, places=3)
    p = np.where(np.isclose(p * bins % 1, 0), p + 0.001, p)  # no probability on an edge of a bin
    found = formulas.calibration(p, truth)
    observed, mean = calibration_curve(truth, p, n_bins=bins)
    assert [part.observed for part in found.bins] == pytest.approx(observed.tolist())
    assert [part.predicted for part in found.bins] == pytest.approx(mean.tolist())
    assert found.brier == pytest.approx(brier_score_loss(truth, p))
    assert sum(part.rows for part in found.bins) == n
    slow = 0.0
    for k in range(bins):
        inside = (p >= k / bins) & (p < (k + 1) / bins)
        if inside.any():
            slow += inside.sum() / n * abs(p[inside].mean() - truth[inside].mean())
    assert found.error == pytest.approx(slow)


def test_a_bin_of_few_rows_is_merged_and_moves_no_error():
    """Two rows of probability 0.95 that both have the outcome are no point at 1.0."""
    p = np.array([0.1] * 30 + [0.7] * 12 + [0.95] * 2)
    truth = np.array(([0] * 9 + [1]) * 3 + [1, 0] * 6 + [1, 1]) > 0
    found = formulas.calibration(p, truth)
    assert [part.rows for part in found.bins] == [30, 14]
    assert found.bins[1].observed == pytest.approx(8 / 14)
    assert found.error == pytest.approx((12 * 0.2 + 2 * 0.05) / 44)


def test_the_calibration_slope_is_that_of_a_logistic_regression():
    p, truth = predicted(3, 300)
    found = formulas.slope(p, truth)
    fit = LogisticRegression(C=1e9, tol=1e-9).fit(scipy.special.logit(p)[:, None], truth)
    assert found == pytest.approx(float(fit.coef_[0, 0]), rel=1e-3)
    tilted = scipy.special.expit(2 * scipy.special.logit(p))  # twice as sure of everything
    assert formulas.slope(tilted, truth) == pytest.approx(found / 2, rel=1e-6)
    assert math.isnan(formulas.slope(np.array([0.1, 0.2, 0.8]), np.array([False, False, True])))


def test_a_probability_of_one_is_in_the_last_bin():
    p, truth = np.repeat([0.97, 1.0], 20), np.arange(40) % 2 == 0
    (only,) = formulas.calibration(p, truth).bins
    assert (only.rows, only.observed) == (40, 0.5)


@pytest.mark.parametrize("specificity", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("seed", range(4))
def test_sensitivity_is_the_best_point_of_the_roc_curve(seed, specificity):
    p, truth = predicted(seed, 120)
    found = formulas.sensitivity(p, truth, np.arange(120), specificity)
    false, hits, _ = roc_curve(truth, p, drop_intermediate=False)
    assert found.found.value == pytest.approx(hits[false <= 1 - specificity + 1e-12].max())
    alarm = p >= found.threshold
    assert alarm[truth].mean() == pytest.approx(found.found.value)
    assert 1 - alarm[~truth].mean() >= specificity - 1e-12


def test_a_threshold_of_validation_samples_is_judged_on_test_samples():
    p, truth = predicted(5, 200)
    own, has = predicted(6, 80)
    found = formulas.sensitivity(p, truth, np.arange(200), 0.8, (own, has))
    there = formulas.sensitivity(own, has, np.arange(80), 0.8)
    assert found.threshold == there.threshold
    assert found.found.value == pytest.approx((p[truth] >= found.threshold).mean())
    assert found.specificity.value == pytest.approx((p[~truth] < found.threshold).mean())
    assert found.specificity.low < found.specificity.value < found.specificity.high
    again = formulas.sensitivity(p, truth, np.arange(200), 0.8, (own, np.zeros(80, bool)))
    assert again == formulas.sensitivity(p, truth, np.arange(200), 0.8)  # of one kind: no choice


def test_a_temperature_is_found_and_changes_no_class():
    """Squared odds are twice too sure: the temperature is 2, and the log loss falls."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet((1.0, 1.0, 1.0), 4000)
    y = (rng.random(4000)[:, None] > p.cumsum(1)).sum(1)
    sure = p**2 / (p**2).sum(1, keepdims=True)
    parts = [Answers(sure[at], y[at], np.arange(2000)) for at in (slice(2000), slice(2000, None))]
    found = recalibrated(*parts)
    assert found.temperature == pytest.approx(2.0, rel=0.1)
    assert found.after < found.before
    cool = cooled(parts[1], found.temperature).values
    assert (cool.argmax(1) == parts[1].values.argmax(1)).all()
    np.testing.assert_allclose(cool.sum(1), 1)
    with pytest.raises(ConfigError, match="found 9 usable validation samples"):
        recalibrated(parts[0].where(slice(9)), None)


def test_intervals_hold_the_value_and_do_not_vanish():
    p, truth = np.linspace(0, 1, 60), np.arange(60) >= 40
    value, low, high = formulas.sensitivity(p, truth, np.arange(60), 0.9).found
    assert (value, high) == (1.0, 1.0)
    exact = scipy.stats.binomtest(20, 20).proportion_ci(method="exact")
    assert low == pytest.approx(exact.low)
    assert formulas.exact(0.3, 50) == pytest.approx(
        tuple(scipy.stats.binomtest(15, 50).proportion_ci(method="exact"))
    )


def test_rows_of_one_unit_are_one_piece_of_evidence():
    p, truth = predicted(6, 90)
    once = formulas.sensitivity(p, truth, np.arange(90), 0.8).found
    four = [np.repeat(part, 4) for part in (p, truth, np.arange(90))]
    together = formulas.sensitivity(*four, 0.8).found
    apart = formulas.sensitivity(*four[:2], np.arange(360), 0.8).found
    assert together == pytest.approx(once)
    assert apart.high - apart.low < 0.7 * (once.high - once.low)


def test_no_sensitivity_without_both_kinds_of_rows():
    p = np.linspace(0, 1, 20)
    for truth in (np.ones(20, bool), np.zeros(20, bool)):
        assert formulas.sensitivity(p, truth, np.arange(20), 0.9) is None


# ---- one site ------------------------------------------------------------------------------------


def answers(n: int = 100, seed: int = 0) -> Answers:
    p, truth = predicted(seed, n)
    both = np.stack([1 - p, p], 1).astype(np.float32)
    return Answers((p > 0.5).astype(int), truth.astype(int), np.arange(n), both)


def test_a_small_subgroup_has_no_numbers():
    codes = np.where(np.arange(100) < FEWEST - 1, 1, 0)
    rows = JudgedRows(("no", "yes"), "died", "sex", ("f", "m", "x"), codes)
    found = site_clinical("accuracy", answers(), rows)
    large, small = found.numbers.subgroups  # nobody is an x here, which is not told
    assert (large.name, small.name) == ("f", "m")
    assert small.score is None
    value, low, high = large.score
    hits = answers().values == answers().targets
    assert value == pytest.approx(100 * hits[codes == 0].mean())
    assert 0 <= low < value < high <= 100


def test_models_that_diverged_and_small_sites_have_no_curve():
    lost = answers()._replace(probabilities=np.full((100, 2), np.nan, np.float32))
    rows = JudgedRows(("no", "yes"))
    for given in (lost, answers(FEWEST - 1)):
        found = site_clinical("accuracy", given, rows)
        assert found.numbers.calibration is None
        assert found.numbers.sensitivity is None
        assert found.numbers.positives == int(given.targets.sum())


def test_the_outcome_is_the_second_of_two_classes_or_the_chosen_one():
    rows = JudgedRows(("alive", "dead"), "state")
    assert site_clinical("accuracy", answers(), rows).outcome == "state: dead"
    other = site_clinical("accuracy", answers(), rows, ClinicalChoice(positive="alive"))
    assert other.outcome == "state: alive"
    assert other.numbers.positives == 100 - int(answers().targets.sum())
    three = JudgedRows(("a", "b", "c"))
    assert site_clinical("accuracy", answers(), three) is None
    with pytest.raises(ConfigError, match=r"--positive: no class is called 'deed'.*'dead'"):
        site_clinical("accuracy", answers(), rows, ClinicalChoice(positive="deed"))
    with pytest.raises(ConfigError, match="--specificity: found 90; expected a share"):
        ClinicalChoice.checked(90)


# ---- a comparison --------------------------------------------------------------------------------


CONFIG = {
    "data": {"client": "site", "target": "died", "subgroup": "sex", "drop": ["sex"], "test": 0.5},
    "model": {"name": "linear"},
    "train": {"lr": 0.3},
    "run": {"rounds": 2, "methods": ["fedavg"]},
    "engine": {"name": "loop"},
}


def write_table(path: Path, classes=("no", "yes")) -> Path:
    rng, lines = np.random.default_rng(2), ["site,age,pressure,sex,died"]
    for site, rows in (("north", 120), ("south", 90), ("<b>tiny", 16)):
        for _ in range(rows):
            age, pressure = rng.normal(size=2)
            sex = rng.choice(["f", "m", ""], p=[0.5, 0.44, 0.06])
            at = int((age + rng.normal() > 0.4) * (len(classes) - 1))
            at = at if len(classes) == 2 else int(rng.integers(len(classes)))
            lines.append(f"{site},{age:.3f},{pressure:.3f},{sex},{classes[at]}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("table") / "patients.csv")


@pytest.fixture(scope="module")
def compared(table, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "run"
    return coterie.compare(CONFIG, data=str(table), out=out)


def test_a_subgroup_may_be_no_input_and_changes_no_result(table):
    data = CONFIG["data"]
    bare = {**CONFIG, "data": {key: data[key] for key in data if key != "subgroup"}}
    ours, plain = (
        coterie.run(config, data=str(table), method="fedavg") for config in (CONFIG, bare)
    )
    assert ours.summary["digest"] == plain.summary["digest"]
    assert ours.roster.fingerprint == plain.roster.fingerprint
    read = load(str(table), client="site", target="died", subgroup="sex", drop=["sex"])
    assert read.feature_names == ("age", "pressure")
    assert read.subgroup_names == ("(missing)", "f", "m")
    kept = load(str(table), client="site", target="died", subgroup="sex")
    assert "sex = f" in kept.feature_names


def test_columns_that_give_no_subgroups_are_refused(table):
    for name, words in (("age", "holds 2.. different values .*at most 20"), ("ag", "no column")):
        with pytest.raises(DataError, match=words):
            load(str(table), client="site", target="died", subgroup=name)


def test_the_numbers_are_those_of_the_stored_answers(compared):
    history = compared.of_seed(0)["fedavg"]
    found = clinical_run([history])
    assert found.outcome == "died: yes"
    own = list(history.outcomes.clients())
    assert [site.rows for site in found.sites] == history.roster.n_test.tolist()
    assert found.together.rows == sum(site.rows for site in found.sites)
    for site, part in zip(found.sites, own, strict=True):
        assert site.positives == int((part.targets == 1).sum())
        assert (part.chances.argmax(1) == part.values).all()
    briers = [site.calibration.brier * site.rows for site in found.sites if site.calibration]
    if all(site.calibration for site in found.sites):
        assert sum(briers) == pytest.approx(found.together.calibration.brier * found.together.rows)
    whole = {group.name: group.rows for group in found.together.subgroups}
    for name, rows in whole.items():
        assert rows == sum(g.rows for site in found.sites for g in site.subgroups if g.name == name)


def test_probabilities_are_kept_for_few_classes_only(tmp_path):
    few = write_table(tmp_path / "few.csv", tuple(f"c{i}" for i in range(FEW_CLASSES)))
    many = write_table(tmp_path / "many.csv", tuple(f"c{i}" for i in range(FEW_CLASSES + 1)))
    runs = [coterie.run(CONFIG, data=str(path), method="local", rounds=1) for path in (few, many)]
    assert runs[0].outcomes.probabilities.shape[1] == FEW_CLASSES
    assert runs[1].outcomes.probabilities is None
    assert clinical_run([runs[0]]).outcome is None  # of several classes none is chosen
    chosen = clinical_run([runs[0]], ClinicalChoice(positive="c2"))
    assert chosen.outcome == "died: c2"
    assert clinical_run([runs[1]]).together.subgroups


def test_the_page_shows_each_site(compared):
    text = page(compared, ClinicalChoice(specificity=0.8))
    section = text.partition('<section class="clinical">')[2].partition("</section>")[0]
    assert "died: yes" in section
    assert "leaves 80 % of the other rows" in section
    assert "&lt;b&gt;tiny" in section
    assert "<b>tiny" not in text
    assert "too few rows" in section
    assert section.count("<figure>") == 1 + sum(
        site.calibration is not None for site in clinical_run([compared.of_seed(0)["local"]]).sites
    )
    shown = clinical_view({"fedavg": [compared.of_seed(0)["fedavg"]]})
    assert shown.sites[1].cells[0] in section


def test_the_page_of_one_site_has_its_own_numbers_alone(compared):
    section = site_page(compared, "north").partition('<section class="clinical">')[2]
    section = section.partition("</section>")[0]
    assert "north" in section
    assert not any(name in section for name in ("south", "tiny", "all sites"))


def test_a_regression_has_subgroups_and_no_outcome(table):
    numbers = {**CONFIG, "data": {**CONFIG["data"], "target": "age", "drop": ["sex", "died"]}}
    run = coterie.run(numbers, data=str(table), method="local", rounds=1)
    found = clinical_run([run])
    assert found.outcome is None
    assert found.together.calibration is None
    assert {group.name for group in found.together.subgroups} == {"(missing)", "f", "m"}
    assert all(g.score.low <= g.score.value <= g.score.high for g in found.sites[0].subgroups[1:])
    text = run_page(run)
    assert "Results by sex" in text
    assert "Brier" not in text


def test_older_runs_and_regressions_have_no_such_section(compared, tmp_path):
    numbers = coterie.run(data="sine", method="local", rounds=1)
    assert clinical_run([numbers]) is None
    old = Path(shutil.copytree(compared.path / "fedavg" / "seed-0", tmp_path / "old"))
    known = ("values", "targets", "units", "sizes")
    stored = dict(np.load(old / PREDICTIONS))
    np.savez(old / PREDICTIONS, **{name: stored[name] for name in known})
    history = Run.read(old)
    assert clinical_run([history]) is None
    with pytest.raises(ConfigError, match="no answers to test samples with names of classes"):
        clinical_run([history], ClinicalChoice(positive="1"))


def test_names_and_codes_of_a_folder_are_not_trusted(compared, tmp_path):
    source = compared.path / "fedavg" / "seed-0"
    stored = dict(np.load(source / PREDICTIONS))
    wrong = {
        "rows_classes": np.array(["no", "yes", "more"]),
        "rows_codes": stored["rows_codes"] + 7,
        "rows_names": np.array(5),
        "probabilities": stored["probabilities"][:-1],
    }
    for name, array in wrong.items():
        copy = Path(shutil.copytree(source, tmp_path / name))
        np.savez(copy / PREDICTIONS, **{**stored, name: array})
        with pytest.raises(StoreError, match=r"predictions\.npz"):
            Run.read(copy)


# ---- the card of a model -------------------------------------------------------------------------


def test_the_card_has_the_numbers_of_its_client(compared, tmp_path):
    run = compared.path / "fedavg" / "seed-0"
    folder = coterie.export(run, "north", tmp_path / "north", specificity=0.75)
    card = (folder / "README.md").read_text()
    numbers = clinical_run([compared.of_seed(0)["fedavg"]], ClinicalChoice(0.75)).sites[0]
    assert "## How far to trust its probabilities" in card
    assert f"Brier score {numbers.calibration.brier:.3f}" in card
    assert re.search(r"chosen on the client's validation samples, for a specificity of 75 %", card)
    assert "By sex:" in card
    for group in numbers.subgroups:
        told = "fewer than 10 | too few rows" if group.rows < FEWEST else f"{group.rows} | "
        assert f"| {group.name} | {told}" in card
    rows = re.findall(r"^\| 0\.\d\d \| (\S.*?) \|", card, re.MULTILINE)
    assert all(text == "fewer than 10" or int(text) >= FEWEST for text in rows)
    assert math.isfinite(numbers.calibration.error)
    coterie.load_export(folder)


def test_a_perfect_score_of_few_rows_has_an_interval():
    """No bootstrap draw differs from it; the rarer class says how sure it can be."""
    truth = np.array([0] * 9 + [1] * 3)
    p = np.where(truth, 0.9, 0.1)
    answers = Answers(np.stack([1 - p, p], 1), truth, np.arange(12))
    found = formulas.estimated_score("auc", answers)
    assert found.value == found.high == 100
    assert 29 < found.low < 30  # three of three


# ---- beside the AUC ------------------------------------------------------------------------------


def test_a_site_that_knows_its_own_rows_alone_takes_their_scarce_class():
    """``died`` is scarce there; a class that was asked for stays."""
    targets = [np.repeat([0, 1], [3, 30])]
    assert scarce_class(("died", "survived"), targets, ClinicalChoice()).positive == "died"
    assert scarce_class(("no", "yes"), [1 - targets[0]], ClinicalChoice()).positive == "yes"
    asked = ClinicalChoice(positive="survived")
    assert scarce_class(("died", "survived"), targets, asked) == asked
