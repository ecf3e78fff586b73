"""What is public: the docs import nothing else."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import coterie

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = sorted((ROOT / "docs").rglob("*.py"))


def public():
    """The public modules, as docs/README.md lists them."""
    text = (ROOT / "docs" / "README.md").read_text("utf-8").partition("## What is public")[2]
    return re.findall(r"^\| `(coterie[\w.]*)` \|", text, re.MULTILINE)


def imports(code):
    """Every (module, name) that code imports from coterie; name is None for a module itself."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((a.name, None) for a in node.names if a.name.split(".")[0] == "coterie")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "coterie":
            yield from ((node.module, a.name) for a in node.names)


def uses(code):
    """Every ``coterie.name`` in code that imports the package as a whole."""
    for node in ast.walk(ast.parse(code)):
        whole = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if whole and node.value.id == "coterie":
            yield node.attr


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def is_public(module, name):
    if module == "coterie":
        return name is None or name in coterie.__all__ or f"coterie.{name}" in public()
    return any(
        module == one or module.startswith(f"{one}.") for one in public() if one != "coterie"
    )


def exists(module, name):
    found = importlib.import_module(module)
    return name is None or hasattr(found, name) or importlib.import_module(f"{module}.{name}")


def test_the_list_of_public_modules_is_true():
    listed = public()
    assert listed[0] == "coterie"
    assert len(listed) > 3
    for name in listed:
        importlib.import_module(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_import_what_is_public(page):
    for code in blocks(page):
        for module, name in imports(code):
            assert is_public(module, name), f"{module}.{name} is not public"
            assert exists(module, name)
        if any(found == ("coterie", None) for found in imports(code)):
            assert {*uses(code)} <= {*coterie.__all__}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_programs_of_the_docs_import_what_exists(program):
    found = list(imports(program.read_text("utf-8")))
    assert all(exists(module, name) for module, name in found)


def test_the_check_of_pages_can_fail():
    (found,) = imports("from coterie.training.rounds import run")
    assert not is_public(*found)
    assert not is_public("coterie", "assemble")
    assert [*uses("import coterie\ncoterie.rum()")] == ["rum"]
