"""Make a streamed model transformers' own: read all experts into ordinary parameters.

The experts are loaded as the reference loads them (model/reference.py): by transformers' own code,
quantised ones expanded to the model's type, one layer after another.
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
from greenroom.hf.model.reference import load_reference_experts, quantiser
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.dense.stored import stored_matrix
from greenroom.runtime.memory.system import available_bytes, give_back

SINCE = "since the model was loaded"


def check(model: PreTrainedModel, source: ModelSource | None, freed: int) -> ModelSource:
    """Raise where a model cannot be made whole; `freed` bytes are given back before it is.

    UnsupportedCall or UnsupportedModel where it cannot be at all, BudgetError where memory does not
    suffice, CheckpointChanged where the files are no longer those of the dense parts.
    """
    if source is None:
        raise UnsupportedCall("this model was not made by greenroom.load: there is no checkpoint")
    adapter = adapter_of(model)
    if adapter is not None and adapter.block:
        raise UnsupportedModel(
            f"{type(model).__name__}: its experts were given another form than transformers', which"
            " only greenroom computes and saves: load it with transformers"
        )
    source.stamps.check(SINCE)
    quantiser(source.checkpoint)  # or UnsupportedModel, naming the package that is missing
    need, room = expanded_bytes(model), available_bytes() + freed
    if need > room:
        raise BudgetError(
            f"all experts in memory take {show_bytes(need)}, {show_bytes(room)} are available"
        )
    return source


def expanded_bytes(model: nn.Module) -> int:
    """The most that memory grows by: all experts, stored dense weights expanded, and once more a
    layer's experts while they are converted."""
    layers = [
        sum(prod(each.shape) * each.dtype.itemsize for each in detached_parameters(module))
        for module in model.modules()
    ]
    stored = {id(each): each for m in model.modules() if (each := stored_matrix(m)) is not None}
    dense = sum(each.shape.numel() * each.dtype.itemsize for each in stored.values())
    return sum(layers) + max(layers) + dense


def materialize(model: Any, source: ModelSource) -> None:
    """Give a detached model all that it lacks; after an error it is detached still.

    The model then computes experts as transformers does by default, may be trained, saved, copied
    and moved, and `num_parameters` and `state_dict` are transformers'.
    """
    skeleton = ModelSkeleton.of(source.checkpoint, source.dtype)
    modules = [model.get_submodule(layer[0].module) for layer in skeleton.layers]
    try:
        for number, module in enumerate(modules):
            for name, values in load_reference_experts(skeleton, number).items():
                module.register_parameter(name, nn.Parameter(values.contiguous()))
        source.stamps.check(SINCE)
    except BaseException:
        for layer, module in zip(skeleton.layers, modules, strict=True):
            for streamed in layer:
                module.register_parameter(streamed.name, None)
        give_back()
        raise
    for module in modules:
        del module.__dict__[STREAMED]
    for parameter in model.parameters():  # expanded ones were made without
        parameter.requires_grad_(parameter.is_floating_point())
    remove(model)
    model.__dict__.pop("_weight_conversions", None)  # those of a model without experts
    set_experts_implementation(model.get_correct_experts_implementation(None), model, *modules)
