"""Tables with one row per client, in which an update costs only the rows that a round changes.

A population may have ten thousand clients and a round a hundred. A :class:`RowTable` is immutable:
an update returns a new table that shares the unchanged rows. A :class:`StateRows` holds the
clients' states between rounds in memory that is written in place.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]  # shape and dtype -> an empty tensor
_BLOCK = 256  # rows written at once


class RowTable:
    """An immutable table ``[K, ...]``: :meth:`updated` returns one that shares unchanged rows.

    >>> old = RowTable(torch.zeros(3, 2))
    >>> new = old.updated(torch.tensor([1]), torch.ones(1, 2))
    >>> new[torch.tensor([0, 1])]
    tensor([[0., 0.],
            [1., 1.]])
    >>> old.dense().sum()
    tensor(0.)
    """

    def __init__(self, base: Tensor, changed: Mapping[int, Tensor] | None = None) -> None:
        self.base, self.changed = base, changed or {}  # changed: client -> row that replaces base's

    def __len__(self) -> int:
        return len(self.base)

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def written(self) -> Tensor:
        """The clients whose rows may differ from the common initial row."""
        one_row = self.base.stride(0) == 0
        return torch.tensor(sorted(self.changed) if one_row else range(len(self))).long()

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        index = index.cpu() if isinstance(index, Tensor) else index
        ids = torch.arange(len(self))[index].tolist()
        if not self.changed or not ids:
            return self.base[torch.tensor(ids, dtype=torch.int64, device=self.device)]
        return torch.stack([self.changed.get(i, self.base[i]) for i in ids])

    def dense(self) -> Tensor:
        return self[:] if self.changed else self.base

    def updated(self, at: Tensor, values: Tensor) -> "RowTable":
        """A table in which the rows of the clients ``at`` are replaced by ``values``."""
        ids = at.tolist()
        if ids == list(range(len(self))):
            return RowTable(values)
        # Copy each row: a view would keep all rows of the round in memory.
        new = {client: row.clone() for client, row in zip(ids, values, strict=True)}
        return RowTable(self.base, {**self.changed, **new})


Rows = Tensor | RowTable


class StateRows:
    """One tensor of the clients' states ``[K, ...]``, written in place.

    A client whose row has not been written has its row of ``begin``. Where all rows of ``begin``
    are one expanded row, that row is stored once; memory for the clients' rows is reserved, and is
    used only when a row is written.
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
        return self._held.device

    @property
    def written(self) -> Tensor:
        if self._written is None:
            return torch.arange(len(self))
        return self._written.nonzero().flatten()

    def __getitem__(self, ids: Tensor) -> Tensor:
        if self._written is None:
            return self._held[ids]
        own = self._written[ids.cpu()].to(ids.device)
        rows = self.begin[ids]
        rows[own] = self._held[ids[own]]
        return rows

    def write(self, ids: Tensor, rows: Tensor) -> None:
        self._held.index_copy_(0, ids.to(self.device), rows.to(self.device))
        if self._written is not None:
            self._written[ids.cpu()] = True
            self._written = None if bool(self._written.all()) else self._written

    def dense(self) -> Tensor:
        """All rows as one tensor, which is the store's own memory: do not write to it."""
        if self._written is not None:
            for ids in (~self._written).nonzero().flatten().split(_BLOCK):
                self.write(ids, self.begin[ids.to(self.device)])
        return self._held


def updated(rows: Rows, at: Tensor, values: Tensor) -> RowTable:
    """A table in which the rows of the clients ``at`` are replaced; ``rows`` is unchanged."""
    return (rows if isinstance(rows, RowTable) else RowTable(rows)).updated(at, values)


def dense(rows: Tensor | RowTable | StateRows) -> Tensor:
    return rows if isinstance(rows, Tensor) else rows.dense()
