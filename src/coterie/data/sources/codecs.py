"""Decodes compressed images with the optional package imagecodecs."""

import numpy as np

from ...errors import DataError
from ..arrays import Array


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
