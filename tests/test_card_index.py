"""The list of all cards and the index of published ones; a wrong file does not hide the others."""

import contextlib
import re
from pathlib import Path

import pytest

from coterie.cli import main
from coterie.errors import ConfigError
from coterie.storage import lock
from coterie.studies import reproducing
from coterie.studies.index_page import BEGIN, END, all_states, published_index
from coterie.studies.reproducing import card_of, reproduction
from test_cards import CARD, taken

ROOT = Path(__file__).parents[1]

CHEAP = CARD.replace('["local", "fedavg", "fedprox@mu"]', '["local", "fedavg"]')


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """A folder with the cards P1-T8 and P1-T9, in which the test runs."""
    home = tmp_path / "experiments"
    (home / "p1").mkdir(parents=True)
    for name in ("T8", "T9"):
        path = home / "p1" / f"{name.lower()}.toml"
        text = CHEAP.replace("P1-T9", f"P1-{name}")
        path.write_text(text.replace("test = 0.5", "test = 0.4") if name == "T8" else text)
    monkeypatch.setenv(reproducing.FOLDER, str(home))
    monkeypatch.chdir(tmp_path)
    return home


def called(capsys, *arguments):
    """The exit code of a command, and what it printed on stdout and on stderr."""
    code = 0
    try:
        main(["reproduce", *arguments])
    except SystemExit as end:
        code = end.code
    return code or 0, *capsys.readouterr()


# Each spoils the card P1-T8: the file, the config of all scales, and that of the scale small. The
# scales of P1-T8 in the last place are right.
WRONG = [
    ("[card]", "[card", "is no card", []),
    ('"accuracy_last"', '"acuracy_last"', "there is no number 'acuracy_last'", []),
    ('id = "P1-T8"', 'id = "P1-T9"', "t9.toml: another card has the id P1-T9", []),
    ("[scales.small.columns.few]", "[scales.small.columns]\nfew = 1\n[x]", "few: found 1", []),
    ("groups = 2", "groups = 'two'", "partition.groups", []),
    ("rounds = 1", "rounds = 'one'", "run.rounds", ["paper"]),
]


@pytest.mark.parametrize(("text", "spoilt", "says", "right"), WRONG)
def test_the_list_shows_a_wrong_card_as_one_line_and_all_other_cards(
    cards, capsys, text, spoilt, says, right
):
    path = cards / "p1" / "t8.toml"
    assert text in path.read_text()
    path.write_text(path.read_text().replace(text, spoilt))
    code, out, err = called(capsys, "--list")
    assert code == 2
    assert "found 1 error in card files" in err
    *listed, wrong = out.splitlines()
    assert says in wrong
    found = [line.split()[:2] for line in listed]
    assert found == [*(["P1-T8", scale] for scale in right), ["P1-T9", "paper"], ["P1-T9", "small"]]
    path.unlink()
    assert called(capsys, "--list")[0] == 0


@pytest.mark.parametrize(("text", "spoilt", "says", "_"), WRONG)
def test_all_runs_the_right_cards_and_reports_the_wrong_one_at_the_end(
    cards, capsys, text, spoilt, says, _
):
    path = cards / "p1" / "t8.toml"
    path.write_text(path.read_text().replace(text, spoilt))
    code, out, err = called(capsys, "all", "--scale", "small", "--publish", "pub")
    assert code == 2
    assert "found 1 error in card files" in err
    assert says in out.splitlines()[-2]
    assert (cards.parent / "runs" / "P1-T9-small" / "card.md").exists()
    assert "P1-T9" in (cards.parent / "runs" / "cards.html").read_text()
    # an index without the wrong card would say nothing of what was published of it
    assert not (cards.parent / "pub" / "README.md").exists()


def test_a_wrong_option_ends_the_command_before_anything_is_run(cards, capsys):
    code, out, err = called(capsys, "all", "--scale", "small", "--methods", "fedavgg")
    assert (code, out) == (2, "")
    assert "did you mean 'fedavg'" in err


