"""Find a model's experts: the modules that transformers lets an implementation compute."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from greenroom.errors import NotMoE, UnsupportedModel
from greenroom.hf.index.conversions import TargetDtypes

STREAMED = "_greenroom_streamed"  # attribute of an experts module: what was taken out of it
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # set by transformers
MOE = re.compile(r"Experts?$|MoE$|Moe$|MoE?(Block|Layer|MLP)$|SparseM(oe|LP)|SparseMoeBlock$")


@dataclass(frozen=True, slots=True)
class StreamedParameter:
    """A parameter whose experts wait on disk: `shape` includes the expert axis, which is first."""

    module: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"


def is_experts(module: nn.Module) -> bool:
    """Whether transformers decorated this module's class with `use_experts_implementation`."""
    return hasattr(module, "_apply_gate") and all(hasattr(module, flag) for flag in FLAGS)


def expert_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The experts modules in the model's order; NotMoE or UnsupportedModel where there are none."""
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if found:
        return found
    name = type(model).__name__
    others = {type(module).__name__ for module in model.modules()} - {name}
    if moe := sorted(other for other in others if MOE.search(other)):
        raise UnsupportedModel(
            f"{name}: its experts ({', '.join(moe[:3])}) are of a kind that is not served yet"
        )
    raise NotMoE(f"{name}: a dense model, there are no experts to stream; transformers can run it")


def find_streamed_parameters(
    model: PreTrainedModel, dtypes: TargetDtypes
) -> list[list[StreamedParameter]]:
    """For each experts module its 3-D expert parameters (biases and norms stay with the model)."""
    layers = []
    for module_name, module in expert_modules(model).items():
        own = [
            StreamedParameter(
                module_name,
                name,
                tuple(parameter.shape),
                dtypes(f"{module_name}.{name}", parameter.dtype),
            )
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim == 3
        ]
        if not own or len({streamed.shape[0] for streamed in own}) != 1:
            raise UnsupportedModel(
                f"{type(model).__name__}: {type(module).__name__} has an unknown arrangement"
            )
        layers.append(own)
    return layers


def detached_parameters(module: nn.Module) -> tuple[StreamedParameter, ...]:
    """The parameters that were taken out of a module; none of most modules."""
    found: tuple[StreamedParameter, ...] = module.__dict__.get(STREAMED, ())
    return found


def detach_experts(model: PreTrainedModel, layers: list[list[StreamedParameter]]) -> None:
    """Take the streamed parameters out of the model; each attribute stays, as None.

    So `parameters` passes them by. Their shapes and dtypes stay in the catalog and with the module.
    """
    for layer in layers:
        module = model.get_submodule(layer[0].module)
        for streamed in layer:
            module.register_parameter(streamed.name, None)
        module.__dict__[STREAMED] = tuple(layer)
        # Or weight initialisation would touch what is not there, by the experts or by their block,
        # which has nothing left to initialise where all of its own comes from the checkpoint.
        module._is_hf_initialized = True
        block = model.get_submodule(layer[0].module.rpartition(".")[0])
        if not block._non_persistent_buffers_set:
            block._is_hf_initialized = True
