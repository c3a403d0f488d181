"""compressed-tensors' floats of eight and four bits: float-quantized, nvfp4 and mxfp4."""

from __future__ import annotations

from typing import Any

from greenroom.hf.checkpoint.quantised.fp4 import combine_four_bits
from greenroom.hf.checkpoint.quantised.fp8 import EIGHT_BITS, Block, combine_eight_bits
from greenroom.hf.checkpoint.quantised.parts import QuantisedCheckpoint, is_positive
from greenroom.json_file import printable

FORMATS = {
    8: ("float-quantized", "naive-quantized", "mxfp8-quantized"),
    4: ("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
}


def combine_floats(checkpoint: QuantisedCheckpoint, schemes: list[dict[str, Any]]) -> None:
    """Combine codes and scales of the config groups with floats.

    `NAME.weight` holds 8-bit floats, `NAME.weight_packed` 4-bit floats, `NAME.weight_scale` the
    scales. `schemes` are the groups' settings of weights.
    """
    for scheme in schemes:
        _check(checkpoint, scheme)
    blocks = [_block(checkpoint, scheme) for scheme in schemes if scheme["num_bits"] == 8]
    for name, codes in checkpoint.tensors.items():
        if blocks and codes.dtype == EIGHT_BITS and name.endswith(".weight"):
            combine_eight_bits(checkpoint, name, [f"{name}_scale"], blocks)
        elif name.endswith(".weight_packed") and codes.dtype != "int32":  # int32 holds integers
            target = name.removesuffix("_packed")
            combine_four_bits(checkpoint, name, target, [f"{target}_scale"])
            checkpoint.combined.pop(f"{target}_shape", None)


def _check(checkpoint: QuantisedCheckpoint, scheme: dict[str, Any]) -> None:
    form, bits = scheme["format"], scheme.get("num_bits")
    what = f"format {printable(form)}, {printable(bits)} bits, floats"
    if form not in FORMATS.get(bits if type(bits) is int else 0, ()):
        raise checkpoint.unserved_error(what)
    if not scheme.get("symmetric", True):
        raise checkpoint.unserved_error(f"{what}, with zero points (asymmetric)")
    if scheme.get("actorder"):
        raise checkpoint.unserved_error(f"{what}, columns reordered by activation (actorder)")


def _block(checkpoint: QuantisedCheckpoint, scheme: dict[str, Any]) -> Block:
    """Return the rows and columns that share a scale, by a group's strategy."""
    strategy, size = scheme.get("strategy"), scheme.get("group_size")
    block = scheme.get("block_structure")
    match strategy:
        case "tensor" | None:
            return None, None
        case "channel":
            return 1, None
        case "group" if is_positive(size):
            return 1, size
        case "block" if (
            isinstance(block, list) and len(block) == 2 and all(map(is_positive, block))
        ):
            return block[0], block[1]
    raise checkpoint.unserved_error(
        f"scales by strategy {printable(strategy)}, group_size {printable(size)}, block_structure"
        f" {printable(block)}"
    )
