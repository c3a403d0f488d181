"""4-bit floats in groups of 32 inputs (MXFP4) or 16 (NVFP4), with scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from greenroom.core.layout import BLOCKS, FLOATS
from greenroom.hf.checkpoint.quantised.parts import E8M0, QuantisedCheckpoint

PACKED = "float4_e2m1fn"  # safetensors' own type; its shapes count values, not bytes
FOUR_BITS = ("uint8", "int8", PACKED)  # dtypes of codes
NVFP4_SCALES = "float8_e4m3fn"
# Suffix of the tensor of a matrix scale -> the encoding.
MATRIX_SCALES = {"weight_scale_2": "nvfp4", "weight_global_scale": "ct_nvfp4"}


def combine_four_bits(
    checkpoint: QuantisedCheckpoint, name: str, target: str, scales: Sequence[str]
) -> None:
    """Combine a matrix of 4-bit floats with its scales.

    name, target: the names of the codes, and of the matrix in an unquantised checkpoint
    scales:       the possible names of the scales, whose type tells MXFP4 from NVFP4
    """
    codes = checkpoint.tensors[name]
    scale = checkpoint.scale_name(name, codes.dtype, 2, scales)
    stored = checkpoint.tensors[scale]
    *lead, rows, width = codes.shape
    if codes.dtype == PACKED:
        if width % 2:
            raise checkpoint.indivisible_error(name, width, 2)
        width //= 2
    matrix_scale, encoding = "", "mxfp4"
    if stored.dtype == NVFP4_SCALES:
        matrix_scale, encoding = _matrix_scale(checkpoint, name, target)
    else:
        stored = replace(stored, dtype="uint8") if stored.dtype in E8M0 else stored
    inputs, nbytes = BLOCKS[encoding]
    if width % nbytes:
        raise checkpoint.indivisible_error(name, 2 * width, inputs)
    shape = (*lead, rows, width // nbytes)
    matrix = replace(
        codes,
        dtype="uint8",
        encoding=encoding,
        shape=(*lead, rows, 2 * width),
        codes=(*lead, rows, width),
    )
    dtypes = (NVFP4_SCALES,) if matrix_scale else E8M0
    checkpoint.combine((name, scale, target), matrix, stored, shape, dtypes)
    if matrix_scale:
        shape = (*lead, 1, 1)
        stored = checkpoint.tensors[matrix_scale]
        if stored.shape in (tuple(lead), (*lead, 1)):
            stored = replace(stored, shape=shape)
        checkpoint.add_companion(target, matrix_scale, stored, shape, FLOATS)


def _matrix_scale(checkpoint: QuantisedCheckpoint, name: str, target: str) -> tuple[str, str]:
    """Return (name of an NVFP4 matrix's scale, the encoding)."""
    names = {
        target.removesuffix("weight") + suffix: encoding
        for suffix, encoding in MATRIX_SCALES.items()
    }
    scale = next((each for each in names if each in checkpoint.tensors), None)
    if scale is None:
        raise checkpoint.error(
            f"{name} is quantised to NVFP4, but its matrix scale ({' or '.join(names)}) is missing"
        )
    return scale, names[scale]
