"""Writes the two pages that are generated from the code: config.md and api.md.

python docs/reference.py

In config.md everything below the line "## The tables" is generated, in api.md everything below
"## The names"; what stands above is written by hand. tests/test_reference.py compares them.
"""

import inspect
import itertools
import re
import typing
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import coterie
from coterie.adapt import ADAPTATIONS
from coterie.core.fields import Field, fields, meanings, summary
from coterie.core.ranges import in_words
from coterie.data.datasets import DATASETS
from coterie.data.partition import PARTITIONS
from coterie.networks.registry import MODELS
from coterie.runs.config.options import OPTIONS
from coterie.runs.config.schema import Config

DOCS = Path(__file__).parent
STARTS = {"config.md": "## The tables\n", "api.md": "## The names\n"}
SEEN = ("options", "named")  # fields of the schema that are no fields of a config
OWN = "coterie"  # the package; inherited members of other packages are not listed
PARTS = {
    "partition": {name: (kind, summary(kind)) for name, kind in PARTITIONS.items()},
    "data": {name: (entry.loader, entry.about) for name, entry in DATASETS.items()},
    "model": {name: (build, summary(build)) for name, build in MODELS.items()},
    "adapt": {name: (kind, summary(kind)) for name, kind in ADAPTATIONS.items()},
}


def config_page() -> str:
    """The generated part of config.md: one section per table, then the fields of named parts."""
    return "\n".join([*map(_table, Config.model_fields), *map(_parts, PARTS)])


def _table(name: str) -> str:
    """The section of one table of a config."""
    kind = Config.table(name)
    hints = typing.get_type_hints(kind, include_extras=True)
    told: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        told |= meanings(base) if base.__module__.startswith(OWN) else {}
    rows = [
        Field(key, hints[key], field.default, told.get(key, ""))
        for key, field in kind.model_fields.items()
        if key not in SEEN
    ]
    default = getattr(Config(), name) or kind()
    rows = [row._replace(default=getattr(default, row.name)) for row in rows]
    about = _plain(inspect.getdoc(kind) or "").partition("\n\nFields:")[0]
    return f"### [{name}]\n\n{about}\n\n{''.join(map(_item, rows))}"


def _parts(table: str) -> str:
    """The fields of everything that one table can name."""
    kinds: Mapping[str, tuple[Any, str]] = PARTS[table]
    described = [
        (f"**`{name}`**: {_plain(about).rstrip('.')}.\n", "".join(map(_item, fields(owner))))
        for name, (owner, about) in kinds.items()
    ]
    sections = []
    for rows, same in itertools.groupby(described, key=lambda one: one[1]):
        text = "\n".join(about for about, _ in same)
        sections.append(f"{text}\n{rows}" if rows else text)
    return f'### [{table}] name = "…"\n\n' + "\n".join(sections)


def _item(field: Field) -> str:
    """One item of a list of fields: the default, the range, the meaning."""
    limits = "" if isinstance(field.default, bool) else f"; {_range(field)}"
    told = _plain(field.meaning).rstrip(".").replace("\n", " ")
    meaning = f": {told}" if told else ""
    return f"- `{field.name}` ({_default(field)}{limits}){meaning}\n"


def _default(field: Field) -> str:
    default = field.default
    if default is inspect.Parameter.empty:
        return "required"
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f'`"{default}"`' if isinstance(default, str) else f"{default}"


INTERVALS = {
    r"of at least (\S+) and below (\S+)": r"in [\1, \2)",
    r"above (\S+) and at most (\S+)": r"in (\1, \2]",
    r"from (\S+) to (\S+?)(?=[,) ]|$)": r"in [\1, \2]",
    r"\ba (?=whole number|number|text)": "",
    "whole number": "integer",
}


def _range(field: Field) -> str:
    """The range in the words of error messages, with intervals written as such."""
    text = in_words(field.type)
    for words, interval in INTERVALS.items():
        text = re.sub(words, interval, text)
    return text


