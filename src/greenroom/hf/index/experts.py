"""Find a model's experts modules, which transformers' experts implementations can compute."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from greenroom.errors import NotMoE, UnsupportedModel
from greenroom.hf.index.conversions import TargetDtypes

STREAMED = "_greenroom_streamed"  # attribute of an experts module: its detached parameters
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # set by transformers
MOE = re.compile(r"Experts?$|MoE$|Moe$|MoE?(Block|Layer|MLP)$|SparseM(oe|LP)|SparseMoeBlock$")


@dataclass(frozen=True, slots=True)
class StreamedParameter:
    """A parameter with all experts of a layer, which stays on disk.

    The first axis of `shape` is the expert.
    """

    module: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"


def is_experts(module: nn.Module) -> bool:
    """True if transformers decorated the module's class with `use_experts_implementation`."""
    return hasattr(module, "_apply_gate") and all(hasattr(module, flag) for flag in FLAGS)


def expert_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return a model's experts modules, in order.

    Raises NotMoE or UnsupportedModel without any.
    """
    experts = {name: module for name, module in model.named_modules() if is_experts(module)}
    if experts:
        return experts
    name = type(model).__name__
    others = {type(module).__name__ for module in model.modules()} - {name}
    if moe := sorted(other for other in others if MOE.search(other)):
        raise UnsupportedModel(
            f"{name}: its experts ({', '.join(moe[:3])}) are of a kind that is not supported"
        )
    raise NotMoE(f"{name}: a dense model without experts to stream; run it with transformers")


def find_streamed_parameters(
    model: PreTrainedModel, dtypes: TargetDtypes
) -> list[list[StreamedParameter]]:
    """Find the three-dimensional parameters of each experts module, which stay on disk.

    Others stay in the model.
    """
    layers = []
    for module_name, module in expert_modules(model).items():
        parameters = [
            StreamedParameter(
                module_name,
                name,
                tuple(parameter.shape),
                dtypes(f"{module_name}.{name}", parameter.dtype),
            )
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim == 3
        ]
        if not parameters or len({streamed.shape[0] for streamed in parameters}) != 1:
            raise UnsupportedModel(
                f"{type(model).__name__}: {type(module).__name__} has no parameters of the shape"
                " [experts, rows, columns], or with different numbers of experts"
            )
        layers.append(parameters)
    return layers


def detached_parameters(module: nn.Module) -> tuple[StreamedParameter, ...]:
    """Return the expert parameters that were detached from a module; empty for most."""
    parameters: tuple[StreamedParameter, ...] = module.__dict__.get(STREAMED, ())
    return parameters


def detach_experts(model: PreTrainedModel, layers: list[list[StreamedParameter]]) -> None:
    """Remove the expert parameters that stay on disk from a model's modules.

    Each attribute stays, as None.

    So `parameters()` skips them. The catalog and the module keep their shapes and dtypes.
    """
    for layer in layers:
        module = model.get_submodule(layer[0].module)
        for streamed in layer:
            module.register_parameter(streamed.name, None)
        module.__dict__[STREAMED] = tuple(layer)
        # Otherwise weight initialisation would access the detached parameters, in the experts or in
        # their block, whose own parameters all come from the checkpoint.
        module._is_hf_initialized = True
        block = model.get_submodule(layer[0].module.rpartition(".")[0])
        if not block._non_persistent_buffers_set:
            block._is_hf_initialized = True
