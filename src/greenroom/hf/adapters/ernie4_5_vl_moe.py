"""ERNIE 4.5 VL: text and pictures have experts of their own, of different widths.

Its checkpoints number them in one row, those for text first. Only these are served.
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


class NotServed(nn.Module):
    """Stands for the experts of pictures."""

    def forward(self, *_: Tensor) -> Tensor:
        raise UnsupportedModel("ERNIE 4.5 VL: pictures are not served, only text")


def adapt(block: Any, model: PreTrainedModel) -> None:
    block.vision_moe.experts = NotServed()


def _conversions(mapping: list[WeightTransform]) -> list[WeightTransform]:
    return [m for m in mapping if not any("vision_moe.experts" in p for p in m.target_patterns)]


ADAPTER = Adapter(
    "Ernie4_5_VLMoeMoeBlock",
    adapt,
    "the text's experts",
    _conversions,
    added=(
        merge_experts("mlp.text_moe.experts.down_proj", "mlp.experts.*.down_proj.weight"),
        merge_experts(
            "mlp.text_moe.experts.gate_up_proj",
            "mlp.experts.*.gate_proj.weight",
            "mlp.experts.*.up_proj.weight",
            then=[Concatenate(dim=1)],
        ),
    ),
    unused=experts_numbered_from("moe_num_experts"),
)
