"""Decode a frame's maps of experts, as the page's map.js does."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import numpy as np


def unpack(text: str, bits: int, size: int) -> list[int]:
    """Return `size` values of so many bits each, lowest bits first."""
    packed = np.frombuffer(b64decode(text), np.uint8)
    flags = np.unpackbits(packed, bitorder="little").reshape(-1, bits)
    values: Any = flags @ (1 << np.arange(bits))
    assert 0 <= values.size - size < 8 // bits
    assert not values[size:].any()
    return [int(value) for value in values[:size]]
