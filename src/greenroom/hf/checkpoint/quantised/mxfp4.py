"""`quant_method: mxfp4`: 4-bit floats under powers of two, as gpt-oss stores its experts."""

from __future__ import annotations

from dataclasses import replace

from greenroom.core.layout import BLOCKS
from greenroom.hf.checkpoint.quantised.parts import QuantisedCheckpoint


def combine_mxfp4(checkpoint: QuantisedCheckpoint) -> None:
    """Combine codes and scales of gpt-oss's MXFP4 format.

    `NAME_blocks` has the shape [experts, outputs, groups, 16 bytes of codes], `NAME_scales` the
    shape [experts, outputs, groups]; a group is 32 inputs.
    """
    inputs, nbytes = BLOCKS["mxfp4"]
    for name, blocks in checkpoint.tensors.items():
        stem = name.removesuffix("_blocks")
        scale = f"{stem}_scales"
        if stem == name or (blocks.dtype != "uint8" and scale not in checkpoint.tensors):
            continue
        checkpoint.scale_name(name, "uint8", 3, [scale])
        *lead, rows, groups, width = blocks.shape
        if width != nbytes:
            raise checkpoint.error(
                f"{name} has shape {list(blocks.shape)}, but the last axis of MXFP4 codes must"
                f" have {nbytes} bytes"
            )
        matrix = replace(
            blocks,
            encoding="mxfp4",
            shape=(*lead, inputs * groups, rows),
            codes=(*lead, rows, nbytes * groups),
            transposed=True,
        )
        shape = (*lead, rows, groups)
        checkpoint.combine(
            (name, scale, stem), matrix, checkpoint.tensors[scale], shape, ("uint8",)
        )
