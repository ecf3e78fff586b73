"""Lists and checks the fields that a config can set on a method, partition, network or dataset.

Methods, adaptations and partitions are dataclasses; networks and dataset loaders are functions
with keyword-only options. Both are read here as lists of fields. The meaning of a field is a line
``name: meaning`` of the docstring or, in a dataclass, the comment behind the field; else its type's
:class:`~coterie.core.ranges.Meaning`.
"""

import dataclasses
import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import ConfigError, did_you_mean
from .ranges import Meaning, fitted, fitted_json, in_words

AUTO = "auto"
REQUIRED = inspect.Parameter.empty


class Field(NamedTuple):
    """One field of a dataclass, or one option of a function."""

    name: str
    type: Any
    default: Any  # REQUIRED where there is none
    meaning: str

    @property
    def kind(self) -> str:
        """The type and range in plain words, for the author of a config."""
        return in_words(self.type)

    def refusal(self, value: Any, where: str) -> ConfigError:
        """The error to raise for a value of another type or out of range."""
        meaning = f" ({self.name}: {self.meaning.rstrip('.')})" if self.meaning else ""
        return ConfigError(f"{where}: found {value!r}; expected {self.kind}{meaning}")


def fields(owner: Callable[..., Any]) -> tuple[Field, ...]:
    """The fields of a dataclass, or the options of a function or class.

    ``shape`` and ``classes`` are not options: they come from the data.
    """
    made_by_init = isinstance(owner, type) and not dataclasses.is_dataclass(owner)
    hints = typing.get_type_hints(owner.__init__ if made_by_init else owner, include_extras=True)
    told: dict[str, str] = {}
    for kind in reversed(owner.__mro__ if isinstance(owner, type) else (owner,)):
        told |= meanings(kind)
    defaults: dict[str, Any] = {}
    if dataclasses.is_dataclass(owner):
        for field in dataclasses.fields(owner):
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            if field.init:
                defaults[field.name] = REQUIRED if default is dataclasses.MISSING else default
    else:
        for name, parameter in inspect.signature(owner).parameters.items():
            open_ended = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if name not in ("shape", "classes") and not open_ended:
                defaults[name] = parameter.default
    return tuple(
        Field(name, kind, default, (told.get(name) or _of_type(kind)).replace("``", ""))
        for name, default in defaults.items()
        for kind in (hints.get(name, Any),)
    )


def _of_type(kind: Any) -> str:
    limits = getattr(kind, "__metadata__", ())
    return next((one.text for one in limits if isinstance(one, Meaning)), "")


def checked(
    given: Mapping[str, Any], known: Iterable[Field], where: str, owner: str
) -> dict[str, Any]:
    """The value of every field, given or default; unknown, missing or mistyped ones are refused."""
    table = {field.name: field for field in known}
    for name in given:
        if name not in table:
            tail = (
                did_you_mean(name, table).replace("known:", "fields:") if table else "it has none"
            )
            raise ConfigError(f"{where}.{name}: {owner} has no such field; {tail}")
    for field in table.values():
        if field.default is REQUIRED and field.name not in given:
            raise ConfigError(
                f"{where}.{field.name}: missing; {owner} needs it ({field.kind}"
                + (f": {field.meaning})" if field.meaning else ")")
            )
    return {
        name: _typed(given[name], field, f"{where}.{name}") if name in given else field.default
        for name, field in table.items()
    }


def _typed(value: Any, field: Field, where: str) -> Any:
    """One value converted to the field's type, as strictly as TOML distinguishes types."""
    try:
        return fitted_json(value, field.type)
    except ValueError:
        raise field.refusal(value, where) from None


class Checked:
    """Base of dataclasses whose fields are checked against their annotations when constructed."""

    def __post_init__(self) -> None:
        """Refuse a field that is of another type or out of range; lists become tuples."""
        owner: Any = type(self)
        for name, kind in _field_types(owner).items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, fitted(value, kind))
            except ValueError:
                field = next(field for field in fields(owner) if field.name == name)
                raise field.refusal(value, f"{owner.__name__}.{name}") from None
        self.check_together()

    def check_together(self) -> None:
        """Refuse fields that contradict each other; by default all combinations are accepted."""

    @property
    def within(self) -> "tuple[Checked, ...]":
        """The methods and adaptations that this one runs; by default those in its fields."""
        owner: Any = type(self)
        values = (getattr(self, name) for name in _field_types(owner))
        return tuple(value for value in values if isinstance(value, Checked))


@functools.cache
def _field_types(owner: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(owner, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(owner) if field.init}


def summary(owner: object) -> str:
    """The first sentence or line of a docstring."""
    return (inspect.getdoc(owner) or "").partition("\n")[0].rstrip(".")


@functools.cache
def meanings(owner: object) -> dict[str, str]:
    """Meanings by field: docstring lines ``name: meaning``, else comments behind the fields."""
    found: dict[str, str] = {}
    try:
        source = textwrap.dedent(inspect.getsource(owner))  # type: ignore[arg-type]
    except (OSError, TypeError):
        source = ""
    if isinstance(owner, type):
        for name, meaning in re.findall(r"^    (\w+): [^#\n]*  # (.+)$", source, re.MULTILINE):
            found[name] = meaning
    depth, name = 0, ""
    for line in (inspect.getdoc(owner) or "").splitlines():
        indent = len(line) - len(line.lstrip())
        if start := re.match(r" *(\w+): (.+)", line):
            depth, name = indent, start[1]
            found[name] = start[2]
        elif name and line and indent > depth:  # the sentence goes on
            found[name] += " " + line.strip()
        else:
            name = ""
    return found