def _plain(text: str) -> str:
    """A docstring as Markdown: roles and double backticks become code."""
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")


def api_page() -> str:
    """The generated part of api.md: functions, then classes, then errors."""
    named = {name: getattr(coterie, name) for name in coterie.__all__}
    functions = [name for name, found in named.items() if not inspect.isclass(found)]
    errors = [name for name, found in named.items() if inspect.isclass(found) and _fails(found)]
    classes = [name for name in named if name not in (*functions, *errors)]
    return "\n".join(
        [
            "### Functions\n",
            *(_function(name, named[name]) for name in functions),
            _options(),
            "### Classes\n",
            *(_class(name, named[name]) for name in classes),
            "### Errors\n",
            *(f"- `{name}`: {_plain(summary(named[name]))}." for name in errors),
            "",
        ]
    )


def _fails(found: type) -> bool:
    return issubclass(found, Exception)


def _function(name: str, found: Any) -> str:
    return f"#### `coterie.{name}{_call(found)}`\n\n{_documented(found)}\n"


def _call(found: Any) -> str:
    """The parameters of a function, with their defaults and without their types."""
    wanted = inspect.signature(found).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in wanted]
    return str(inspect.Signature([each for each in bare if each.name != "self"]))


def _documented(found: Any) -> str:
    """A docstring; indented lists of fields and examples stay as they are written."""
    text = _plain(inspect.getdoc(found) or "")
    parts = re.split(r"\n\n", text)
    return "\n\n".join(_block(part) for part in parts)


def _block(part: str) -> str:
    lines = part.splitlines()
    if lines[0].startswith(">>>") or lines[0].startswith("    "):
        return "```text\n" + part + "\n```"
    head, rest = lines[0], lines[1:]
    if rest and all(line.startswith("    ") for line in rest):
        return f"{head}\n\n" + "\n".join(_items(rest))
    return part


def _items(lines: list[str]) -> Iterator[str]:
    """A list ``name: meaning`` of a docstring as a list of Markdown."""
    item = ""
    for line in lines:
        if re.match(r" {4}\w+: ", line):
            yield from [item] if item else []
            name, _, meaning = line.strip().partition(": ")
            item = f"- `{name}`: {meaning}"
        else:
            item += f" {line.strip()}"
    yield item


def _options() -> str:
    """The keywords that run, compare and others have in common."""
    pairs = ", ".join(f"`{option.name}` (`{option.field}`)" for option in OPTIONS.values())
    return f"#### `**options`\n\nEach sets a field of the [config](config.md): {pairs}.\n"


def _class(name: str, found: type) -> str:
    members = "".join(_members(found))
    return f"#### `coterie.{name}`\n\n{_documented(found)}\n" + (f"\n{members}" if members else "")


def _members(found: type) -> Iterator[str]:
    """The documented public members of a class; those of a public base stand there."""
    public = {id(getattr(coterie, name)) for name in coterie.__all__} - {id(found)}
    for key in sorted(dir(found)):
        home = next((base for base in found.__mro__ if key in vars(base)), None)
        if key.startswith(("_", "model_post")) or home is None or id(home) in public:
            continue
        if not home.__module__.startswith(OWN):
            continue
        one = inspect.getattr_static(found, key)
        inner = one.__func__ if isinstance(one, staticmethod | classmethod) else one
        if inspect.isfunction(inner) and inner.__doc__:
            yield f"- `{key}{_call(inner)}`: {_plain(summary(inner))}.\n"
        elif isinstance(one, property | cached_property) and one.__doc__:
            yield f"- `{key}`: {_plain(summary(one))}.\n"


PAGES = {"config.md": config_page, "api.md": api_page}


def refreshed(name: str, page: str) -> str:
    """A page with its generated part as the code has it."""
    above, start, _ = page.partition(STARTS[name])
    return f"{above}{start}\n{PAGES[name]()}"


if __name__ == "__main__":
    for each in PAGES:
        place = DOCS / each
        place.write_text(refreshed(each, place.read_text("utf-8")), "utf-8")
