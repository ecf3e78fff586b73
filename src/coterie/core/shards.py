"""The clients' data shards: one client's at a site, all clients' in a simulation.

Only the client half of a method reads this data, one client at a time. A server never does: it
knows only the counts in :class:`~coterie.core.problem.Problem`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

SPLITS = ("train", "val", "test")


class Split(NamedTuple):
    """One split of one client, or of several clients with a leading dimension."""

    samples: Tensor  # [n] indices into the dataset; padded where sizes differ
    size: Tensor  # []


class Ragged:
    """The index lists of all clients, of different lengths, in one flat tensor."""

    def __init__(self, lists: Sequence[Tensor], device: torch.device) -> None:
        self.sizes = [len(part) for part in lists]
        self._size = torch.tensor(self.sizes, device=device)
        self._offset = (self._size.cumsum(0) - self._size).to(device)
        empty = torch.zeros(1, dtype=torch.int64)  # padding points at a real sample
        parts = (part.to("cpu", torch.int64) for part in lists)
        self._flat = torch.cat([*parts, empty]).to(device)

    def of(self, client: int) -> Tensor:
        first = int(self._offset[client])
        return self._flat[first : first + self.sizes[client]]

    def rows(self, ids: list[int], step: int = 1) -> Split:
        """The lists of some clients, padded to the longest of them and to at least one entry.

        Lists of different lengths are padded to a multiple of ``step``, so that different groups of
        clients more often have the same shape.
        """
        at = torch.tensor(ids, device=self._flat.device)
        width = max(1, *(self.sizes[i] for i in ids))
        width = width if self.even(ids) else -(-width // step) * step
        inside = self._offset[at, None] + torch.arange(width, device=at.device)
        return Split(self._flat[inside.clamp(max=len(self._flat) - 1)], self._size[at])

    def even(self, ids: list[int]) -> bool:
        """Whether these clients hold equally many samples, more than 0: then nothing is padded."""
        sizes = {self.sizes[i] for i in ids}
        return len(sizes) == 1 and 0 not in sizes


class Scaling(NamedTuple):
    """Scale and shift from stored numbers to model inputs, and from targets to their own unit."""

    scale: Tensor | None = None  # broadcast against one sample; None changes nothing
    shift: Tensor | None = None
    target_scale: float = 1.0  # a target in the source's units is y * target_scale + target_shift
    target_shift: float = 0.0


@dataclass(frozen=True, eq=False)
class Shards:
    """The samples and targets, and the indices of each client's samples.

    ``x`` and ``y`` hold every sample once; a client is a list of indices per split. ``relabel``
    maps each class to the client's label for it; samples from index ``literal`` on are not
    relabelled.
    """

    x: Tensor  # [N, ...]
    y: Tensor  # [N] int64 classes, [N, T] at every position, or [N] targets of a regression
    splits: Mapping[str, Ragged]  # by the names of SPLITS
    relabel: Tensor  # [K, classes], or [K, 0] where labels mean the same to all clients
    scaling: Scaling
    dtype: torch.dtype  # of model inputs
    units: Tensor | None = None  # [N] the unit (a patient) of each sample; None: one unit each
    literal: int | None = None
    shares: Tensor | None = None  # [K, classes] of each client's own training data, if needed

    @property
    def device(self) -> torch.device:
        return self.x.device

    def inputs(self, index: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Model inputs of some samples: numbers are scaled, tokens are not.

        ``change`` is applied to the stored samples, before scaling.
        """
        x = self.x[index]
        if x.dtype == torch.int64:
            return x
        if change is not None:
            x = change(x)
        x = x.to(self.dtype)
        scale, shift = self.scaling.scale, self.scaling.shift
        return x if scale is None or shift is None else x * scale + shift

    def in_units(self, values: Tensor) -> Tensor:
        """Targets or predictions of a regression in the unit of the source's target column."""
        return values.double() * self.scaling.target_scale + self.scaling.target_shift

    def placed(self, client: int, population: int) -> "Shards":
        """The shard of a single client as that of client ``client`` among ``population``."""
        none = torch.zeros(0, dtype=torch.int64)
        lists = {name: [none] * population for name in SPLITS}
        for name in SPLITS:
            lists[name][client] = self.splits[name].of(0)
        relabel = self.relabel.new_zeros(population, self.relabel.shape[1])
        relabel[client] = self.relabel[0]
        splits = {name: Ragged(rows, self.device) for name, rows in lists.items()}
        shares = None if self.shares is None else self.shares.expand(population, -1)
        return replace(self, splits=splits, relabel=relabel, shares=shares)

    def of(self, client: int) -> "Shards":
        """The shard of one client: only its own samples, under its number here."""
        lists = {name: self.splits[name].of(client) for name in SPLITS}
        held = torch.cat([*lists.values()]).unique()
        if not len(held):  # sorted by unique(): literal samples stay last
            held = torch.zeros(1, dtype=torch.int64, device=self.device)
        splits = {}
        for name, mine in lists.items():
            rows = [torch.zeros(0, dtype=torch.int64)] * len(self.splits[name].sizes)
            rows[client] = torch.searchsorted(held, mine)
            splits[name] = Ragged(rows, self.device)
        relabel = torch.zeros_like(self.relabel)
        relabel[client] = self.relabel[client]
        literal = None if self.literal is None else int((held < self.literal).sum())
        units = held if self.units is None else self.units[held]
        return replace(
            self,
            x=self.x[held],
            y=self.y[held],
            splits=splits,
            relabel=relabel,
            units=units,
            literal=literal,
        )
