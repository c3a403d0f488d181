"""8-bit floats: `quant_method: fp8` (DeepSeek-V3 and V4) and `mxfp8`.

DeepSeek-V4's experts are 4-bit floats in the same checkpoint (`expert_dtype: fp4`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from greenroom.core.layout import FLOATS
from greenroom.hf.checkpoint.quantised.fp4 import FOUR_BITS, combine_four_bits
from greenroom.hf.checkpoint.quantised.parts import E8M0, QuantisedCheckpoint, is_positive

EIGHT_BITS = "float8_e4m3fn"
SCALES = ("_scale_inv", "scale", "qscale_weight")  # after the name, or in place of its `weight`

Block = tuple[int | None, int | None]  # rows and columns that share a scale; None: all


def combine_fp8(checkpoint: QuantisedCheckpoint) -> None:
    """Combine codes and scales of DeepSeek's fp8 format.

    `NAME.weight` holds 8-bit floats, `NAME.weight_scale_inv` one scale for each block of
    `weight_block_size` rows and columns. Experts may be 4-bit floats, with a scale for each 32
    columns of a row.
    """
    block = _block(checkpoint)
    checkpoint.drop_scales_of_activations()
    for name, codes in checkpoint.tensors.items():
        stem = name.removesuffix("weight")
        scales = [name + SCALES[0], *(stem + last for last in SCALES[1:] if stem != name)]
        if codes.dtype == EIGHT_BITS:
            combine_eight_bits(checkpoint, name, scales, [block])
        elif codes.dtype in FOUR_BITS and any(scale in checkpoint.tensors for scale in scales):
            combine_four_bits(checkpoint, name, name, scales)


def combine_eight_bits(
    checkpoint: QuantisedCheckpoint, name: str, scales: Sequence[str], blocks: Sequence[Block]
) -> None:
    """Combine a matrix of 8-bit floats with its scales.

    `scales` are the possible names of the scales. `blocks` are the possible blocks that share a
    scale; the number of scales shows which.
    """
    codes = checkpoint.tensors[name]
    scale = checkpoint.scale_name(name, EIGHT_BITS, 2, scales)
    stored = checkpoint.tensors[scale]
    *lead, rows, columns = codes.shape
    sides = [(min(down or rows, rows), min(across or columns, columns)) for down, across in blocks]
    counts = [(-(-rows // down), -(-columns // across)) for down, across in sides]
    fits = [stored.shape in _spellings(tuple(lead), *count) for count in counts]
    choice = fits.index(True) if any(fits) else 0
    (down, across), shape = sides[choice], (*lead, *counts[choice])
    if any(fits) and stored.shape != shape:
        stored = replace(stored, shape=shape)
    if stored.dtype in E8M0:
        stored = replace(stored, dtype="float8_e8m0fnu")
    matrix = replace(codes, encoding="fp8", codes=codes.shape, unit=down)
    checkpoint.combine((name, scale, name), matrix, stored, shape, (*FLOATS, *E8M0))
    if columns % across:
        raise checkpoint.indivisible_error(name, columns, across)


def _spellings(lead: tuple[int, ...], down: int, across: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes in which tools store down x across scales of a matrix."""
    yield (*lead, down, across)
    yield (*lead, down, 1, across, 1)
    if across == 1:
        yield (*lead, down)
        if down == 1:
            yield lead


def _block(checkpoint: QuantisedCheckpoint) -> Block:
    """Return the rows and columns that share an fp8 scale."""
    block = checkpoint.settings.get("weight_block_size")
    if block is None:
        return None, None
    if not isinstance(block, list) or len(block) != 2 or not all(map(is_positive, block)):
        raise checkpoint.setting_error("weight_block_size", block, "two positive numbers, or null")
    return block[0], block[1]
