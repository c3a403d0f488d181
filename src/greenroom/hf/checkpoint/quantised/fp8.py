"""`quant_method: fp8`: 8-bit floats with block scales, as in DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from greenroom.core.layout import FLOATS
from greenroom.hf.checkpoint.quantised.parts import QuantisedCheckpoint, is_positive

FP8_SCALES = (
    "_scale_inv",
    "scale",
    "qscale_weight",
)  # suffixes of the name, or replacements of `weight` in it
E8M0 = ("uint8", "float8_e8m0fnu")  # powers of two; some files call them uint8
UNUSED = ("activation_scale", "input_scale")  # Greenroom does not quantise activations


def combine_fp8(checkpoint: QuantisedCheckpoint) -> None:
    """Combine codes and scales of DeepSeek's fp8 format.

    `NAME.weight` holds 8-bit floats, `NAME.weight_scale_inv` one scale for each block of
    `weight_block_size` rows and columns.
    """
    block = _block(checkpoint)
    for name, codes in checkpoint.tensors.items():
        if name.endswith(UNUSED):
            del checkpoint.combined[name]
        if codes.dtype != "float8_e4m3fn":
            continue
        stem = name.removesuffix("weight")
        names = [name + FP8_SCALES[0], *(stem + last for last in FP8_SCALES[1:] if stem != name)]
        scale = checkpoint.scale_name(name, codes.dtype, 2, names)
        *lead, rows, columns = codes.shape
        down, across = block or (rows, columns)
        shape = (*lead, -(-rows // down), -(-columns // across))
        stored = checkpoint.tensors[scale]
        if block is None and stored.shape in ((), (1,)):  # one scale for the matrix
            stored = replace(stored, shape=shape)
        if stored.dtype in E8M0:
            stored = replace(stored, dtype="float8_e8m0fnu")
        matrix = replace(codes, encoding="fp8", codes=codes.shape, unit=min(down, rows))
        checkpoint.combine((name, scale, name), matrix, stored, shape, (*FLOATS, *E8M0))
        if columns % min(across, columns):
            raise checkpoint.indivisible_error(name, columns, across)


def _block(checkpoint: QuantisedCheckpoint) -> tuple[int, int] | None:
    """Return the rows and columns that share an fp8 scale; None for matrix-wide scales."""
    block = checkpoint.settings.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(map(is_positive, block)):
        raise checkpoint.setting_error("weight_block_size", block, "two positive numbers, or null")
    return block[0], block[1]
