"""The list of all cards and the pages of papers; a wrong file does not hide the others."""

import contextlib
import re
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie.storage import files, lock
from coterie.studies.paper_page import BEGIN, END, all_states, pages
from coterie.studies.records import published_records
from coterie.studies.reproducing import card_of, reproduction
from support import cards_home
from test_cards import CARD, taken

ROOT = Path(__file__).parents[1]

CHEAP = CARD.replace('["local", "fedavg", "fedprox@mu"]', '["local", "fedavg"]')


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """A folder with the cards P1-T8 and P1-T9, in which the test runs."""
    other = CHEAP.replace("P1-T9", "P1-T8").replace("test = 0.5", "test = 0.4")
    return cards_home(tmp_path, monkeypatch, t8=other, t9=CHEAP)


@pytest.fixture
def reproduce(command):
    """Type ``coterie reproduce``; its exit code, stdout and stderr."""
    return lambda *words: command("reproduce", *words)


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
def test_a_wrong_card_is_one_line_and_an_error_and_does_not_stop_the_others(
    cards, reproduce, text, spoilt, says, right
):
    path = cards / "p1" / "t8.toml"
    assert text in path.read_text()
    path.write_text(path.read_text().replace(text, spoilt))
    code, out, err = reproduce("--list")
    assert code == 2
    assert "found 1 error in card files" in err
    *listed, _, wrong = out.splitlines()
    assert says in wrong
    found = [line.split()[:2] for line in listed]
    assert found == [*(["P1-T8", scale] for scale in right), ["P1-T9", "paper"], ["P1-T9", "small"]]
    code, out, err = reproduce("all", "--scale", "small", "--publish", "pub")
    assert code == 2
    assert says in out.splitlines()[-1]
    assert (cards.parent / "runs" / "P1-T9-small" / "card.md").exists()
    # a page without the wrong card would say nothing of what was published of it
    assert not (cards.parent / "fedfomo.md").exists()


def test_a_wrong_option_ends_the_command_before_anything_is_run(cards, reproduce):
    code, out, err = reproduce("all", "--scale", "small", "--methods", "fedavgg")
    assert (code, out) == (2, "")
    assert "did you mean 'fedavg'" in err


def test_a_card_is_listed_and_run_from_its_own_file_where_another_file_has_its_name(
    cards, reproduce
):
    (cards / "p1" / "t9.toml").rename(cards / "p1" / "t7.toml")
    (cards / "p1" / "t9.toml").write_text("[card")
    code, out, err = reproduce("all", "--scale", "small")
    assert code == 2
    assert "found 1 error in card files" in err
    assert (cards.parent / "runs" / "P1-T9-small" / "card.md").exists()
    assert "P1-T9          small    1 partial" in out


def test_a_card_is_found_beside_a_wrong_one_and_a_missing_one_is_said_to_be_perhaps_that(cards):
    (cards / "p1" / "t8.toml").write_text("[card")
    (cards / "p1" / "t9.toml").rename(cards / "p1" / "t7.toml")  # not where its id says
    assert card_of("P1-T9").about.id == "P1-T9"
    with pytest.raises(ConfigError, match=r"no card 'P1-T6'.*t8\.toml"):
        card_of("P1-T6")


def rows(text, heading):
    """The cells of each line of the table below a heading."""
    lines = text.partition(heading)[2].partition("\n#")[0].splitlines()
    found = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in lines if line[:1] == "|"]
    return found[2:]


PART = f"# Ours\n\nbefore\n\n{BEGIN}\nan older index\n{END}\n\nafter\n"


def test_the_index_is_put_between_the_markers_and_leads_to_pages_and_pictures(cards, reproduce):
    home = cards.parent / "docs"
    home.mkdir()
    (home / "README.md").write_text(PART)
    assert reproduce("P1-T8", "--scale", "small", "--publish", "docs/cards")[0] == 0
    for _ in range(2):
        assert reproduce("--list", "--publish", "docs/cards")[0] == 0
        text = (home / "README.md").read_text()
        assert text.startswith(f"# Ours\n\nbefore\n\n{BEGIN}\n")
        assert text.endswith(f"{END}\n\nafter\n")
        assert "an older index" not in text
        assert re.findall(r"\]\(([^)]*)\)", text) == ["fedfomo.md"]
    page = (home / "fedfomo.md").read_text()
    pictures = re.findall(r"!\[.*?\]\(([^)]*)\)", page)
    assert pictures == ["pictures/p1-t8.svg"]
    assert (home / pictures[0]).read_text().startswith("<svg")
    assert reproduce("FedFomo", "--show", "--publish", "docs/cards") == (0, f"{page}\n", "")


@pytest.mark.parametrize("page", [BEGIN, f"{END}\n{BEGIN}"])
def test_a_readme_without_both_markers_is_refused_and_kept(cards, reproduce, page):
    path = cards.parent / "README.md"
    path.write_text(page)
    code, _, err = reproduce("--list", "--publish", "pub")
    assert code == 2
    assert "README.md: found" in err
    assert path.read_text() == page


