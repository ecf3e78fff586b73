"""Writes the two pages that are generated from the code: config.md and api.md.

python docs/reference.py

In config.md everything below the line "## The tables" is generated, in api.md everything below
"## The names"; what stands above is written by hand. tests/test_reference.py compares them.
"""

import inspect
import re
import typing
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import coterie
from coterie.core.fields import Field, meanings, summary
from coterie.core.ranges import in_words
from coterie.runs.config.options import OPTIONS
from coterie.runs.config.schema import Config

DOCS = Path(__file__).parent
STARTS = {"config.md": "## The tables\n", "api.md": "## The names\n"}
SEEN = ("options", "named")  # fields of the schema that are no fields of a config
OWN = "coterie"  # the package; inherited members of other packages are not listed


def config_page() -> str:
    """The generated part of config.md: one section per table."""
    return "\n".join(map(_table, Config.model_fields))


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
    r"above (\S+) and at most (\S+?)(?=[,) ]|$)": r"in (\1, \2]",
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
            "\n### Errors\n",
            *(f"- `{name}`: {_plain(summary(named[name]))}." for name in errors),
            "",
        ]
    )


def _fails(found: type) -> bool:
    return issubclass(found, Exception)


def _function(name: str, found: Any) -> str:
    return f"- `{name}{_call(found)}`: {_plain(summary(found))}."


def _call(found: Any) -> str:
    """The parameters of a function, with their defaults and without their types."""
    bare = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(found).parameters.values()
    ]
    return str(inspect.Signature(bare))


def _options() -> str:
    """The keywords that run, compare and others have in common."""
    pairs = ", ".join(f"`{option.name}` (`{option.field}`)" for option in OPTIONS.values())
    return f"\n`**options` set fields of the [config](config.md): {pairs}.\n"


def _class(name: str, found: type) -> str:
    members = ", ".join(f"`{member}`" for member in _members(found))
    about = f"- `{name}`: {_plain(summary(found))}."
    return f"{about} {members}" if members else about


def _members(found: type) -> Iterator[str]:
    """The documented public members of a class; those of a public base stand there."""
    public = {id(getattr(coterie, name)) for name in coterie.__all__} - {id(found)}
    for key in sorted(dir(found)):
        home = next((base for base in found.__mro__ if key in vars(base)), None)
        if key.startswith(("_", "model_post")) or home is None or id(home) in public:
            continue
        one = inspect.getattr_static(found, key)
        inner = one.__func__ if isinstance(one, staticmethod | classmethod) else one
        known = inspect.isfunction(inner) or isinstance(one, property | cached_property)
        if home.__module__.startswith(OWN) and known and inner.__doc__:
            yield f"{key}()" if inspect.isfunction(inner) else key


PAGES = {"config.md": config_page, "api.md": api_page}


def refreshed(name: str, page: str) -> str:
    """A page with its generated part as the code has it."""
    above, start, _ = page.partition(STARTS[name])
    return f"{above}{start}\n{PAGES[name]()}"


if __name__ == "__main__":
    for each in PAGES:
        place = DOCS / each
        place.write_text(refreshed(each, place.read_text("utf-8")), "utf-8")
