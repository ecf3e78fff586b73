"""Columns whose numbers are wildly out of scale at one client: a wrong unit, or a slipped digit.

Standardisation takes one mean and one deviation for all clients, so that a single huge number
flattens a column for everybody.
"""

from typing import NamedTuple

import numpy as np

from .assign import Floats
from .federation import Federation

FAR = 1000.0  # times as far from everybody's middle as most numbers are


class Extreme(NamedTuple):
    """One column at one client."""

    client: str
    column: str
    value: float  # the number that is farthest off
    middle: float  # the median over all clients
    usual: float  # how far from it the larger half of the numbers begins, over all clients


def extremes(federation: Federation) -> list[Extreme]:
    """The columns of each client that hold a number far out of the scale of all clients.

    Far is a thousand times the median distance from the median (or from 1, where half of the
    numbers are the same), whatever the distribution: heavy tails of honest data stay below.
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
    """The median of each column and the median distance from it; 1 where half are the same."""
    with np.errstate(all="ignore"):
        middle = np.nan_to_num(np.nanmedian(x, axis=0))
        usual = np.nan_to_num(np.nanmedian(np.abs(x - middle), axis=0))
    return middle, np.where(usual > 0, usual, np.maximum(1.0, np.abs(middle)))
