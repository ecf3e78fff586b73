"""What can go wrong, and what it is called.

    CoterieError
    ├── ConfigError        a field, a file or a combination of fields that cannot be run
    ├── DataError          a dataset, table or partition that cannot be read or made
    ├── EngineError        an engine that cannot run this exactly, or a client that failed in it
    ├── StoreError         a run's folder that cannot be written, read or trusted
    └── StoppedError       the user asked a run to stop, and it has

    SlowerError            a faster way that is not taken; the run goes on without it and says so
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

# Control characters, surrogates, and what turns the order of letters around.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_LONG = re.compile(r"(\S{1000})\S+")  # a word of a message, such as a cell of a table, is cut there


def printable(text: object) -> str:
    r"""One line as it may go to a terminal: line ends and escape codes are written as escapes.

    >>> printable("ward \x1b[2J 7")
    'ward \\x1b[2J 7'
    """
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], str(text))


def printable_lines(text: object) -> str:
    """Several lines as they may go to a terminal."""
    return "\n".join(map(printable, str(text).split("\n")))


class CoterieError(Exception):
    """Anything this library raises on purpose."""

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


class StoppedError(CoterieError):
    """A run that stopped because it was asked to, by this signal; it can be resumed."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class SlowerError(Exception):
    """A faster way of doing a call that is not taken. Engines catch it; no user sees it raised."""


class TraceError(SlowerError):
    """A call did something that a list of operations cannot repeat."""


class CompilerError(SlowerError):
    """Steps that are not compiled: an operation is not known, or there is no working compiler."""


class MismatchError(SlowerError):
    """A trace, or compiled steps, that cannot be shown to compute what the call computes."""


class CoterieWarning(UserWarning):
    """Something that did not stop a run and has to be known."""

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
