"""Describes each client's part of a table, and finds columns that clients wrote in different ways.

All functions read the data before it is standardised. They find what a person should look at; they
change nothing, and what they find may be right as it is.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.inference import smallest_gain
from ..core.metrics import METRICS, Array, score
from ..data.arrays import Floats
from ..data.federation import Dataset, Federation, sample_hashes
from ..data.sources.sheets import NO_CELL
from ..errors import few
from ..runs.run import Roster

OFF = 10.0  # times the others' median or spread: another unit, as cm and m
FAR = 1000.0  # times the median distance from the median over all clients
FEW = 3  # classes whose shares are said
FEWEST = 5  # known numbers of a client from which its median and spread are compared
MANY = 8  # warnings of one kind, at most
HIGH = 80.0  # percent: an accuracy of always answering the commonest class that hides failures
COARSE = 20.0  # percentage points: a test set that shows only larger gains tells little


class SitePart(NamedTuple):
    """One client's rows: how many, how complete, which classes, and what its test data can show."""

    client: str
    train: int
    val: int
    test: int
    test_units: int  # test samples, or units (patients) where the data has units
    missing: float | None  # share of empty cells in the inputs; None if the data is no table
    classes: dict[str, float]  # the share of each class among all rows; empty for a regression
    commonest: float | None  # accuracy on test data of always answering the commonest class
    smallest_gain: float | None  # in percentage points; None if no gain can be shown

    @property
    def rows(self) -> int:
        """All rows of the client."""
        return self.train + self.val + self.test

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        return {**self._asdict(), "rows": self.rows}

    def cells(self) -> tuple[str, ...]:
        """The text of each column."""
        often = sorted(self.classes.items(), key=lambda pair: -pair[1])
        said = [f"{name} {100 * share:.0f} %" for name, share in often[:FEW]]
        said += [f"{len(often) - FEW} more"] * (len(often) > FEW)
        return (
            self.client,
            *(f"{n:,}" for n in (self.rows, self.train, self.val, self.test)),
            "—" if self.missing is None else f"{100 * self.missing:.1f} %",
            "—" if self.commonest is None else f"{self.commonest:.1f} %",
            "—" if self.smallest_gain is None else f"{self.smallest_gain:.0f} points",
            ", ".join(said) or "—",
        )


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
        test, y = federation.own_test[i], data.y[rows]
        sizes = len(federation.train[i]), len(federation.own_val[i]), len(test)
        units = sizes[2] if data.units is None else len(data.units[test].unique())
        count = {name: int((y == c).sum()) for c, name in enumerate(names)}
        shares = {name: n / y.numel() for name, n in count.items() if n}
        missing = None if empty is None or not len(rows) else float(empty[rows].mean())
        own = _commonest(data, federation.train[i].numpy(), test.numpy())
        least = smallest_gain(units, len(federation))
        found.append(SitePart(federation.clients[i], *sizes, units, missing, shares, own, least))
    return found


def _commonest(data: Dataset, train: Array, test: Array) -> float | None:
    """The accuracy of always answering the commonest class of the training data."""
    if not data.classes or not len(train) or not len(test):
        return None
    asked, answer = data.y[test].numpy().ravel(), data.y[train].flatten().bincount().argmax()
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
    found, first = dict[str, dict[str, int]](), 0
    for column in data.columns:
        if column.levels:
            found[column.name] = {level: first + i for i, level in enumerate(column.levels)}
        first += len(column.titles)
    return found


def _used(federation: Federation) -> dict[str, dict[str, tuple[str, ...]]]:
    """For each category column and the target, the clients that use each level."""
    data, rows = original(federation), rows_of(federation)

    def users(has: npt.NDArray[np.bool_]) -> tuple[str, ...]:
        return tuple(c for c, own in zip(federation.clients, rows, strict=True) if has[own].any())

    found = {
        column: {
            level: users(data.x[:, at].numpy() > 0)
            for level, at in levels.items()
            if level != NO_CELL
        }
        for column, levels in categories(data).items()
    }
    if data.columns or max(map(len, data.class_names), default=0) > 1:  # "A" and "a" are letters
        y = data.y.numpy()
        found["the target"] = {name: users(y == c) for c, name in enumerate(data.class_names)}
    return found


