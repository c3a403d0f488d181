"""Pixels of encoded pictures, by Pillow, within limits that are checked before decoding."""

from __future__ import annotations

import base64
import binascii
import importlib.util
from dataclasses import dataclass
from io import BytesIO
from threading import Lock
from typing import TYPE_CHECKING, Any

from greenroom.errors import UsageError
from greenroom.hf.pictures.header import FORMATS, PictureHeader, Truncated, read_header

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 1 << 24
MOST_RATIO = 200  # of the longer to the shorter side; the image processor's own limit
PIXEL_BYTES = 8  # of a picture while it is decoded: four for Pillow's pixels, and a converted copy

_ONE = Lock()  # one picture is decoded at a time, whose memory is set aside


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """A picture as a client sends it: base64, and its media type, or None if not declared."""

    data: str
    media_type: str | None = None


def missing_decoder() -> str:
    """Return why no picture can be decoded; "" if Pillow is installed."""
    if importlib.util.find_spec("PIL") is None:
        return "Pillow is not installed: pip install 'greenroom[pictures]'"
    return ""


def read_base64(picture: EncodedPicture) -> tuple[bytes, PictureHeader]:
    """Return a picture's bytes and header. UsageError if it is not valid, or too large."""
    try:
        data = base64.b64decode(picture.data, validate=True)
    except (binascii.Error, ValueError):
        raise UsageError("its data are not valid base64") from None
    try:
        header = read_header(data)
    except Truncated as error:
        raise UsageError(f"it is damaged: {error}") from None
    if header is None:
        raise UsageError(f"its format is none of {', '.join(FORMATS)}")
    kind, width, height = header
    if picture.media_type not in (None, kind):
        raise UsageError(f"it is {kind}, not {str(picture.media_type)[:40]}")
    _check_size(width, height)
    return data, header


def _check_size(width: int, height: int) -> None:
    if not width or not height:
        raise UsageError(f"it has no pixels: its size is {width} x {height}")
    if width * height > MOST_PIXELS:
        raise UsageError(f"its size is {width} x {height}: at most {MOST_PIXELS:,} pixels are read")
    if max(width, height) > MOST_RATIO * min(width, height):
        raise UsageError(
            f"its size is {width} x {height}: one side is more than {MOST_RATIO} times the other"
        )


def decode(data: bytes, header: PictureHeader, resize: Any) -> Image:
    """Decode a picture to RGB, upright as its EXIF data say, and resized by `resize`.

    Of an animation, the first frame is taken. `resize` takes and returns Pillow's image. Raises
    UsageError if the picture is damaged.
    """
    from PIL import Image
    from transformers.image_utils import load_image

    kind = header.media_type.removeprefix("image/").upper()
    with _ONE:
        try:
            with Image.open(BytesIO(data), formats=(kind,)) as image:
                _check_size(*image.size)
                upright = load_image(image)
        except (UsageError, MemoryError):
            raise
        except Exception as error:  # Pillow's decoders raise errors of many types
            raise UsageError(f"it is damaged: {' '.join(str(error).split())[:100]}") from None
        return resize(upright)
