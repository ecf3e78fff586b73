"""``coterie deploy`` and ``coterie site`` as their users meet them, and the instructions."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
import typer

from coterie import cli
from coterie.algorithms import ALGORITHMS, ALIASES
from coterie.data.data_schema import Schema
from coterie.data.sources.sheets import InputColumn, TargetColumn
from coterie.deploy import keys, site_folder
from coterie.deploy.admission import spoken
from coterie.deploy.documents import (
    ConsentTable,
    PolicyTable,
    ScoresTable,
    SiteLimitsTable,
    StatisticsTable,
)
from coterie.deploy.folders import FederationFolder, SiteFolder
from coterie.deploy.site_report import left
from coterie.deploy.terms import Agreement, Request, SiteCounts

ADDRESS = "coordinator.example.org:8443"


# Commands and options of the instructions that others are writing: to be emptied.
@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(capsys):
    """Run a command; its exit code, stdout and stderr."""

    def call(line: str):
        with pytest.raises(SystemExit) as ended:
            cli.main(shlex.split(line))
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call


@pytest.fixture
def done(command):
    """Run a command that succeeds and warns of nothing; its stdout."""

    def call(line: str) -> str:
        code, out, err = command(line)
        assert (code, err) == (0, "")
        return out

    return call


@pytest.fixture
def pair(done):
    """A federation and a site that is not admitted yet."""
    done(f"deploy init fed --address {ADDRESS}")
    done("site init a --invite fed/invite.toml --name a")
    return FederationFolder.open(Path("fed")), SiteFolder.open(Path("a"))


def test_from_the_invitation_to_the_list(done):
    """Both sides print the same two fingerprints, which are those of the certificates."""
    made = done(f"deploy init fed/ --address {ADDRESS} --transport flower --name stroke")
    invited = done("site init a/ --invite fed/invite.toml --name a")
    admitted = done("deploy add-site fed/ a/a.pub --name a")
    fed, site = FederationFolder.open(Path("fed")), SiteFolder.open(Path("a"))
    ca = spoken(keys.fingerprint(fed.ca.read_bytes()))
    own = spoken(keys.fingerprint(site.certificate.read_bytes()))
    listed, shown = done("deploy list fed/"), done("site show a/")
    for text in (made, invited, listed, shown):
        assert ca in text
    for text in (invited, admitted, listed, shown):
        assert own in text
    assert (fed.name, site.federation, site.transport) == ("stroke", "stroke", "flower")
    assert "a: admitted, added " in listed
    assert f"expires {keys.expiry(site.certificate.read_bytes()):%Y-%m-%d}" in listed
    assert "send to the coordinator: a/a.pub" in invited
    assert "send to every site: fed/invite.toml" in made


def test_a_revoked_site_comes_back_with_new_keys(done, command, pair):
    done("deploy add-site fed a/a.pub --name a")
    done("deploy revoke fed a")
    assert "a: REVOKED on " in done("deploy list fed")
    code, _, err = command("deploy add-site fed a/a.pub --name a")
    assert (code, "which are revoked" in err) == (2, True)
    before = pair[1].public_part().sha256
    assert spoken(before) not in done("site renew a")
    done("deploy add-site fed a/a.pub --name a")
    listed = done("deploy list fed")
    assert "a: admitted" in listed
    assert spoken(before) not in listed


def test_a_renewed_certificate_is_of_the_same_ca(done, pair):
    before = pair[0].server.read_bytes(), pair[0].ca.read_bytes()
    assert "restart the coordinator" in done("deploy renew fed")
    assert pair[0].server.read_bytes() != before[0]
    assert pair[0].ca.read_bytes() == before[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("deploy init fed --address host:1", "exists already"),
        ("deploy init new --address host", "expected HOST:PORT"),
        ("deploy init new --address host:1 --transport carrier", "--transport"),
        ("deploy init new --address host:1 --name 'a b'", "--name"),
        ("deploy add-site fed a/key.pem --name a", "holds a private key"),
        ("deploy add-site fed a/a.pub --name b", "expected that of 'b'"),
        ("deploy add-site fed none.pub --name a", "none.pub: cannot be read"),
        ("deploy add-site a a/a.pub --name a", "has no federation.toml"),
        ("deploy revoke fed b", "no site is called 'b'"),
        ("deploy list nowhere", "has no federation.toml"),
        ("site init a --invite fed/invite.toml --name a", "exists already"),
        ("site init b --invite a/a.pub --name a", "invite"),
        ("site init b --invite fed/invite.toml --name ../b", "--name"),
        ("site show fed", "has no site.toml"),
    ],
)
def test_a_refusal_is_one_message_and_changes_nothing(command, pair, work, line, said):
    before = sorted(work.rglob("*"))
    code, out, err = command(line)
    assert code == 2
    assert out == ""
    assert err.startswith("coterie: ")
    assert "Traceback" not in err
    if said != "invite":
        assert said in err
    assert sorted(work.rglob("*")) == before


def test_expiry_is_warned_of_on_stderr(command, pair, monkeypatch):
    soon = datetime.now(UTC) + timedelta(days=keys.SITE_DAYS - 3)
    monkeypatch.setattr(site_folder, "now", lambda: soon)
    for line in ("deploy list fed", "site show a"):
        code, _, err = command(line)
        assert code == 0
        assert re.search(r"coterie: warning: .*certificate expire[sd] on", err)


def test_site_show_tells_what_was_agreed_and_what_left(done, pair):
    """Also where a coordinator put control codes into names, and where a line is damaged."""
    site = pair[1]
    folder = site.experiments / ("e" * 64)
    folder.mkdir(parents=True)
    config = {"algorithm": {"name": "fedfomo"}, "run": {"rounds": 7}}
    schema = Schema("table", TargetColumn("y", "quantity"), (InputColumn("x", "numbers"),))
    counts = (SiteCounts(9, 9, 9),) * 2
    agreed = Agreement("", "0" * 32, json.dumps(config), ("a", "b"), counts, schema, None, kept=2)
    (folder / "agreement.json").write_text(agreed.to_json())
    coded = replace(agreed, clients=("a", "b\x1b[2J")).to_json()
    bad = {"damaged": "{", "list": "[]", "deep": '{"config": "[[[["}', "coded": coded}
    for name, text in bad.items():
        (site.experiments / name).mkdir()
        (site.experiments / name / "agreement.json").write_text(text)
    line = {"experiment": "e" * 64, "kind": "local", "round": 3, "bytes": 1000, "sha256": "0"}
    early = {**line, "experiment": "", "kind": "who", "round": None, "bytes": 70}
    lines = [json.dumps(line), json.dumps({**line, "round": 4}), "{damaged", json.dumps(early)]
    site.sent.write_text("\n".join(lines) + "\n")
    shown = done("site show a")
    assert "may have a part in this site's" in shown
    assert "eeeeeeeeeeee: fedfomo, 7 rounds, with a, b" in shown
    for name in bad:
        assert f"{name}: cannot be read" in shown
    assert "before an experiment: who: 1 answers, 70 bytes\n" in shown
    assert "eeeeeeeeeeee: local: 2 answers, 2,000 bytes, last in round 4" in shown
    assert left(site.sent)["unreadable", "lines of the log"].answers == 1


def test_a_log_that_is_a_link_is_refused(command, pair, work):
    (work / "elsewhere").write_text("{}\n")
    pair[1].sent.symlink_to(work / "elsewhere")
    code, _, err = command("site show a")
    assert (code, "is a link" in err) == (2, True)


# ---- the instructions ----------------------------------------------------------------------------


def known() -> set[str]:
    """Every command, and every command with one of its options."""
    found = set()

    def walk(group: click.Group, before: str) -> None:
        for name, inner in group.commands.items():
            found.add(f"{before}{name}")
            options = [flag for each in inner.params for flag in each.opts if flag[:2] == "--"]
            found.update(f"{before}{name} {flag}" for flag in options)
            if isinstance(inner, click.Group):
                walk(inner, f"{before}{name} ")

    walk(typer.main.get_command(cli.app), "")
    return found


def asked(text: str) -> set[str]:
    """Every command of a text, and every command with each option that the text gives it."""
    found = set()
    for line in re.findall(r"\bcoterie ((?:deploy|site) [a-z-]+|[a-z]+)([^`\n]*)", text):
        found.add(line[0])
        found.update(f"{line[0]} {flag}" for flag in re.findall(r"--[a-z-]+", line[1]))
    return found


def test_the_instructions_are_this_federations(pair):
    text = (pair[0].path / "RUNBOOK.md").read_text("utf-8")
    assert ADDRESS in text
    assert "TCP port 8443 of `coordinator.example.org`" in text
    assert spoken(keys.fingerprint(pair[0].ca.read_bytes())) in text
    assert f"coterie coordinator {pair[0].path.absolute()}" in text
    assert not re.search(r"\$\w", text)


def test_the_instructions_name_commands_and_options_that_exist(pair):
    text = (pair[0].path / "RUNBOOK.md").read_text("utf-8")
    assert asked(text) <= known()
    assert {"deploy init --address", "site init --invite", "doctor --data"} <= asked(text)


def test_the_page_says_of_every_method_who_sees_what():
    page = (Path(__file__).parents[1] / "docs" / "who-sees-what.md").read_text("utf-8")
    table = page.partition("## By method")[2]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", table, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted([*ALGORITHMS, *ALIASES])
    assert {row.count(" | ") for _, row in rows} <= {3}
    for name, row in rows:
        shares = name in ALGORITHMS and ALGORITHMS[name]().traits.sharing is not None
        assert shares == ("raw samples" in row)


def test_site_toml_names_every_field_with_its_default(pair):
    """The owner reads the file: a field that is not in it would be a rule nobody has seen."""
    text = (pair[1].path / "site.toml").read_text("utf-8")
    told = tomllib.loads(text)
    tables = {"consent": ConsentTable, "policy": PolicyTable, "scores": ScoresTable}
    tables |= {"limits": SiteLimitsTable, "statistics": StatisticsTable}
    for name, table in tables.items():
        assert table.model_validate(told[name]) == table()
        assert told[name].keys() == table.model_fields.keys()


def test_the_commands_load_nothing_heavy_before_they_are_used():
    code = (
        "import sys, io, contextlib\n"
        "from coterie import cli\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    for line in (['deploy', '--help'], ['site', 'init', '--help']):\n"
        "        try: cli.main(line)\n"
        "        except SystemExit: pass\n"
        "print(*{'torch', 'pydantic', 'cryptography'} & sys.modules.keys())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == []


def test_the_owner_sees_approves_exports_and_renews(done, pair, work):
    """What a request asks for and which texts would leave is shown before anybody approves."""
    rows = [f"{at / 7:.3f},{'xy'[at % 2]},{'ill' if at % 3 else 'well'}" for at in range(60)]
    (work / "a.csv").write_text("\n".join(["age,kind,label", *rows]) + "\n")
    text = (work / "a" / "site.toml").read_text()
    (work / "a" / "site.toml").write_text(
        text.replace("[data]\n", f'[data]\nname = "{work / "a.csv"}"\ntarget = "label"\n')
    )
    assert "no request waits" in done("site requests a")
    request = Request("fed", ("a", "b"), ("fedavg", "local"), 5, 1)
    (work / "a" / "requests").mkdir()
    (work / "a" / "requests" / f"{request.id}.json").write_text(request.to_json())
    shown = done("site requests a")
    for word in (request.id[:12], "fedavg, local; 5 rounds", "kind: x (30), y (30)", "a, b"):
        assert word in shown
    assert "approved" in done(f"site approve a {request.id[:8]} --yes")
    assert "no request waits" in done("site requests a")
    done("site division a --out one.csv")
    first = (work / "one.csv").read_text()
    assert {line.rsplit(",", 1)[1] for line in first.splitlines()[1:]} == {
        '"train"',
        '"val"',
        '"test"',
    }
    done("site division a --out two.csv")
    assert (work / "two.csv").read_text() == first
    done("site renew-division a --yes")
    done("site division a --out three.csv")
    assert (work / "three.csv").read_text() != first
