"""Finds columns with extreme numbers at one client: a wrong unit, or a misplaced decimal point.

Standardisation uses one mean and one deviation for all clients, so a single huge number flattens
the column for every client.
"""

from typing import NamedTuple

import numpy as np

from .assign import Floats
from .federation import Federation

FAR = 1000.0  # times the median distance from the median over all clients


class Extreme(NamedTuple):
    """One column of one client that holds an extreme number."""

    client: str
    column: str
    value: float  # the number that is farthest from the median
    middle: float  # the median over all clients
    usual: float  # the median distance from that median, over all clients


def extremes(federation: Federation) -> list[Extreme]:
    """The columns of each client that hold a number far outside the scale of all clients.

    A number is far if its distance from the median is more than a thousand times the median
    distance (which counts as 1 where half of the numbers are equal). No distribution is assumed:
    the heavy tails of correct data stay below that.
    """
    data = federation.dataset if federation.source is None else federation.source
    if data.numeric is None or data.x.ndim != 2:
        return []
    x = data.x.double().numpy()
    columns = np.flatnonzero(data.numeric.numpy())
    middle, usual = _scale(x[:, columns])
    found = []
    parts = zip(federation.train, federation.own_val, federation.own_test, strict=True)
    for client, splits in zip(federation.clients, parts, strict=True):
        own = x[np.concatenate([split.numpy() for split in splits])][:, columns]
        off = np.nan_to_num(np.abs(own - middle))
        for at in np.flatnonzero((off > FAR * usual).any(axis=0)):
            row = int(off[:, at].argmax())
            name = data.feature_names[columns[at]] if data.feature_names else f"x{columns[at]}"
            numbers = float(own[row, at]), float(middle[at]), float(usual[at])
            found.append(Extreme(client, name, *numbers))
    return found


def _scale(x: Floats) -> tuple[Floats, Floats]:
    """The median of each column and the median distance from it, or 1 where that is zero."""
    with np.errstate(all="ignore"):
        middle = np.nan_to_num(np.nanmedian(x, axis=0))
        usual = np.nan_to_num(np.nanmedian(np.abs(x - middle), axis=0))
    return middle, np.where(usual > 0, usual, np.maximum(1.0, np.abs(middle)))
