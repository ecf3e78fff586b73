"""Reads images: folders ``CLIENT/CLASS/``, CIFAR and MNIST in their original files or archives."""

import gzip
import io
import math
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np
import torch

from ...core.ranges import Interval
from ...errors import DataError
from ..arrays import TEST, TRAIN, Array, Names, Piece, assemble
from ..federation import Dataset

# ---- compressed images, by the optional package imagecodecs --------------------------------------


def decode(content: bytes, where: str) -> Array:
    """Decode a PNG, JPEG or JPEG XL image to an array ``[height, width(, channels)]`` of bytes."""
    try:
        import imagecodecs
    except ImportError as error:
        raise DataError(
            f"{where}: compressed images need the package imagecodecs; "
            "install it with: pip install 'coterie[data]'"
        ) from error
    try:
        if content.startswith(b"\x89PNG"):
            image = imagecodecs.png_decode(content)
        elif content.startswith(b"\xff\xd8\xff"):
            image = imagecodecs.jpeg_decode(content)
        else:
            image = imagecodecs.jpegxl_decode(content)
    except Exception as error:  # each codec has its own exceptions
        raise DataError(f"{where}: not an image that can be read ({error})") from error
    found = np.asarray(image)
    if found.dtype != np.uint8:
        raise DataError(f"{where}: found pixels of type {found.dtype}, expected 8 bits per channel")
    return found


# ---- files of a folder, a tar or a zip archive, without unpacking anything to disk ---------------

ARCHIVES = (".tgz", ".tar", ".tar.gz", ".zip")


def is_archive(path: Path) -> bool:
    """Whether the file name is that of a supported archive."""
    return path.is_file() and path.name.endswith(ARCHIVES)


def names(path: Path) -> list[str]:
    """The base names of all files in a folder or archive, sorted."""
    return sorted({name for name, _ in _walk(path)})


