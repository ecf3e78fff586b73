"""Writes the page of a method, or brings the generated part of a page up to date.

python docs/methods/new_page.py NAME [NAME ...]

A method without a page gets one: its title, its docstring, all sections, its fields and its paper.
Of a page that exists only two sections are rewritten: in "Fields" the names and defaults (meanings
stay as they are written), and "Paper", which is made of the class. All else is written by hand, but
for "At work", which docs/figures.py draws.
"""

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from coterie.algorithms import ALGORITHMS
from coterie.core.fields import REQUIRED, fields, summary

PAGES = Path(__file__).parent
SECTIONS = {
    "The update": "TODO: the formulae of the module's docstring. Prediction: TODO.\n\n"
    "Departures: [`NAME.py`](../../src/coterie/algorithms/NAME.py), "
    "[readings](../readings.md).",
    "What travels and what it costs": "TODO: messages down and up, memory and compute.",
    "When to use it": "- TODO: where it helps.\n- Not TODO: where it does not.",
    "Fields": "",
    "Paper": "",
    "At work": "TODO: docs/figures.py writes this section.",
}


def shown(default: Any) -> str:
    """A default as a page writes it."""
    if default is REQUIRED:
        return "required"
    if default is None:
        return "none"
    text = json.dumps(default)
    return f"`{text}`" if isinstance(default, str) else text


def field_list(method: type, meanings: dict[str, str]) -> str:
    """One item per field; ``meanings`` are those that the page has, else the docstring's."""
    known = fields(method)
    if not known:
        return "None.\n"
    return "".join(
        f"- `{field.name}` ({shown(field.default)}): "
        f"{meanings.get(field.name, field.meaning.rstrip('.'))}\n"
        for field in known
    )


def paper(method: Any) -> str:
    """The BibTeX entry, or the reference where there is none."""
    return f"```bibtex\n{method.bibtex}\n```\n" if method.bibtex else f"{method.paper}.\n"


def skeleton(name: str) -> str:
    """A new page, to be completed by hand."""
    method = ALGORITHMS[name]
    idea = inspect.getdoc(sys.modules[method.__module__]) or ""
    module = method.__module__.rpartition(".")[2]
    sections = "".join(
        f"\n## {title}\n\n{body.replace('NAME', module)}\n" for title, body in SECTIONS.items()
    )
    told = idea.partition("\n")[0].partition(": ")[2] or summary(method)
    return refreshed(name, f"# {name}: {told.rstrip('.')}\n\nTODO: the idea.\n{sections}")


def refreshed(name: str, page: str) -> str:
    """A page with its generated part as the code has it."""
    method, told = ALGORITHMS[name], _section(page, "Fields")
    rows = re.findall(r"^- `(\w+)` \(.+?\): (.*)$", told, re.MULTILINE)
    page = _with_section(page, "Fields", field_list(method, dict(rows)))
    return _with_section(page, "Paper", paper(method))


def _section(page: str, title: str) -> str:
    """The text of a section."""
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _with_section(page: str, title: str, body: str) -> str:
    """A page with the text of a section replaced; a new section comes before "At work"."""
    before, found, rest = page.partition(f"\n## {title}\n")
    if not found:
        before, found, rest = page.partition("\n## At work\n")
        return f"{before}\n## {title}\n\n{body}{found}{rest}"
    tail = rest.find("\n## ")
    return f"{before}{found}\n{body}{rest[tail:] if tail >= 0 else ''}"


def main(names: list[str]) -> None:
    """Write or refresh some pages."""
    for name in names:
        page = PAGES / f"{name}.md"
        text = refreshed(name, page.read_text("utf-8")) if page.exists() else skeleton(name)
        page.write_text(text, "utf-8")


if __name__ == "__main__":
    if not sys.argv[1:] or not set(sys.argv[1:]) <= ALGORITHMS.keys():
        sys.exit(f"{__doc__}\nmethods: {', '.join(ALGORITHMS)}")
    main(sys.argv[1:])
