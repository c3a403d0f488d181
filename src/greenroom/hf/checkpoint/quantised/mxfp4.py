"""`quant_method: mxfp4`: 4-bit floats under powers of two.

gpt-oss stores its experts in stacks. Other exports have a matrix for each expert.
"""

from __future__ import annotations

from dataclasses import replace

from greenroom.core.layout import BLOCKS
from greenroom.hf.checkpoint.quantised.fp4 import FOUR_BITS, combine_four_bits
from greenroom.hf.checkpoint.quantised.parts import QuantisedCheckpoint


def combine_mxfp4(checkpoint: QuantisedCheckpoint) -> None:
    """Combine codes and scales of gpt-oss's MXFP4 format.

    `NAME_blocks` has the shape [experts, outputs, groups, 16 bytes of codes], `NAME_scales` the
    shape [experts, outputs, groups]; a group is 32 inputs. Decoding transposes these matrices, but
    not the weights of single experts and layers: `NAME.weight_blocks` with `NAME.weight_scales`,
    or `NAME.weight` [outputs, inputs / 2] with `NAME.weight_scale`.
    """
    inputs, nbytes = BLOCKS["mxfp4"]
    for name, blocks in checkpoint.tensors.items():
        if f"{name}_scale" in checkpoint.tensors and blocks.dtype in FOUR_BITS:
            combine_four_bits(checkpoint, name, name, [f"{name}_scale"])
            continue
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
        stacked = not stem.endswith(".weight")
        matrix = replace(
            blocks,
            encoding="mxfp4",
            shape=(*lead, inputs * groups, rows) if stacked else (*lead, rows, inputs * groups),
            codes=(*lead, rows, nbytes * groups),
            transposed=stacked,
        )
        shape = (*lead, rows, groups)
        checkpoint.combine(
            (name, scale, stem), matrix, checkpoint.tensors[scale], shape, ("uint8",)
        )
