"""Format and size of pictures from their first bytes, compared with Pillow's."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.hf.pictures.header import Truncated, read_header
from tests.pictures import encode, picture

KINDS: list[tuple[str, dict[str, Any], str]] = [
    ("PNG", {}, "RGB"),
    ("PNG", {}, "P"),
    ("JPEG", {}, "RGB"),
    ("JPEG", {"progressive": True, "comment": b"\xff\xc0 no frame"}, "L"),
    ("JPEG", {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"}, "RGB"),
    ("WEBP", {}, "RGB"),
    ("WEBP", {"lossless": True}, "RGB"),
    ("WEBP", {}, "RGBA"),
    ("GIF", {}, "P"),
]


@pytest.mark.parametrize(("kind", "options", "mode"), KINDS)
def test_format_and_size_are_pillows(kind: str, options: dict[str, Any], mode: str) -> None:
    data = encode(picture(37, 301, mode=mode), kind, **options)
    assert read_header(data) == (f"image/{kind.lower()}", 37, 301)


@pytest.mark.parametrize(("kind", "options", "mode"), KINDS)
def test_a_header_that_ends_early_is_truncated(
    kind: str, options: dict[str, Any], mode: str
) -> None:
    data = encode(picture(37, 301, mode=mode), kind, **options)
    found = 0
    for length in range(len(data)):
        try:
            header = read_header(data[:length])
        except Truncated:
            found += 1
        else:
            assert header in (None, (f"image/{kind.lower()}", 37, 301))
    assert found


@pytest.mark.parametrize(
    "data", [b"", b"x", b"BM" + bytes(60), b"%PDF-1.7", b"<svg></svg>", b"RIFF....WAVE"]
)
def test_other_formats_have_no_header(data: bytes) -> None:
    assert read_header(data) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n" + bytes(40),
        b"\xff\xd8\xff\xe0\x00\x02no marker",
        b"\xff\xd8\xff\xe0\x00\x00" * 10,
        b"RIFF\0\0\0\0WEBPALPH" + bytes(40),
    ],
)
def test_damaged_headers_are_errors(data: bytes) -> None:
    with pytest.raises(Truncated):
        read_header(data)