def test_a_card_is_listed_and_run_from_its_own_file_where_another_file_has_its_name(cards, capsys):
    (cards / "p1" / "t9.toml").rename(cards / "p1" / "t7.toml")
    (cards / "p1" / "t9.toml").write_text("[card")
    code, out, err = called(capsys, "all", "--scale", "small")
    assert code == 2
    assert "found 1 error in card files" in err
    assert (cards.parent / "runs" / "P1-T9-small" / "card.md").exists()
    assert "P1-T9          small    holds" in out


def test_a_card_is_found_beside_a_wrong_one_and_a_missing_one_is_said_to_be_perhaps_that(cards):
    (cards / "p1" / "t8.toml").write_text("[card")
    (cards / "p1" / "t9.toml").rename(cards / "p1" / "t7.toml")  # not where its id says
    assert card_of("P1-T9").about.id == "P1-T9"
    with pytest.raises(ConfigError, match=r"no card 'P1-T6'.*t8\.toml"):
        card_of("P1-T6")


def rows(text):
    """The cells of each card's line, by its id."""
    found = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in found if cells[0].startswith("P1-")}


PART = f"# Ours\n\nbefore\n\n{BEGIN}\nan older index\n{END}\n\nafter\n"


def test_the_index_is_put_between_the_markers_beside_the_folder_and_its_links_lead_there(
    cards, capsys
):
    home = cards.parent / "docs"
    home.mkdir()
    (home / "README.md").write_text(PART)
    for name in ("P1-T8", "P1-T9"):
        scale = "small" if name == "P1-T8" else "paper"
        assert called(capsys, name, "--scale", scale, "--publish", "docs/cards")[0] == 0
    assert called(capsys, "--list", "--publish", "docs/cards")[0] == 0
    text = (home / "README.md").read_text()
    assert text.startswith(f"# Ours\n\nbefore\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\nafter\n")
    assert "an older index" not in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links == ["cards/P1-T8.small.md", "cards/P1-T9.paper.md"]
    assert all((home / link).exists() for link in links)
    assert not (home / "cards" / "README.md").exists()
    once = text
    assert called(capsys, "--list", "--publish", "docs/cards")[0] == 0
    assert (home / "README.md").read_text() == once


def test_without_markers_the_index_is_a_page_in_the_folder(cards, capsys):
    (cards.parent / "README.md").write_text("ours")
    called(capsys, "P1-T9", "--scale", "small", "--publish", "pub")
    assert called(capsys, "--list", "--publish", "pub")[0] == 0
    assert (cards.parent / "README.md").read_text() == "ours"
    text = (cards.parent / "pub" / "README.md").read_text()
    assert "](P1-T9.small.md)" in text
    assert text.startswith("# Paper cards\n")


@pytest.mark.parametrize("page", [BEGIN, END, f"{END}\n{BEGIN}"])
def test_one_marker_alone_is_refused_and_the_page_is_kept(cards, capsys, page):
    path = cards.parent / "README.md"
    path.write_text(page)
    code, _, err = called(capsys, "--list", "--publish", "pub")
    assert code == 2
    assert "README.md: found one of the markers" in err
    assert path.read_text() == page


def test_a_line_says_what_was_run_at_paper_scale_and_at_other_scales(cards, capsys):
    """Runs that are in this folder and not published do not count."""
    called(capsys, "P1-T9", "--publish", "pub", "--columns", "few", "--methods", "local")
    called(capsys, "P1-T8", "--scale", "small", "--publish", "pub")
    called(capsys, "P1-T8", "--columns", "few")
    called(capsys, "--list", "--publish", "pub")
    found = rows((cards.parent / "pub" / "README.md").read_text())
    assert found["P1-T8"][1:] == [
        "0 of 8",
        "holds at [small](P1-T8.small.md)",
    ]
    assert found["P1-T9"][1:] == ["2 of 8", "run at [paper](P1-T9.paper.md) (0 of 1 claims judged)"]
    for path in (cards.parent / "pub").glob("*"):
        path.unlink()
    called(capsys, "--list", "--publish", "pub")
    assert rows((cards.parent / "pub" / "README.md").read_text())["P1-T9"][1:] == [
        "0 of 8",
        "not run",
    ]


