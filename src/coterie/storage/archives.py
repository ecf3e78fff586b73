"""Reads npz files from untrusted sources, and writes safetensors files.

An npz file is a zip archive with one array per member. Before an array is read, its header is
compared with its number of bytes, and the total size of all arrays with the machine's memory, so
that neither a false header nor a zip bomb takes more memory than is allowed. Pickled data is never
read.
"""

import hashlib
import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy.typing as npt
import torch
from numpy.lib import format as npy
from torch import Tensor

from ..core.rows import RowTable, StateRows

Array = npt.NDArray[Any]

_MEMORY_SHARE = 0.5  # the share of the machine's memory that the arrays of one file may take
_FAULTS = (
    *(ValueError, EOFError, KeyError, OverflowError, MemoryError, NotImplementedError),
    *(RuntimeError, struct.error, zipfile.BadZipFile, zlib.error),
)


def read_npz(path: Path) -> dict[str, Array]:
    """All arrays of an npz file by name; ValueError if it holds anything but plain arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _refuse_bomb(sum(member.file_size for member in members))
            return {_name(member): _array(archive, member) for member in members}
    except _FAULTS as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _refuse_bomb(size: int) -> None:
    most = _MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > most:
        raise ValueError(
            f"its arrays take {size:,} bytes, and this machine's memory allows {most:,.0f}"
        )


def _name(member: zipfile.ZipInfo) -> str:
    return member.filename.removesuffix(".npy")


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    with archive.open(member) as stream:
        _refuse_lies(stream, member)
    with archive.open(member) as stream:
        array: Array = npy.read_array(stream, allow_pickle=False)
        return array


def _refuse_lies(stream: IO[bytes], member: zipfile.ZipInfo) -> None:
    """Refuse an array whose header does not match its number of bytes."""
    old = npy.read_magic(stream) == (1, 0)
    header = npy.read_array_header_1_0 if old else npy.read_array_header_2_0
    shape, _, dtype = header(stream)
    there, said = member.file_size - stream.tell(), math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or (said != there and not dtype.hasobject):
        raise ValueError(
            f"{_name(member)} says that it has the shape {list(shape)} of {dtype}, which is "
            f"{said:,} bytes, and holds {there:,}"
        )


# ---- safetensors files, written block by block: a file may be larger than the memory -------------

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
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def blocks(self) -> Iterator[Tensor]:
        """The rows, in blocks of about ``BLOCK`` bytes."""
        a_row = max(1, torch.Size(self.shape[1:]).numel() * self.dtype.itemsize)
        for ids in self.ids.split(max(1, BLOCK // a_row)):
            yield self.rows[ids.to(self.rows.device)]


Stored = Tensor | Some


def size_of(array: Stored) -> int:
    return array.size if isinstance(array, Some) else array.numel() * array.element_size()


def write_arrays(path: Path, arrays: Mapping[str, Stored]) -> dict[str, Any]:
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


def _bytes(arrays: Mapping[str, Stored]) -> Iterator[bytes | memoryview]:
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
