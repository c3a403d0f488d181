"""Bit sets of integers, with levels of summary bits to find the next lower member.

Level 0 has a bit for each integer. A bit of level k + 1 says that a block of 64 bits of level k is
not zero. So every operation takes one step for each level.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.core.policy import compiled

ONE = np.uint64(1)


class Bits(NamedTuple):
    """Arrays of a bit set of integers, for compiled eviction policies."""

    blocks: NDArray[np.uint64]  # all levels, one after another
    level: Ints  # [levels + 1] level k has blocks[level[k] : level[k + 1]]


def empty(size: int) -> Bits:
    """Create an empty bit set for integers below `size`."""
    counts = [max(1, -(-size // 64))]
    while counts[-1] > 1:
        counts.append(-(-counts[-1] // 64))
    level = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Bits(np.zeros(level[-1], np.uint64), level)


@intrinsic
def _leading_zeros(typingctx: Any, block: Any) -> Any:
    """Count the zero bits above the highest set bit of a nonzero block."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


@intrinsic
def trailing_zeros(typingctx: Any, block: Any) -> Any:
    """Count the zero bits below the lowest set bit of a nonzero block."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


@intrinsic
def count_ones(typingctx: Any, block: Any) -> Any:
    """Count the set bits of a block."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@compiled
def insert(bits: Bits, number: int) -> None:
    """Insert an integer into a bit set."""
    i = number
    for k in range(bits.level.size - 1):
        block = bits.level[k] + (i >> 6)
        previous = bits.blocks[block]
        bits.blocks[block] = previous | (ONE << np.uint64(i & 63))
        if previous != 0:
            return
        i >>= 6


@compiled
def discard(bits: Bits, number: int) -> None:
    """Remove an integer from the bit set that contains it."""
    i = number
    for k in range(bits.level.size - 1):
        block = bits.level[k] + (i >> 6)
        left = bits.blocks[block] & ~(ONE << np.uint64(i & 63))
        bits.blocks[block] = left
        if left != 0:
            return
        i >>= 6


@compiled
def largest_below(bits: Bits, number: int) -> int:
    """Find a bit set's largest member below a number; -1 if none."""
    i = number  # look for a bit before bit i of the level
    for k in range(bits.level.size - 1):
        lower = bits.blocks[bits.level[k] + (i >> 6)] if (i & 63) else np.uint64(0)
        lower &= (ONE << np.uint64(i & 63)) - ONE
        if lower != 0:
            i = (i & ~63) | (63 - int(_leading_zeros(lower)))
            for j in range(k - 1, -1, -1):
                block = bits.blocks[bits.level[j] + i]
                i = (i << 6) | (63 - int(_leading_zeros(block)))
            return i
        i >>= 6
    return -1
