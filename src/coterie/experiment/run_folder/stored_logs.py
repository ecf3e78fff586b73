"""``rounds.jsonl`` and ``clients.csv``: the logs that a run writes after every round."""

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...results import kinds
from ...results.history import FEDERATED, SCORES, Line, Roster, Scores
from ...storage import files
from .names import unreadable

COLUMNS = ("round", "client", "n_train", "n_val", "n_test", *SCORES)
# A spreadsheet reads a cell that begins with one of these as a formula, so a quote is put before
# it. A quote itself is quoted too, so that reading restores the name.
_FORMULA = re.compile(r"(^|[,;\t\r\n])(?=[=+\-@\t\r\n＝＋－＠'])")
_QUOTED = re.compile(r"(^|[,;\t\r\n])'")
LINE = {  # the fields that every line has, and their kinds
    "round": "a count",
    "clients": "a list of counts",
    "bytes_down": "a count",
    "bytes_up": "a count",
    "bytes_serve": "a count",
    "seconds": "finite seconds",
    "rejected": "a list of clients and reasons",
}
LINE_MAY = {  # the fields that some lines have
    **dict.fromkeys((*SCORES, FEDERATED), "a number or null"),
    "in_group_weight": "a finite number or null",
    "off_diagonal": "zero, uniform or varied",
    "distillation": "two numbers",
    "objective": "a number or null",
    "train_loss": "a number or null",
}


def read_rounds(path: Path) -> list[Line]:
    """Read the complete lines of ``rounds.jsonl``; a last line cut short by a crash is dropped."""
    lines: list[Line] = []
    for text in _read_lines(path).split("\n")[:-1]:
        try:
            lines.append(_checked_line(files.from_json(text)))
        except ValueError as error:
            raise unreadable(path, error, "one JSON object per line") from error
    return lines


def _checked_line(line: Any) -> Line:
    """Check a line of ``rounds.jsonl``; ValueError names the first field that is wrong.

    Fields of a user's own method may hold anything.
    """
    if not isinstance(line, dict):
        raise ValueError(f"a line is {kinds.shown(line)}")
    for name, kind in LINE.items():
        kinds.check(name, line.get(name), kind)
    for name in LINE_MAY.keys() & line.keys():
        kinds.check(name, line[name], LINE_MAY[name])
    if "distillation" in line:
        return {**line, "distillation": [kinds.number(part) for part in line["distillation"]]}
    return line


def client_rows(index: int, scores: Scores, roster: Roster) -> Iterator[tuple[Any, ...]]:
    """The lines of one round for ``clients.csv``; the cell of a missing score is empty.

    A quote is put before a client's name that a spreadsheet would read as a formula.
    """
    for i, name in enumerate(roster.clients):
        numbers = [float(scores[column][i]) for column in SCORES]
        cells = ["" if math.isnan(number) else repr(number) for number in numbers]
        yield (
            index,
            _FORMULA.sub(r"\1'", name),
            roster.n_train[i],
            roster.n_val[i],
            roster.n_test[i],
            *cells,
        )


def append_clients(path: Path, rows: Iterable[tuple[Any, ...]]) -> None:
    """Add lines to ``clients.csv``."""
    with path.open("a", encoding="utf-8", newline="") as file:
        file.writelines(map(_csv_line, rows))


def _csv_line(row: tuple[Any, ...]) -> str:
    """One line of CSV.

    The writer quotes line ends in a cell only if its own line end has the same characters.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(row)
    return text.getvalue().removesuffix("\r\n") + "\n"


def read_clients(path: Path) -> tuple[list[tuple[int, Scores]], Roster]:
    """Read the scores of every evaluated round, and the clients; an incomplete round is dropped."""
    table = csv.DictReader(io.StringIO(_read_lines(path), newline=""))
    rounds: dict[int, list[dict[str, str]]] = {}
    try:
        for row in table:
            row["client"] = _QUOTED.sub(r"\1", row["client"])
            rounds.setdefault(int(row["round"]), []).append(row)
        first = next(iter(rounds.values()), [])
        sizes = {name: _sizes(first, name) for name in COLUMNS[2:5]}
        names = tuple(row["client"] for row in first)
        scores = [
            (index, {name: _column(rows, name) for name in SCORES})
            for index, rows in rounds.items()
            if tuple(row["client"] for row in rows) == names
        ]
    except (KeyError, TypeError, ValueError, OverflowError, csv.Error) as error:
        raise unreadable(path, error, f"a table with columns {', '.join(COLUMNS)}") from error
    return scores, Roster(names, **sizes, groups=None, fingerprint="", weak={})


def _sizes(rows: list[dict[str, str]], name: str) -> Any:
    sizes = np.array([int(row[name]) for row in rows], dtype=np.int64)
    if bool((sizes < 0).any()):
        raise ValueError(f"{name} is {sizes.min()}, below 0")
    return sizes


def _column(rows: list[dict[str, str]], name: str) -> Any:
    return np.array([float(row[name]) if row[name] else math.nan for row in rows])


def _read_lines(path: Path) -> str:
    """The text of a file up to its last line end; a crash cut short what follows."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        return text[: text.rfind("\n") + 1]
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, "a text file of a run") from error