def spellings(federation: Federation) -> Iterator[str]:
    """A warning for categories of a column that look like one, or that only one client uses.

    Two look like one if they differ only in case, blanks and punctuation; or if one is the
    beginning of the other (F and female) and no client uses both.
    """
    for column, used in _used(federation).items():
        pairs = [
            (one, other)
            for one, other in combinations(used, 2)
            if _plain(one) == _plain(other) != ""
            or (_begins(one, other) and not {*used[one]} & {*used[other]})
        ]
        for one, other in pairs:
            yield (
                f"column '{column}': '{one}' ({few(used[one])}) and '{other}' "
                f"({few(used[other])}) look like one category written in two ways; write it one way"
            )
        if not pairs:
            yield from _codings(federation, column, used)


def _codings(
    federation: Federation, column: str, used: dict[str, tuple[str, ...]]
) -> Iterator[str]:
    """One warning for however many clients share no category of a column with any other."""
    odd = {}
    for client in federation.clients:
        own = [level for level, at in used.items() if client in at]
        others = [level for level, at in used.items() if {*at} - {client}]
        if own and others and not {*own} & {*others}:
            odd[client] = own, others
    if odd:
        most = 8 if len(odd) == 1 else 2
        told = [f"'{client}' ({few(own, most)})" for client, (own, _) in odd.items()]
        others = next(iter(odd.values()))[1]
        also = f"; the others use {few(others)}" if len(odd) == 1 else ""
        yield (
            f"column '{column}': no other client uses the categories of {few(told)}{also}; check "
            "that they mean the same by it, or write what is the same one way"
        )


def _plain(level: str) -> str:
    return "".join(letter for letter in level.casefold() if letter.isalnum())


def _begins(one: str, other: str) -> bool:
    """Whether the shorter one consists of letters and begins the longer one."""
    short, long = sorted((_plain(one), _plain(other)), key=len)
    return short.isalpha() and long.isalpha() and long.startswith(short)


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


def scales(federation: Federation) -> Iterator[str]:
    """A warning for a client's column whose median or spread is ten times the others', or a tenth.

    Spread is the distance between the quartiles. A median counts only if it is far from the others'
    median compared with the spreads: medians around zero have no scale.
    """
    data = original(federation)
    if data.numeric is None or data.x.ndim != 2 or len(federation) < 2:
        return
    x, rows = data.x.double().numpy(), rows_of(federation)
    for at in np.flatnonzero(data.numeric.numpy()):
        known = [own[~np.isnan(own)] for own in (x[mine, at] for mine in rows)]
        quartiles = np.array(
            [np.quantile(v, (0.25, 0.5, 0.75)) if len(v) >= FEWEST else [np.nan] * 3 for v in known]
        )
        middle, spread = quartiles[:, 1], quartiles[:, 2] - quartiles[:, 0]
        for i, client in enumerate(federation.clients):
            if (odd := _odd(i, middle, spread)) is not None:
                own, others, what = odd
                yield (
                    f"client '{client}': column '{_column(data, int(at))}' has a {what} of "
                    f"{own:g}, the others {others:g}, {OFF:g} times or more apart; check its unit "
                    "(cm and m, mg and g)"
                )


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


# ---- samples that occur in two splits of a client, or at two clients -----------------------------


class Duplicates(NamedTuple):
    """The number of distinct samples that occur more than once."""

    across_splits: dict[str, int]  # by client: its samples in two or more of its splits
    across_clients: int  # samples that two or more clients hold
    holders: tuple[str, ...]  # the clients that hold them


def duplicates(federation: Federation) -> Duplicates:
    """Count equal inputs with equal targets among every client's own samples, as it labels them."""
    inside: dict[str, int] = {}
    holders: dict[bytes, set[int]] = {}
    parts = zip(federation.train, federation.own_val, federation.own_test, strict=True)
    for i, splits in enumerate(parts):
        found = [set(_prints(federation, i, split)) for split in splits]
        often = Counter(sample for split in found for sample in split)
        if twice := sum(count > 1 for count in often.values()):
            inside[federation.clients[i]] = twice
        own = found[:2] if federation.common_test else found  # the common test set is nobody's
        for sample in set().union(*own):
            holders.setdefault(sample, set()).add(i)
    shared = [who for who in holders.values() if len(who) > 1]
    names = tuple(federation.clients[i] for i in sorted(set().union(*shared)))
    return Duplicates(inside, len(shared), names)


def _prints(federation: Federation, client: int, held: Tensor) -> list[bytes]:
    """A short hash of each of these samples of a client."""
    data, y = original(federation), federation.dataset.y[held]
    y = y if federation.relabel is None else federation.relabel[client, y]
    return sample_hashes(data.x[held], y)


