"""Format and size of a picture, read from its first bytes.

The size is known before a decoder sees the picture: some decoders allocate it while they open it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

# Markers of a JPEG file that begin a frame and have its size: SOF0 to SOF15, without those between
# that define Huffman tables, extensions and arithmetic coding.
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
BARE = frozenset(range(0xD0, 0xDA)) | {0x01}  # markers without a length

Size = tuple[int, int]


class Truncated(ValueError):
    """A picture whose header is not complete, or not valid."""


class PictureHeader(NamedTuple):
    """Format and size in pixels of an encoded picture; `media_type` as in image/png."""

    media_type: str
    width: int
    height: int


def read_header(data: bytes) -> PictureHeader | None:
    """Read a picture's format and size; None for other formats. Raises Truncated."""
    for media_type, (is_format, size_of) in FORMATS.items():
        if is_format(data):
            try:
                return PictureHeader(media_type, *size_of(data))
            except IndexError:
                raise Truncated("its header is not complete") from None
    return None


def _number(data: bytes, begin: int, nbytes: int, order: str) -> int:
    if len(data) < begin + nbytes:
        raise IndexError
    return int.from_bytes(data[begin : begin + nbytes], "big" if order == ">" else "little")


def _png(data: bytes) -> Size:
    if data[12:16] != b"IHDR":
        raise Truncated("its first chunk is not IHDR")
    return _number(data, 16, 4, ">"), _number(data, 20, 4, ">")


def _gif(data: bytes) -> Size:
    return _number(data, 6, 2, "<"), _number(data, 8, 2, "<")


def _jpeg(data: bytes) -> Size:
    at = 2
    while True:
        if _number(data, at, 1, ">") != 0xFF:
            raise Truncated("a marker is missing")
        while (marker := data[at + 1]) == 0xFF:  # fill bytes
            at += 1
        if marker in FRAMES:
            return _number(data, at + 7, 2, ">"), _number(data, at + 5, 2, ">")
        at += 2 if marker in BARE else 2 + _number(data, at + 2, 2, ">")


def _webp(data: bytes) -> Size:
    kind = data[12:16]
    if kind == b"VP8X":
        return _number(data, 24, 3, "<") + 1, _number(data, 27, 3, "<") + 1
    if kind == b"VP8L":
        bits = _number(data, 21, 4, "<")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return _number(data, 26, 2, "<") & 0x3FFF, _number(data, 28, 2, "<") & 0x3FFF
    raise Truncated("its first chunk has no picture")


FORMATS: Mapping[str, tuple[Callable[[bytes], bool], Callable[[bytes], Size]]] = {
    "image/png": (lambda data: data.startswith(b"\x89PNG\r\n\x1a\n"), _png),
    "image/jpeg": (lambda data: data.startswith(b"\xff\xd8\xff"), _jpeg),
    "image/webp": (lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP", _webp),
    "image/gif": (lambda data: data[:6] in (b"GIF87a", b"GIF89a"), _gif),
}
