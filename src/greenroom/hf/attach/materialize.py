"""Turn a model with streamed experts into an ordinary one with all experts in memory.

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
from greenroom.hf.model.reference import load_reference_experts, make_quantiser
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.dense.stored import stored_matrix
from greenroom.runtime.memory.system import available_bytes, release_memory

SINCE = "since the model was loaded"


def check(model: PreTrainedModel, source: ModelSource | None, freed: int) -> ModelSource:
    """Check that all experts of a model can be read into memory.

    Returns the source of the model's checkpoint. `freed` bytes return to the system before they are
    read. UnsupportedCall or UnsupportedModel where the model cannot have them at all, BudgetError
    where memory does not suffice, CheckpointChanged where files are no longer those that the dense
    parts were read from.
    """
    if source is None:
        raise UnsupportedCall(
            "this model was not loaded by greenroom.load, so its checkpoint is not known"
        )
    adapter = adapter_of(model)
    if adapter is not None and adapter.block:
        raise UnsupportedModel(
            f"{type(model).__name__}: greenroom replaced its experts modules by a form that"
            " transformers cannot compute or save: load the model with transformers instead"
        )
    source.stamps.check(SINCE)
    make_quantiser(source.checkpoint)  # or UnsupportedModel, naming the package that is missing
    need, room = expanded_bytes(model), available_bytes() + freed
    if need > room:
        raise BudgetError(
            f"all experts in memory take {show_bytes(need)}, {show_bytes(room)} are available"
        )
    return source


def expanded_bytes(model: nn.Module) -> int:
    """Return the bytes that materialising a model (all experts in memory) adds at most.

    They are all experts, the dense weights that expand, and one layer's experts a second time while
    they are converted.
    """
    layers = [
        sum(prod(each.shape) * each.dtype.itemsize for each in detached_parameters(module))
        for module in model.modules()
    ]
    stored = {id(each): each for m in model.modules() if (each := stored_matrix(m)) is not None}
    dense = sum(each.shape.numel() * each.dtype.itemsize for each in stored.values())
    return sum(layers) + max(layers) + dense


def materialize(model: Any, source: ModelSource) -> None:
    """Read all experts into a model whose expert cache is detached.

    After an error the model has no experts again. The model then computes experts as transformers
    does by default, may be trained, saved, copied and moved, and `num_parameters` and `state_dict`
    are transformers'.
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
        release_memory()
        raise
    for module in modules:
        del module.__dict__[STREAMED]
    for parameter in model.parameters():  # expanded parameters have requires_grad off
        parameter.requires_grad_(parameter.is_floating_point())
    remove(model)
    model.__dict__.pop("_weight_conversions", None)  # they are for a model without experts
    set_experts_implementation(model.get_correct_experts_implementation(None), model, *modules)
