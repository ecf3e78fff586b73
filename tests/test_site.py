"""``mkdocs.yml`` names every page, and what the README and the pages let a reader type works."""

import re
import shlex
from pathlib import Path

import pytest
import typer

import coterie
from coterie.cli import app

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
DOCS = ROOT / SITE["docs_dir"]
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
README = PAGES[0].read_text("utf-8")


def pages(entry):
    """The files that a part of the navigation names."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages(part)]


def excluded(name):
    return any(name.startswith(part) for part in SITE["exclude_docs"].split())


def test_every_page_of_the_navigation_exists_and_none_is_there_twice():
    named = pages(SITE["nav"])
    assert [name for name in named if not (DOCS / name).is_file()] == []
    assert len(named) == len(set(named))
    assert not any(map(excluded, named))


def test_every_page_is_in_the_navigation_or_excluded():
    found = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert {name for name in found if not excluded(name)} == {*pages(SITE["nav"])}


def test_what_is_not_in_the_navigation_on_purpose_exists():
    assert all((DOCS / name).exists() for name in SITE["not_in_nav"].split())


def test_the_picture_of_the_readme_is_small():
    assert "](docs/page.png)" in (ROOT / "README.md").read_text("utf-8")
    assert (DOCS / "page.png").stat().st_size < 300_000


def blocks(page):
    """The blocks without a language: what a reader types, and what is printed."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [text.replace("\\\n", " ") for language, text in found if not language]


def command_of(words):
    """The click command that a typed line calls, and its arguments."""
    found, rest = typer.main.get_command(app), words[1:]
    while rest and rest[0] in getattr(found, "commands", {}):
        found, rest = found.commands[rest[0]], rest[1:]
    return found, rest


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_typed_commands_and_their_options_exist(page):
    for line in "".join(blocks(page)).splitlines():
        if re.match(r"coterie [a-z-]", line):
            found, rest = command_of(shlex.split(line, comments=True))
            known = {name for each in found.params for name in (*each.opts, *each.secondary_opts)}
            assert not getattr(found, "commands", {}) or not rest or rest[0][:1] == "-", line
            options = [word.partition("=")[0] for word in rest if re.match(r"-+[a-z]", word)]
            assert {*options} <= known | {"--help", "-h"}, line


def test_the_config_of_the_readme_is_read_as_it_stands(tmp_path):
    (text,) = re.findall(r"^```toml\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    rows = "".join(f"{site},{i},{i % 2}\n" for site in "ab" for i in range(8))
    (tmp_path / "sites.csv").write_text("site,age,outcome\n" + rows)
    (tmp_path / "that.toml").write_text(text)
    done = coterie.run(tmp_path / "that.toml", method="fedavg", rounds=1, engine="loop")
    assert len(done.test_loss[-1]) == 2  # one score per site


def test_the_python_of_the_readme_runs(capsys):
    """With one round and one seed instead of the numbers that are written there."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for told, quick in (("rounds=10", 'rounds=1, engine="loop"'), ("seeds=3", "seeds=1")):
        assert told in code
        code = code.replace(told, quick)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "FedFomo" in printed
    assert "client3:" in printed
