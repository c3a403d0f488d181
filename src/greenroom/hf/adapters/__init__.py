"""Adapters for MoE architectures whose classes lack transformers' experts interface.

transformers' decorator `use_experts_implementation` gives other architectures this interface.
"""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform

from greenroom.hf.adapters.helpers.experts_interface import Adapter
from greenroom.hf.mtp.layer import renamings

# Each name is a folder of transformers' models, and a file of this package.
ADAPTERS = (
    "dbrx",
    "ernie4_5_vl_moe",
    "jetmoe",
    "llama4",
    "longcat_flash",
    "nllb_moe",
    "qwen3_omni_moe",
    "step3p7",
    "switch_transformers",
)


def folder_of(kind: type[PreTrainedModel]) -> str:
    """Return the folder in transformers/models with a model class's code, such as `qwen3_moe`."""
    return kind.__module__.split(".")[-2]


def load_adapter(folder: str) -> Adapter:
    """Return the adapter of an architecture, by the name of its folder in transformers/models."""
    adapter: Adapter = import_module(f"{__name__}.{folder}").ADAPTER
    return adapter


def adapter_of(model: PreTrainedModel) -> Adapter | None:
    """Return the adapter for a model's architecture, or None if it needs no adapter."""
    folder = folder_of(type(model))
    return load_adapter(folder) if folder in ADAPTERS else None


def adapt(model: PreTrainedModel) -> str:
    """Make a model's experts modules work with transformers' experts implementations.

    The model must be on the meta device. Models that need no adapter are unchanged. Returns a
    warning to show to the user, or "".
    """
    adapter = adapter_of(model)
    if adapter is None:
        return ""
    for module in [m for m in model.modules() if type(m).__name__ == adapter.block]:
        adapter.adapt(module, model)
    return adapter.warning


def weight_transforms(model: PreTrainedModel, quantiser: Any = None) -> list[WeightTransform]:
    """Return the weight transforms that make a model's parameters from a checkpoint's tensors.

    `quantiser` is transformers' quantiser for a checkpoint that must be dequantised, else None.
    """
    mapping = [*renamings(model), *get_model_conversion_mapping(model, None, quantiser)]
    adapter = adapter_of(model)
    if adapter is None:
        return mapping
    return [*adapter.transforms(mapping), *deepcopy(adapter.added)]
