"""Turn a model with streamed experts into an ordinary one with all experts in memory.

Experts are loaded by transformers' own code (model/reference.py), one layer after another.
Quantised experts are dequantised to the model's dtype.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from greenroom.config import show_bytes
from greenroom.errors import BudgetError, UnsupportedCall, UnsupportedModel
from greenroom.hf.adapters import adapter_of
from greenroom.hf.attach.module_guard import remove
from greenroom.hf.checkpoint.source import ModelSource
from greenroom.hf.index.experts import STREAMED, detached_parameters
from greenroom.hf.model.implementation import set_experts_implementation
from greenroom.hf.model.reference import load_reference_experts, make_quantiser
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.dense.table import restore_tables, stored_weight
from greenroom.runtime.memory.system import available_bytes, release_memory

SINCE = "since the model was loaded"


def check(model: PreTrainedModel, source: ModelSource | None, freed: int) -> ModelSource:
    """Check that all experts of a model can be read into memory.

    source: the files that the model was loaded from; the result is this object
    freed:  the number of bytes that detaching the expert cache frees

    Raises UnsupportedCall for a model that greenroom.load did not load, UnsupportedModel if its
    architecture or quantisation does not allow it, BudgetError if memory does not suffice, and
    CheckpointChanged if files have changed since the model was loaded.
    """
    if source is None:
        raise UnsupportedCall(
            "materialize needs a model that greenroom.load loaded: the checkpoint of this model is"
            " not known"
        )
    adapter = adapter_of(model)
    if adapter is not None and adapter.block:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be materialised: Greenroom replaced its experts modules"
            " by its own, which transformers cannot save: load the model with transformers instead"
        )
    source.stamps.check(SINCE)
    make_quantiser(source.checkpoint)  # or UnsupportedModel, naming the package that is missing
    need, room = expanded_bytes(model), available_bytes() + freed
    if need > room:
        raise BudgetError(
            f"materialize: all experts need {show_bytes(need)} of memory, and only"
            f" {show_bytes(room)} are available: free memory, or use the model without materialize"
        )
    return source


def expanded_bytes(model: nn.Module) -> int:
    """Return the most bytes that reading all experts of a model into memory adds.

    The sum covers all experts, other quantised weights after dequantisation, embedding tables on
    disk, and a second copy of one layer's experts during their conversion.
    """
    layers = [
        sum(prod(each.shape) * each.dtype.itemsize for each in detached_parameters(module))
        for module in model.modules()
    ]
    stored = {id(each): each for m in model.modules() if (each := stored_weight(m)) is not None}
    dense = sum(each.shape.numel() * each.dtype.itemsize for each in stored.values())
    return sum(layers) + max(layers) + dense


def materialize(model: Any, source: ModelSource) -> None:
    """Read all experts into a model whose expert cache is detached.

    The model then computes experts as transformers does by default, and can be trained, saved,
    copied and moved. If reading fails, the model has no experts, as before.
    """
    skeleton = ModelSkeleton.of(source.checkpoint, source.dtype)
    modules = [model.get_submodule(layer[0].module) for layer in skeleton.layers]
    try:
        for number, module in enumerate(modules):
            for name, values in load_reference_experts(skeleton, number).items():
                module.register_parameter(name, nn.Parameter(values.contiguous()))
        source.stamps.check(SINCE)
        restore_tables(model)
    except BaseException:
        for layer, module in zip(skeleton.layers, modules, strict=True):
            for streamed in layer:
                module.register_parameter(streamed.name, None)
        release_memory()
        raise
    for module in modules:
        del module.__dict__[STREAMED]
    for parameter in model.parameters():  # expanded parameters have requires_grad off
        parameter.requires_grad_(parameter.is_floating_point())
    remove(model)
    model.__dict__.pop("_weight_conversions", None)  # they are for a model without experts
    set_experts_implementation(model.get_correct_experts_implementation(None), model, *modules)
