"""The exceptions and warnings of coterie.

    CoterieError
    ├── ConfigError        a field, a file or a combination of fields that cannot be run
    ├── DataError          a dataset, table or partition that cannot be read or made
    ├── EngineError        an engine that cannot run this exactly, or a client that failed in it
    ├── StoreError         a run's folder that cannot be written, read or trusted
    └── StoppedError       a run that stopped because the user asked it to

    SlowerError            a faster way that cannot be used; the run goes on without it and says so
    ├── TraceError         a call that cannot be traced
    ├── CompilerError      steps that cannot be compiled: an unknown operation, no compiler
    └── MismatchError      a trace or compiled steps that do not compute what the call computes

    CoterieWarning         something that a reader of the results has to know

Every message says what was found, what was expected and what to do. The command line prints it
without a traceback and ends with code 2.
"""

import difflib
import re
from collections.abc import Iterable

# Control characters, surrogates, and the marks that change the direction of writing.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_LONG = re.compile(r"(\S{1000})\S+")  # a longer word of a message, such as a table cell, is cut


def printable(text: object) -> str:
    r"""Escape one line for a terminal: line ends and control codes are written as escapes.

    >>> printable("ward \x1b[2J 7")
    'ward \\x1b[2J 7'
    """
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], str(text))


def printable_lines(text: object) -> str:
    """Escape several lines for a terminal; line ends are kept."""
    return "\n".join(map(printable, str(text).split("\n")))


class CoterieError(Exception):
    """The base of all errors that this library raises on purpose."""

    def __str__(self) -> str:
        return _LONG.sub(r"\1…", printable_lines(super().__str__()))


class ConfigError(CoterieError):
    """A configuration that cannot be run."""


class DataError(CoterieError):
    """Data that cannot be read, or a partition that cannot be made from it."""


class EngineError(CoterieError):
    """An engine that cannot do what is asked, or a client that failed inside it."""


class StoreError(CoterieError):
    """A run's folder that cannot be written, read or trusted."""


class InUseError(StoreError):
    """A folder that another process holds."""


class StoppedError(CoterieError):
    """A run that stopped because it was asked to, by this signal; it can be resumed."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class SlowerError(Exception):
    """A faster way to execute a call that cannot be used. Engines catch it; users never see it."""


class TraceError(SlowerError):
    """A call did something that a trace (a list of operations) cannot replay."""


class CompilerError(SlowerError):
    """Steps that cannot be compiled: an unknown operation, or no working compiler."""


class MismatchError(SlowerError):
    """A trace, or compiled steps, that cannot be shown to compute what the call computes."""


class CoterieWarning(UserWarning):
    """Something that did not stop a run but that a reader of the results has to know."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of an "unknown name" message: a guess where one is close, then all known names.

    >>> did_you_mean("epsilonn", ["downloads", "epsilon"])
    "did you mean 'epsilon'? (known: downloads, epsilon)"
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean '{close[0]}'? " if close else ""
    return f"{guess}(known: {', '.join(known)})"


def few(names: Iterable[str], most: int = 8) -> str:
    """The first names, and how many more there are, for a message.

    >>> few("abc", 2)
    'a, b and 1 more'
    """
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
