"""Quantise float32 weights to the encodings `int8`, `int4`, `fp8` and nested int8 of a pack.

Each function takes rows of a matrix in float32 and fills codes and scales, on one core and without
the interpreter lock. It returns False if a weight is infinite or NaN. "Largest" is the largest
magnitude in a group of weights that share a scale.

int8    The scale is largest / 127, in float16. Codes are rounded to the nearest.
int4    The scale has the opposite sign of the largest weight, whose code is -8 or near -8. Of four
        candidates near largest / 8, the scale with the smallest squared error is taken. Scales have
        5 significant bits, so their product with a code is exact in bfloat16.
nested  Codes are int8, 16 h + l, from -119 to 119, with h and l in separate planes of 4 bits. The
        plane of h is an int4 copy with 16 times the scale. The scale is the smallest number of 5
        significant bits that is at least largest / 119.
fp8     The scale is largest / 448 of a rectangular block, in float32. Codes are rounded to the
        nearest, ties to even.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit

F32 = NDArray[np.float32]

FAST = {"reassoc", "contract", "nsz"}  # infinities and NaN keep their meaning, divisions are exact
INFINITE = np.int32(0x7F800000)  # bits of a float32 without sign; smaller ones are finite
GROUP = 32  # weights that share a scale of int4 in a pack
EXACT = 5  # significant bits of a scale of int4
HALF = 11  # of a float16
TRIES = 4  # candidate scales of int4
FIRST = np.float32(0.9 / 8)  # the smallest candidate, relative to the largest weight
# Reciprocals of scales, by the 4 bits after the first one, instead of a division a candidate.
OVER = np.array([16 / (16 + k) for k in range(16)], np.float32)
SHIFT = np.float32(12582912.0)  # 1.5 * 2^23; the low bits of x + SHIFT are x rounded to an integer
SHIFTED = np.int32(0x4B400000)
TINY = np.float32(2.0**-14)  # the smallest normal float16
STEP = np.float32(2.0**24)  # the reciprocal of the smallest float16 step
LARGEST = np.float32(65504.0)
HALF_OF_LARGEST = np.float32(32752.0)
ONE, ZERO = np.float32(1), np.float32(0)
# The largest nested code, and the weight of h in a code.
NESTED, SIXTEEN = np.float32(119), np.float32(16)
E4M3_LEAST = np.float32(2.0**-6)  # the smallest normal value; below it steps are 2^-9
# 2^23 steps; the low bits of x + E4M3_SHIFT are x rounded to a step.
E4M3_SHIFT = np.float32(2.0**14)
E4M3_SHIFTED = np.int32(0x46800000)


@jit
def _nearest(x: np.float32) -> np.int32:
    """Round a number of magnitude below 2^22 to the nearest integer, ties to even."""
    return np.int32(np.float32(x + SHIFT).view(np.int32) - SHIFTED)


@jit
def _size(x: np.float32) -> np.int32:
    """Return the float32 bits of a number's magnitude.

    As integers they are ordered like the magnitudes, with infinities and NaN last.
    """
    return np.int32(np.float32(x).view(np.int32) & 0x7FFFFFFF)


@jit
def _largest(x: F32) -> np.int32:
    """Return the largest magnitude in a row of weights, as float32 bits."""
    largest = np.int32(0)
    for i in range(len(x)):
        largest = max(largest, _size(x[i]))
    return largest


@jit
def _as_half(scale: np.float32, bits: int) -> np.float32:
    """Round a scale to the nearest float16 with `bits` significant bits.

    Returns a float32, at most 65504, the largest float16.
    """
    if scale < TINY:
        return np.float32(np.float32(_nearest(scale * STEP)) / STEP)
    drop = 24 - bits
    word = np.float32(scale).view(np.int32)
    word = np.int32(word + (1 << (drop - 1)) - 1 + ((word >> drop) & 1))
    return min(np.int32(word >> drop << drop).view(np.float32), LARGEST)


@jit(fastmath=FAST)
def int8(w: F32, group: int, codes: NDArray[np.int8], scales: F32) -> bool:
    """Quantise rows of weights to int8 codes, with one float16 scale for each group.

    w:      the weights [rows, columns]
    group:  the number of adjacent weights of a row that share a scale
    codes:  filled with the codes, [rows, columns]
    scales: filled with the scales, [rows, columns / group]

    Returns False if a weight is infinite or NaN.
    """
    finite = True
    for row in range(w.shape[0]):
        for g in range(w.shape[1] // group):
            x = w[row, g * group : (g + 1) * group]
            largest = _largest(x)
            finite = finite and bool(largest < INFINITE)
            scale = _as_half(np.float32(np.int32(largest).view(np.float32) / np.float32(127)), HALF)
            scales[row, g] = scale
            over = ONE / scale if scale > ZERO else ZERO
            out = codes[row, g * group : (g + 1) * group]
            for i in range(group):
                out[i] = min(max(_nearest(x[i] * over), np.int32(-127)), np.int32(127))
    return finite


@jit
def _scale_up(scale: np.float32) -> np.float32:
    """Round a scale up to a float16 of 5 significant bits."""
    if scale < TINY:
        return np.float32(np.ceil(scale * STEP) / STEP)
    drop = 24 - EXACT
    word = np.int32(np.float32(scale).view(np.int32) + (1 << drop) - 1)
    return np.float32(np.int32(word >> drop << drop).view(np.float32))


@jit(fastmath=FAST)
def nested(
    w: F32, group: int, high: NDArray[np.uint8], low: NDArray[np.uint8], scales: F32
) -> bool:
    """Quantise rows of weights to int8 codes that contain int4 codes, in two planes.

    w:      the weights [rows, columns]
    group:  the number of adjacent weights of a row that share a scale
    high:   filled with the int4 codes, the high 4 bits of the int8 codes, [rows, columns / 2]
    low:    filled with the low 4 bits of the int8 codes, [rows, columns / 2]
    scales: filled with the scales of the int4 codes, [rows, columns / group]

    A byte holds two values, each plus 8; the first is in the low half. Returns False if a weight is
    infinite or NaN, or a scale exceeds float16.
    """
    finite = True
    for row in range(w.shape[0]):
        for g in range(w.shape[1] // group):
            x = w[row, g * group : (g + 1) * group]
            largest = _largest(x)
            finite = finite and bool(largest < INFINITE)
            scale = _scale_up(np.int32(largest).view(np.float32) / NESTED)
            scales[row, g] = scale * SIXTEEN
            finite = finite and bool(scales[row, g] <= LARGEST)
            over = ONE / scale if scale > ZERO else ZERO
            for i in range(0, group, 2):
                a, b = _nested(x[i] * over), _nested(x[i + 1] * over)
                at = (g * group + i) // 2
                high[row, at] = np.uint8((a + 136) >> 4 | ((b + 136) >> 4) << 4)
                low[row, at] = np.uint8(((a + 8) & 15) | ((b + 8) & 15) << 4)
    return finite


@jit
def _nested(x: np.float32) -> np.int32:
    """Round a scaled weight to an int8 code from -119 to 119.

    So the high 4 bits of the code, an int4 code, are from -7 to 7.
    """
    return min(max(_nearest(x), np.int32(-119)), np.int32(119))


@jit(fastmath=FAST)
def int4(w: F32, group: int, codes: NDArray[np.uint8], scales: F32) -> bool:
    """Quantise rows of weights to int4 codes, with one float16 scale for each group.

    w:      the weights [rows, columns]
    group:  the number of adjacent weights of a row that share a scale
    codes:  filled with the codes, [rows, columns / 2]; a byte holds two codes, each plus 8, the
            first in the low half
    scales: filled with the scales, [rows, columns / group]

    Returns False if a weight is infinite or NaN.
    """
    finite = True
    unpacked = np.empty(w.shape[1], np.uint8)  # a row's codes, one a byte
    pairs = unpacked.view(np.uint16)
    for row in range(w.shape[0]):
        for g in range(w.shape[1] // group):
            x = w[row, g * group : (g + 1) * group]
            out = unpacked[g * group : (g + 1) * group]
            # A constant length lets the compiler vectorise loops without a remainder.
            scale = _int4_group(x, GROUP, out) if group == GROUP else _int4_group(x, group, out)
            scales[row, g] = scale
            finite &= np.isfinite(scale)
        out = codes[row]
        for i in range(len(out)):
            out[i] = np.uint8((pairs[i] | pairs[i] >> 4) & 255)
    return finite


@jit(inline="always")
def _int4_group(x: F32, count: int, out: NDArray[np.uint8]) -> np.float32:
    """Quantise one group of weights to int4 codes; return the group's scale.

    `out` is filled with the codes plus 8. The scale is NaN if a weight is infinite or NaN.
    """
    most, size = np.int32(0), np.int32(0)  # integer comparisons let the compiler vectorise
    for i in range(count):
        most = max(most, np.float32(x[i]).view(np.int32))
        size = max(size, _size(x[i]))
    if size >= INFINITE:
        return np.float32(np.nan)
    sign = ONE if size > most else -ONE
    largest = np.int32(size).view(np.float32)
    best = np.float32(_as_half(np.float32(largest / np.float32(8)), EXACT))
    if TINY <= best < HALF_OF_LARGEST:
        word = np.float32(_as_half(np.float32(largest * FIRST), EXACT)).view(np.int32)
        least_error = np.float32(np.inf)
        for k in range(TRIES):
            bits = np.int32(word + (k << (24 - EXACT)))
            power = np.int32((254 << 23) - (bits & INFINITE)).view(
                np.float32
            )  # the reciprocal of the scale's power of two
            scale, over = bits.view(np.float32), sign * power * OVER[bits >> 24 - EXACT & 15]
            error = ZERO  # squared, of the group with this scale
            for i in range(count):
                gap = x[i] - sign * scale * np.float32(_int4_code(x[i] * over))
                error += gap * gap
            if error < least_error:
                best, least_error = scale, error
    best *= sign
    over = ONE / best if best != ZERO else ZERO
    for i in range(count):
        out[i] = np.uint8(_int4_code(x[i] * over) + np.int32(8))
    return best


@jit(inline="always")
def _int4_code(x: np.float32) -> np.int32:
    return min(max(_nearest(x), np.int32(-8)), np.int32(7))


@jit(fastmath=FAST)
def fp8(w: F32, rows: int, columns: int, codes: NDArray[np.uint8], scales: F32) -> bool:
    """Quantise a matrix to float8_e4m3fn codes, with one float32 scale for each block.

    w:             the weights, whose sides are multiples of a block's sides
    rows, columns: the sides of a block
    codes:         filled with the codes, in the shape of w
    scales:        filled with one scale for each block, [block rows, block columns]

    Returns False if a weight is infinite or NaN.
    """
    finite = True
    for down in range(w.shape[0] // rows):
        for across in range(w.shape[1] // columns):
            left, right = across * columns, (across + 1) * columns
            largest = np.int32(0)
            for row in range(down * rows, (down + 1) * rows):
                largest = max(largest, _largest(w[row, left:right]))
            finite = finite and bool(largest < INFINITE)
            scale = np.float32(np.int32(largest).view(np.float32) / np.float32(448))
            scales[down, across] = scale
            over = ONE / scale if scale > ZERO and np.isfinite(ONE / scale) else ZERO
            for row in range(down * rows, (down + 1) * rows):
                x, out = w[row, left:right], codes[row, left:right]
                for i in range(columns):
                    out[i] = _e4m3(x[i] * over)
    return finite


@jit
def _e4m3(x: np.float32) -> np.uint8:
    """Return the code of the nearest float8_e4m3fn; larger values become 448."""
    value = np.float32(min(abs(x), np.float32(448)))
    word = value.view(np.int32)
    code = np.int32((word + ((word >> 20) & 1) + 0x7FFFF >> 20) - (127 - 7 << 3))
    if value < E4M3_LEAST:
        code = np.int32(np.float32(value + E4M3_SHIFT).view(np.int32) - E4M3_SHIFTED)
    return np.uint8(code | (np.float32(x).view(np.int32) >> 24 & 0x80))
