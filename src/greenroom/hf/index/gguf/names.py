"""Find llama.cpp's name of each model parameter, by gguf's own table of tensor names.

The table maps names of original checkpoints. transformers renames and fuses some of them when it
loads a checkpoint, so its own weight conversions are reversed first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import gguf
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
)

from greenroom.hf.adapters import weight_transforms

# Differences between names of checkpoints and those that gguf's table lists, in this order.
RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(model\.)?language_model\.(model\.)?", "model."),
        (r"\.dt_bias$", ".dt_proj.bias"),
        (r"_bias$", ".bias"),  # e_score_correction_bias
    )
)
LAYER = re.compile(r"\.(\d+)\.")
SUFFIXES = ("", ".weight", ".bias")


class GgufNames:
    """llama.cpp's names for the parameters of one model, from gguf's table of tensor names.

    `architecture` is GGUF's name, which must be one that gguf knows. The table is made once.
    """

    def __init__(self, model: PreTrainedModel, architecture: str, layers: int) -> None:
        number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
        # gguf changes a dict of this class for some architectures, so each table has its own copy.
        blocks = {"block_mappings_cfg": dict(gguf.TensorNameMap.block_mappings_cfg)}
        self._table = type("Table", (gguf.TensorNameMap,), blocks)(number, layers)
        reverse = _reversed(model)
        self._renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
        self._converters = [each for each in reverse if isinstance(each, WeightConverter)]

    def names_of(self, parameter: str) -> Iterator[str]:
        """Yield possible names of a parameter in a GGUF file, the most likely first."""
        renamed, _ = apply_converters(parameter, self._converters)
        for name in (apply_renamings(renamed, self._renamings), parameter):
            for pattern, replacement in RULES:
                name = pattern.sub(replacement, name)
            for suffix in SUFFIXES:
                if name.endswith(suffix) and (
                    stem := self._table.get_name(name.removesuffix(suffix))
                ):
                    yield from (stem + suffix, f"{stem}.weight")


def layer_of(name: str) -> int | None:
    """Return the number of a parameter's layer: the first number in its name, if there is one."""
    match = LAYER.search(name)
    return int(match[1]) if match else None


def _reversed(model: PreTrainedModel) -> list[WeightRenaming | WeightConverter]:
    """Return transformers' weight transforms of a model from its parameters to a checkpoint."""
    reverse = []
    for transform in reversed(weight_transforms(model)):
        if isinstance(transform, PrefixChange):  # a prefix that some checkpoints have
            continue
        try:
            reverse.append(transform.reverse_transform())
        except NotImplementedError:  # of routed experts, which are found by their modules
            continue
    return reverse
