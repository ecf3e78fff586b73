"""Columns that alone tell the outcome, and splits that lack one of two classes."""

import re

import numpy as np

from ..data.federation import Federation
from ..errors import few
from .findings import original, rows_of

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
    rows = np.concatenate(rows_of(federation))
    rows = rows[:: max(1, len(rows) // MOST_TRIED)]
    x, y = data.x[rows].numpy(), data.y[rows].numpy()
    kind, judge = DecisionTreeRegressor(**TREE), r2_score
    if not data.regression:
        kind, judge = DecisionTreeClassifier(**TREE), balanced_accuracy_score
        often = np.bincount(y)[y] >= FEWEST_TRIED
        x, y = x[often], y[often]
    if not data.columns or len(np.unique(y)) < 2 or len(y) < 2 * FEWEST_TRIED:
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
    if data.classes != 2:
        return found
    names = data.class_names or ("0", "1")
    splits = {"train": federation.train, "val": federation.own_val, "test": federation.own_test}
    for i, client in enumerate(federation.clients):
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