def read(path: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Read the files whose base name is wanted, in one pass; returns contents by base name."""
    return {name: content() for name, content in _walk(path) if wanted(name)}


def _walk(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file():
                yield file.name, file.read_bytes
    elif not is_archive(path):
        raise DataError(f"{path}: expected a folder or one of {', '.join(ARCHIVES)}")
    else:
        try:
            if path.suffix == ".zip":
                with zipfile.ZipFile(path) as zipped:
                    for name in zipped.namelist():
                        if not name.endswith("/"):
                            yield PurePosixPath(name).name, partial(zipped.read, name)
                return
            with tarfile.open(path) as archive:
                for member in archive:
                    stream = archive.extractfile(member) if member.isfile() else None
                    if stream is not None:
                        yield PurePosixPath(member.name).name, stream.read
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
            raise DataError(f"{path}: broken archive ({error}); fetch it again") from error


# ---- the pickles of CIFAR, without executing any code in them ------------------------------------

# A pickle is a program that may call any function it can name. This reader knows three names, those
# that numpy arrays need, and gives the program inert placeholders for them. The result consists of
# lists, dictionaries, strings, numbers, and placeholders, which :func:`array` converts to arrays.

_KNOWN = (
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
)


class Placeholder:
    """What a pickle says of an array or a dtype, before it is checked and converted."""

    __slots__ = ("state", "told")

    def __init__(self, told: tuple[Any, ...]) -> None:
        self.told, self.state = told, None  # of a dtype, its code is told

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise DataError(
                f"it names '{module}.{name}', which no CIFAR file needs; nothing was run"
            )
        # A pickle can set attributes of a function or class, but not of a bound method.
        return self._placeholder

    def _placeholder(self, *told: Any) -> Placeholder:
        return Placeholder(told)


def loads(content: bytes, where: str) -> dict[str, Any]:
    """Load the dictionary in a CIFAR pickle, with its keys as text."""
    try:
        found = _Reader(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a broken pickle can raise anything
        raise DataError(
            f"{where}: not a CIFAR batch: {error}; fetch the original from its publisher"
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{where}: not a CIFAR batch: expected a dictionary")
    return {text(key): value for key, value in found.items()}


def text(value: Any) -> str:
    """Convert a string of Python 2 or 3 to text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def array(stored: Any, where: str) -> Array:
    """Check the pickle's description of an array, and convert it to a numpy array of bytes."""
    try:
        _, shape, kind, fortran, raw = stored.state
        good = isinstance(raw, bytes) and text(kind.told[0]) == "u1" and not fortran
        good = good and all(isinstance(n, int) and n >= 0 for n in shape)
    except (AttributeError, IndexError, TypeError, ValueError):
        good = False
    if not good or len(raw) != math.prod(shape):
        raise DataError(f"{where}: expected an array of bytes and the shape it has")
    return np.frombuffer(raw, np.uint8).reshape(shape)


# ---- CIFAR-10 and CIFAR-100 from the original pickles -------------------------------------------

_BATCHES10 = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR10_NAMES: tuple[str, ...] = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


def read_cifar(path: Path, *, name: str = "") -> Dataset:
    """Read ``cifar-10-python.tar.gz`` or ``cifar-100-python.tar.gz``, packed or unpacked."""
    if "data_batch_1" in names(path):
        return _read_cifar10(path, name or "cifar10")
    return _read_cifar100(path, name or "cifar100")


def _read_cifar10(path: Path, name: str) -> Dataset:
    wanted = (*_BATCHES10, "batches.meta")
    found = read(path, lambda file: file in wanted)
    pieces = []
    for file in _BATCHES10:
        if file in found:
            batch = loads(found[file], file)
            part = TEST if file == "test_batch" else TRAIN
            pieces.append(Piece(_images(batch, file), _labels(batch, "labels", file), part))
    names = CIFAR10_NAMES
    if "batches.meta" in found:
        names = _names(loads(found["batches.meta"], "batches.meta"), "label_names")
    return assemble(name, pieces, Names(names))


def _read_cifar100(path: Path, name: str) -> Dataset:
    found = read(path, lambda file: file in ("train", "test", "meta"))
    pieces, coarse = [], []
    for file, part in (("train", TRAIN), ("test", TEST)):
        if file not in found:
            raise DataError(f"{path}: expected the files 'train' and 'test' of CIFAR-100")
        batch = loads(found[file], file)
        pieces.append(Piece(_images(batch, file), _labels(batch, "fine_labels", file), part))
        coarse.append(_labels(batch, "coarse_labels", file))
    names: tuple[str, ...] = ()
    if "meta" in found:
        names = _names(loads(found["meta"], "meta"), "fine_label_names")
    fine = np.concatenate([piece.y for piece in pieces])
    superclass = np.zeros(int(fine.max()) + 1, np.int64)
    superclass[fine] = np.concatenate(coarse)  # from images, which have both
    return assemble(name, pieces, Names(names), superclass)


def _images(batch: dict[str, Any], file: str) -> Array:
    flat = array(batch.get("data"), file)
    if flat.ndim != 2 or flat.shape[1] != 3072:
        raise DataError(f"{file}: images have shape {flat.shape}, expected [N, 3072]")
    return flat.reshape(-1, 3, 32, 32)


def _labels(batch: dict[str, Any], key: str, file: str) -> Array:
    found = batch.get(key)
    if not isinstance(found, list) or not all(isinstance(label, int) for label in found):
        raise DataError(f"{file}: expected a list of whole numbers under '{key}'")
    return np.array(found, np.int64)


def _names(meta: dict[str, Any], key: str) -> tuple[str, ...]:
    found = meta.get(key)
    return tuple(text(name) for name in found) if isinstance(found, list) else ()


# ---- the idx format of MNIST, Fashion-MNIST and EMNIST, plain or gzipped -------------------------

_KINDS = ("images", "labels")
_PARTS = {"train": TRAIN, "t10k": TEST, "test": TEST}
_LETTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


def is_idx(name: str) -> bool:
    """Whether a file name is that of an idx file."""
    return "idx" in name and "ubyte" in name


def read_idx(path: Path, *, name: str = "") -> Dataset:
    """Read a folder or archive with the four files ``train-images-idx3-ubyte`` and so on.

    Of EMNIST's subsets, ``byclass`` is read; its images are stored transposed.
    """
    mine = "emnist-byclass-"
    found = read(path, lambda f: is_idx(f) and (not f.startswith("emnist") or f.startswith(mine)))
    arrays = {_key(file): _parse(file, content) for file, content in found.items()}
    parts = [part for part in _PARTS if (part, "images") in arrays and (part, "labels") in arrays]
    if "train" not in parts:
        raise DataError(
            f"{path}: found {sorted(found) or 'no idx files'}, expected train-images-idx3-ubyte "
            "and train-labels-idx1-ubyte (or .gz), and the same for t10k or test"
        )
    emnist = any(file.startswith("emnist") for file in found)
    pieces = [_piece(arrays, part, emnist) for part in parts]
    names = Names(_LETTERS if emnist else ())
    return assemble(name or ("emnist" if emnist else path.name), pieces, names)


def _key(file: str) -> tuple[str, str]:
    part = next((part for part in _PARTS if part in file), file)
    return part, next((kind for kind in _KINDS if kind in file), file)


def _piece(arrays: dict[tuple[str, str], Array], part: str, emnist: bool) -> Piece:
    x, y = arrays[part, "images"], arrays[part, "labels"].astype(np.int64)
    return Piece(x.transpose(0, 2, 1) if emnist else x, y, _PARTS[part])


def _parse(file: str, content: bytes) -> Array:
    """Parse one idx file of unsigned bytes into an array."""
    try:
        raw = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: broken gzip file ({error}); fetch it again") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise DataError(f"{file}: not an idx file of bytes (it starts with {raw[:4].hex()})")
    rank = raw[3]
    if len(raw) < 4 + 4 * rank:
        raise DataError(f"{file}: the idx header is cut short; fetch the file again")
    shape = struct.unpack(f">{rank}I", raw[4 : 4 + 4 * rank])
    if len(raw) - 4 - 4 * rank != math.prod(shape):
        raise DataError(
            f"{file}: the header promises {shape}, that is {math.prod(shape)} bytes, but "
            f"{len(raw) - 4 - 4 * rank} follow; fetch the file again"
        )
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)


