"""Fills in missing features and standardises features, by the training data alone.

Mean and deviation come from sums that each client can compute for itself (:func:`sums_of`,
:func:`squares_of`), added up in client order (:func:`add_up`): if the clients' data is in different
places, the same two rounds of sums give the same bits.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import DataError
from .federation import Dataset, Indices

Floats = npt.NDArray[np.float64]


class Sums(NamedTuple):
    """The contribution of one or several clients to the mean of each column."""

    known: Floats  # [D] the number of known values
    total: Floats  # [D]


def sums_of(rows: Tensor) -> Sums:
    """The number and the sum of one client's known values in each column of rows ``[n, D]``."""
    values = rows.double().numpy()
    known = ~np.isnan(values)
    return Sums(known.sum(axis=0).astype(np.float64), np.where(known, values, 0.0).sum(axis=0))


def squares_of(rows: Tensor, mean: Floats) -> Sums:
    """Like :func:`sums_of`, for squared deviations from the mean of all clients."""
    return sums_of((rows.double() - torch.from_numpy(mean)).square())


def add_up(parts: Iterable[Sums]) -> Floats:
    """The mean of each column over all clients, summed in client order; NaN without any value."""
    count, total = (np.zeros(()), np.zeros(()))
    for part in parts:
        count, total = count + part.known, total + part.total
    with np.errstate(invalid="ignore"):
        return np.asarray(total / count)


def standardised(dataset: Dataset, train: Indices) -> Dataset:
    """Fill in missing numbers and set the scaling of a dataset, fitted on the training rows.

    Missing numbers become the training mean. Numbers are scaled by ``scale`` and ``shift``, as for
    images. Targets of a regression are standardised too; ``target_scale`` and ``target_shift``
    convert them back.
    """
    if dataset.numeric is None:
        return dataset
    if not any(len(mine) for mine in train):
        raise DataError(f"{dataset.name}: no client has training data")
    mean, std = _moments([dataset.x[mine] for mine in train])
    x = torch.where(dataset.x.isnan(), mean.float(), dataset.x)
    scale = torch.where(dataset.numeric, 1 / std, torch.ones(()))
    shift = torch.where(dataset.numeric, -mean / std, torch.zeros(()))
    ready = replace(dataset, x=x, scale=scale.float(), shift=shift.float())
    if not dataset.regression:
        return ready
    centre, spread = _moments([dataset.y[mine, None] for mine in train])
    y = (dataset.y.double() - centre) / spread
    return replace(ready, y=y.float(), target_scale=float(spread), target_shift=float(centre))


def _moments(clients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each column over its known values; 0 and 1 if it has none."""
    mean = np.nan_to_num(add_up(sums_of(rows) for rows in clients))
    std = np.nan_to_num(np.sqrt(add_up(squares_of(rows, mean) for rows in clients)), nan=1.0)
    std = np.where(std > 1e-9 * (1 + np.abs(mean)), std, 1.0)
    return torch.from_numpy(mean), torch.from_numpy(std)
