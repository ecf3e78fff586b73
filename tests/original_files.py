"""Writers of small files in the formats datasets are published in."""

import gzip
import struct
from pathlib import Path

import numpy as np


def write_idx(path: Path, array: np.ndarray, *, zipped: bool) -> None:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if zipped else content)


def write_idx_folder(
    folder: Path, prefix: str = "", *, zipped: bool = True
) -> dict[str, np.ndarray]:
    """Eight training and four test images; ``prefix`` as EMNIST's files have it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 8), ("test" if prefix else "t10k", 4)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 5, 6))
        arrays[f"{part}-labels-idx1-ubyte"] = np.arange(count) % 4
    for name, array in arrays.items():
        write_idx(folder / f"{prefix}{name}{'.gz' if zipped else ''}", array, zipped=zipped)
    return arrays


# The opcodes with which Python 2 wrote the CIFAR files (protocol 2, strings as BINSTRING).


def py2_string(value: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(value)) + value


def py2_int(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def py2_list(items: list[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def py2_array(array: np.ndarray) -> bytes:
    """As numpy 1 pickled an array of bytes: _reconstruct, then its state."""
    shape = b"(" + b"".join(py2_int(n) for n in array.shape) + b"t"
    kind = (
        b"cnumpy\ndtype\n(" + py2_string(b"u1") + py2_int(0) + py2_int(1) + b"tR"
        b"(" + py2_int(3) + py2_string(b"|") + b"NNN" + py2_int(-1) * 2 + py2_int(0) + b"tb"
    )
    start = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + py2_int(0) + b"t"
    state = py2_int(1) + shape + kind + b"\x89" + py2_string(array.astype(np.uint8).tobytes())
    return start + py2_string(b"b") + b"tR(" + state + b"tb"


def py2_pickle(entries: dict[bytes, bytes]) -> bytes:
    body = b"".join(py2_string(key) + value for key, value in entries.items())
    return b"\x80\x02}(" + body + b"u."


def write_cifar10(folder: Path) -> np.ndarray:
    """Six batches of four images; returns all images in order ``[24, 3, 32, 32]``."""
    folder.mkdir(parents=True)
    images = np.random.default_rng(1).integers(0, 256, (24, 3, 32, 32)).astype(np.uint8)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for i, name in enumerate(names):
        batch = {
            b"batch_label": py2_string(name.encode()),
            b"labels": py2_list([py2_int((4 * i + j) % 10) for j in range(4)]),
            b"data": py2_array(images[4 * i : 4 * i + 4].reshape(4, -1)),
        }
        (folder / name).write_bytes(py2_pickle(batch))
    titles = py2_list([py2_string(f"name{i}".encode()) for i in range(10)])
    (folder / "batches.meta").write_bytes(py2_pickle({b"label_names": titles}))
    return images


def write_cifar100(folder: Path) -> np.ndarray:
    """Six training and three test images of six fine classes in two coarse ones."""
    folder.mkdir(parents=True)
    images = np.random.default_rng(2).integers(0, 256, (9, 3, 32, 32)).astype(np.uint8)
    for name, rows in (("train", range(6)), ("test", range(6, 9))):
        fine = [row % 6 for row in rows]
        batch = {
            b"fine_labels": py2_list([py2_int(f) for f in fine]),
            b"coarse_labels": py2_list([py2_int(f // 3) for f in fine]),
            b"data": py2_array(images[list(rows)].reshape(len(rows), -1)),
        }
        (folder / name).write_bytes(py2_pickle(batch))
    titles = py2_list([py2_string(f"fine{i}".encode()) for i in range(6)])
    (folder / "meta").write_bytes(py2_pickle({b"fine_label_names": titles}))
    return images
