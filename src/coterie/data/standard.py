"""How samples become inputs: features are filled in and standardised by the training data alone.

Mean and deviation come from sums that each client computes for itself (:func:`site_sums`, then
:func:`site_squares`), added up in client order (:func:`means_of`, then :func:`moments_of`). If the
clients' data is in different places, the same two rounds of sums give the same bits.

A :class:`Preprocessing` has everything that a trained model needs beside its weights. It is stored
beside the models of a run, and it comes from other machines: ``from_json`` checks all of it.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import random
from ..errors import DataError
from ..storage.files import parsed, strict
from .arrays import Floats
from .data_schema import Schema
from .federation import Dataset, Indices


class Sums(NamedTuple):
    """The contribution of one or several clients to the mean of each column."""

    known: Floats  # [D] the number of known values
    total: Floats  # [D]


def sums_of(rows: Tensor) -> Sums:
    """The number and the sum of one client's known values in each column of rows ``[n, D]``."""
    values = rows.double().numpy()
    known = ~np.isnan(values)
    return Sums(known.sum(axis=0).astype(np.float64), np.where(known, values, 0.0).sum(axis=0))


def add_up(parts: Iterable[Sums]) -> Floats:
    """The mean of each column over all clients, summed in client order; NaN without any value."""
    count, total = (np.zeros(()), np.zeros(()))
    for part in parts:
        count, total = count + part.known, total + part.total
    with np.errstate(invalid="ignore"):
        return np.asarray(total / count)


