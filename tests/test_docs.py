"""Every method has its page, whose generated part is as the code has it; no link is dead."""

import ast
import importlib
import inspect
import re
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import coterie
from coterie.algorithms import ALGORITHMS
from coterie.api import Options
from coterie.core.fields import fields
from coterie.runs.config.loading import load
from coterie.runs.config.schema import Config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SECTIONS = ("What travels and what it costs", "When to use it", "Fields", "Paper", "At work")

_spec = spec_from_file_location("new_page", DOCS / "methods" / "new_page.py")
new_page = module_from_spec(_spec)
_spec.loader.exec_module(new_page)


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_methods_page_is_whole_and_its_generated_part_is_the_codes(method):
    """A field that is added, removed or given another default must be told, and the paper."""
    page = (DOCS / "methods" / f"{method}.md").read_text("utf-8")
    for section in SECTIONS:
        assert f"\n## {section}\n" in page, f"{method}.md has no section '{section}'"
    assert "TODO" not in page
    assert new_page.refreshed(method, page) == page, f"run docs/methods/new_page.py {method}"


def test_a_new_page_has_all_sections_and_every_field_with_its_meaning():
    """The skeleton of a page, and what is kept of a page when it is brought up to date."""
    page = new_page.skeleton("fedprox")
    for section in SECTIONS:
        assert f"\n## {section}\n" in page
    for field in fields(ALGORITHMS["fedprox"]):
        meaning = field.meaning.rstrip(".")
        assert f"- `{field.name}` ({new_page.shown(field.default)}): {meaning}\n" in page
    assert ALGORITHMS["fedprox"].bibtex in page
    stale = page.replace("(0.1): strength", "(0.2): my own words for").replace("MLSys", "ICML")
    mended = new_page.refreshed("fedprox", stale)
    assert mended == page.replace("(0.1): strength", "(0.1): my own words for")


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


def test_every_reading_that_is_cited_exists_once():
    """Code, cards and pages cite the numbers of docs/readings.md."""
    number = r"\b(?:G|B|P[1-5])-\d+\b"
    text = (DOCS / "readings.md").read_text("utf-8")
    known = re.findall(rf"^- \*\*({number}) ", text, re.MULTILINE)
    assert len(known) == len(set(known)) > 0
    folders = ("src", "tests", "docs", "experiments", "bench")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    texts = [path for path in paths if path.suffix in (".py", ".md", ".toml")]
    wrong = {
        (cited, path.name)
        for path in texts
        for cited in re.findall(number, path.read_text("utf-8"))
        if cited not in known
    }
    assert not wrong


def blocks(language: str) -> list[tuple[str, str]]:
    """The blocks of code in one language, with their pages."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page.name, code) for page in PAGES for code in fence.findall(page.read_text("utf-8"))]


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_on_a_page_imports_and_calls_what_there_is(page, code):
    """Names that are imported or read from coterie exist, and calls have arguments that do."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("coterie"):
            found = importlib.import_module(node.module)
            assert all(hasattr(found, alias.name) for alias in node.names)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("coterie."):
            eval(ast.unparse(node), {"coterie": coterie})
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("coterie."):
            called = eval(ast.unparse(node.func), {"coterie": coterie})
            known = {*inspect.signature(called).parameters, *Options.__annotations__}
            assert {word.arg for word in node.keywords} <= known


def configs() -> list[tuple[str, str]]:
    """Blocks that are configs; those with sweeps or code of their own have tests of their own."""
    return [
        (page, code)
        for page, code in blocks("toml")
        if tomllib.loads(code).keys() <= Config.model_fields.keys()
        and page != "sweeps.md"
        and not re.search(r'"\w+:\w+"', code)
    ]


@pytest.mark.parametrize(("page", "code"), configs())
def test_a_config_on_a_page_has_fields_that_there_are(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a name says the format; nothing is read
    for name in ("scans/a/b/1.png", "letters/a.txt", "leaf/femnist/data/a.json", "features.npz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in re.findall(r'"(\S+\.csv)"', code):
        (tmp_path / name).touch()
    assert load(tomllib.loads(code)).run
