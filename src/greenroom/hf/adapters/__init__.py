"""Adapters for MoE architectures that need more than transformers' experts decorator."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform

from greenroom.hf.adapters.helpers.experts_interface import Adapter

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
    """Return the folder of transformers that holds a model class's code, such as `qwen3_moe`."""
    return kind.__module__.split(".")[-2]


def load_adapter(folder: str) -> Adapter:
    """Import the adapter module of an architecture and return its Adapter."""
    adapter: Adapter = import_module(f"{__name__}.{folder}").ADAPTER
    return adapter


def adapter_of(model: PreTrainedModel) -> Adapter | None:
    """Return the adapter for a model's architecture, or None where it needs none."""
    folder = folder_of(type(model))
    return load_adapter(folder) if folder in ADAPTERS else None


def adapt(model: PreTrainedModel) -> str:
    """Make a model's experts modules work with transformers' experts implementations.

    Returns a warning for the user, or "".

    The model is on the meta device. Models whose experts have the interface are left alone.
    """
    adapter = adapter_of(model)
    if adapter is None:
        return ""
    for module in [m for m in model.modules() if type(m).__name__ == adapter.block]:
        adapter.adapt(module, model)
    return adapter.warning


def weight_transforms(model: PreTrainedModel, quantiser: Any = None) -> list[WeightTransform]:
    """Return the weight transforms that make a model's parameters from a checkpoint's tensors.

    `quantiser`: transformers' quantiser, where the tensors must be dequantised.
    """
    mapping = get_model_conversion_mapping(model, None, quantiser)
    adapter = adapter_of(model)
    if adapter is None:
        return mapping
    return [*adapter.transforms(mapping), *deepcopy(adapter.added)]
