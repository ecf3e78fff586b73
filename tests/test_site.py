"""``mkdocs.yml``: its pages exist, and every page of docs/ is in its navigation or excluded."""

from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
DOCS = ROOT / SITE["docs_dir"]


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
