"""Runs that blow up say so, with the round; runs that do not, do not."""

from dataclasses import replace

import numpy as np
import pytest

from coterie.engines.base import Evaluation
from coterie.runs.alarms import raise_alarms
from coterie.runs.run import Log
from coterie.runs.summary import finished
from coterie.training.guard import Rejection
from coterie.training.rounds import train
from coterie.views.comparison import Comparison
from coterie.views.table import methods_table, to_html, to_text
from support import METHODS, RECIPE, engine_of, task
from synthetic import predictors, record, roster, run_of

CLIENTS, ROUNDS = 12, 6


def log_of(method="scaffold", metric="accuracy", change=None, rejected=None):
    """Six healthy rounds of a method, with other evaluations or rejections in some of them."""
    log = Log(method, 0, metric, roster(CLIENTS))
    for index in range(ROUNDS):
        made = record(index, np.full(CLIENTS, 50.0 + index))
        evaluation = made.evaluation
        if change is not None:
            evaluation = Evaluation(*(np.array(part) for part in evaluation))
            change(index, evaluation)
        found = () if rejected is None else rejected(index)
        log.append(made._replace(evaluation=evaluation, rejected=found))
    return log


def alarms_of(log):
    return [alarm for alarm in raise_alarms(log.run(), {}) if alarm.code == "diverged"]


@pytest.mark.parametrize("method", ["scaffold", "local", "fedavg"])
@pytest.mark.parametrize("loss", [np.nan, np.inf, 1e4])
def test_one_client_that_blows_up_is_named_with_the_round(method, loss):
    def change(index, evaluation):
        if index >= 3:
            evaluation.test_loss[2] = loss

    (alarm,) = alarms_of(log_of(method, change=change))
    assert alarm.beside == "diverged in round 4"
    assert f"{method} diverged in round 4" in alarm.text
    assert "1 of 12 clients" in alarm.text


def test_a_score_without_a_number_is_enough():
    def change(index, evaluation):
        evaluation.test[:] = np.inf if index == 2 else 0.5

    (alarm,) = alarms_of(log_of(metric="rmse", change=change))
    assert alarm.beside == "diverged in round 3"


def test_a_regression_is_judged_against_its_own_start():
    def growing(factor):
        def change(index, evaluation):
            evaluation.test_loss[:] = 5e3 * (factor if index == 4 else 1)

        return change

    assert not alarms_of(log_of(metric="rmse", change=growing(100)))
    assert alarms_of(log_of(metric="rmse", change=growing(1e5)))[0].beside.endswith("round 5")


def test_who_has_no_score_raises_nothing():
    def change(index, evaluation):
        for part in evaluation:
            part[5] = np.nan

    assert not alarms_of(log_of(change=change))


def test_half_of_the_clients_rejected_is_a_run_that_blew_up():
    def one_more(reason):
        return lambda index: (Rejection(index, reason), Rejection(11 - index, reason))

    (alarm,) = alarms_of(log_of(rejected=one_more("not_finite")))
    assert alarm.beside == "diverged in round 3"
    assert alarms_of(log_of(rejected=one_more("copies")))
    assert not alarms_of(log_of(rejected=one_more("samples")))
    assert not alarms_of(log_of(rejected=lambda index: (Rejection(4, "not_finite"),)))


def test_it_stands_in_the_table_beside_the_number():
    def change(index, evaluation):
        evaluation.test_loss[0] = np.nan if index == 3 else 1.0

    made = finished(log_of(change=change), predictors(CLIENTS), {}, {})
    assert [alarm["beside"] for alarm in made.summary["alarms"]] == ["diverged in round 4"]
    local = run_of("local", rounds=ROUNDS)
    shown = methods_table(Comparison.of([local, made]))
    (line,) = [text for text in to_text(shown).splitlines() if "SCAFFOLD" in text]
    assert line.startswith("!")
    assert "55.0 (diverged in round 4)" in line
    assert "diverged in round 4" in to_html(shown)


def log_of_run(name, rate):
    method = METHODS[name]()
    calm = replace(RECIPE, lr=rate, epochs=1, momentum=0.0, weight_decay=0.0)
    on = task(method, recipe=calm)
    log = Log(name, 0, "accuracy", roster(on.problem.population))
    for made in train(method, on.problem, engine_of("vmap", on), 2):
        log.append(made)
    return log


@pytest.mark.parametrize("name", METHODS)
def test_no_method_is_accused_at_an_ordinary_rate(name):
    assert not alarms_of(log_of_run(name, 0.1))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "waffle", "erosion"])
def test_an_absurd_rate_is_loud(name):
    assert alarms_of(log_of_run(name, 1e9))
