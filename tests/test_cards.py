"""Studies and cards: what is missing is run, the table and the claims come from records alone."""

import contextlib
import json
import math
import random
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from coterie.errors import ConfigError, StoppedError, StoreError
from coterie.runs.config.loading import load
from coterie.storage import lock
from coterie.studies.card_file import merged, read_card
from coterie.studies.card_text import markdown, warnings
from coterie.studies.outcome import (
    FAILS,
    HOLDS,
    NOT_RUN,
    PARTIAL,
    RELATIONS,
    UNDECIDED,
    StudyOutcome,
)
from coterie.studies.records import CellRecord, published_records, read_records, record_for
from coterie.studies.reproducing import all_cards, reproduction
from coterie.studies.study import (
    Claim,
    Printed,
    StudyCell,
    method_and_column,
    restricted,
    study_of,
)
from coterie.studies.study_page import study_figures, study_page
from coterie.studies.study_runs import folder_of, missing
from coterie.studies.sweeping import sweep
from support import cards_home

CARD = """
[card]
id = "P1-T9"
paper = "FedFomo"
title = "A table of ours"
number = "accuracy_last"
[paper.few]
local = [10.0, 200.0]
fedavg = 250.0
[[claims]]
text = "FedAvg is not far above Local"
above = ["local", "fedavg"]
by = -150.0
[data]
name = "digits"
test = 0.5
[partition]
name = "concept_shift"
groups = 2
[model]
name = "linear"
[engine]
name = "loop"
[run]
methods = ["local", "fedavg", "fedprox@mu"]
rounds = 2
seeds = 2
[algorithm."fedprox@mu"]
mu = 0.5
[columns.few]
partition.clients = 3
[columns.many]
partition.clients = 5
[columns."many, worst"]
partition.clients = 5
number = "worst_tenth"
[scales.small]
note = "one round"
run.rounds = 1
[scales.small.columns.few]
run.seeds = 1
"""


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """A folder with one card, in which the test runs."""
    return cards_home(tmp_path, monkeypatch, t9=CARD)


