"""Every method has its page, every page tells all fields with their defaults, no link is dead."""

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from coterie.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SECTIONS = ("What travels and what it costs", "When to use it", "Fields", "At work")


def told(page: str) -> dict[str, str]:
    """The fields that a page tells of, with their defaults."""
    table = page.partition("## Fields")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))


def shown(default: object) -> str:
    """A default as a page writes it, quotes of code aside."""
    return "none" if default is None else json.dumps(default)


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_methods_page_is_whole_and_its_fields_are_the_codes(method):
    """A field that is added, removed or given another default must be told."""
    page = (DOCS / "methods" / f"{method}.md").read_text("utf-8")
    for section in SECTIONS:
        assert f"\n## {section}\n" in page, f"{method}.md has no section '{section}'"
    known = {f.name: f.default for f in fields(ALGORITHMS[method]) if f.default is not MISSING}
    found = told(page)
    assert found.keys() == {f.name for f in fields(ALGORITHMS[method])}
    for name, default in known.items():
        text = found[name].strip("`")
        same = text == shown(default) or (_number(text) == default and _number(text) is not None)
        assert same, f"{method}.md: {name} is {text} there and {default!r} in the code"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_method_is_in_the_index_and_has_a_small_figure(method):
    """The index links the page; the figure is one that a page can carry."""
    assert f"]({method}.md)" in (DOCS / "methods" / "README.md").read_text("utf-8")
    assert (DOCS / "methods" / "figures" / f"{method}.svg").stat().st_size < 45_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page):
    """Links between files of the repository lead somewhere."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    dead = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not dead
