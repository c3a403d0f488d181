"""Adapter for Qwen3 Omni: loads the part that writes text, not the one that speaks."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.core_model_loading import PrefixChange, WeightTransform

from greenroom.hf.adapters.helpers.experts_interface import Adapter


def _transforms(mapping: list[WeightTransform]) -> list[WeightTransform]:
    return [PrefixChange(prefix_to_remove="thinker"), *mapping]


def _is_unused(name: str, model: PreTrainedModel) -> bool:
    return name.startswith(("talker.", "code2wav."))


ADAPTER = Adapter(
    special="only the thinker: no speech",
    transforms=_transforms,
    is_unused=_is_unused,
    config_part="thinker_config",
    renames=((r"^thinker\.", ""),),
)
