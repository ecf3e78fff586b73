"""The arguments of commands that take a config: one flag for each row of OPTIONS."""

import inspect
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from ..errors import ConfigError, CoterieWarning, printable
from ..runs.config.options import OPTIONS

CODE = typer.Option(
    "--code",
    metavar="DIR",
    help="a folder with a module that the config names as package.module:Class",
)

CODES = typer.Option(
    "--codes",
    metavar="FILE",
    help="CSV with the columns column, code, means: what this site's own codes are elsewhere",
)

STRICT = typer.Option("--strict", help="refuse unknown categories and missing columns")

JSON = typer.Option("--json", help="print one JSON value (docs/json.md), and progress on stderr")

COLUMNS = typer.Option(
    "--columns",
    metavar="NAME,...",
    help="further columns of the table, as in variance,best_tenth; a wrong name lists all names",
)

TENSORBOARD = typer.Option(
    "--tensorboard", metavar="DIR", help="also write scores and bytes for TensorBoard"
)

WANDB = typer.Option("--wandb", metavar="PROJECT", help="also log them to Weights & Biases")

MLFLOW = typer.Option("--mlflow", metavar="EXPERIMENT", help="also log them to MLflow")


SPECIFIC = typer.Option(
    "--specificity", help="sensitivity is given at this specificity, for an outcome of classes"
)
POSITIVE = typer.Option(
    "--positive",
    metavar="CLASS",
    help="the class that is the outcome; default: the second of two classes",
)

RECALIBRATE = typer.Option(
    "--recalibrate", help="set the temperature of probabilities by the client's validation data"
)


def say(*lines: str) -> None:
    """Print lines, without control codes that names may contain."""
    for line in lines:
        print(printable(line), flush=True)


def warn(lines: Iterable[str]) -> None:
    for line in lines:
        warnings.warn(line, CoterieWarning, stacklevel=2)


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it takes a config file and the options that override it.

    The command receives the config and the given options; its further parameters are its own
    options.
    """
    argument = typer.Argument(
        help="TOML file, or heart: four hospitals; without it, a small built-in example",
        metavar="CONFIG",
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(
            "config", keyword, default=None, annotation=Annotated[str | None, argument]
        )
    ]
    for row in OPTIONS.values():
        option = typer.Option(help=f"{row.help} [{row.field}]", show_default=False)
        hint: Any = Annotated[row.type | None, option]
        parameters.append(inspect.Parameter(row.name, keyword, default=None, annotation=hint))
    setting = typer.Option(
        "--set", metavar="FIELD=VALUE", help="any field, as in train.momentum=0.9"
    )
    for name, repeated in (("set", setting), ("code", CODE)):
        hint = Annotated[list[str] | None, repeated]
        parameters.append(inspect.Parameter(name, keyword, default=None, annotation=hint))
    own = list(inspect.signature(command).parameters.values())[2:]
    parameters += [option.replace(kind=keyword) for option in own]

    def wrapped(**given: Any) -> None:
        config, further = (
            given.pop("config"),
            {option.name: given.pop(option.name) for option in own},
        )
        try:
            command(config, flags(given), **further)
        except KeyboardInterrupt:
            print("coterie: interrupted; finished runs are kept", file=sys.stderr)
            raise SystemExit(130) from None

    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


def flags(given: dict[str, Any]) -> dict[str, Any]:
    """The flags as :func:`coterie.api.configure` takes them: lists split, values read as TOML."""
    found = {name: value for name, value in given.items() if value is not None and name != "set"}
    if "methods" in found:
        found["methods"] = [name.strip() for name in found["methods"].split(",") if name.strip()]
    if "seeds" in found:
        found["seeds"] = _seeds(found["seeds"])
    found["set"] = settings(given.get("set") or [])
    return found


def settings(given: Iterable[str]) -> dict[str, Any]:
    """The values of ``--set FIELD=VALUE``, by field."""
    return dict(map(_setting, given))


def _seeds(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise ConfigError(f"run.seeds: found '{text}'; expected a number, or 0,1,2")
    return numbers if "," in text else numbers[0]


def _setting(text: str) -> tuple[str, Any]:
    """``train.lr=0.1`` as a dotted name and a value in TOML's syntax; a bare word is a text."""
    field, equals, value = (part.strip() for part in text.partition("="))
    if not equals or "." not in field:
        raise ConfigError(f"--set {text}: expected FIELD=VALUE, as in train.momentum=0.9")
    if re.fullmatch(r"[A-Za-z_][\w.:/-]*", value) and value not in ("true", "false", "nan", "inf"):
        return field, value
    try:
        return field, tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        raise ConfigError(
            f"--set {text[:60]}: '{value[:60]}' is no TOML value; expected a number, true, false, "
            "a quoted text or a [list]"
        ) from None
