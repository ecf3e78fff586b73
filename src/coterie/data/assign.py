"""Assigns samples to clients: the part that all partitions have in common.

A partition puts each sample into a *cell* (a class, a cluster, an owner) and says how many samples
of each cell every client gets. :func:`assigned` shuffles each cell once and gives the clients
consecutive blocks of it, so no sample is assigned twice and the assignment always terminates.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core import random
from ..errors import DataError
from .arrays import TEST
from .federation import Dataset, Indices

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Quota(NamedTuple):
    """How many samples of each cell every client is to get."""

    clients: tuple[str, ...]
    cells: Ints  # [N] the cell of every sample
    names: tuple[str, ...]  # of the cells
    counts: Callable[[Ints, bool], Ints]  # (supply [cells], whether test part) -> [K, cells]
    groups: Ints | None = None  # [K]
    relabel: Ints | None = None  # [K, classes]
    note: str = ""


class Parts(NamedTuple):
    """The samples assigned to each client, before validation data is split off."""

    clients: tuple[str, ...]
    pool: Indices  # samples for training and validation, and for testing if ``test`` is None
    test: Indices | None  # samples of the source's own test part, if it has one
    groups: Tensor | None = None
    relabel: Tensor | None = None
    note: str = ""


def client_names(count: int) -> tuple[str, ...]:
    """Default names for clients without names."""
    return tuple(f"client{i}" for i in range(count))


def generator(*words: int | str) -> np.random.Generator:
    """numpy's generator for draws that :mod:`coterie.core.random` does not offer (Dirichlet)."""
    return np.random.default_rng(random.derive(*words))


def even(total: int, parts: int) -> Ints:
    """Divide a total into parts that differ by at most one, larger parts first.

    >>> even(10, 4).tolist()
    [3, 3, 2, 2]
    """
    return np.full(parts, total // parts) + (np.arange(parts) < total % parts)


def part_of(supply: Ints, fraction: float) -> Ints:
    """A fraction of every cell, rounded down."""
    return np.asarray(np.floor(fraction * supply + 1e-9), np.int64)


def largest_remainder(total: int, shares: Floats, ties: Floats | None = None) -> Ints:
    """Integer quotas in proportion to the shares, which add up to the total.

    Equal remainders are rounded up in the order of ``ties`` (smallest first), by default by index.

    >>> largest_remainder(5, np.array([0.5, 0.25, 0.25])).tolist()
    [3, 1, 1]
    """
    exact = total * shares / shares.sum()
    quota: Ints = np.floor(exact + 1e-9).astype(np.int64)
    order = np.lexsort(
        (np.zeros(len(shares)) if ties is None else ties, np.round(quota - exact, 9))
    )
    quota[order[: total - int(quota.sum())]] += 1
    return quota


def assigned(dataset: Dataset, plan: Quota, seed: int) -> Parts:
    """Carry out a plan on the training part, and on the source's test part if it has one."""
    is_test = np.zeros(len(dataset.y), bool)
    if dataset.fixed is not None:
        is_test = (dataset.fixed == TEST).numpy()
    pool = np.flatnonzero(~is_test)
    if len(plan.clients) > len(pool):
        raise DataError(
            f"{dataset.name}: {len(plan.clients)} clients but only {len(pool)} training samples; "
            "ask for fewer clients"
        )
    return Parts(
        clients=plan.clients,
        pool=_hand_out(plan, pool, False, seed),
        test=_hand_out(plan, np.flatnonzero(is_test), True, seed) if is_test.any() else None,
        groups=_tensor(plan.groups),
        relabel=_tensor(plan.relabel),
        note=plan.note,
    )


def _tensor(values: Ints | None) -> Tensor | None:
    return None if values is None else torch.from_numpy(values.astype(np.int64))


def _hand_out(plan: Quota, pool: Ints, test: bool, seed: int) -> Indices:
    cells = plan.cells[pool]
    supply = np.bincount(cells, minlength=len(plan.names))
    counts = plan.counts(supply, test)
    _check_supply(plan, counts, supply, "test" if test else "training")
    order = random.bits(seed, "deal", int(test), torch.arange(len(pool))).argsort().numpy()
    by_cell = order[np.argsort(cells[order], kind="stable")]
    start = np.cumsum(supply) - supply
    ends = start + np.cumsum(counts, axis=0)  # [K, cells]
    held = [
        np.concatenate([by_cell[b - n : b] for b, n in zip(*row, strict=True) if n])
        if row[1].any()
        else by_cell[:0]
        for row in zip(ends, counts, strict=True)
    ]
    return tuple(torch.from_numpy(np.sort(pool[mine])) for mine in held)


def _check_supply(plan: Quota, counts: Ints, supply: Ints, part: str) -> None:
    demand = counts.sum(axis=0)
    for cell in np.flatnonzero(demand > supply):
        raise DataError(
            f"{plan.names[cell]}: the partition asks for {demand[cell]} {part} samples but there "
            f"are {supply[cell]}; ask for fewer clients or samples per client"
        )


def class_cells(dataset: Dataset, partition: str) -> tuple[Ints, tuple[str, ...]]:
    """The class of every sample as its cell, and the class names; refuses regression data."""
    if dataset.regression:
        raise DataError(
            f"{dataset.name} has real-valued targets and partition '{partition}' divides classes; "
            "use iid or natural"
        )
    if dataset.y.ndim > 1:
        raise DataError(
            f"{dataset.name} has a target at every position of a sample and partition "
            f"'{partition}' divides samples of one class; use iid or natural"
        )
    names = dataset.class_names or tuple(str(c) for c in range(dataset.classes))
    return dataset.y.numpy(), tuple(f"class {name}" for name in names)


def one_cell(dataset: Dataset) -> tuple[Ints, tuple[str, ...]]:
    """One cell for all samples."""
    return np.zeros(len(dataset.y), np.int64), ("all",)
