"""The answers of predictors to test samples, of one client and of several clients."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .metrics import Array

Counts = NDArray[np.int64]


class Outcomes(NamedTuple):
    """The predictors' answers on the clients' test samples, one client after the other."""

    values: Array  # [N] classes (-1: not a number) or predictions; [N, C] probabilities for auc
    targets: Array  # [N]
    units: Counts  # [N] samples of one unit are resampled together; without units, the sample's id
    sizes: Counts  # [K] number of test samples of each client
    probabilities: Array | None = None  # [N, C] of few classes, where values are classes

    def clients(self) -> Iterator["Answers"]:
        """The outcomes of each client."""
        ends = self.sizes.cumsum()
        for start, end in zip(ends - self.sizes, ends, strict=True):
            probable = self.probabilities
            yield Answers(
                *(self.values[start:end], self.targets[start:end], self.units[start:end]),
                None if probable is None else probable[start:end],
            )


class Answers(NamedTuple):
    """One client's part of :class:`Outcomes`."""

    values: Array
    targets: Array
    units: Counts
    probabilities: Array | None = None

    def where(self, rows: Array) -> "Answers":
        """The answers to some of the samples."""
        probable = None if self.probabilities is None else self.probabilities[rows]
        return Answers(self.values[rows], self.targets[rows], self.units[rows], probable)

    @property
    def chances(self) -> Array | None:
        """The probabilities of all classes ``[n, C]``; None if they were not kept."""
        return self.values if self.values.ndim == 2 else self.probabilities


def outcomes_of(clients: Sequence[Answers]) -> Outcomes:
    """Concatenate the outcomes of several clients, in the smallest dtypes that hold them exactly.

    Probabilities are stored as float32.
    """
    values, targets, units = (
        np.concatenate(part) for part in zip(*(client[:3] for client in clients), strict=True)
    )
    if values.ndim == 2:
        values = values.astype(np.float32)
    sizes = np.array([len(client.targets) for client in clients], dtype=np.int64)
    known = [c.probabilities for c in clients if c.probabilities is not None]
    probable = np.concatenate(known).astype(np.float32) if len(known) == len(clients) else None
    return Outcomes(_small(values), _small(targets), units.astype(np.int64), sizes, probable)


def join(parts: Sequence[Outcomes]) -> Outcomes:
    """Concatenate the outcomes of groups of clients."""
    return outcomes_of([client for part in parts for client in part.clients()])


def _small(values: Array) -> Array:
    if not np.issubdtype(values.dtype, np.integer):
        return values
    low, high = values.min(initial=-1), values.max(initial=0)
    return values.astype(np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high)))
