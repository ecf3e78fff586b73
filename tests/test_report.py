import base64
import dataclasses
import hashlib
import html.parser
import io
import json
import math
import re
import shutil
import zlib

import numpy as np
import pytest

import coterie
from coterie.api import write_comparison
from coterie.errors import ConfigError, StoreError
from coterie.runs import statistics
from coterie.runs.alarms import raise_alarms, same_run
from coterie.runs.run import Log
from coterie.runs.run_folder import RunFolder
from coterie.runs.summary import finished
from coterie.views import figures, helping, page, reliance, svg, table, words
from coterie.views.comparison import Comparison
from coterie.views.page import run_page
from synthetic import (
    CLIENTS,
    GROUPS,
    comparison_of,
    grouped,
    predictors,
    record,
    roster,
    run_of,
    scores,
)

EVIL = '<script>alert("x")</script>&\'"'


def history_of(method, test, A=None):
    log = Log(method, 0, "accuracy", roster(len(test[0])))
    for index, row in enumerate(test):
        log.append(record(index, np.asarray(row, dtype=float), A))
    return log.run()


def codes(history, **references):
    return [alarm.code for alarm in raise_alarms(history, references)]


# Alarms


def test_a_run_that_equals_another_is_loud():
    local, fedavg = scores("local", 0, 3), scores("fedavg", 0, 3)
    references = {"local": history_of("local", local), "fedavg": history_of("fedavg", fedavg)}
    assert codes(history_of("fedfomo", local), **references) == ["equals_local"]
    assert codes(history_of("fedprox", fedavg), **references) == ["equals_fedavg"]
    assert codes(history_of("fedfomo", local * (1 + 1e-9)), **references) == ["equals_local"]
    assert codes(references["local"], **references) == []
    assert codes(references["fedavg"], **references) == []
    assert codes(history_of("fedavg", local), local=references["local"]) == ["equals_local"]


def test_only_rounds_that_both_evaluated_are_compared():
    test = scores("local", 0, 4)
    often, rarely = history_of("local", test), Log("fedfomo", 0, "accuracy", roster())
    rarely.append(record(1, test[1]))
    rarely.append(record(3, test[3]))
    assert same_run(rarely.run(), often)
    never = Log("fedfomo", 0, "accuracy", roster())
    never.append(record(9, test[3]))
    assert not same_run(never.run(), often)


def test_one_other_loss_in_one_round_is_enough_to_differ():
    local = history_of("local", np.full((3, 4), 100.0))
    other = history_of("fedfomo", np.full((3, 4), 100.0))
    assert same_run(other, local)
    other.test_loss[1, 2] += 1e-3
    assert codes(other, local=local) == []


def test_weights_that_say_nothing_are_loud():
    test = scores("fedamp", 0, 2)
    uniform = np.full((CLIENTS, CLIENTS), 1 / CLIENTS)
    assert codes(history_of("fedamp", test, np.eye(CLIENTS))) == ["no_collaboration"]
    assert codes(history_of("fedamp", test, uniform)) == ["uniform_weights"]
    assert codes(history_of("fedamp", test, grouped(0.8))) == []
    assert codes(history_of("local", test, np.eye(CLIENTS))) == []  # that is its name
    assert codes(history_of("fedavg", test, uniform)) == []
    log = Log("fedamp", 0, "accuracy", roster())
    log.append(record(0, test[0], uniform))
    log.append(record(1, test[1], grouped(0.8)))
    assert codes(log.run()) == []  # uniform once is a start, not an alarm


def swinging(amplitude, rounds=20, noise=0.0, seed=0, drift=0.0):
    """Scores of groups that are served well in turn, every second round."""
    rng = np.random.default_rng(seed)
    side = np.where(GROUPS == 0, 1.0, -0.5)
    turn = (-1.0) ** np.arange(rounds)
    rise = drift * np.arange(rounds)[:, None]
    return 50 + amplitude * turn[:, None] * side + rise + rng.normal(0, noise, (rounds, CLIENTS))