def shared_units(federation: Federation) -> list[str]:
    """Names of units that two or more clients use: the same patient, or the same numbering."""
    names, units = federation.dataset.unit_names, federation.units
    held = torch.cat([*federation.train, *federation.val, *federation.test])
    here = [] if units is None else [names[unit] for unit in units[held].unique().tolist()]
    return [name for name, count in Counter(here).items() if count > 1]


# ---- extreme numbers at one client: a wrong unit or digit, which flattens the column for all -----


def extremes(federation: Federation) -> Iterator[str]:
    """A warning for each client's column that holds a number far outside that of all clients.

    A number is far if its distance from the median is more than a thousand times the median
    distance (which counts as 1 where half of the numbers are equal). No distribution is assumed:
    the heavy tails of correct data stay below that.
    """
    data = original(federation)
    if data.numeric is None or data.x.ndim != 2:
        return
    columns = np.flatnonzero(data.numeric.numpy())
    x = data.x.double().numpy()[:, columns]
    with np.errstate(all="ignore"):
        middle = np.nan_to_num(np.nanmedian(x, axis=0))
        usual = np.nan_to_num(np.nanmedian(np.abs(x - middle), axis=0))
    usual = np.where(usual > 0, usual, np.maximum(1.0, np.abs(middle)))
    for client, rows in zip(federation.clients, rows_of(federation), strict=True):
        off = np.nan_to_num(np.abs(x[rows] - middle))
        for at in np.flatnonzero((off > FAR * usual).any(axis=0)):
            yield (
                f"client '{client}': column '{_column(data, int(columns[at]))}' holds "
                f"{x[rows[int(off[:, at].argmax())], at]:g}, where all clients together are around "
                f"{middle[at]:g} (typically {usual[at]:g} away); check its unit and its digits"
            )


def _column(data: Dataset, at: int) -> str:
    return data.feature_names[at] if data.feature_names else f"x{at}"


# ---- columns that alone tell the outcome, and splits that lack one of two classes ----------------

TELLS, TELLS_LATE = 0.95, 0.8  # balanced accuracy or R² of one column: it is asked about
LATE = re.compile(r"discharg|(?:^|_)los(?:$|_)|stay|death|died|follow|outcome|result|final", re.I)
MOST_TRIED, FEWEST_TRIED = 4000, 10  # rows that a column is tried on, and rows of a class
TREE = {"max_depth": 3, "min_samples_leaf": 5, "random_state": 0}


