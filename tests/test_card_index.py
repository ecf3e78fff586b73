"""The list of all cards and the index of published ones; a wrong file does not hide the others."""

import pytest

from coterie.commands.cli import main
from coterie.errors import ConfigError
from coterie.studies import reproducing
from coterie.studies.reproducing import card_of
from test_cards import CARD

CHEAP = CARD.replace('["local", "fedavg", "fedprox@mu"]', '["local", "fedavg"]')


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """A folder with the cards P1-T8 and P1-T9, in which the test runs."""
    home = tmp_path / "experiments"
    (home / "p1").mkdir(parents=True)
    for name in ("T8", "T9"):
        path = home / "p1" / f"{name.lower()}.toml"
        path.write_text(CHEAP.replace("P1-T9", f"P1-{name}"))
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
