"""GGUF encodings whose four-bit codes index a table of 16 integers."""

from __future__ import annotations

from functools import partial

from greenroom.runtime.kernels.codegen.formats.codes import Left, joint_product, runs, split_bytes
from greenroom.runtime.kernels.codegen.formats.expand import Expander
from greenroom.runtime.kernels.codegen.formats.families.k_quants import (
    half_super_block,
    in_super_block,
)
from greenroom.runtime.kernels.codegen.formats.families.simple import (
    block_at,
    four_blocks,
    from_bytes,
    in_blocks,
)
from greenroom.runtime.kernels.codegen.formats.format import Format
from greenroom.runtime.kernels.codegen.formats.scales import Row, half_floats
from greenroom.runtime.kernels.codegen.llvm.values import (
    F16_KIND,
    F32,
    I16,
    I32,
    Value,
    counted_loop,
)

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_xs_scales(row: Row) -> None:
    """Emit code that writes the scales of GGUF iq4_xs as float32.

    A block has a float16 factor, and eight scales of six bits plus 32: 2 bytes hold their high two
    bits, the next 4 bytes their low four bits.
    """
    with counted_loop(0, row.inputs >> 8) as number:
        block = row.codes + number * 136
        low = ((block + 4).load(I32).broadcast(8) >> range(0, 32, 4)) & 15
        high = ((block + 2).load(I16).convert(I32).broadcast(8) >> range(0, 16, 2)) & 3
        scales = ((low | (high << 4)) - 32).convert(F32, signed=True)
        row.put(number << 3, scales * block.load(I16).widened(F16_KIND))


def iq4_xs_at(row: Row, at: Value, half: int) -> Value:
    """Find 32 codes of GGUF iq4_xs: 16 bytes with codes i and i + 16 each."""
    block, part = in_super_block(row, at, 136)
    return block + (part << 5) + (8 + 16 * half)


def iq4_xs_codes(row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """Load 128 codes of GGUF iq4_xs."""
    start, side = half_super_block(row, at, 136)
    return split_bytes((start + 8 + (side << 6)).load(I32, 16))


FORMATS: dict[str, Format] = {
    "iq4_nl": Format(
        Expander(
            in_blocks(18, I16, half_floats),
            partial(from_bytes, partial(block_at, 18), IQ4_VALUES),
        ),
        joint_product(partial(four_blocks, 18), runs(16), table=IQ4_VALUES),
    ),
    "iq4_xs": Format(
        Expander(iq4_xs_scales, partial(from_bytes, iq4_xs_at, IQ4_VALUES)),
        joint_product(iq4_xs_codes, runs(16), table=IQ4_VALUES),
    ),
}
