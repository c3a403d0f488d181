"""Quantised blocks with random or with chosen values, for shapes.py.

A *pool* is some megabytes of random blocks of one type; matrices are made by repeating it from
different starts. In every type, a block of zero bytes has the value 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
POOL_BLOCKS = 32_749  # a prime, so that the rows of a matrix do not repeat in step with the pool
FP4_RMS = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)


@dataclass(frozen=True)
class Kind:
    """A stored type: values and bytes of a block; how blocks are drawn; a block with one value."""

    name: str
    values: int
    nbytes: int
    draw: Callable[[np.random.Generator, int, float], Bytes]
    one: Callable[[int, float], Bytes] | None = None

    def size(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix of that shape."""
        return math.prod(shape) // self.values * self.nbytes


@cache
def pool(kind: str, std: float) -> Bytes:
    """Random blocks of a type [blocks, bytes]; values have mean 0 and this standard deviation."""
    # With the same draws, rows of the head would equal rows of the embedding, and win.
    random = np.random.default_rng([*kind.encode(), round(std * 1e9)])
    per_block = KINDS[kind].values
    blocks = POOL_BLOCKS if per_block > 1 else 64 * POOL_BLOCKS
    return KINDS[kind].draw(random, blocks, std)


def one_hot(kind: str, place: int, value: float) -> Bytes:
    """A block whose value at `place` is (nearly) `value`, and 0 elsewhere."""
    one = KINDS[kind].one
    if one is None:
        raise ValueError(f"no block of {kind} with one value is defined")
    return one(place, value)


def _half(value: Any) -> Bytes:
    return np.asarray(value, np.float16).reshape(-1, 1).view(np.uint8)


def _signs(random: np.random.Generator, n: int) -> NDArray[Any]:
    return random.integers(0, 2, n) * 2.0 - 1.0


def _bytes(random: np.random.Generator, n: int, width: int) -> Bytes:
    return random.integers(0, 256, (n, width), np.uint8)


def _q8_0(random: np.random.Generator, n: int, std: float) -> Bytes:
    return np.hstack([_half(_signs(random, n) * std / 73.9), _bytes(random, n, 32)])


def _one_q8_0(place: int, value: float) -> Bytes:
    codes = np.zeros((1, 32), np.uint8)
    codes[0, place] = 127
    return np.hstack([_half([value / 127]), codes])[0]


def _q5_0(random: np.random.Generator, n: int, std: float) -> Bytes:
    return np.hstack([_half(_signs(random, n) * std / 9.25), _bytes(random, n, 20)])


def _q4_0(random: np.random.Generator, n: int, std: float) -> Bytes:
    return np.hstack([_half(_signs(random, n) * std / 4.637), _bytes(random, n, 16)])


def _iq4_xs(random: np.random.Generator, n: int, std: float) -> Bytes:
    """Scales of sub-blocks are from -32 to 31 (rms 18.48); the codebook's rms is 67.44."""
    return np.hstack([_half(np.full(n, std / (18.48 * 67.44))), _bytes(random, n, 134)])


def _q4_k(random: np.random.Generator, n: int, std: float) -> Bytes:
    """The minimum of a sub-block is 7.5 times its scale, so its values are symmetric."""
    scale = random.integers(32, 64, (n, 8)).astype(np.uint8)  # mean of squares: 47.9 ** 2
    d = std / (47.9 * 4.61)
    low, high = scale[:, :4], scale[:, 4:]
    upper = low | (high >> 4) << 6
    packed = np.hstack([upper, upper, (high & 15) * 17])
    halves = np.tile(np.hstack([_half([d]), _half([7.5 * d])]), (n, 1))
    return np.hstack([halves, packed, _bytes(random, n, 128)])


def _one_q4_k(place: int, value: float) -> Bytes:
    """One sub-block has the scale 63, all others 0; one of its codes is 15, all others are 0."""
    block, packed = place // 32, np.zeros(12, np.uint8)
    if block < 4:
        packed[block] = 63
    else:
        packed[block - 4], packed[block + 4] = 0xC0, 15
    codes = np.zeros(128, np.uint8)
    codes[block // 2 * 32 + place % 32] = 15 << 4 * (block % 2)
    return np.hstack([_half([value / (63 * 15)])[0], np.zeros(2, np.uint8), packed, codes])


def _q6_k(random: np.random.Generator, n: int, std: float) -> Bytes:
    scale = random.integers(32, 128, (n, 16)) * _signs(random, n)[:, None]  # rms 84.6
    d = np.full(n, std / (84.6 * 18.5))
    return np.hstack([_bytes(random, n, 192), scale.astype(np.int8).view(np.uint8), _half(d)])


def _one_q6_k(place: int, value: float) -> Bytes:
    """Codes are 32 (the value 0) but for one, which is 63; only its group has a scale."""
    half, rest = divmod(place, 128)
    quarter, lane = divmod(rest, 32)
    low, high = np.zeros(128, np.uint8), np.full(64, 0b10101010, np.uint8)
    low[half * 64 + quarter % 2 * 32 + lane] = 15 << 4 * (quarter // 2)
    high[half * 32 + lane] |= 3 << 2 * quarter
    scales = np.zeros(16, np.uint8)
    scales[place // 16] = 127
    return np.hstack([low, high, scales, _half([value / (31 * 127)])[0]])


def _mxfp4(random: np.random.Generator, n: int, std: float) -> Bytes:
    return np.hstack([_fp4_scales(random, n, std), _bytes(random, n, 16)])


def _fp4_scales(random: np.random.Generator, n: int, std: float) -> Bytes:
    exponent = round(math.log2(std / FP4_RMS))
    return np.full((n, 1), 127 + exponent, np.uint8)


def _f32(random: np.random.Generator, n: int, std: float) -> Bytes:
    return (random.standard_normal((n, 1), np.float32) * np.float32(std)).view(np.uint8)


def _one_f32(place: int, value: float) -> Bytes:
    return np.array([value], np.float32).view(np.uint8)


def _bf16(random: np.random.Generator, n: int, std: float) -> Bytes:
    return as_bf16(_f32(random, n, std).view(np.float32))


def as_bf16(values: NDArray[np.float32]) -> Bytes:
    """Round to bfloat16, to nearest; the last axis has twice as many bytes as values."""
    wide = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)


def _one_bf16(place: int, value: float) -> Bytes:
    return as_bf16(np.array([value], np.float32))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("F32", 1, 4, _f32, _one_f32),
        Kind("BF16", 1, 2, _bf16, _one_bf16),
        Kind("Q8_0", 32, 34, _q8_0, _one_q8_0),
        Kind("Q4_0", 32, 18, _q4_0),
        Kind("Q5_0", 32, 22, _q5_0),
        Kind("Q4_K", 256, 144, _q4_k, _one_q4_k),
        Kind("Q6_K", 256, 210, _q6_k, _one_q6_k),
        Kind("IQ4_XS", 256, 136, _iq4_xs),
        Kind("MXFP4", 32, 17, _mxfp4),
        # the codes and the scales of safetensors' MXFP4, each a tensor of its own
        Kind("FP4 codes", 32, 16, lambda random, n, std: _bytes(random, n, 16)),
        Kind("FP4 scales", 32, 1, _fp4_scales),
    )
}
