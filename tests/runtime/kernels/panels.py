"""The order of panels, by numpy (native/formats/panel.hpp)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.core.layout import BLOCKS

ROWS = 16
# Bytes before the first word of a block; those after the last word are what is left.
HEADS = {"q8_0": 2, "q4_0": 2, "q5_0": 2, "iq4_nl": 2, "gguf_mxfp4": 1}
PANELS = (
    *("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs", "gguf_mxfp4", "gguf_nvfp4", "gguf_nvfp4_scaled"),
)


def arranged(codes: NDArray[np.uint8], encoding: str) -> NDArray[np.uint8]:
    """Arrange rows of codes [rows, bytes] in panels."""
    whole, size, head = len(codes) // ROWS * ROWS, BLOCKS[encoding][1], HEADS.get(encoding, 0)
    words = (size - head) // 4
    out = codes.copy()
    blocks = codes[:whole].reshape(-1, ROWS, codes.shape[1] // size, size).swapaxes(1, 2)
    middle = blocks[..., head : head + 4 * words].reshape(*blocks.shape[:3], words, 4)
    parts = blocks[..., :head], middle.swapaxes(2, 3), blocks[..., head + 4 * words :]
    flat = [part.reshape(*blocks.shape[:2], -1) for part in parts]
    out[:whole] = np.concatenate(flat, -1).reshape(whole, -1)
    return out