def telling_columns(federation: Federation) -> dict[str, float]:
    """Columns from which alone a small decision tree tells the target of rows it has not seen.

    A column whose name says that it is known late is asked about from a lower score on.
    """
    from sklearn.metrics import balanced_accuracy_score, r2_score
    from sklearn.model_selection import cross_val_predict
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    data, found, first = original(federation), dict[str, float](), 0
    if not data.columns:
        return found
    rows = np.concatenate(rows_of(federation))
    rows = rows[:: max(1, len(rows) // MOST_TRIED)]
    x, y = data.x[rows].numpy(), data.y[rows].numpy()
    kind, judge = DecisionTreeRegressor(**TREE), r2_score
    if not data.regression:
        kind, judge = DecisionTreeClassifier(**TREE), balanced_accuracy_score
        often = np.bincount(y)[y] >= FEWEST_TRIED
        x, y = x[often], y[often]
    if len(np.unique(y)) < 2 or len(y) < 2 * FEWEST_TRIED:
        return found
    for column in data.columns:
        block = x[:, first : (first := first + len(column.titles))]
        told = float(judge(y, cross_val_predict(kind, block, y, cv=3)))
        if told >= (TELLS_LATE if LATE.search(column.name) else TELLS):
            found[column.name] = told
    return found


def one_sided(federation: Federation) -> dict[str, list[str]]:
    """For each client, its splits that lack one of two classes, in words."""
    data, found = federation.dataset, dict[str, list[str]]()
    names = data.class_names or ("0", "1")
    splits = {"train": federation.train, "val": federation.own_val, "test": federation.own_test}
    for i, client in enumerate(federation.clients if data.classes == 2 else ()):
        for split, parts in splits.items():
            held = set(data.y[parts[i]].unique().tolist())
            if len(held) == 1:
                lacks = names[1 - held.pop()]
                found.setdefault(client, []).append(f"no '{lacks}' in {split}")
    return found


def leakage_warnings(federation: Federation) -> list[str]:
    """Warnings about columns that may be known only after the outcome, and one-sided splits."""
    by = "of its variance" if federation.dataset.regression else "balanced accuracy"
    found = [
        f"column '{column}' alone tells the target ({100 * score:.0f} % {by}); is it known when "
        f"the model is asked? If only afterwards, leave it out with data.drop = ['{column}']"
        for column, score in telling_columns(federation).items()
    ]
    lacking = [f"{client} ({', '.join(lacks)})" for client, lacks in one_sided(federation).items()]
    if lacking:
        found.append(
            f"{len(lacking)} of {len(federation)} clients have a split without one of the two "
            f"classes: {few(lacking)}; a score there says little, and AUC is not defined"
        )
    return found


# ---- warnings: one sentence each, with clients and columns ---------------------------------------


def _capped(said: list[str], what: str) -> list[str]:
    """The first warnings, and how many more there are."""
    more = len(said) - MANY
    return [*said[:MANY], f"{more} more {what}"] if more > 0 else said


def data_warnings(federation: Federation) -> list[str]:
    """Warnings about columns that clients wrote in different ways, or left empty."""
    empty = [
        f"column '{column}' is empty in all rows of {few(clients)}; their models learn nothing "
        "from it"
        for column, clients in empty_columns(federation).items()
    ]
    return [
        *_capped(empty, "columns are empty at some clients"),
        *_capped(list(spellings(federation)), "categories are written in several ways"),
        *_capped(list(scales(federation)), "columns of clients have another scale"),
        *_capped(list(extremes(federation)), "columns of clients are out of scale"),
    ]


def score_warnings(sites: Sequence[SitePart], metric: str) -> list[str]:
    """Warnings about scores that say little: a dominating class, and small test sets."""
    found, usual = [], mean_commonest(sites)
    if metric == "accuracy" and usual is not None and usual >= HIGH:
        found.append(
            f"always answering the commonest class scores {usual:.1f} % accuracy;"
            ' a useless model looks good: use --set run.metric=auc (or [run] metric = "auc")'
        )
    blind, coarse = [], []
    for site in (site for site in sites if site.test):
        if site.smallest_gain is None:
            blind.append(f"{site.client} ({site.test_units})")
        elif site.smallest_gain > COARSE:
            least = f"from {site.smallest_gain:.0f} points"
            coarse.append(f"{site.client} ({site.test_units}: {least})")
    if blind:
        found.append(
            f"{len(blind)} of {len(sites)} clients have too few test samples (or units) to show "
            f"any gain of their own: {few(blind)}; raise data.test, or collect more"
        )
    if coarse and METRICS[metric].targets == "classes":
        found.append(
            f"{len(coarse)} of {len(sites)} clients have test data that shows only large gains of "
            f"their own (test samples or units: the smallest gain): {few(coarse)}; the mean over "
            "clients may still tell, and --folds 5 tests all of their samples"
        )
    return found


def mean_commonest(sites: Sequence[SitePart]) -> float | None:
    """The accuracy of always answering each client's commonest class, mean over clients."""
    known = [site.commonest for site in sites if site.commonest is not None]
    return sum(known) / len(known) if known else None


def repeated_warnings(federation: Federation, repeated: Duplicates) -> list[str]:
    """Warnings about samples and units that occur twice and would make scores too good."""
    found = []
    if repeated.across_splits:
        found.append(
            f"{sum(repeated.across_splits.values())} samples are in more than one of train, "
            f"validation and test data of a client: {few(list(repeated.across_splits))}"
        )
    if repeated.across_clients:
        found.append(
            f"{repeated.across_clients} samples are held by more than one client: "
            f"{few(list(repeated.holders))}"
        )
    if units := shared_units(federation):
        found.append(
            f"{len(units)} units are named at more than one client and taken for different ones "
            f"there: {few(units)}; if they are the same, a client may train on another's test data"
        )
    return found


def weak_warnings(roster: Roster, participation: float) -> list[str]:
    """Warnings about clients that lack data, and about rounds with less than one client."""
    kinds: dict[str, list[str]] = {}
    for name, lack in roster.weak.items():
        kinds.setdefault(lack, []).append(name)
    found = [
        f"{len(names)} of {len(roster)} clients have {lack}: {few(names)}"
        for lack, names in kinds.items()
    ]
    if participation * len(roster) < 1:
        found.append("participation is below one client per round; one client takes part")
    return found
