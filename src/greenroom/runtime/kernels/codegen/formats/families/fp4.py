"""4-bit floats (e2m1) with a scale for 16 inputs in 8-bit floats (e4m3): NVFP4.

nvfp4       codes of neighbours in a byte; scales, and a float32 scale of the matrix, are tensors of
            their own; the matrix scale multiplies
ct_nvfp4    the same; the matrix scale divides
gguf_nvfp4  blocks of 64 inputs: four scales, then four times 8 bytes with codes i and i + 8 each
gguf_nvfp4_scaled   the same; a float32 scale of the matrix is a tensor of its own, and multiplies
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from greenroom.runtime.kernels.codegen.formats.codes import (
    NEIGHBOURS,
    Left,
    joined,
    joint_product,
    runs,
    split_bytes,
)
from greenroom.runtime.kernels.codegen.formats.expand import (
    E2M1,
    PAIRED,
    STARTS,
    TWICE_E2M1,
    Expander,
    from_table,
)
from greenroom.runtime.kernels.codegen.formats.families.groups import interleaved, neighbours
from greenroom.runtime.kernels.codegen.formats.format import Format
from greenroom.runtime.kernels.codegen.formats.scales import Row, prepare_in_vectors
from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    BF16_KIND,
    F16,
    F32,
    I8,
    I16,
    I32,
    Value,
    below_or_all,
    counted_loop,
)

GROUP_SHIFT = 4  # a scale for 16 inputs


def e4m3(raw: Value) -> Value:
    """Convert 8-bit floats to float32, by way of float16 (groups.fp8 has the reason)."""
    moved = (raw.convert(I16, signed=True) << 7) & -0x4001
    return (moved | ((moved + 0x80) & 0x4000)).bitcast(F16).convert(F32) * 256.0


def with_matrix_scale(combine: Callable[[Value, Value], Value]) -> Any:
    """Make the `prepare` function for group scales that are combined with a matrix scale."""

    def prepare(row: Row) -> None:
        matrix_scale = row.other.load(F32).broadcast()

        def value(at: Value, left: Value | None) -> list[Value]:
            scales = e4m3((row.scale + at).load(I8, LANES, below_or_all(left)))
            return [combine(scales, matrix_scale)]

        prepare_in_vectors(row, row.inputs >> GROUP_SHIFT, value)

    return prepare


def block_scales(row: Row, factor: Value | None = None) -> None:
    """Emit code that writes the scales of GGUF nvfp4 as float32, halved; 0x7f is 0.

    The scales are multiplied by `factor`, four lanes, if there is one.
    """
    with counted_loop(0, row.inputs >> 6) as number:
        raw = (row.codes + number * 36).load(I8, 4)
        halved = ((raw.convert(I16) & 0x7F) << 7).bitcast(F16).convert(F32) * 128.0
        scales = halved.constant(0.0).where(raw.convert(I32).equals(0x7F), halved)
        row.put(number << 2, scales if factor is None else scales * factor)


def scaled_block_scales(row: Row) -> None:
    """Emit code that writes the scales of GGUF nvfp4, and the scale of the matrix.

    For integer products the matrix scale is in the other scales. Otherwise it is the first minimum:
    a weight's code and block scale are multiplied exactly, and only the last product is rounded.
    """
    matrix_scale = row.scale.load(F32)
    if row.powers is not None:
        return block_scales(row, matrix_scale.broadcast(4))
    block_scales(row)
    row.minima.store(matrix_scale)
    return None


def block_codes(row: Row, at: Value, half: int) -> list[Value]:
    """Load the 4-bit codes of half a block of GGUF nvfp4, as int32."""
    block, codes = row.codes + (at >> 6) * 36 + (4 + 16 * half), []
    for start in STARTS:
        address = block + 8 * (start // 16)
        raw = address.load(I8, 8).convert(I32)
        if LANES == 16:
            codes.append(raw.shuffle([*range(8)] * 2) >> [4 * (i // 8) for i in range(16)])
        else:
            codes.append(raw >> 4 * (start % 16 // 8))
    return codes


def two_blocks(row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """Load the codes of two blocks of GGUF nvfp4; 0 for a second block that the row lacks."""
    first = row.codes + (at >> 6) * 36 + 4
    mask = None if left is None else (left > 64).broadcast(8)
    return split_bytes(joined([first.load(I32, 8), (first + 36).load(I32, 8, mask)]))


def _with_separate_scales(combine: Callable[[Value, Value], Value]) -> Format:
    return Format(
        Expander(
            with_matrix_scale(combine),
            partial(from_table, interleaved, E2M1, shift=GROUP_SHIFT),
            PAIRED,
        ),
        joint_product(neighbours, NEIGHBOURS, table=TWICE_E2M1, factor=0.5, shift=GROUP_SHIFT),
    )


FORMATS: dict[str, Format] = {
    "nvfp4": _with_separate_scales(lambda scale, matrix_scale: scale * matrix_scale),
    "ct_nvfp4": _with_separate_scales(lambda scale, matrix_scale: scale / matrix_scale),
    "gguf_nvfp4": Format(
        Expander(
            block_scales,
            partial(from_table, block_codes, TWICE_E2M1, exact=(BF16_KIND,), shift=GROUP_SHIFT),
        ),
        joint_product(two_blocks, runs(8), table=TWICE_E2M1, shift=GROUP_SHIFT),
    ),
    "gguf_nvfp4_scaled": Format(
        Expander(
            scaled_block_scales,
            partial(from_table, block_codes, TWICE_E2M1, scaled=True, shift=GROUP_SHIFT),
        ),
        joint_product(two_blocks, runs(8), table=TWICE_E2M1, shift=GROUP_SHIFT),
    ),
}
