"""The page for one site: what it holds of the others, which is nothing, and ``coterie report``."""

import re

import numpy as np
import pytest

from coterie.api import write_comparison
from coterie.commands import page_command
from coterie.errors import ConfigError, StoreError
from coterie.runs.run import Log, Roster, Run
from coterie.runs.run_folder import RunFolder
from coterie.runs.summary import finished
from coterie.views import page
from coterie.views.comparison import Comparison
from coterie.views.site_page import site_page
from synthetic import grouped, predictors, record, run_of, scores

NAMES = ("North", "Lakeside", "County <b>", "Southgate", "Harbour", "Riverside")


def federation(names=NAMES, others=1, digest="d" * 64):
    """Six sites; what ``others`` changes is the names, counts and scores of all but North."""
    train = np.array([40] + [others * 1000 + 7 * i for i in range(1, 6)])
    groups = np.array([0, 1, 2, 0, 1, 2])
    who = Roster(names, train, train // 4, np.array([20] * 6) + train * 3, groups, f"f{digest}", {})
    runs = []
    for method, gain in (("local", 0.0), ("fedfomo", 14.0)):
        test = np.full((6, 6), 50.0) + gain
        test[:, 1:] += others / 8
        runs.append(run_of(method, who=who, test=test, rounds=6))
    return Comparison.of(runs)


def test_the_page_of_a_site_depends_on_nothing_of_the_others_but_its_own_weights():
    one = site_page(federation(), "North")
    other = (NAMES[0], *(f"elsewhere {i}" for i in range(5)))
    assert one == site_page(federation(other, others=3, digest="e" * 64), "North")
    assert one != site_page(federation(), "Lakeside")


def test_the_page_of_a_site_holds_no_name_count_score_or_hash_of_another():
    found = federation()
    text = site_page(found, "North").replace(page._templates().globals["script"], "")
    shown = re.sub(r"<svg.*?</svg>|<style.*?</style>", "", text, flags=re.DOTALL)
    roster = found.runs[0].roster
    for i, name in enumerate(roster.clients[1:], start=1):
        assert name.split()[0] not in text
        for count in (roster.n_train[i], roster.n_val[i], roster.n_test[i]):
            assert not re.search(rf"\b{count}\b", text)
        for run in found.runs:
            assert f"{run.last[i]:.1f}" not in shown
    assert roster.fingerprint not in text
    for run in found.runs:
        assert run.summary["digest"] not in text
    assert "North: joining gains you " in text
    assert "You rely mostly on peer 1." in text


def test_peers_are_numbered_by_weight_alone():
    """The same weights on other clients give the same page, in whatever order those are listed."""
    order = np.array([0, 4, 2, 5, 1, 3])
    made = []
    for places in (np.arange(6), order):
        who = Roster(NAMES, *[np.full(6, 40)] * 3, None, "f", {})
        log = Log("fedamp", 0, "accuracy", who)
        rng = np.random.default_rng(0)
        for index in range(4):
            A = rng.dirichlet(np.ones(6), 6)
            made_record = record(index, np.full(6, 50.0), A[np.ix_(places, places)])
            log.append(made_record._replace(rejected=()))
        made.append(site_page(finished(log, predictors(6), {}, {}), "North"))
    assert made[0] == made[1]
    shares = [int(x) for x in re.findall(r"<td>(\d+) %</td>", made[0])]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == 5


def test_a_site_sees_its_own_rejected_uploads_and_no_others():
    text = site_page(run_of("fedfomo"), "site-1")
    assert "FedFomo: 1 uploads of this site were left out as not finite." in text
    assert "left out" not in site_page(run_of("fedfomo"), "site-2")
    with pytest.raises(ConfigError, match="no client 'site-99'"):
        site_page(run_of("fedfomo"), "site-99")


def written(path):
    for method in ("local", "fedfomo"):
        log = Log(method, 0, "accuracy", run_of(method).roster)
        folder = RunFolder.create(path / method / "seed-0", log, {}, {})
        for index, row in enumerate(scores(method, 0, 3)):
            folder.append(record(index, row, grouped(0.9) if method == "fedfomo" else None))
        folder.finish(predictors())
    return path


def test_the_command_writes_pages_of_runs_and_leaves_their_folders(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    whole = written(tmp_path / "runs")
    runs = [str(whole / m / "seed-0") for m in ("local", "fedfomo")]
    page_command.report(runs)
    assert "Is joining worth it?" in (tmp_path / "report.html").read_text()
    assert capsys.readouterr().out == "page: report.html\n"
    page_command.report(runs[1:], out="one.html")
    assert "FedFomo gives a mean" in (tmp_path / "one.html").read_text()
    page_command.report(runs, site="site-3")
    text = (tmp_path / "report-site-3.html").read_text()
    assert "site-3: " in text
    assert "site-4" not in text
    write_comparison(Comparison.of(map(Run.read, runs), tmp_path / "runs"), tmp_path / "runs")
    page_command.report(["runs"], out="whole.html")
    assert "Is joining worth it?" in (tmp_path / "whole.html").read_text()
    with pytest.raises(StoreError, match="inside a folder of results"):
        page_command.report(["runs"], out="runs/report.html")