@strict
class Moments:
    """Mean and deviation of every input and, in a regression, of the target."""

    mean: tuple[float, ...]  # [D]
    std: tuple[float, ...]
    target_mean: float = 0.0
    target_std: float = 1.0

    def to_json(self) -> str:
        """All numbers as JSON; Python reads the same bits back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Moments":
        """Read what :meth:`to_json` wrote; refuses anything else."""
        return checked_moments(parsed(text, Moments, "moments"))


def checked_moments(moments: Moments) -> Moments:
    """The moments; refuses numbers that nothing can be standardised by."""
    numbers = (*moments.mean, *moments.std, moments.target_mean, moments.target_std)
    if len(moments.mean) != len(moments.std):
        raise DataError(
            f"moments: found {len(moments.mean)} means and {len(moments.std)} deviations; expected "
            "equally many"
        )
    if not all(map(math.isfinite, numbers)) or min((*moments.std, moments.target_std)) <= 0:
        raise DataError("moments: found a number that is not finite, or a deviation of 0 or less")
    return moments


def site_sums(dataset: Dataset, train: Tensor) -> Sums:
    """What one client sends first: the sums of its training rows.

    There is one column for each input and, in a regression, one more for the target.
    """
    inputs = sums_of(dataset.x[train])
    return _beside(inputs, sums_of(dataset.y[train, None])) if dataset.regression else inputs


def means_of(sums: Iterable[Sums]) -> Floats:
    """What the coordinator makes of the sums, in client order; 0 for a column without values."""
    return np.nan_to_num(add_up(sums))


def site_squares(dataset: Dataset, train: Tensor, means: Floats) -> Sums:
    """What one client sends second: its squared deviations from the means of all clients."""
    width = dataset.x.shape[1]
    if means.shape != (width + dataset.regression,) or not np.isfinite(means).all():
        raise DataError(
            f"{dataset.name}: found means of shape {list(means.shape)} for {width} inputs; expected"
            " a finite number for each input and for the target of a regression"
        )
    mean = torch.from_numpy(means)
    inputs = sums_of((dataset.x[train].double() - mean[:width]).square())
    if not dataset.regression:
        return inputs
    return _beside(inputs, sums_of((dataset.y[train, None].double() - mean[width:]).square()))


def moments_of(means: Floats, squares: Iterable[Sums], regression: bool) -> Moments:
    """What the coordinator makes of the squares, in client order.

    The deviation is 1 for a column that is constant or without values.
    """
    std = np.nan_to_num(np.sqrt(add_up(squares)), nan=1.0)
    std = np.where(std > 1e-9 * (1 + np.abs(means)), std, 1.0)
    mean, spread = means.tolist(), std.tolist()
    last = {"target_mean": mean.pop(), "target_std": spread.pop()} if regression else {}
    return checked_moments(Moments(tuple(mean), tuple(spread), **last))


def _beside(inputs: Sums, targets: Sums) -> Sums:
    known, total = (np.concatenate(pair) for pair in zip(inputs, targets, strict=True))
    return Sums(known, total)


def apply(dataset: Dataset, moments: Moments) -> Dataset:
    """Fill in missing numbers and set the scaling of a dataset by given moments.

    Missing numbers become the mean. Numbers are scaled by ``scale`` and ``shift``, as for images.
    Targets of a regression are standardised too; ``target_scale`` and ``target_shift`` convert them
    back. A dataset without numbers to standardise stays as it is.
    """
    if dataset.numeric is None:
        return dataset
    if len(moments.mean) != len(dataset.numeric):
        raise DataError(
            f"{dataset.name}: found {len(moments.mean)} means for {len(dataset.numeric)} inputs; "
            "expected one for each"
        )
    mean, std = (torch.tensor(part, dtype=torch.float64) for part in (moments.mean, moments.std))
    x = torch.where(dataset.x.isnan(), mean.float(), dataset.x)
    scale = torch.where(dataset.numeric, 1 / std, torch.ones(()))
    shift = torch.where(dataset.numeric, -mean / std, torch.zeros(()))
    ready = replace(dataset, x=x, scale=scale.float(), shift=shift.float(), moments=moments)
    if not dataset.regression:
        return ready
    centre, spread = moments.target_mean, moments.target_std
    y = (dataset.y.double() - centre) / spread
    return replace(ready, y=y.float(), target_scale=spread, target_shift=centre)


def standardised(dataset: Dataset, train: Indices) -> Dataset:
    """Fill in missing numbers and set the scaling of a dataset, fitted on the training rows."""
    if dataset.numeric is None:
        return dataset
    if not any(len(mine) for mine in train):
        raise DataError(f"{dataset.name}: no client has training data")
    means = means_of(site_sums(dataset, mine) for mine in train)
    squares = (site_squares(dataset, mine, means) for mine in train)
    return apply(dataset, moments_of(means, squares, dataset.regression))


UNKNOWN = 0.05  # share of a client's training rows whose category is hidden, in each column


def with_unknown(dataset: Dataset, clients: Sequence[str], train: Indices) -> Dataset:
    """Hide the categories of some training rows, so that models learn to answer without them.

    A hidden category is zero in all features of its column, as is one that training did not know.
    The rows depend on the client, the column and the place among its training rows alone.
    """
    if not any(column.levels for column in dataset.columns):
        return dataset
    x, first = dataset.x.clone(), 0
    for column in dataset.columns:
        block = slice(first, first := first + len(column.titles))
        for client, rows in zip(clients, train if column.levels else (), strict=False):
            luck = random.uniform("unknown", client, column.name, torch.arange(len(rows)))
            x[rows[luck < UNKNOWN], block] = 0.0
    return replace(dataset, x=x)


# ---- how samples become the inputs of a network, and its outputs answers ------------------------


@strict
class Pixels:
    """The input of a network is ``pixel * scale + shift``, by channel."""

    scale: tuple[float, ...]
    shift: tuple[float, ...]


@strict
class Preprocessing:
    """How samples are encoded, filled in and scaled."""

    schema: Schema
    moments: Moments | None  # of rows of features, if they are standardised
    pixels: Pixels | None  # of images

    def __post_init__(self) -> None:
        """Refuse numbers that do not fit the schema."""
        example = self.schema.example()
        if self.moments is not None:
            if self.schema.numeric is None or len(self.moments.mean) != len(example.x[0]):
                raise DataError("preprocessing.moments: expected one mean for each feature")
            checked_moments(self.moments)
        if (self.pixels is None) != (self.schema.kind != "images"):
            raise DataError("preprocessing.pixels: expected a scale for images, and only for them")
        if self.pixels is not None:
            numbers = (*self.pixels.scale, *self.pixels.shift)
            if len(numbers) != 2 * self.schema.shape[0] or not all(map(math.isfinite, numbers)):
                raise DataError("preprocessing.pixels: expected two numbers for each channel")

    @classmethod
    def of(cls, schema: Schema, scaled: Dataset) -> "Preprocessing":
        """As a dataset of this schema was scaled."""
        pixels = None
        if schema.kind == "images" and scaled.scale is not None and scaled.shift is not None:
            scale, shift = scaled.scale.flatten().tolist(), scaled.shift.flatten().tolist()
            pixels = Pixels(tuple(scale), tuple(shift))
        return cls(schema, scaled.moments, pixels)

    def to_json(self) -> str:
        """All of it as JSON; Python reads the same bits back."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Preprocessing":
        """Read what :meth:`to_json` wrote; refuses anything else."""
        return parsed(text, cls, "preprocessing")

    def inputs(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The network's inputs for encoded samples ``[n, ...]``: filled in and scaled."""
        if self.schema.kind == "tokens":
            return x
        ready = self.scaled(replace(self.schema.example(), x=x))
        x = ready.x.to(dtype)
        if ready.scale is None or ready.shift is None:
            return x
        return x * ready.scale.to(dtype) + ready.shift.to(dtype)

    def scaled(self, dataset: Dataset) -> Dataset:
        """A dataset of this schema, filled in, with the scaling of the training data."""
        if self.moments is not None:
            dataset = apply(dataset, self.moments)
        if self.pixels is None:
            return dataset
        scale, shift = (torch.tensor(p).view(-1, 1, 1) for p in asdict(self.pixels).values())
        return replace(dataset, scale=scale, shift=shift)

    def in_units(self, values: Tensor) -> Tensor:
        """Outputs of a regression in the unit of the target."""
        moments = self.moments or Moments((), ())
        return values.double() * moments.target_std + moments.target_mean


def preprocessing_of(dataset: Dataset) -> Preprocessing | None:
    """How a dataset was preprocessed; None if no schema can describe it."""
    try:
        schema = Schema.of(dataset)
        if dataset.target is not None:
            schema = Schema("table", dataset.target, dataset.columns, parts=schema.parts)
        return Preprocessing.of(schema, dataset)
    except DataError:
        return None
