"""Pictures are decoded as transformers loads them, and bad ones are refused with one line."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from greenroom.errors import UsageError
from greenroom.hf.pictures import decode as decoding
from greenroom.hf.pictures.decode import EncodedPicture, decode, read_base64
from tests.pictures import encode, in_base64, picture


def read(data: bytes, media_type: str | None = None) -> np.ndarray[Any, Any]:
    encoded = EncodedPicture(in_base64(data), media_type)
    return np.asarray(decode(*read_base64(encoded), lambda image: image))


def png(width: int, height: int, body: bytes = b"") -> bytes:
    """A PNG file whose header says any size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(body)), (b"IEND", b"")):
        data += struct.pack(">I", len(content)) + kind + content
        data += struct.pack(">I", zlib.crc32(kind + content))
    return data


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "LA", "1", "I;16"])
def test_pixels_are_those_of_transformers(mode: str) -> None:
    image = picture(21, 13, mode="L" if mode == "I;16" else mode).convert(mode)
    assert np.array_equal(read(encode(image)), np.asarray(load_image(image)))


def test_a_photo_stands_upright() -> None:
    image, exif = picture(40, 20), Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert read(encode(image, "JPEG", exif=exif)).shape == (40, 20, 3)


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [picture(16, 16, seed, "P") for seed in range(3)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(read(data), np.asarray(frames[0].convert("RGB")))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_truncated_picture_is_refused(kind: str) -> None:
    data = encode(picture(64, 64), kind)
    for length in (len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(UsageError, match=r"^it is damaged: ") as error:
            read(data[:length])
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("at", range(30, 400, 37))
def test_changed_bytes_never_raise_another_error(at: int) -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = bytearray(encode(picture(24, 24), kind))
        data[at] ^= 0xFF
        try:
            read(bytes(data))
        except UsageError as error:
            assert str(error).startswith("it")  # noqa: PT017 - some changes are no damage


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png(100_000, 100_000), "at most 16,777,216 pixels"),
        (png(1, 1 << 24 | 1), "at most 16,777,216 pixels"),
        (png(0, 7), "no pixels"),
        (png(4000, 10), "more than 200 times"),
        (png(5, 5), "damaged"),
        (b"BM" + bytes(100), "its format is none of image/png, image/jpeg"),
        (b"", "its format is none of"),
    ],
)
def test_pictures_that_are_refused(
    data: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if message != "damaged":
        monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(UsageError, match=message):
        read(data)


@pytest.mark.parametrize("text", ["#", "abc", "äöü=", "iVBORw0KGgo=\n\n", "a" * 5])
def test_text_that_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not valid base64"):
        read_base64(EncodedPicture(text, "image/png"))


def test_the_declared_type_must_be_right() -> None:
    with pytest.raises(UsageError, match="it is image/png, not image/jpeg"):
        read(encode(picture(9, 9)), "image/jpeg")


def test_a_frame_larger_than_its_screen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(encode(picture(20, 20, mode="P"), "GIF"))
    data[6:10] = struct.pack("<HH", 1, 1)  # the screen
    monkeypatch.setattr(decoding, "MOST_PIXELS", 100)
    with pytest.raises(UsageError, match="at most 100 pixels"):
        read(bytes(data))
