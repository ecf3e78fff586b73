"""Describes each client's part of a table, and finds columns that clients wrote in different ways.

All functions read the data before it is standardised. They find what a person should look at; they
change nothing, and what they find may be right as it is.
"""

from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.metrics import Array, score
from .federation import Dataset, Federation
from .sources.columns import NO_CELL

OFF = 10.0  # times the others' median or spread: another unit, as cm and m
FEWEST = 5  # known numbers of a client from which its median and spread are compared

Floats = npt.NDArray[np.float64]


class SitePart(NamedTuple):
    """One client's rows: how many, how complete, and which classes."""

    client: str
    train: int
    val: int
    test: int
    test_units: int  # test samples, or units (patients) where the data has units
    missing: float | None  # share of empty cells in the inputs; None if the data is no table
    classes: dict[str, float]  # the share of each class among all rows; empty for a regression
    commonest: float | None  # accuracy on test data of always answering the commonest class

    @property
    def rows(self) -> int:
        """All rows of the client."""
        return self.train + self.val + self.test


class Alike(NamedTuple):
    """Two categories of one column that look like two spellings of one."""

    column: str
    one: str
    at: tuple[str, ...]  # the clients that use it
    other: str
    other_at: tuple[str, ...]


class Coding(NamedTuple):
    """A client whose categories of a column are used by no other client."""

    client: str
    column: str
    own: tuple[str, ...]
    others: tuple[str, ...]


class OtherScale(NamedTuple):
    """A column whose numbers at one client have another magnitude than at the others."""

    client: str
    column: str
    own: float  # the client's median, or its spread
    others: float  # the median over the other clients
    what: str  # "median" or "spread"


def original(federation: Federation) -> Dataset:
    """The dataset before it was standardised."""
    return federation.dataset if federation.source is None else federation.source


def rows_of(federation: Federation) -> list[npt.NDArray[np.int64]]:
    """The indices of all samples of each client."""
    parts = zip(federation.train, federation.own_val, federation.own_test, strict=True)
    return [np.concatenate([split.numpy() for split in splits]) for splits in parts]


def parts(federation: Federation) -> list[SitePart]:
    """One description per client."""
    data, found = original(federation), []
    names = data.class_names or tuple(map(str, range(data.classes)))
    empty = _empty_cells(data)
    for i, rows in enumerate(rows_of(federation)):
        test = federation.own_test[i]
        sizes = len(federation.train[i]), len(federation.own_val[i]), len(test)
        units = sizes[2] if data.units is None else len(data.units[test].unique())
        counts = [int((data.y[rows] == c).sum()) for c in range(data.classes)]
        shares = {
            name: n / data.y[rows].numel() for name, n in zip(names, counts, strict=True) if n
        }
        missing = None if empty is None or not len(rows) else float(empty[rows].mean())
        own = _commonest(data, federation.train[i].numpy(), test.numpy())
        found.append(SitePart(federation.clients[i], *sizes, units, missing, shares, own))
    return found


def _commonest(data: Dataset, train: Array, test: Array) -> float | None:
    """The accuracy of always answering the commonest class of the training data."""
    if not data.classes or not len(train) or not len(test):
        return None
    y = data.y.numpy()
    asked, answer = y[test].ravel(), np.bincount(y[train].ravel()).argmax()
    return score("accuracy", np.full(len(asked), answer), asked)


def _empty_cells(data: Dataset) -> npt.NDArray[np.bool_] | None:
    """For each row and input column, whether the cell is empty ``[N, columns]``."""
    if data.numeric is None or data.x.ndim != 2 or not data.feature_names:
        return None
    x = data.x.numpy()
    numbers = np.isnan(x[:, data.numeric.numpy()])
    named = [
        x[:, levels[NO_CELL]] > 0 if NO_CELL in levels else np.zeros(len(x), np.bool_)
        for levels in categories(data).values()
    ]
    return np.concatenate([numbers, *(one[:, None] for one in named)], axis=1)


def categories(data: Dataset) -> dict[str, dict[str, int]]:
    """The feature of each level of each category column."""
    found: dict[str, dict[str, int]] = {}
    if data.numeric is None:
        return found
    for at, title in enumerate(data.feature_names):
        column, is_level, level = title.partition(" = ")
        if is_level and not data.numeric[at]:
            found.setdefault(column, {})[level] = at
    return found


