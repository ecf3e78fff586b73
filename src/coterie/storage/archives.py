"""Reads npz files from untrusted sources.

An npz file is a zip archive with one array per member. Before an array is read, its header is
compared with its number of bytes, and the total size of all arrays with the machine's memory, so
that neither a false header nor a zip bomb takes more memory than is allowed. Pickled data is never
read.
"""

import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy.typing as npt
from numpy.lib import format as npy

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
