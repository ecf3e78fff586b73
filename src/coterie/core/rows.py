"""One row for every client of a large population, at the cost of the rows that a round touches.

A population may have ten thousand clients and a round a hundred. A :class:`RowTable` is a value: a
method's server replaces it and shares the rows that did not change. A :class:`StateRows` holds the
clients' states between rounds in memory that is written in place.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]  # a shape and type -> an empty array
_BLOCK = 256  # rows filled at once


class RowTable:
    """Rows ``[K, ...]`` that never change: :meth:`updated` shares all other rows with its result.

    >>> old = RowTable(torch.zeros(3, 2))
    >>> new = old.updated(torch.tensor([1]), torch.ones(1, 2))
    >>> new[torch.tensor([0, 1])]
    tensor([[0., 0.],
            [1., 1.]])
    >>> old.dense().sum()
    tensor(0.)
    """

    def __init__(self, base: Tensor, changed: Mapping[int, Tensor] | None = None) -> None:
        self.base, self.changed = base, changed or {}  # rows that differ from the base's

    def __len__(self) -> int:
        return len(self.base)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.base.device

    @property
    def written(self) -> Tensor:
        """The clients whose rows may differ from what everybody began with."""
        one_row = self.base.stride(0) == 0
        return torch.tensor(sorted(self.changed) if one_row else range(len(self))).long()

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """Some rows, copied."""
        index = index.cpu() if isinstance(index, Tensor) else index
        ids = torch.arange(len(self))[index].tolist()
        if not self.changed or not ids:
            return self.base[torch.tensor(ids, dtype=torch.int64, device=self.device)]
        return torch.stack([self.changed.get(i, self.base[i]) for i in ids])

    def dense(self) -> Tensor:
        """All rows as one tensor."""
        return self[:] if self.changed else self.base

    def updated(self, at: Tensor, values: Tensor) -> "RowTable":
        """The same rows but for those ``at`` some clients."""
        ids = at.tolist()
        if ids == list(range(len(self))):
            return RowTable(values)
        # a copy each: a view would keep the rows of all others of the round alive
        new = {client: row.clone() for client, row in zip(ids, values, strict=True)}
        return RowTable(self.base, {**self.changed, **new})


Rows = Tensor | RowTable


class StateRows:
    """One array of the clients' states ``[K, ...]``, written in place.

    A client whose row has not been written has its row of ``begin``. Where all rows of ``begin``
    are one expanded row, that row is held once; memory for the others is reserved, and taken when
    they are written.
    """

    def __init__(self, begin: Rows, allocate: Allocate) -> None:
        changed = begin.changed if isinstance(begin, RowTable) else {}
        base = begin.base if isinstance(begin, RowTable) else begin
        self._held = allocate(tuple(base.shape), base.dtype)
        self._written: Tensor | None = torch.zeros(len(base), dtype=torch.bool)  # None: all are
        if base.stride(0) == 0 or not len(base):  # one row, expanded
            self.begin = base[:1].to(self.device).expand(base.shape)
        else:
            self.begin = self._held
            self.write(torch.arange(len(base)), base)
        for client, row in changed.items():
            self.write(torch.tensor([client]), row[None])

    def __len__(self) -> int:
        return len(self._held)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._held.device

    @property
    def written(self) -> Tensor:
        """The clients that have rows of their own."""
        if self._written is None:
            return torch.arange(len(self))
        return self._written.nonzero().flatten()

    def __getitem__(self, ids: Tensor) -> Tensor:
        """The rows of some clients, copied."""
        if self._written is None:
            return self._held[ids]
        own = self._written[ids.cpu()].to(ids.device)
        rows = self.begin[ids]
        rows[own] = self._held[ids[own]]
        return rows

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replace the rows of some clients."""
        self._held.index_copy_(0, ids.to(self.device), rows.to(self.device))
        if self._written is not None:
            self._written[ids.cpu()] = True
            self._written = None if bool(self._written.all()) else self._written

    def dense(self) -> Tensor:
        """All rows as one tensor: the store's own memory, to be read only."""
        if self._written is not None:
            for ids in (~self._written).nonzero().flatten().split(_BLOCK):
                self.write(ids, self.begin[ids.to(self.device)])
        return self._held


def updated(rows: Rows, at: Tensor, values: Tensor) -> RowTable:
    """Rows with those of some clients replaced; what there was stays as it is."""
    return (rows if isinstance(rows, RowTable) else RowTable(rows)).updated(at, values)


def dense(rows: Tensor | RowTable | StateRows) -> Tensor:
    """Rows as one tensor."""
    return rows if isinstance(rows, Tensor) else rows.dense()
