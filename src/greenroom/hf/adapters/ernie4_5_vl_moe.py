"""Adapter for ERNIE 4.5 VL, which has separate experts for text and images.

Its checkpoints number the experts of a layer consecutively, text experts first. Greenroom supports
only text inputs, so only the text experts are loaded.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, WeightTransform

from greenroom.errors import UnsupportedModel
from greenroom.hf.adapters.helpers.experts_interface import (
    Adapter,
    experts_numbered_from,
    merge_experts,
)


class UnservedExperts(nn.Module):
    """Placeholder for ERNIE 4.5 VL's image experts, which raises an error when called."""

    def forward(self, *_: Tensor) -> Tensor:
        raise UnsupportedModel("ERNIE 4.5 VL: image inputs are not supported: give text only")


def adapt(block: Any, model: PreTrainedModel) -> None:
    block.vision_moe.experts = UnservedExperts()


def _without_vision(mapping: list[WeightTransform]) -> list[WeightTransform]:
    return [m for m in mapping if not any("vision_moe.experts" in p for p in m.target_patterns)]


ADAPTER = Adapter(
    "Ernie4_5_VLMoeMoeBlock",
    adapt,
    "text experts only",
    _without_vision,
    added=(
        merge_experts("mlp.text_moe.experts.down_proj", "mlp.experts.*.down_proj.weight"),
        merge_experts(
            "mlp.text_moe.experts.gate_up_proj",
            "mlp.experts.*.gate_proj.weight",
            "mlp.experts.*.up_proj.weight",
            then=[Concatenate(dim=1)],
        ),
    ),
    is_unused=experts_numbered_from("moe_num_experts"),
)
