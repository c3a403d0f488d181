"""8-bit and 4-bit floats of ModelOpt, Quark and FBGEMM, whose tensors say what they are.

`NAME.weight` holds the codes: 8-bit floats, or 4-bit floats in bytes. `NAME.weight_scale` holds one
scale for a matrix, for each row or for each block. A dtype and a number of scales belong to one
format only, so the tools' settings, which differ between versions, are not needed.
"""

from __future__ import annotations

from typing import Any

from greenroom.hf.checkpoint.quantised.fp4 import FOUR_BITS, combine_four_bits
from greenroom.hf.checkpoint.quantised.fp8 import EIGHT_BITS, Block, combine_eight_bits
from greenroom.hf.checkpoint.quantised.parts import QuantisedCheckpoint

BLOCKS: tuple[Block, ...] = ((None, None), (1, None), (128, 128), (1, 32))
# Last part of a tensor's name -> what the tensor is, which Greenroom does not compute with.
REFUSED = {
    "pre_quant_scale": "a scale of activations, from AWQ or SmoothQuant",
    "weight_zero_point": "zero points",
    "svdquant_lora_a": "an SVDQuant correction",
}


def combine_exported(checkpoint: QuantisedCheckpoint) -> None:
    """Combine codes and scales of float formats by the tensors' names, dtypes and shapes."""
    if "e5m3" in _values(checkpoint.settings, "scale_format"):
        raise checkpoint.unserved_error("scales in e5m3 (scale_format)")
    checkpoint.drop_scales_of_activations()
    for name, codes in checkpoint.tensors.items():
        if what := REFUSED.get(name.rpartition(".")[2]):
            raise checkpoint.unserved_error(f"{name} holds {what}")
        scales = [f"{name}_scale"]
        if not name.endswith(".weight"):
            continue
        if codes.dtype == EIGHT_BITS:
            combine_eight_bits(checkpoint, name, scales, BLOCKS)
        elif codes.dtype in FOUR_BITS:
            combine_four_bits(checkpoint, name, name, scales)
        elif scales[0] in checkpoint.tensors:
            raise checkpoint.unserved_error(f"{name} has scales, and codes in {codes.dtype}")
    checkpoint.check_no_scales_left()


def _values(settings: Any, key: str) -> set[str]:
    """Return the texts that a key has anywhere in nested settings."""
    parts = settings if isinstance(settings, list) else []
    texts: set[str] = set()
    if isinstance(settings, dict):
        parts = list(settings.values())
        texts = {value for name, value in settings.items() if name == key and type(value) is str}
    return texts.union(*(_values(part, key) for part in parts))
