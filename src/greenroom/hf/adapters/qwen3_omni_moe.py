"""Qwen3 Omni: the thinker reads and writes; the talker, which speaks, is left on disk."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.core_model_loading import PrefixChange, WeightTransform

from greenroom.hf.adapters.helpers.experts_interface import Adapter


def _conversions(mapping: list[WeightTransform]) -> list[WeightTransform]:
    return [PrefixChange(prefix_to_remove="thinker"), *mapping]


def _unused(name: str, model: PreTrainedModel) -> bool:
    return name.startswith(("talker.", "code2wav."))


ADAPTER = Adapter(
    special="the thinker alone: no speech",
    conversions=_conversions,
    unused=_unused,
    part="thinker_config",
    names=((r"^thinker\.", ""),),
)