def _used(federation: Federation) -> dict[str, dict[str, tuple[str, ...]]]:
    """For each category column and the target, the clients that use each level."""
    data, rows = original(federation), rows_of(federation)
    clients = federation.clients
    found = {}
    for column, levels in categories(data).items():
        held = {level: data.x[:, at].numpy() > 0 for level, at in levels.items()}
        found[column] = {
            level: tuple(name for name, own in zip(clients, rows, strict=True) if has[own].any())
            for level, has in held.items()
            if level != NO_CELL
        }
    if data.class_names:
        y = data.y.numpy()
        found["the target"] = {
            level: tuple(
                name for name, own in zip(clients, rows, strict=True) if (y[own] == c).any()
            )
            for c, level in enumerate(data.class_names)
        }
    return found


def alike(federation: Federation) -> list[Alike]:
    """Pairs of categories that look like spellings of one.

    They differ only in case, blanks and punctuation; or one is the beginning of the other (F and
    female) and no client uses both.
    """
    return [
        Alike(column, one, used[one], other, used[other])
        for column, used in _used(federation).items()
        for one, other in combinations(used, 2)
        if _same(one, other) or (_begins(one, other) and not {*used[one]} & {*used[other]})
    ]


def _plain(level: str) -> str:
    return "".join(letter for letter in level.casefold() if letter.isalnum())


def _same(one: str, other: str) -> bool:
    return _plain(one) == _plain(other) != ""


def _begins(one: str, other: str) -> bool:
    """Whether the shorter one consists of letters and begins the longer one."""
    short, long = sorted((_plain(one), _plain(other)), key=len)
    return short.isalpha() and long.isalpha() and long.startswith(short)


def codings(federation: Federation) -> list[Coding]:
    """Clients that share no category of a column with any other client."""
    found = []
    for column, used in _used(federation).items():
        for client in federation.clients:
            own = tuple(level for level, at in used.items() if client in at)
            others = tuple(level for level, at in used.items() if {*at} - {client})
            if own and others and not {*own} & {*others}:
                found.append(Coding(client, column, own, others))
    return found


def empty_columns(federation: Federation) -> dict[str, list[str]]:
    """Input columns that are empty in all rows of some clients, with these clients."""
    data, found = original(federation), dict[str, list[str]]()
    empty = _empty_cells(data)
    if empty is None or data.numeric is None:
        return found
    numbers = [data.feature_names[at] for at in np.flatnonzero(data.numeric.numpy())]
    columns = [*numbers, *categories(data)]
    for client, rows in zip(federation.clients, rows_of(federation), strict=True):
        for at in np.flatnonzero(empty[rows].all(0)) if len(rows) else []:
            found.setdefault(columns[at], []).append(client)
    return found


def scales(federation: Federation) -> list[OtherScale]:
    """Columns of clients whose median or spread is ten times that of the other clients, or a tenth.

    Spread is the distance between the quartiles. A median counts only if it is far from the others'
    median compared with the spreads: medians around zero have no scale.
    """
    data, found = original(federation), list[OtherScale]()
    if data.numeric is None or data.x.ndim != 2 or len(federation) < 2:
        return found
    x, rows = data.x.double().numpy(), rows_of(federation)
    for at in np.flatnonzero(data.numeric.numpy()):
        name = data.feature_names[at] if data.feature_names else f"x{at}"
        known = [own[~np.isnan(own)] for own in (x[mine, at] for mine in rows)]
        quartiles = np.array(
            [np.quantile(v, (0.25, 0.5, 0.75)) if len(v) >= FEWEST else [np.nan] * 3 for v in known]
        )
        middle, spread = quartiles[:, 1], quartiles[:, 2] - quartiles[:, 0]
        for i, client in enumerate(federation.clients):
            if (odd := _odd(i, middle, spread)) is not None:
                found.append(OtherScale(client, name, *odd))
    return found


def _odd(i: int, middle: Floats, spread: Floats) -> tuple[float, float, str] | None:
    """The client's number, the others', and which; None if it is like the others'."""
    others = ~np.isnan(middle) & (np.arange(len(middle)) != i)
    if np.isnan(middle[i]) or not others.any():
        return None
    usual, width = float(np.median(middle[others])), float(np.median(spread[others]))
    own, own_width = float(middle[i]), float(spread[i])
    if abs(own - usual) > 2 * max(width, own_width) and _far(abs(own), abs(usual)):
        return own, usual, "median"
    return (own_width, width, "spread") if _far(own_width, width) else None


def _far(one: float, other: float) -> bool:
    """Whether one is ten times the other or more; false if one is zero."""
    return min(one, other) > 0 and max(one, other) >= OFF * min(one, other)
