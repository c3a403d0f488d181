"""Find a model's experts modules, and detach the parameters that stay on disk."""

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
    """A parameter of an experts module that stays on disk.

    It holds one matrix for each expert of a layer: `shape` is [experts, rows, columns]. `module` is
    the module's name and `name` the parameter's name in the module.
    """

    module: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"


def is_experts(module: nn.Module) -> bool:
    """True if a module's class is decorated with transformers' `use_experts_implementation`."""
    return hasattr(module, "_apply_gate") and all(hasattr(module, flag) for flag in FLAGS)


def expert_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return a model's experts modules by name, in the order of its modules.

    An experts module holds the weights of all experts of a layer. If the model has none, raises
    UnsupportedModel if its modules look like a Mixture of Experts, else NotMoE.
    """
    experts = {name: module for name, module in model.named_modules() if is_experts(module)}
    if experts:
        return experts
    name = type(model).__name__
    others = {type(module).__name__ for module in model.modules()} - {name}
    if moe := sorted(other for other in others if MOE.search(other)):
        raise UnsupportedModel(
            f"{name}: this architecture is not supported: its experts ({', '.join(moe[:3])}) do not"
            " use transformers' experts implementations"
        )
    raise NotMoE(f"{name}: this is a dense model without experts: run it with transformers")


def find_streamed_parameters(
    model: PreTrainedModel, dtypes: TargetDtypes
) -> list[list[StreamedParameter]]:
    """Find the parameters of each experts module that stay on disk: those with three axes.

    Other parameters of the modules, such as biases, stay in the model. `dtypes` gives the dtype of
    each parameter. Raises NotMoE or UnsupportedModel if the model has no supported experts.
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
                f"{type(model).__name__}: this architecture is not supported: the module"
                f" {type(module).__name__} needs parameters of the shape [experts, rows, columns],"
                " all with the same number of experts"
            )
        layers.append(parameters)
    return layers


def detached_parameters(module: nn.Module) -> tuple[StreamedParameter, ...]:
    """Return the expert parameters that `detach_experts` removed from a module.

    Empty if the module is no experts module.
    """
    parameters: tuple[StreamedParameter, ...] = module.__dict__.get(STREAMED, ())
    return parameters


def detach_experts(model: PreTrainedModel, layers: list[list[StreamedParameter]]) -> None:
    """Remove the expert parameters that stay on disk from a model's modules.

    The attributes remain, with the value None, so `parameters()` skips them.
    `detached_parameters` returns their shapes and dtypes.
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