def numbers(outcome):
    """The table without what differs between two runs of the same thing."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in outcome.rows()]
    return json.dumps(rows)


def test_only_what_is_missing_is_run_and_the_card_is_the_same(cards):
    one = reproduction("p1-t9", "small")
    ran = []
    first = one.run([lambda step: ran.append((step.method, step.seed))])
    assert [method for method, _ in ran] == ["local", "fedavg", "fedprox@mu"]
    records = sorted((one.out / "records").glob("*.json"))
    lost = json.loads(records[1].read_text())["method"]
    records[1].unlink()
    ran.clear()
    again = one.run([lambda step: ran.append((step.method, step.seed))])
    assert [method for method, _ in ran] == [lost]
    assert numbers(again) == numbers(first)
    ran.clear()
    one.run([lambda step: ran.append(step)])
    assert ran == []
    assert not list((one.out / "runs").glob("*/*/seed-*"))  # folders of finished runs are removed


def test_a_killed_run_is_continued_by_a_command_that_asks_for_other_methods_and_seeds(cards):
    how = {"out": cards / "out", "columns": ("few",), "changes": {"run.checkpoint_every": 1}}

    def watch(step):
        if (step.method, step.done) == ("fedavg", 2):
            raise StoppedError("stopped", 15)

    with pytest.raises(StoppedError):
        reproduction("P1-T9", methods=("fedavg",), seeds=1, **how).run([watch])
    steps = []
    reproduction("P1-T9", **how).run([steps.append])
    trained = [(step.seed, step.done) for step in steps if step.method == "fedavg" and step.score]
    assert trained == [(0, 2), (1, 1), (1, 2)]  # seed 0 goes on with its second round


def taken(one, label, seed):
    """The folder that a process locks while it runs a cell of the column ``few``."""
    cells = {(cell.method.label, cell.seed): cell for cell in one.study.cells()}
    place = folder_of(one.out, cells[label, seed])
    return place.with_name(f"{place.name}-taken")


def test_a_cell_that_another_process_runs_is_left_to_it_and_its_record_is_used(cards, looking):
    how = {"columns": ("few",), "seeds": 1}
    whole = reproduction("P1-T9", out="whole", **how).run()
    one, ran, release = reproduction("P1-T9", out="shared", **how), [], threading.Event()
    (made,) = [r for r in read_records(Path("whole/records")).values() if r.method == "fedavg"]

    def other():
        with lock.held(taken(one, "fedavg", 0)):
            held.set()
            release.wait(60)
            made.write(one.out / "records")

    held = threading.Event()
    process = threading.Thread(target=other)
    process.start()
    held.wait(60)

    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            release.set()
            process.join()

    looking(sleep)
    found = one.run([lambda step: ran.append((step.method, step.waits))])
    assert {method for method, waits in ran if not waits} == {"local", "fedprox@mu"}
    assert [method for method, waits in ran if waits] == ["fedavg"]  # told once, not at every look
    assert ran[-1] == ("fedavg", True)  # all others are done by then
    assert numbers(found) == numbers(whole)


def test_a_cell_whose_process_ended_without_a_record_is_run(cards, looking):
    one, ended = reproduction("P1-T9", columns=("few",), seeds=1), contextlib.ExitStack()
    ended.enter_context(lock.held(taken(one, "fedavg", 0)))
    looking(lambda _: ended.close())
    ran = []
    one.run([lambda step: ran.append(step.method)])
    assert ran[-1] == "fedavg"
    assert one.missing() == 0


@pytest.mark.slow
def test_two_processes_share_the_runs_of_a_card(cards):
    code = "from coterie.cli import main; main()"
    command = [sys.executable, "-c", code, "reproduce", "P1-T9", "--out", "both"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    runs = [re.findall(r"^(\S+, seed \d): 2 rounds", text, re.M) for text in told]
    assert sum(map(len, runs)) == 12  # each run once, by one of them
    assert numbers(reproduction("P1-T9", out="both").run()) == numbers(reproduction("P1-T9").run())


def test_fewer_columns_methods_and_seeds_are_part_of_the_same_card(cards):
    part = reproduction("P1-T9", columns=("many",), methods=("local", "fedavg"), seeds=1)
    part.run()
    known = reproduction("P1-T9")
    assert known.missing() == 12 - 2
    more = reproduction("P1-T9", seeds=3)
    assert more.missing() == 18 - 2


def test_publishing_loses_no_record_and_adds_none_of_other_settings(cards):
    published = cards.parent / "pub" / "P1-T9.small.json"
    reproduction("P1-T9", "small", publish="pub", methods=("local", "fedavg")).run()
    before = published.read_text()
    asked = {"publish": "pub", "methods": ("local", "fedavg")}
    assert reproduction("P1-T9", "small", out="elsewhere", **asked).missing() == 0  # taken as run
    other = {"train.lr": 0.3}
    reproduction("P1-T9", "small", out="other", publish="pub", changes=other).run()
    assert published.read_text() == before
    faster = {"engine.name": "vmap"}  # not another experiment
    reproduction("P1-T9", "small", out="more", publish="pub", changes=faster).run()
    old, new = (published_records(json.loads(text), "") for text in (before, published.read_text()))
    assert [record.key for record in new][:2] == [record.key for record in old]
    assert len(json.loads(published.read_text())["records"]) == 3


def test_the_key_of_a_run_names_the_experiment_and_not_the_machine(cards):
    def key(**changes):
        study = reproduction("P1-T9", changes=changes).study
        column = study.columns[0]
        return StudyCell(column, column.config.methods()[1], 0).key

    assert key() == key(**{"engine.name": "vmap"}) == key(**{"train.precision": "tf32"})
    assert len({key(), key(**{"train.lr": 0.3}), key(**{"train.precision": "float64"})}) == 3


def test_a_record_outlives_a_new_option_and_not_a_changed_default(study):
    cell = next(study.cells())
    known = fake(study, {("result", cell.method.label, cell.seed): 1.0})
    record = known[cell.key]
    assert record_for(cell, known) is record
    older = {name: table for name, table in record.config.items() if name != "guard"}
    older["train"] = {k: v for k, v in record.config["train"].items() if k != "clip"}
    assert record_for(cell, {cell.key: replace(record, config=older)}) is not None
    other = {**record.config, "train": {**record.config["train"], "clip": 0.5}}
    assert record_for(cell, {cell.key: replace(record, config=other)}) is None
    assert cell not in missing(study, known)


@pytest.mark.parametrize("kind", ["sweep", "curves", "matrices", "scatter"])
def test_a_study_is_drawn_as_it_asks(study, kind):
    values = {
        ("result", method.label, seed): 50.0 + seed for method in study.methods for seed in (0, 1)
    }
    known = fake(study, values)
    weights = [[0.25] * 4] * 4
    known = {key: replace(record, matrices={"3": weights}) for key, record in known.items()}
    found = study_figures(StudyOutcome(replace(study, figure=kind), known))
    others = len(study.methods) - 1
    wanted = {"sweep": 1, "curves": 1, "matrices": others + 1, "scatter": others}
    assert len(found) == wanted[kind]
    assert all("<svg" in figure.drawn for figure in found)
    assert study_figures(StudyOutcome(replace(study, figure=kind), {})) == []
    if kind == "sweep":  # the line of the variants, and level lines of the others
        assert {"mu", "FedProx", "FedAvg", "Local"} <= {
            *re.findall(r">([\w ]+)</text>", found[0][1])
        }


def test_what_is_relative_to_local_is_the_difference_of_the_means(cards):
    outcome = reproduction("P1-T9", columns=("few",)).run()
    (column,) = outcome.study.columns
    alone = outcome.values(column, "local")
    for method in ("fedavg", "fedprox@mu"):
        own = outcome.values(column, method)
        relative = outcome.values(column, method, "relative_to_local")
        for seed in own:
            assert relative[seed] == pytest.approx(own[seed] - alone[seed], abs=1e-4)
        for record, lone in zip(
            outcome.of(column, method), outcome.of(column, "local"), strict=True
        ):
            gained = [a - b for a, b in zip(record.last, lone.last, strict=True)]
            assert record.number("relative_best_tenth") == pytest.approx(max(gained))
            assert record.number("relative_worst_tenth") == pytest.approx(min(gained))
            assert record.number("relative_variance") == pytest.approx(np.var(gained))
            assert record.number("relative_variance_worst_tenth") == 0  # of a single client
    one, two = (outcome.paired(column, a, b) for a, b in (("local", "fedavg"), ("fedavg", "local")))
    assert one.p == two.p
    assert outcome.paired(column, "local", "local").n == 0


OF_TWO = CARD.replace('number = "accuracy_last"', 'number = "best_of_rounds"\nclients = [0, 2]')


def test_a_card_about_some_clients_keeps_their_curves_and_draws_and_compares_these(cards):
    text = OF_TWO.replace('title = "A', 'figure = "curves"\ntitle = "A')
    (cards / "p1" / "t9.toml").write_text(text)
    outcome = reproduction("P1-T9", columns=("few",), changes={"run.rounds": 4}).run()
    (column,) = outcome.study.columns
    for record in (r for m in ("local", "fedavg") for r in outcome.of(column, m)):
        assert sorted(record.curves) == ["0", "2"]
        assert [record.curves["0"][-1], record.curves["2"][-1]] == [record.last[0], record.last[2]]
        curve = np.mean([record.curves["0"], record.curves["2"]], axis=0)
        best = [max(curve[: at + 1]) for at in range(4)]
        assert record.best_so_far((0, 2)) == pytest.approx(best)
        assert record.number("mean_best_so_far", (0, 2)) == pytest.approx(np.mean(best))
        assert record.number("mean_best_so_far", (0,)) <= record.number("best_of_rounds", (0,))
        assert math.isnan(record.number("mean_best_so_far", (1,)))  # not kept
    (figure,) = study_figures(outcome)
    assert "client 0, 2" in figure.caption
    assert "best so far" in figure.caption
    older = {key: replace(record, curves={}) for key, record in outcome.records.items()}
    assert study_figures(StudyOutcome(outcome.study, older)) == []  # and not all clients' curve


def test_the_lead_of_underperformers_local_models_is_that_of_a_slow_loop(study):
    luck, cell = random.Random(0), next(study.cells())
    (record,) = fake(study, {("result", cell.method.label, cell.seed): 1.0}).values()
    for _ in range(80):
        own, alone = ([float(luck.randrange(4)) for _ in range(4)] for _ in range(2))
        worse = [b for a, b in zip(own, alone, strict=True) if a < b]
        others = [b for a, b in zip(own, alone, strict=True) if a >= b]
        found = replace(record, last=own).relative(replace(record, last=alone))
        lead = found.number("underperformers_local_lead")
        if worse and others:
            assert lead == pytest.approx(sum(worse) / len(worse) - sum(others) / len(others))
        else:
            assert math.isnan(lead)


def test_the_cause_of_a_failure_is_told_at_its_own_scale_only(cards):
    path = cards / "p1" / "t9.toml"
    path.write_text(CARD.replace("by = -150.0", 'by = 150.0\ncause = { small = "too short" }'))
    for scale, said in (("small", True), ("paper", False)):
        text = markdown(reproduction("P1-T9", scale).run())
        assert "FedAvg is not far above Local" in text
        assert ("Cause: too short" in text) is said
    path.write_text(CARD.replace("by = -150.0", 'cause = { smal = "too short" }'))
    with pytest.raises(ConfigError, match="did you mean 'small'"):
        read_card(path)


def fake(study, values, clients=4):
    """Records with these numbers: ``values[column, method, seed]``."""
    made = {}
    for cell in study.cells():
        value = values.get((cell.column.name, cell.method.label, cell.seed))
        if value is not None:
            summary = {"metric": "accuracy", "accuracy_last": value, "seconds": 1.0}
            scores = [value] * clients
            made[cell.key] = CellRecord(
                *(cell.key, cell.tables(), cell.method.label, cell.seed, summary, [0], [value]),
                *(scores, scores, scores, [1] * clients, None, {}, {}),
            )
    return made


@pytest.fixture(scope="module")
def study():
    tables = {
        "data": {"name": "digits"},
        "algorithm": {"fedprox": {"mu": {"sweep": [0.1, 1.0]}}},
        "run": {"methods": ["local", "fedavg", "fedprox"], "seeds": 3},
    }
    return study_of(tables, load().code, name="ours")


def state_of(comparisons):
    """The state by an independent interval: all comparisons above zero, or one below it."""
    ends = [ttest_1samp(x, 0).confidence_interval(0.95) for x in comparisons]
    if any(end.high < 0 for end in ends):
        return FAILS
    return HOLDS if all(end.low > 0 for end in ends) else UNDECIDED


@pytest.mark.filterwarnings("ignore:Precision loss")
def test_claims_are_judged_by_the_interval_over_seeds_of_each_comparison(study):
    draw = np.random.default_rng(0)
    methods = [method.label for method in study.methods]
    seen = set()
    for _ in range(80):
        v = {m: draw.normal(draw.integers(0, 4), draw.choice([0.01, 0.4]), 3) for m in methods}
        values = {("result", m, s): float(v[m][s]) for m in methods for s in range(3)}
        a, b, c = draw.permutation(methods)[:3]
        by = float(draw.choice([0.0, 1.0]))
        truth = {
            Claim("", "above", (a, b, c), by): [v[a] - v[b] - by, v[a] - v[c] - by],
            Claim("", "below", (a, b), by): [v[b] - v[a] - by],
            Claim("", "rises", (a, b, c), by): [v[b] - v[a] - by, v[c] - v[b] - by],
            Claim("", "falls", (a, b, c), by): [v[a] - v[b] - by, v[b] - v[c] - by],
            Claim("", "best", ("fedavg",)): [v["fedavg"] - v[m] for m in methods if m != "fedavg"],
            Claim("", "level", (a, b), 2.0): [2 - v[a] + v[b], 2 + v[a] - v[b]],
            Claim("", "at_least", (a,), 2.0): [v[a] - 2],
        }
        assert {claim.relation for claim in truth} == {*RELATIONS}
        found = StudyOutcome(replace(study, claims=tuple(truth)), fake(study, values)).judged
        assert [one.state for one in found] == [state_of(x) for x in truth.values()]
        assert [one.leans for one in found] == [
            min(x.mean() for x in comparisons) > 0 for comparisons in truth.values()
        ]
        assert [one.least.state for one in found] == [one.state for one in found]
        seen |= {(one.claim.relation, one.state) for one in found}
    assert len(seen) == 3 * len(RELATIONS)


def test_best_compares_what_the_paper_prints(study):
    *labels, better = [method.label for method in study.methods]
    worth = dict.fromkeys(labels, 1.0) | {"fedavg": 2.0, better: 3.0}
    values = {("result", m, s): v + s / 100 for m, v in worth.items() for s in range(3)}
    claim = Claim("", "best", ("fedavg",))
    assert judged(study, values, claim)[0] == [FAILS]
    printed = {"result": {"local": Printed(1.0), "fedavg": Printed(2.0)}}
    states, evidence = judged(replace(study, printed=printed), values, claim)
    assert states == [HOLDS]
    assert better not in evidence[0]


def test_with_fewer_seeds_methods_or_columns_a_claim_is_partial(study, sweep_study):
    values = {("result", m, s): float(len(m)) for m in ("local", "fedavg") for s in range(3)}
    claim, more = Claim("", "above", ("fedavg", "local")), ("fedavg", "local", "fedprox@mu=0.1")
    assert judged(study, values, claim, claim._replace(methods=more))[0] == [HOLDS, PARTIAL]
    assert judged(replace(study, left_out=("another",)), values, claim)[0] == [PARTIAL]
    del values["result", "local", 2]
    states, evidence = judged(study, values, claim)
    assert (states, evidence) == ([PARTIAL], ("result: fedavg 6.00, local 5.00 (2 seeds)",))
    values["result", "local", 1] = math.nan  # a record that lacks the number
    assert judged(study, values, claim)[1] == ("result: fedavg 6.00, local 5.00 (1 seed)",)
    only = {("val=0.1", m, s): float(len(m)) for m in ("local", "fedavg") for s in range(3)}
    here, all_of_them = claim._replace(columns=("val=0.1",)), claim
    assert judged(sweep_study, only, here, all_of_them)[0] == [HOLDS, PARTIAL]


def test_a_claim_is_judged_for_our_variant_too(study):
    numbers = {"local": 5.0, "fedavg": 4.0, "fedprox@mu=0.1": 6.0}
    values = {("result", m, s): v for m, v in numbers.items() for s in range(3)}
    claim = Claim("", "above", ("fedavg", "local"), ours="fedprox@mu=0.1")
    (found,) = StudyOutcome(replace(study, claims=(claim,)), fake(study, values)).judged
    assert (found.state, found.ours.state) == (FAILS, HOLDS)


def test_a_card_says_which_runs_had_alarms_and_which_methods_ended_with_equal_models(study):
    values = {("result", m, s): 1.0 for m in ("local", "fedavg", "fedprox@mu=1.0") for s in (0, 1)}
    records = fake(study, values)
    for record in records.values():
        alone = record.method == "fedavg" and record.seed == 1
        text = "fedavg gave no weight to any other client in any round: it is training alone."
        record.summary["alarms"] = [{"code": "x", "text": text, "beside": ""}] if alone else []
        record.summary["digest"] = "same" if record.method != "fedavg" else f"own{record.seed}"
    outcome = StudyOutcome(study, records)
    expected = [
        "fedavg gave no weight to any other client in any round: it is training alone (seed 1)",
        "Local and FedProx (mu=1.0) end with the same models (seeds 0, 1)",
    ]
    assert warnings(outcome, study.columns[0]) == expected
    for text in expected:
        assert f"- **Careful:** {text.partition(':')[0]}" in markdown(outcome)
        assert f"<li>Careful: {text.partition(':')[0]}: result.</li>" in study_page(outcome)
    assert warnings(StudyOutcome(study, fake(study, values)), study.columns[0]) == []


def test_a_claim_with_p_holds_only_where_all_signed_rank_tests_are_below_it(study):
    scores = (("local", 1.0), ("fedavg", 2.0), ("fedprox@mu=0.1", 2.5))
    values = {("result", m, s): v for m, v in scores for s in range(3)}
    claim = Claim("", "above", ("fedprox@mu=0.1", "local", "fedavg"), p=0.13)
    strict, turned = claim._replace(p=0.12), claim._replace(methods=("local", "fedavg"))
    states, _ = judged(study, values, claim, strict, turned)
    # Four clients, all better: p = 2 / 2 ** 4. The other way round p is as small, and it fails.
    assert states == [HOLDS, UNDECIDED, FAILS]


@pytest.fixture(scope="module")
def sweep_study():
    """A study with the columns val=0.1, val=0.3 and val=0.5."""
    tables = {
        "data": {"name": "digits", "val": {"sweep": [0.1, 0.3, 0.5]}},
        "run": {"methods": ["local", "fedavg"], "seeds": 3},
    }
    return study_of(tables, load().code, name="ours")


def at(method, share):
    return f"{method} | val={share}"


def judged(study, values, *claims):
    """The state of each claim, and the evidence of the last one."""
    found = StudyOutcome(replace(study, claims=claims), fake(study, values)).judged
    return [one.state for one in found], found[-1].evidence


def test_a_claim_between_columns_is_judged_once_and_says_where_its_numbers_are(sweep_study):
    values = {(f"val={v}", "fedavg", s): 10 * v + s for v in (0.1, 0.3, 0.5) for s in range(3)}
    claim = Claim("", "rises", tuple(at("fedavg", v) for v in (0.1, 0.3, 0.5)))
    states, evidence = judged(sweep_study, values, claim)
    assert states == [HOLDS]
    means = "fedavg (val=0.1) 2.00, fedavg (val=0.3) 4.00, fedavg (val=0.5) 6.00"
    assert evidence == (f"{means} (3 seeds)",)
    alone = {(f"val={v}", "local", s): 10 * v + s for v in (0.1, 0.3, 0.5) for s in range(3)}
    lead = claim._replace(lead_over="local")
    assert judged(sweep_study, values | alone, lead)[0] == [UNDECIDED]  # it leads nowhere
    more = claim._replace(methods=(*claim.methods, at("fedavg", 0.7)))
    assert judged(sweep_study, values, more)[0] == [PARTIAL]  # a value that the scale leaves out


def test_a_method_without_a_column_is_taken_in_each_column_that_is_judged(sweep_study):
    values = {(f"val={v}", "fedavg", s): 10 * v for v in (0.1, 0.3, 0.5) for s in range(3)}
    shares = ("val=0.3", "val=0.5")
    claim = Claim("", "above", ("fedavg", at("fedavg", 0.1)), 1.0, shares)
    states, evidence = judged(sweep_study, values, claim)
    assert states == [HOLDS]
    assert [text.partition(":")[0] for text in evidence] == [*shares]
    assert judged(sweep_study, values, claim._replace(margin=3.0))[0] == [FAILS]  # at 0.3


def test_a_method_alone_is_not_best_nor_are_the_others_compared_without_it(study):
    values = {("result", "fedavg", seed): 5.0 for seed in (0, 1)}
    assert judged(study, values, Claim("", "best", ("fedavg",)))[0] == [NOT_RUN]
    others = {("result", m, 0): float(len(m)) for m in ("local", "fedprox@mu=0.1")}
    assert judged(study, others, Claim("", "best", ("fedavg",)))[0] == [NOT_RUN]
    alone = restricted(study, methods=("fedavg",))
    assert judged(alone, values, Claim("", "best", ("fedavg",)))[0] == [NOT_RUN]


def test_a_claim_whose_runs_are_missing_is_not_run(study):
    claims = (Claim("", "above", ("fedavg", "local")), Claim("", "best", ("fedavg",)))
    values = {("result", "fedavg", 0): 5.0, ("result", "local", 1): 3.0}
    outcome = StudyOutcome(replace(study, claims=claims), fake(study, values))
    assert [one.state for one in outcome.judged] == [NOT_RUN, NOT_RUN]
    assert outcome.counts == (2, 12)
    assert len(missing(study, fake(study, values))) == 10
    assert StudyOutcome(study, {}).state == NOT_RUN


@pytest.mark.parametrize(
    ("printed", "inside"),
    [(Printed(81.9), True), (Printed(82.1), False), (Printed(90.0, 10.0), True), (None, None)],
)
def test_a_number_is_inside_the_printed_deviation_or_the_tolerance(study, printed, inside):
    values = {("result", "fedavg", seed): 80.0 for seed in (0, 1)}
    table = {} if printed is None else {"result": {"fedavg": printed}}
    outcome = StudyOutcome(replace(study, printed=table), fake(study, values))
    (entry,) = [entry for entry in outcome.entries if entry.method == "fedavg"]
    assert entry.inside is inside
    assert entry.ours.mean == 80.0
    assert math.isnan(next(e for e in outcome.entries if e.method != "fedavg").ours.mean)
    ours = "**80.00 ± 0.00**" if inside else "80.00 ± 0.00"
    paper = "" if printed is None else f" ({printed.mean:.2f})"
    assert f"| FedAvg | {ours}{paper} |" in markdown(outcome)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: {**found, "format": 2},
        lambda found: [found],
        lambda found: {**found, "method": "../../x"},
        lambda found: {**found, "matrices": {"0": [[1, 2]]}},
        lambda found: {**found, "summary": {}},
        lambda found: {**found, "curves": {"0": [1.0, 2.0, 3.0]}},
        lambda found: {name: value for name, value in found.items() if name != "curve"},
    ],
)
def test_a_spoilt_record_is_refused_with_its_path(cards, spoil):
    one = reproduction("P1-T9", "small", methods=("local",))
    one.run()
    (path,) = (one.out / "records").glob("*.json")
    (record,) = read_records(one.out / "records").values()
    assert record.seed == 0
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    with pytest.raises(StoreError, match=path.name):
        one.outcome()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("P1-T9", "Q1"), "card.id"),
        (('"accuracy_last"', '"acuracy_last"'), "there is no number"),
        (("above = [", "abov = ["), "claims"),
        (('above = ["local", "fedavg"]', ""), "0 relations"),
        (('above = ["local", "fedavg"]', 'above = ["local"]'), "expected two or more"),
        (
            ('above = ["local", "fedavg"]', 'below = ["local", "fedavg"]\np = 0.1'),
            "found p; expected",
        ),
        (('above = ["local", "fedavg"]', 'best = "local | few"'), "found a column"),
        (('above = ["local", "fedavg"]', 'above = ["local", "fedavg |"]'), "found no column"),
        (
            (
                'above = ["local", "fedavg"]',
                'falls = ["local | few", "local | many"]\ncolumns = ["few"]',
            ),
            "remove columns",
        ),
        (("[10.0, 200.0]", '["x"]'), "expected a number or"),
        (("[scales.small.columns.few]", "[scales.small.columns.fwe]"), "did you mean 'few'"),
        (("mu = 0.5", "muu = 0.5"), "did you mean 'mu'"),
    ],
)
def test_a_wrong_card_is_refused_with_its_file_and_place(cards, change, says):
    path = cards / "p1" / "t9.toml"
    path.write_text(CARD.replace(*change))
    with pytest.raises(ConfigError, match=says) as error:
        read_card(path).study("small")
    assert "t9.toml" in str(error.value)


def test_tables_are_merged_field_by_field_unless_they_name_something_else():
    base = {
        "partition": {"name": "iid", "clients": 3},
        "data": {"name": "a", "val": 0.1, "part": "train"},
    }
    over = {"partition": {"name": "latent"}, "data": {"name": "b"}}
    assert merged(base, over) == {
        "partition": {"name": "latent"},
        "data": {"name": "b", "val": 0.1},
    }
    assert merged(base, {"partition": {"clients": 4}})["partition"] == {"name": "iid", "clients": 4}


def test_a_sweep_in_memory_gives_one_row_per_column_and_method():
    found = sweep(
        {
            "data": {"name": "digits", "val": {"sweep": [0.1, 0.3]}},
            "model": {"name": "linear"},
            "engine": {"name": "loop"},
            "algorithm": {"fedprox": {"mu": {"sweep": [0.1, 1]}}},
            "run": {"methods": ["fedprox"], "rounds": 1},
        },
        clients=3,
    )
    assert [(row["column"], row["method"]) for row in found.rows()] == [
        (column, method)
        for column in ("val=0.1", "val=0.3")
        for method in ("local", "fedprox@mu=0.1", "fedprox@mu=1")
    ]
    assert all(math.isfinite(row["mean"]) for row in found.rows())


SHIPPED, WRONG = all_cards()


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_card_loads_at_every_scale_and_speaks_of_its_own_methods(name):
    assert WRONG == []
    card = SHIPPED[name]
    for scale in card.names:
        study = card.study(scale)
        assert study.columns, scale
    study = card.study()
    assert {column.config.run.deal for column in study.columns} == {"anew"}  # as in the papers
    labels = {method.label for method in study.methods}
    for column, printed in study.printed.items():
        assert column in {c.name for c in study.columns}
        assert {*printed} <= labels
    columns = {c.name for c in study.columns}
    for claim in study.claims:
        places = [method_and_column(method) for method in claim.methods]
        assert {label for label, _ in places} <= labels, claim.text
        assert {*claim.columns, *(name for _, name in places if name)} <= columns, claim.text