CLAIMS = """
[[claims]]
text = "Fails with a cause | a bar"
place = "abstract"
columns = ["few"]
above = ["local", "fedavg"]
by = 150.0
cause = "nothing is 150 points better"
[[claims]]
text = "Holds at paper scale and fails at the scale small"
place = "conclusion"
columns = ["few"]
at_least = ["local", 1.5]
number = "rounds"
[[claims]]
text = "Cannot be judged"
above = ["fedprox", "local"]
[data]
"""


def test_claims_are_counted_at_the_largest_scale_that_judges_them_and_scales_are_not_merged(
    cards, reproduce
):
    path = cards / "p1" / "t9.toml"
    text = path.read_text().replace("[data]\n", CLAIMS)
    text = re.sub(r"seeds = \d", "seeds = 3", text)
    path.write_text(text.replace("[scales.small]\n", '[scales.small]\ntried = "ten rounds"\n'))
    (cards / "p1" / "t8.toml").unlink()
    home = cards.parent

    def page():
        reproduce("--list", "--publish", "pub")
        (index,) = [line for line in (home / "README.md").read_text().splitlines() if "[" in line]
        return index.split(" | ")[1:-1], (home / "fedfomo.md").read_text()

    main, all_of = "## Abstract and conclusion", "### "
    assert page()[0] == ["2", "0", "0", "0", "0", "2"]
    reproduce("P1-T9", "--scale", "small", "--publish", "pub")
    counts, told = page()
    states = {cells[0]: (cells[2], cells[6]) for cells in rows(told, main)}
    assert states == {
        r"Fails with a cause \| a bar": ("small", "fails"),
        "Holds at paper scale and fails at the scale small": ("small", "fails"),
    }
    assert counts == ["2", "0", "2", "0", "0", "0"]
    assert "P1-T9, Fails with a cause | a bar: nothing is 150 points better" in told
    assert "- P1-T9, scale small, tried and left: ten rounds" in told
    assert "1 claim partial." in told.partition(f"{all_of}small")[2]
    assert not any("partial" in cells[6] for cells in rows(told, f"{all_of}small"))
    assert all(len(line) <= 200 for line in told.splitlines() if line.startswith("|"))
    reproduce("P1-T9", "--publish", "pub", "--columns", "few", "--seeds", "2")
    counts, told = page()  # partial at paper scale: the judgement at the scale small stands
    assert counts == ["2", "0", "2", "0", "0", "0"]
    assert {cells[6] for cells in rows(told, f"{all_of}paper")} >= {"partial +", "partial -"}
    reproduce("P1-T9", "--publish", "pub")
    counts, told = page()
    assert counts == ["2", "1", "1", "0", "0", "0"]
    assert {cells[2] for cells in rows(told, main)} == {"paper"}
    assert {cells[2] for cells in rows(told, f"{all_of}small")} == {"small"}


def test_the_pages_in_the_documentation_are_those_of_their_records():
    published = ROOT / "docs" / "results" / "cards"
    found, wrong = all_states(published)
    assert wrong == []
    say = "run 'coterie reproduce --list --publish docs/results/cards'"
    for path, text in pages(found, published).items():
        assert path.read_text("utf-8") == text, say
        rows = [line for line in text.splitlines() if path.suffix == ".md" and line[:1] == "|"]
        assert all(len(row) <= 200 for row in rows), path
    assert all(path.stat().st_size <= 200_000 for path in published.iterdir())


def test_a_run_that_several_cards_publish_has_one_result():
    found = {}
    for path in sorted((ROOT / "docs" / "results" / "cards").iterdir()):
        for record in published_records(files.read_json(path), path):
            told = (record.last, record.curve)
            assert found.setdefault(record.key, told) == told, (path.name, record.method)


def test_all_goes_on_where_a_dataset_is_missing_and_says_so(cards, reproduce, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(cards))
    text = (cards / "p1" / "t9.toml").read_text()
    for name, given in (("T8", 'name = "mnist"'), ("T7", 'name = "digits"')):
        other = text.replace("P1-T9", f"P1-{name}").replace('name = "digits"', given)
        (cards / "p1" / f"{name.lower()}.toml").write_text(other)
    code, out, err = reproduce("all", "--scale", "small")
    assert code != 0
    assert "1 of 3 cards were not run: P1-T8: " in err
    assert "# P1-T7" in out  # the card behind the one that lacks its data
    assert "# P1-T9" in out


def test_of_several_cards_all_free_runs_come_before_any_waiting(cards, reproduce, looking):
    one, other = reproduction("P1-T8", "small"), reproduction("P1-T9", "small")
    held, done = contextlib.ExitStack(), []
    held.enter_context(lock.held(taken(one, "fedavg", 0)))

    def sleep(_):
        done.append(other.missing())
        held.close()

    looking(sleep)
    code, printed, told = reproduce("P1-T8", "P1-T9", "--scale", "small")
    assert code == 0
    assert done == [0]  # nothing of the second card was left when the first was waited for
    assert printed.index("# P1-T9") < printed.index("# P1-T8")  # shown as soon as it is complete
    assert "fedavg, seed 0: another process runs it; waiting" in told
