"""Writes safetensors files block by block, so that a file may be larger than the memory."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.rows import RowTable, StateRows

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
BLOCK = 1 << 26  # bytes written at once


class Some(NamedTuple):
    """Some rows of an array, in the order of ``ids``."""

    rows: Tensor | RowTable | StateRows
    ids: Tensor  # [n]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, rows: Tensor | RowTable | StateRows, ids: Tensor) -> "Some":
        """The rows of some clients; the rows of other clients are not read."""
        like = rows[ids[:0].to(rows.device)]
        return cls(rows, ids, (len(ids), *like.shape[1:]), like.dtype)

    @property
    def size(self) -> int:
        """The size of the rows in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def blocks(self) -> Iterator[Tensor]:
        """The rows, in blocks of about ``BLOCK`` bytes."""
        a_row = max(1, torch.Size(self.shape[1:]).numel() * self.dtype.itemsize)
        for ids in self.ids.split(max(1, BLOCK // a_row)):
            yield self.rows[ids.to(self.rows.device)]


Array = Tensor | Some


def size_of(array: Array) -> int:
    """The size of an array in bytes."""
    return array.size if isinstance(array, Some) else array.numel() * array.element_size()


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Write arrays to a new file, flush it to disk, and return its size and sha256."""
    total, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for part in _bytes(arrays):
            file.write(part)
            total.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": total.hexdigest()}


def _bytes(arrays: Mapping[str, Array]) -> Iterator[bytes | memoryview]:
    # Wide dtypes first, so that every array begins at a multiple of its item size.
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in order:
        begin, end = end, end + size_of(arrays[name])
        kind, shape = DTYPES[arrays[name].dtype], list(arrays[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        array = arrays[name]
        for block in array.blocks() if isinstance(array, Some) else [array]:
            flat = block.detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data
