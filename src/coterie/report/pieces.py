"""What the page of a comparison and the page of a run have in common."""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..errors import ConfigError, did_you_mean
from ..results.history import Roster
from ..storage import files
from .colours import style


@cache
def _templates() -> Environment:
    loader = PackageLoader("coterie.report", "templates")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def rendered(template: str, values: Mapping[str, Any]) -> str:
    """A page as HTML text, from a template; everything that comes from users is escaped.

    The page's policy allows the one script of ours by its hash, and no other.
    """
    script, named = _script()
    return (
        _templates()
        .get_template(template)
        .render({**values, "script": script, "script_hash": named, "palette": _palette()})
    )


@cache
def _palette() -> dict[str, Markup]:
    """The colours of methods as CSS declarations, for light and for dark pages."""
    return {"light": Markup(style("light")), "dark": Markup(style("dark"))}


@cache
def _script() -> tuple[Markup, Markup]:
    """The script of the pages, and its hash as a content security policy names it."""
    text = resources.files(__package__).joinpath("templates/report.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(text), Markup(f"sha256-{digest}")


def unbroken(text: str) -> str:
    """The text with no-break spaces, so that numbers stay on one line with their units."""
    return re.sub(r" (?=[%=<]|[0-9.]+\))", "\N{NO-BREAK SPACE}", text)


def client_index(roster: Roster, name: str) -> int:
    """The place of a client in its federation; an unknown name is refused."""
    if name not in roster.clients:
        known = did_you_mean(name, roster.clients)
        raise ConfigError(f"there is no client '{name}'; {known}")
    return roster.clients.index(name)


def groups_of(roster: Roster) -> int:
    """The number of true groups; 0 if they are not known."""
    return 0 if roster.groups is None else len(set(roster.groups.tolist()))


def samples_of(roster: Roster) -> str:
    """The number of training samples per client, or the range of these numbers."""
    least, most = roster.n_train.min(), roster.n_train.max()
    return f"{most}" if least == most else f"{least}–{most}"


def command_of(environment: Mapping[str, Any]) -> str | None:
    """The command line that started a run; None if it was started from Python."""
    argv = environment.get("argv") or []
    if not argv or Path(argv[0]).stem not in ("coterie", "__main__"):
        return None
    return shlex.join(["coterie", *argv[1:]])


def pretty(value: Mapping[str, Any]) -> str:
    """A config or an environment as indented JSON text."""
    return json.dumps(files.plain(dict(value)), indent=2, ensure_ascii=False, default=str)
