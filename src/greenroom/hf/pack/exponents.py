"""Encode bfloat16 weights in 12 bits, as `bf12` (runtime/encodings/bf12.py), without loss."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit
from greenroom.runtime.encodings.bf12 import ORDER, SPAN

NUMBERS = 16  # exponents that have a code, of each matrix


@jit
def _count(weights: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Count the exponents of weights, given as their bits."""
    counts = np.zeros(256, np.int64)
    for row in range(weights.shape[0]):
        for column in range(weights.shape[1]):
            counts[weights[row, column] >> 7 & 255] += 1
    return counts


@jit
def _fill(
    weights: NDArray[np.uint16],
    number: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    ends: NDArray[np.int32],
    escapes: NDArray[np.int32],
) -> bool:
    """Fill codes, ends and escapes; False if there are more escapes than places for them.

    number: of each exponent; 255: it has none
    """
    columns = weights.shape[1]
    span = np.zeros(SPAN, np.uint8)
    listed = 0
    for row in range(weights.shape[0]):
        for first in range(0, columns, SPAN):
            count = min(SPAN, columns - first)
            for j in range(count):
                at = first + (ORDER[j] if count == SPAN else j)
                word = np.int32(weights[row, at])
                code = number[word >> 7 & 255]
                bits = word >> 8 & 128 | word & 127
                if code == 255:
                    code, bits = np.uint8(0), np.int32(0)
                codes[row, first + j] = np.uint8(bits)
                span[j] = code
            place = columns + first // 2
            for j in range(count // 2):
                codes[row, place + j] = span[2 * j] | span[2 * j + 1] << 4
        for column in range(columns):
            word = np.int32(weights[row, column])
            if number[word >> 7 & 255] == 255:
                if listed == escapes.shape[1]:
                    return False
                escapes[0, listed] = np.int32(column | word << 16)
                listed += 1
        ends[row, 0] = listed
    return True


def bf12(
    weights: NDArray[np.uint16],
    codes: NDArray[np.uint8],
    ends: NDArray[np.int32],
    exponents: NDArray[np.uint8],
    escapes: NDArray[np.int32],
) -> bool:
    """Encode a matrix of bfloat16 weights [rows, columns], given as their bits.

    The other arguments are filled. Returns False if there are more escapes than places for them.
    """
    counts = _count(weights)
    frequent = np.sort(np.argsort(-counts, kind="stable")[:NUMBERS])
    frequent = frequent[counts[frequent] > 0]
    exponents[:], escapes[:] = 0, 0
    exponents[0, : len(frequent)] = frequent
    number = np.full(256, 255, np.uint8)
    number[frequent] = np.arange(len(frequent), dtype=np.uint8)
    return bool(_fill(weights, number, codes, ends, escapes))
