"""What ``coterie list``, ``show`` and ``new`` print and write: names, fields, and an example."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, NamedTuple

from ..adapt import ADAPTATIONS
from ..algorithms import ALGORITHMS, ALIASES
from ..core.fields import REQUIRED, Field, fields, summary
from ..core.metrics import METRICS, Metric
from ..data.datasets import DATASETS
from ..data.partition import PARTITIONS
from ..data.sources.heart import heart_config, heart_table
from ..engines import ENGINES
from ..errors import ConfigError, StoreError, did_you_mean
from ..networks.registry import MODELS
from ..runs.config.loading import HEART
from ..storage import files

# ---- list and show -------------------------------------------------------------------------------

WIDTH = 100


class Entry(NamedTuple):
    """Something a config can name."""

    about: str  # in one line
    text: str  # the whole description
    fields: tuple[Field, ...]
    paper: str = ""
    bibtex: str = ""


def _method(kind: type[Any]) -> Entry:
    text = inspect.getdoc(inspect.getmodule(kind)) or inspect.getdoc(kind) or ""
    return Entry(summary(kind), text, fields(kind), kind.paper, kind.bibtex)


def _alias(name: str) -> Entry:
    base, adapt = ALIASES[name]
    entry, adapted = _method(ALGORITHMS[base]), ADAPTATIONS[adapt]
    about = f"{base}, then {summary(adapted)[0].lower()}{summary(adapted)[1:]}"
    return entry._replace(about=about)


def _plain(owner: Callable[..., Any]) -> Entry:
    return Entry(summary(owner), _prose(owner), fields(owner))


def _prose(owner: object) -> str:
    """A docstring without its list of fields, which is printed separately."""
    kept = []
    for line in (inspect.getdoc(owner) or "").partition("\nFields:")[0].splitlines():
        if line.partition(":")[0].strip() not in {f.name for f in fields(owner)}:  # type: ignore[arg-type]
            kept.append(line)
    return "\n".join(kept).strip()


def _metric(row: Metric) -> Entry:
    direction = "higher" if row.higher_is_better else "lower"
    scale = ", in percent" if row.percent else f", {row.unit}" if row.unit else ""
    about = f"{row.title} of {row.targets}{scale}; {direction} is better"
    return Entry(about, about, ())


TABLES: dict[str, tuple[Iterable[str], Callable[[str], Entry]]] = {
    "methods": (
        (*ALGORITHMS, *ALIASES),
        lambda name: _alias(name) if name in ALIASES else _method(ALGORITHMS[name]),
    ),
    "datasets": (
        DATASETS,
        lambda name: _plain(DATASETS[name].loader)._replace(about=DATASETS[name].about),
    ),
    "partitions": (PARTITIONS, lambda name: _plain(PARTITIONS[name])),
    "models": (MODELS, lambda name: _plain(MODELS[name])),
    "adaptations": (ADAPTATIONS, lambda name: _plain(ADAPTATIONS[name])),
    "engines": (ENGINES, lambda name: Entry(ENGINES[name], ENGINES[name], ())),
    "metrics": (METRICS, lambda name: _metric(METRICS[name])),
}


def listing(kind: str) -> str:
    """The names of a kind, one line each with a short description."""
    rows = listed(kind)
    width = max(len(row["name"]) for row in rows)
    return "\n".join(f"{row['name']:<{width}}  {row['about']}" for row in rows)


def listed(kind: str) -> list[dict[str, str]]:
    """The names of a kind with their short descriptions, for JSON."""
    names, entry = _table(kind)
    return [{"name": name, "about": entry(name).about} for name in names]


def _table(kind: str) -> tuple[list[str], Callable[[str], Entry]]:
    plural = kind if kind in TABLES else f"{kind}s"
    if plural not in TABLES:
        raise ConfigError(f"there is nothing called '{kind}' to list; {did_you_mean(kind, TABLES)}")
    names, entry = TABLES[plural]
    return list(names), entry


def explanation(words: list[str]) -> str:
    """The description of a name; ``words`` may begin with a kind if two kinds share the name."""
    kinds = list(TABLES) if len(words) == 1 else [words[0]]
    name = words[-1]
    found = [entry(name) for names, entry in map(_table, kinds) if name in names]
    if not found or len(words) > 2:
        known = [each for kind in kinds for each in _table(kind)[0]]
        raise ConfigError(f"nothing is called '{' '.join(words)}'; {did_you_mean(name, known)}")
    return "\n\n".join(_explained(name, entry) for entry in found)


def _explained(name: str, entry: Entry) -> str:
    parts = [f"{name}: {entry.about}"]
    if entry.text.rstrip(".") not in ("", entry.about):
        parts.append(entry.text)
    if entry.fields:
        parts.append("fields\n" + "\n".join(map(_field_text, entry.fields)))
    if entry.paper:
        parts.append("paper\n" + textwrap.fill(entry.paper, WIDTH, **_indent(2)))
    if entry.bibtex:
        parts.append(entry.bibtex)
    return "\n\n".join(parts)


def _field_text(field: Field) -> str:
    default = "must be given" if field.default is REQUIRED else f"default {_value(field.default)}"
    head = f"  {field.name} ({field.kind}; {default})"
    if not field.meaning:
        return head
    return head + "\n" + textwrap.fill(field.meaning, WIDTH, **_indent(6))


def _indent(by: int) -> dict[str, Any]:
    return {"initial_indent": " " * by, "subsequent_indent": " " * by}


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


# ---- new -----------------------------------------------------------------------------------------

TEMPLATES = resources(__package__).joinpath("templates")


def write_example(name: str) -> tuple[Path, Path]:
    """Write ``NAME.toml`` and ``NAME.csv``; refuses a path that exists. Returns both paths.

    The name ``heart`` gives the table of the dataset. Otherwise the table is made up and shows the
    layout that coterie reads: six sites with 30 patients each, two rows a patient. At three sites
    ``score`` raises the risk of the outcome, at the others it lowers it: there are collaborators
    to be found.
    """
    config, table = _paths(name)
    if config.stem == HEART:
        text, rows = heart_config(), heart_table()
    else:
        made = (TEMPLATES.joinpath(f"federation.{kind}") for kind in ("toml", "csv"))
        text, rows = (file.read_text(encoding="utf-8") for file in made)
    with files.writing(config):
        config.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(table, rows)
    files.write_text(config, text.replace("@NAME@", config.stem))
    return config, table


def _paths(name: str) -> tuple[Path, Path]:
    """The paths of both files; refuses names that are no plain file name, and paths in use."""
    place = files.expanded(name.removesuffix(".toml"))
    if not re.fullmatch(r"\w[\w-]*", place.name):
        raise StoreError(
            f"NAME: found '{name}'; expected letters, digits, '-' and '_', as in my-federation, "
            "after an optional folder"
        )
    paths = tuple(place.with_name(place.name + suffix) for suffix in (".toml", ".csv"))
    for path in paths:
        if path.exists() or path.is_symlink():
            raise StoreError(f"{path}: exists already; nothing was written; choose another name")
    return paths[0], paths[1]
