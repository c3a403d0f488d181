"""bf12 stores every bfloat16 matrix bit for bit, or refuses it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from greenroom.hf.pack.exponents import bf12
from greenroom.runtime.encodings.bf12 import decode, escape_room


def encoded(bits: NDArray[np.uint16], room: int | None = None) -> list[np.ndarray] | None:
    rows, columns = bits.shape
    parts = [
        np.full((rows, columns // 2 * 3), 0xA5, np.uint8),
        np.full((rows, 1), -7, np.int32),
        np.full((1, 16), 0xA5, np.uint8),
        np.full((1, escape_room(rows, columns) if room is None else room), -7, np.int32),
    ]
    return parts if bf12(bits, *parts) else None


def decoded(parts: list[np.ndarray]) -> NDArray[np.uint16]:
    weights = decode(*(torch.from_numpy(part) for part in parts))
    assert weights.dtype is torch.bfloat16
    return weights.view(torch.int16).numpy().view(np.uint16)


@settings(deadline=None)  # the first example may compile
@given(
    st.integers(1, 5),
    st.sampled_from([32, 64, 96, 128, 160]),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_every_bit_comes_back_while_there_is_room(
    rows: int, columns: int, spread: int, seed: int
) -> None:
    """`spread`: how many exponents there are, from all 256."""
    random = np.random.default_rng(seed)
    exponents = random.choice(256, spread, replace=False)
    bits = random.choice(exponents, (rows, columns)) << 7 | random.integers(0, 128, (rows, columns))
    bits = (bits | random.integers(0, 2, bits.shape) << 15).astype(np.uint16)
    parts = encoded(bits)
    _, counts = np.unique(bits >> 7 & 255, return_counts=True)
    rare = int(np.sort(counts)[:-16].sum())
    assert (parts is None) == (rare > escape_room(rows, columns))
    if parts is not None:
        assert parts[1][-1, 0] == rare
        assert np.array_equal(decoded(parts), bits)


def test_a_matrix_by_hand() -> None:
    """Exponent 127 is that of 1.0 (0x3F80); 17 others, one of which has no code."""
    bits = np.full((2, 64), 0x3F80, np.uint16)
    bits[0, 1] = 0xBF81  # -1.0078125: sign 1, mantissa 1
    bits[0, 16:32] = np.arange(1, 17) << 7  # exponents 1 to 16
    bits[1, 5] = 30 << 7 | 3  # the same count, a later exponent
    parts = encoded(bits)
    assert parts is not None
    codes, ends, exponents, escapes = parts
    assert exponents.tolist() == [[*range(1, 16), 127]]
    assert ends.tolist() == [[1], [2]]
    assert escapes[0, :2].tolist() == [31 | 16 << 7 << 16, 5 | (30 << 7 | 3) << 16]
    assert not escapes[0, 2:].any()
    assert codes[0, :3].tolist() == [0, 0x81, 0]
    assert codes[0, 64] == 15 | 15 << 4
    # Weights 32 to 39 are in places 8 to 15, so 16 is in place 32.
    assert codes[0, 64 + 16] == 0 | 1 << 4
    assert np.array_equal(decoded(parts), bits)


def test_room_is_used_to_the_last_place() -> None:
    bits = np.arange(17, 17 + 64, dtype=np.uint16)[None] << 7
    assert encoded(bits, 48) is not None
    assert encoded(bits, 47) is None


def test_damaged_lists_change_weights_only() -> None:
    random = np.random.default_rng(3)
    parts = encoded(random.integers(0, 1 << 16, (6, 96)).astype(np.uint16) & 0xBFFF | 0x3C00)
    assert parts is not None
    for _ in range(50):
        parts[1][:] = random.integers(-9, 40, parts[1].shape)
        parts[3][:] = random.integers(-(2**31), 2**31, parts[3].shape)
        assert decoded(parts).shape == (6, 96)