def test_a_swing_with_period_two_is_loud():
    for drift in (0.0, 1.0):
        assert codes(history_of("term", swinging(10, drift=drift, noise=3))) == ["two_cycle"]
    growing = 50 + (swinging(10, 20) - 50) * np.linspace(0, 1, 20)[:, None]
    assert codes(history_of("fedavg", growing)) == ["two_cycle"]
    assert codes(history_of("term", swinging(1))) == []  # a point up and down matters to nobody
    assert codes(history_of("term", swinging(10, 7))) == []  # too short to tell


def test_a_swing_is_looked_for_only_where_it_can_be_seen():
    test, log = swinging(10, 40), {}
    for gap in (2, 3):
        log[gap] = Log("term", 0, "accuracy", roster())
        for index in range(gap - 1, 40, gap):
            log[gap].append(record(index, test[index]))
    assert codes(log[2].run()) == []  # every second round shows one side
    assert codes(log[3].run()) == ["two_cycle"]


def test_noise_and_learning_do_not_swing():
    for seed in range(50):
        assert codes(history_of("term", swinging(0, noise=8, seed=seed))) == []
        assert codes(history_of("term", swinging(0, noise=3, drift=2, seed=seed))) == []
    curve = 90 - 60 * np.exp(-np.arange(20) / 4)[:, None] + np.zeros(CLIENTS)
    assert codes(history_of("term", curve)) == []
    slow = 50 + 20 * np.sin(np.arange(20) / 2)[:, None] * np.ones(CLIENTS)
    assert codes(history_of("term", slow)) == []


def taught(*pairs):
    log = Log("pafl_kd", 0, "accuracy", roster())
    for index, pair in enumerate(pairs):
        told = {} if pair is None else {"distillation": pair}
        row = record(index, np.full(CLIENTS, 70.0 + index))
        log.append(row._replace(observed=told))
    return codes(log.run())


def test_distillation_that_leaves_its_teacher_is_loud():
    assert taught(None, [0.1, 5.0], [0.1, 0.4]) == ["left_teacher"]
    assert taught(None, [0.1, math.nan]) == ["left_teacher"]
    assert taught(None, [0.1, 0.09], [0.1, 0.1], [0.1, 0.2]) == []
    assert taught(None, None) == []


# Comparisons


@pytest.fixture(scope="module")
def comparison():
    return comparison_of(seeds=(0, 1, 2))


def test_a_row_is_the_mean_and_deviation_over_seeds(comparison):
    row = next(row for row in comparison.rows if row.method == "fedfomo")
    means = [run.summary["accuracy_last"] for run in comparison.of_method("fedfomo")]
    assert row.mean == (pytest.approx(np.mean(means)), pytest.approx(np.std(means, ddof=1)))
    gained = np.array(
        [
            scores("fedfomo", seed, 20)[-1] - scores("local", seed, 20)[-1]
            for seed in comparison.seeds
        ]
    )
    assert row.relative_to_local.mean == pytest.approx(gained.mean())
    assert (row.better, row.worse, row.compared) == ((gained > 0).sum(), (gained < 0).sum(), 36)
    assert row.paired == statistics.wilcoxon(gained.mean(0))
    assert row.bytes_per_client.mean == 20 * 2 * 5000


def test_a_comparison_without_local_is_refused():
    with pytest.raises(StoreError, match="no run of 'local' for seed 1"):
        Comparison.of([run_of("local", 0), run_of("fedavg", 0), run_of("fedavg", 1)])


def test_runs_on_other_data_are_not_compared():
    with pytest.raises(StoreError, match="other data"):
        Comparison.of([run_of("local"), run_of("fedavg", who=roster(seed=5))])
    with pytest.raises(StoreError, match="and 6 clients; expected accuracy and 12"):
        Comparison.of([run_of("local"), run_of("fedavg", who=roster(6))])