# ---- a folder of images per client: ``clinic_a/healthy/001.png`` ---------------------------------

Side = Annotated[int, Interval(ge=1, le=10_000)]
SUFFIXES = (".png", ".jpg", ".jpeg", ".jxl")


def read_images(path: Path, *, name: str = "", size: Side | None = None) -> Dataset:
    """Read images in ``client/class/``.

    size: resize all images to squares of so many pixels per side; None leaves them as they are
    """
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    for file in found:
        if len(file.relative_to(path).parts) != 3:
            raise DataError(f"{file}: expected images in {path}/CLIENT/CLASS/")
    if not found:
        raise DataError(f"{path}: found no images ({', '.join(SUFFIXES)}) in CLIENT/CLASS/")
    decoded = [_resized(decode(file.read_bytes(), str(file)), size) for file in found]
    clients = sorted({file.parts[-3] for file in found})
    classes = sorted({file.parts[-2] for file in found})
    y = np.array([classes.index(file.parts[-2]) for file in found])
    owners = np.array([clients.index(file.parts[-3]) for file in found])
    piece = Piece(_stacked(found, decoded), y, TRAIN, owners)
    return assemble(name or path.name, [piece], Names(tuple(classes), tuple(clients)))


def _resized(image: Array, size: int | None) -> Array:
    """The image as ``[height, width, 1 or 3]``, without transparency, resized if asked for."""
    image = image[:, :, None] if image.ndim == 2 else image
    image = image[:, :, :1] if image.shape[2] == 2 else image[:, :, :3]
    if size is None or image.shape[:2] == (size, size):
        return image
    pixels = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1)[None]
    small = torch.nn.functional.interpolate(
        pixels, (size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return small[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).numpy()


def _stacked(found: list[Path], decoded: list[Array]) -> Array:
    """Stack all images into one array; grey images become RGB if any image has colour."""
    shape = decoded[0].shape[:2]
    for file, image in zip(found, decoded, strict=True):
        if image.shape[:2] != shape:
            raise DataError(
                f"{file}: {image.shape[0]}x{image.shape[1]} pixels, but {found[0]} has "
                f"{shape[0]}x{shape[1]}; set data.size to resize all of them"
            )
    channels = max(image.shape[2] for image in decoded)
    return np.stack([np.broadcast_to(image, (*shape, channels)) for image in decoded])
