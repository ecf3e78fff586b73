"""Reads one folder of images per client: ``clinic_a/healthy/001.png``."""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from ...core.ranges import Interval
from ...errors import DataError
from ..arrays import TRAIN, Array, Names, Piece, assemble
from ..federation import Dataset
from .codecs import decode

Side = Annotated[int, Interval(ge=1, le=10_000)]
SUFFIXES = (".png", ".jpg", ".jpeg", ".jxl")


def is_image(file: Path) -> bool:
    """Whether a file name is that of a supported image."""
    return file.suffix.lower() in SUFFIXES


def read_images(path: Path, *, name: str = "", size: Side | None = None) -> Dataset:
    """Read images in ``client/class/``.

    size: resize all images to squares of so many pixels per side; None leaves them as they are
    """
    found = sorted(file for file in path.rglob("*") if is_image(file))
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