def test_what_is_written_is_read_again(tmp_path):
    runs = []
    for method in ("local", "fedfomo"):
        log = Log(method, 4, "accuracy", roster(seed=4))
        folder = RunFolder.create(tmp_path / method / "seed-4", log, {}, {})
        for index, row in enumerate(scores(method, 4, 3)):
            folder.append(record(index, row, grouped(0.9) if method == "fedfomo" else None))
        runs.append(folder.finish(predictors()))
    made = Comparison.of(runs, tmp_path)
    write_comparison(made, tmp_path)
    again = coterie.read(tmp_path)
    assert repr(again) == repr(made)
    assert again.to_dict() == made.to_dict()
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert stored["verdict"] == made.verdict
    assert stored["methods"][1]["in_group_weight"]["mean"] == pytest.approx(0.9, abs=1e-6)
    moved = shutil.move(tmp_path, tmp_path.with_name("moved"))
    assert repr(coterie.read(moved)) == repr(made)


# Words


def test_a_table_says_the_same_in_text_terminal_and_page(comparison):
    from rich.console import Console

    shown = table.methods_table(comparison)
    text, page_text = table.to_text(shown), str(table.to_html(shown))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table.to_rich(shown))
    printed = console.export_text()
    assert len(max(printed.splitlines(), key=len)) <= 80
    for line in shown.lines:
        for cell in line.cells:
            assert cell in text
            assert cell in page_text
            assert cell.replace(" ± ", "±") in printed
    assert [line.cells[0] for line in shown.lines if line.best] == ["FedFomo"]


FURTHER = ("variance", "variance_best_tenth", "variance_worst_tenth", "best_tenth", "weighted_mean")


def test_further_columns_are_shown_if_they_are_asked_for(comparison):
    usual = table.methods_table(comparison)
    asked = table.methods_table(comparison, ("variance_worst_tenth", "variance"))
    heads = [column.head for column in asked.columns[len(usual.columns) :]]
    assert heads == ["variance", "VarW"]
    for line, row in zip(asked.lines, comparison.rows, strict=True):
        of_seeds = [run.last for run in comparison.of_method(row.method)]
        spread = [statistics.over_clients(last, np.ones(len(last))) for last in of_seeds]
        expected = [s.variance for s in spread], [s.variance_worst for s in spread]
        cells = [words.spread(statistics.over_seeds(values), "accuracy") for values in expected]
        assert list(line.cells[-2:]) == cells
    assert "VarB" in comparison.text(["variance_best_tenth"])
    with pytest.raises(ConfigError, match="called 'varience'; did you mean 'variance'"):
        comparison.text(["varience"])


def test_the_federated_accuracy_is_a_column_where_a_global_model_has_one(comparison):
    assert "federated %" not in repr(comparison)
    runs = []
    for run in comparison.runs:
        lines = run.lines
        if run.method == "fedavg":
            lines = (*lines[:-1], {**lines[-1], "federated": 61.5})
        history = dataclasses.replace(run, lines=lines)
        runs.append(history)
    shown = table.methods_table(Comparison.of(runs))
    at = [column.head for column in shown.columns].index("federated %")
    found = {line.cells[0]: line.cells[at] for line in shown.lines}
    assert found["FedAvg"].startswith("61.5")
    assert found["Local"] == words.NONE


def test_cells_by_hand():
    who = roster(2, groups=None)
    runs = [
        run_of("local", who=who, test=np.array([[50.0, 60.0]])),
        run_of("fedavg", who=who, test=np.array([[60.0, 55.0]])),
    ]
    cells = table.methods_table(Comparison.of(runs)).lines[1].cells
    assert cells == ("FedAvg", "57.5", "55.0", "1 of 2", "2.0 kB", "57.5", "57.5")


def test_numbers_for_people():
    assert words.number(-0.04, "accuracy", sign=True) == "0.0"
    assert words.number(1.25, "rmse") == "1.25"
    assert words.spread(statistics.OverSeeds(0.6821, 0.09163), "rmse") == "0.682 ± 0.092"
    assert words.spread(statistics.OverSeeds(12345.6, 78.9), "rmse") == "12346 ± 79"
    assert words.number(-3.0, "accuracy", sign=True) == "\N{MINUS SIGN}3.0"
    assert words.number(math.nan, "accuracy") == "—"


def _copied(run):
    log = Log("fedprox", 0, "accuracy", run.roster)
    for index, row in enumerate(run.test):
        log.append(record(index, row))
    return log


# The page