CLAIMS = """
[[claims]]
text = "Fails with a cause | a bar"
above = ["local", "fedavg"]
by = 150.0
cause = "nothing is 150 points better"
[[claims]]
text = "Holds at paper scale and fails at the scale small"
at_least = ["local", 2.0]
number = "rounds"
[[claims]]
text = "Cannot be judged"
above = ["fedprox", "local"]
[data]
"""


def test_the_claims_of_first_tier_cards_are_counted_at_paper_scale_and_where_they_were_run_first(
    cards, capsys
):
    path = cards / "p1" / "t9.toml"
    path.write_text(path.read_text().replace("[data]\n", CLAIMS))
    other = cards / "p1" / "t8.toml"
    other.write_text(other.read_text().replace("tier = 1", "tier = 2"))

    def counted():
        called(capsys, "--list", "--publish", "pub")
        text = (cards.parent / "pub" / "README.md").read_text()
        assert "2 cards, 1 of them of the first tier." in text
        assert "hold | fail with a cause | fail without one | not run |" in text
        found = re.findall(r"^\| at .*?\|(.*)\|$", text, re.MULTILINE)
        return [[int(cell) for cell in line.split("|")] for line in found], rows(text)["P1-T9"]

    assert counted()[0] == [[0, 0, 0, 4], [0, 0, 0, 4]]
    called(capsys, "P1-T8", "--scale", "small", "--publish", "pub")  # of the second tier: no page
    assert [page.name for page in (cards.parent / "pub").glob("P1-*")] == ["P1-T8.small.json"]
    called(capsys, "P1-T9", "--scale", "small", "--publish", "pub")
    found, row = counted()
    assert found == [[0, 0, 0, 4], [1, 1, 1, 1]]
    assert row[-1] == (
        "2 of 3 claims fail at [small](P1-T9.small.md) (3 of 4 claims judged): "
        r"Fails with a cause \| a bar; "
        "Holds at paper scale and fails at the scale small"
    )
    called(capsys, "P1-T9", "--publish", "pub", "--columns", "few")
    assert counted()[0] == [[2, 1, 0, 1], [2, 1, 0, 1]]


def test_the_index_in_the_documentation_is_that_of_its_records():
    published = ROOT / "docs" / "results" / "cards"
    found, wrong = all_states(published)
    assert wrong == []
    path, text = published_index(found, published)
    assert path == ROOT / "docs" / "results" / "README.md"
    say = "run 'coterie reproduce --list --publish docs/results/cards'"
    assert path.read_text("utf-8") == text, say


def test_all_goes_on_where_a_dataset_is_missing_and_says_so(cards, capsys, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(cards))
    text = (cards / "p1" / "t9.toml").read_text()
    for name, given in (("T8", 'name = "mnist"'), ("T7", 'name = "digits"')):
        other = text.replace("P1-T9", f"P1-{name}").replace('name = "digits"', given)
        (cards / "p1" / f"{name.lower()}.toml").write_text(other)
    code, out, err = called(capsys, "all", "--scale", "small")
    assert code != 0
    assert "1 of 3 cards were not run: P1-T8: " in err
    assert "# P1-T7" in out  # the card behind the one that lacks its data
    assert "# P1-T9" in out


def test_of_several_cards_all_free_runs_come_before_any_waiting(cards, capsys, looking):
    one, other = reproduction("P1-T8", "small"), reproduction("P1-T9", "small")
    held, done = contextlib.ExitStack(), []
    held.enter_context(lock.held(taken(one, "fedavg", 0)))

    def sleep(_):
        done.append(other.missing())
        held.close()

    looking(sleep)
    code, printed, told = called(capsys, "P1-T8", "P1-T9", "--scale", "small")
    assert code == 0
    assert done == [0]  # nothing of the second card was left when the first was waited for
    assert printed.index("# P1-T9") < printed.index("# P1-T8")  # shown as soon as it is complete
    assert "fedavg, seed 0: another process runs it; waiting" in told
