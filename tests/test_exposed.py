"""What leaves a site, as the pages tell it."""

import re

import numpy as np

from coterie.algorithms.exposure import EXPOSURES
from coterie.runs.run import Log
from coterie.views.page import RAW, exposed, page, users_of
from coterie.views.site_page import site_page
from synthetic import comparison_of, record, roster, run_of


def history_of(matrices, method="fedfomo"):
    log = Log(method, 0, "accuracy", roster(3))
    for index, A in enumerate(matrices):
        log.append(record(index, np.full(3, 50.0), A))
    return log.run()


ONE = np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
TWO = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])


def test_methods_that_hand_models_from_site_to_site_are_the_marked_ones():
    marked = {name for name, row in EXPOSURES.items() if re.search(r"\*\*.*model.*\*\*", row.site)}
    assert set(RAW) == marked


def test_the_users_of_a_model_are_the_distinct_others_that_gave_it_weight():
    assert users_of([history_of([ONE, TWO, TWO])]).tolist() == [1, 2, 0]
    assert users_of([history_of([ONE]), history_of([TWO])]).tolist() == [1, 1, 0]
    assert users_of([history_of([None])]) is None


def test_the_section_says_who_used_a_raw_model_and_who_only_sent_to_averages():
    made = {"fedavg": [history_of([None], "fedavg")], "fedfomo": [history_of([ONE, TWO])]}
    found = exposed(made)
    assert [line[-1] for line in found.methods] == [
        "not as it is",
        "at least 0 to 2 of 2 other sites",
    ]
    assert found.site_heads[3:] == ("FedFomo: had by",)
    assert [line[3:] for line in found.sites] == [("1",), ("2",), ("0",)]
    unshown = exposed({"fedfomo": [history_of([None])]}).methods[0]
    assert unshown[-1] == "not known: sites did not show their weights"
    own = exposed({"my.module:Method": [history_of([ONE], "my.module:Method")]}).methods[0]
    assert (own[0], own[-1]) == ("Method", "not known")
    assert "Travels" in own[1]


def test_whoever_was_sent_a_model_had_it_whatever_weight_it_gets():
    log = Log("fedfomo", 0, "accuracy", roster(3))
    log.append(
        record(0, np.full(3, 50.0), ONE)._replace(raw={1: frozenset({0}), 2: frozenset({0})})
    )
    run = log.run()
    assert users_of([run]).tolist() == [2, 1, 0]  # the second has its weight by ONE alone
    assert exposed({"fedfomo": [run]}).methods[0][-1] == "0 to 2 of 2 other sites"


def test_uploads_and_what_the_guard_rejected_are_counted_for_each_site():
    found = exposed({"fedavg": [history_of([None] * 5, "fedavg")]})  # rejects site-1 in round 3
    assert [line[1] for line in found.sites] == [5, 4, 5]
    assert [line[2] for line in found.sites] == ["—", "1 not finite", "—"]


def test_pages_have_the_section_and_a_site_only_its_own_row():
    assert "What leaves a site" in page(comparison_of(("local", "fedfomo")))
    text = site_page(run_of("fedfomo"), "site-2")
    section = text.partition("What leaves your site")[2]
    assert re.findall(r'<th scope="row">(site-[0-9]+)</th>', section) == ["site-2"]
    (line,) = exposed({"fedfomo": [run_of("fedfomo")]}, 2).methods
    assert line[-1] == "at least 11 of 11 other sites"