class Reader(html.parser.HTMLParser):
    """Checks that tags nest and notes names and addresses."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.addresses = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.addresses += [v for k, v in attrs if k in ("href", "src")]
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read_page(text):
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def scripts_of(text):
    return re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)


def test_the_page_allows_one_script_by_its_hash_and_no_other(comparison):
    text = page.page(comparison)
    (script,) = scripts_of(text)
    named = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{named}'" in text
    assert "default-src 'none'" in text


def test_the_page_stands_alone_and_is_well_formed(comparison):
    text = page.page(comparison)
    reader = read_page(text)
    assert {"table", "svg", "details", "h1"} <= reader.seen
    assert reader.seen.isdisjoint({"link", "img", "iframe", "object"})
    assert all(address.startswith("data:") for address in reader.addresses)
    assert not re.search(r"https?://|@import|url\(", text)
    assert comparison.verdict[:20] in text
    assert text.count("<circle") - text.count('class="node') == 2 * 5 * CLIENTS  # two figures
    assert text.count('class="node"') == 3 * CLIENTS


def test_names_from_users_are_text_and_nothing_else(comparison):
    names = (EVIL, *(f"s{i}" for i in range(CLIENTS - 1)))
    evil = comparison_of(("local", "fedfomo"), names=names, weak={EVIL: EVIL})
    method = run_of("fedfomo", who=evil.runs[0].roster)
    config = {**method.config, EVIL: EVIL}
    environment = {"argv": ["coterie", "compare", EVIL]}
    dressed = finished(_copied(method), predictors(), config, environment)
    whole = Comparison.of([evil.runs[0], method, dressed])
    for text in (page.page(whole), whole._repr_html_(), run_page(whole.runs[2])):
        assert EVIL not in text
        assert set(scripts_of(text)) <= {page._templates().globals["script"]}
        read_page(text)
    assert "&lt;script&gt;" in page.page(whole)
    assert "coterie compare &#39;&lt;script" in page.page(whole)


def test_the_page_of_a_run_stands_alone_and_tells_everything():
    made = run_of("fedfomo")
    text = run_page(made)
    reader = read_page(text)
    assert {"table", "svg", "details", "h1"} <= reader.seen
    assert reader.seen.isdisjoint({"link", "img", "iframe", "object"})
    assert scripts_of(text) == [page._templates().globals["script"]]
    assert not re.search(r"https?://|@import|url\(", text)
    assert text.count('class="client"') == CLIENTS  # one line per client
    for name in made.roster.clients:
        assert f'<th scope="row">{name}</th>' in text
    assert [f'<th scope="row">{r + 1}</th>' in text for r in range(20)] == [True] * 20
    assert "Who helps whom" in text
    assert "site-1 (not finite)" in text  # round 3 left it out
    assert "Uploads were left out as not finite: 1 of FedFomo." in text
    assert made.summary["digest"] in text


def test_the_page_of_a_run_has_its_alarms_and_its_gain():
    alone = run_of("local")
    copy = run_of("fedavg", test=alone.test, references={"local": alone})
    text = run_page(copy)
    assert "Read this first" in text
    assert "equals_local" in text
    assert "Who helps whom" not in text
    assert "0.0 compared with each client’s own local model" in text
    assert "Read this first" not in run_page(run_of("fedamp", test=np.full((2, CLIENTS), 50.0)))


@pytest.mark.parametrize("clients", [1, 60, 130])
def test_the_page_of_a_run_draws_at_most_sixty_lines(clients):
    text = run_page(run_of("fedavg", who=roster(clients)))
    assert text.count('class="client"') == {1: 1, 60: 60, 130: 44}[clients]


def test_the_page_of_a_run_says_whom_a_client_learns_most_from():
    """By the largest part of its weight on others; nobody where it gives no weight."""
    log = Log("fedamp", 0, "accuracy", roster(3))
    A = np.array([[0.9, 0.0, 0.1], [0.0, 1.0, 0.0], [0.3, 0.2, 0.5]])
    log.append(record(0, np.array([50.0, 60.0, 70.0]), A))
    text = run_page(finished(log, predictors(3), {}, {})).partition("Every client")[2]
    cells = re.findall(r'<th scope="row">(site-\d)</th>.*?<td>([^<]*)</td><td>—</td></tr>', text)
    assert cells == [("site-0", "site-2 (100 %)"), ("site-1", "—"), ("site-2", "site-0 (60 %)")]


def test_a_page_draws_no_matrix_of_very_many_clients():
    """A run of 10,000 clients must not need gigabytes for its page."""
    clients = reliance.MOST_CLIENTS + 1
    log = Log("fedamp", 0, "accuracy", roster(clients))
    log.append(record(0, np.full(clients, 50.0), np.full((clients, clients), 1 / clients)))
    assert "Who helps whom" not in run_page(finished(log, predictors(clients), {}, {}))


@pytest.mark.parametrize("weight", [None, -1.0, math.nan, 1e38])
@pytest.mark.parametrize("score", [math.nan, -math.inf, 1e300])
@pytest.mark.parametrize("clients", [1, 30])
def test_a_page_of_a_diverged_run_is_made_without_a_warning(weight, score, clients):
    """A run whose page fails could never be finished."""
    A = None if weight is None else np.full((clients, clients), weight)
    log = Log("fedamp", 0, "rmse", roster(clients))
    for index in range(2):
        with np.errstate(all="ignore"):
            log.append(record(index, np.full(clients, score), A))
    with np.errstate(all="ignore"):
        data = finished(log, predictors(clients), {}, {})
    read_page(run_page(data))


def test_a_page_of_clients_without_scores_is_made_too():
    nan = np.full((1, 4), math.nan)
    who = roster(4, groups=None)
    runs = [run_of("local", who=who, test=nan), run_of("fedavg", who=who, test=nan)]
    assert "nothing can be said" in page.page(Comparison.of(runs))
    read_page(page.page(comparison_of(("local",))))


def test_the_heatmap_orders_clients_by_group_and_leaves_oneself_out():
    drawn = str(helping.heatmap(grouped(1.0), GROUPS, "weights"))
    data = base64.b64decode(re.search(r"base64,([^\"]*)", drawn)[1])
    begin = data.index(b"IDAT")
    size = int.from_bytes(data[begin - 4 : begin])
    rows = np.frombuffer(zlib.decompress(data[begin + 4 : begin + 4 + size]), np.uint8)
    opacity = rows.reshape(CLIENTS, 1 + 4 * CLIENTS)[:, 4::4]
    same = np.repeat(np.arange(3), 4)[:, None] == np.repeat(np.arange(3), 4)
    expected = np.where(np.eye(CLIENTS, dtype=bool), 90, 255 * same)
    assert opacity.tolist() == expected.tolist()
    assert drawn.count('class="cut"') == 4


def lines_of(drawn):
    """The points of each line of a figure."""
    paths = re.findall(r'<path d="([^"]*)"[^>]*class="line"', drawn)
    return [[tuple(map(float, p.split())) for p in re.findall(r"[\d.]+ [\d.]+", d)] for d in paths]


def test_a_band_shows_the_range_over_seeds(comparison):
    drawn = str(figures.learning_curves(comparison))
    assert drawn.count('class="band-seeds"') == len(comparison.methods)
    assert 'class="band-seeds"' not in str(figures.learning_curves(comparison_of()))
    band = re.search(r'<polygon points="([^"]*)"', drawn)[1].split()
    heights = [float(point.split(",")[1]) for point in band]
    for place, (_, y) in enumerate(lines_of(drawn)[0]):  # between the least and the largest
        assert heights[-1 - place] - 0.1 <= y <= heights[place] + 0.1


def test_labels_are_moved_apart_and_stay_inside():
    for crowd in ([50.0, 50.0, 50.0, 99.0], [95.0, 98.0, 99.0], [1.0, 2.0, 3.0]):
        ordered = sorted(svg.apart(crowd, 15, 0, 100))
        assert min(np.diff(ordered)) >= 15
        assert ordered[0] >= 0
        assert ordered[-1] <= 100
    assert svg.ticks(0.2, 0.9) == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert svg.ticks(5, 5)[0] <= 5 <= svg.ticks(5, 5)[-1]
