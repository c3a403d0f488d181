"""Refuse module calls (`to`, `state_dict`, ...) that would break a model with streamed experts.

Changing its type or device, training, saving, copying and pickling would reach only the dense
parts, or leave compiled kernels with addresses of freed memory. Each of these calls goes through
one method of `nn.Module`, which `install` shadows by an attribute of the instance; transformers'
classes are unchanged. `remove` deletes the attributes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from greenroom.core.layout import FLOATS
from greenroom.errors import UnsupportedCall
from greenroom.hf.index.experts import detached_parameters
from greenroom.runtime.kernels.dense.stored import stored_matrix

WAY_OUT = "model.greenroom.materialize() reads them into memory first"
COPIES = (
    "a model whose experts are streamed cannot be {} (it has open files and threads):"
    f" load it again where it is needed, or {WAY_OUT}"
)
SAVES = (
    "{} would leave the experts out, which are streamed: copy the checkpoint's folder, or"
    f" {WAY_OUT}"
)
_NAMES = (
    "train", "_load_from_state_dict", "__deepcopy__", "__reduce_ex__", "_apply",
    "_save_to_state_dict", "save_pretrained", "push_to_hub", "num_parameters",
)  # fmt: skip

Placement = tuple[torch.dtype, torch.device]
ModuleRef = Callable[[], Any]  # a weak reference to the module


def install(model: PreTrainedModel, compiled: Set[nn.Module]) -> None:
    """Refuse calls that would break a streamed model, on all its modules.

    A second call changes nothing. `compiled` are the modules whose weights compiled code reads. A
    module that contains none of them, and no streamed or stored weight, may be converted and moved:
    some models convert their routers.
    """
    for module in model.modules():
        attributes, module_ref = module.__dict__, weakref.ref(module)
        attributes["train"] = partial(_train, module_ref)
        if any(part in compiled or _holds(part) for part in module.modules()):
            attributes["_apply"] = partial(_apply, module_ref)
        attributes["_load_from_state_dict"] = partial(_load_from_state_dict, module_ref)
        attributes["__deepcopy__"] = partial(_refuse, COPIES.format("copied"))
        attributes["__reduce_ex__"] = partial(_refuse, COPIES.format("pickled"))
        if _holds(module):
            attributes["_save_to_state_dict"] = partial(_save_to_state_dict, module_ref)
        if isinstance(module, PreTrainedModel):
            for name in ("save_pretrained", "push_to_hub"):
                attributes[name] = partial(_refuse, SAVES.format(name))
            attributes["num_parameters"] = partial(_num_parameters, module_ref)


def make_address_check(
    model: nn.Module, experts: Sequence[nn.Module], compiled: Set[nn.Module]
) -> Callable[[], None]:
    """Return a check that raises UnsupportedCall once a dense weight has moved in memory.

    `weight.data = other` keeps the parameter and exchanges its memory: compiled kernels would go on
    reading the old address. The layers themselves notice another parameter under the same name
    (runtime/kernels/dense/module_check.py), and values that are written in place need no check.

    `experts` are modules whose own parameters (biases) kernels read, `compiled` are modules whose
    weights compiled dense layers read by address.
    """
    weights = [
        (module if module in experts else None, name, parameter, weight, weight.data_ptr())
        for name, module in model.named_modules()
        if module in compiled or module in experts
        for parameter, weight in module.named_parameters(recurse=False)
    ]

    def check() -> None:
        for module, name, parameter, weight, address in weights:
            exchanged = module is not None and module._parameters.get(parameter) is not weight
            if exchanged or weight.data_ptr() != address:
                raise UnsupportedCall(
                    f"the memory of {name}.{parameter} was replaced, and compiled kernels still"
                    " read the old one: write values in place (weight.copy_(...) under"
                    " torch.no_grad())"
                )

    return check


def _holds(module: nn.Module) -> bool:
    """Check whether a module's own weights are streamed or stored quantised."""
    return bool(detached_parameters(module)) or stored_matrix(module) is not None


def remove(model: nn.Module) -> None:
    """Remove the guards that refuse calls on a streamed model's modules."""
    for module in model.modules():
        for name in _NAMES:
            module.__dict__.pop(name, None)


def _apply(
    module_ref: ModuleRef, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Guard `nn.Module._apply`, which `to`, `half`, `cuda`, `type`, `share_memory` ... call.

    Nothing happens where `fn` would leave all weights as they are, as in torch; float32 buffers
    stay float32 too. Any other `fn` raises UnsupportedCall.
    """
    module: nn.Module = module_ref()
    for dtype, device in dict.fromkeys(_placements(module)):
        probe = torch.empty(1, dtype=dtype, device=device)
        address = probe.data_ptr()
        try:
            result = fn(probe)
        except Exception as error:  # torch without CUDA, a device that is not there
            raise UnsupportedCall(_refusal(dtype, None)) from error
        if result is not probe or probe.data_ptr() != address:
            raise UnsupportedCall(_refusal(dtype, result))
    return module


def _placements(module: nn.Module) -> Iterator[Placement]:
    """Return type and device of all weights in a module, including streamed and stored ones."""
    parameters = list(module.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    yield from ((each.dtype, each.device) for each in parameters or module.buffers())
    for part in module.modules():
        yield from ((each.dtype, device) for each in detached_parameters(part))
        if (stored := stored_matrix(part)) is not None:
            yield stored.dtype, stored.device


def _refusal(dtype: torch.dtype, result: Tensor | None) -> str:
    """Return the error message for converting weights of `dtype` to those of `result`."""
    if result is None or result.dtype is dtype:
        return (
            "the weights cannot be moved while experts are streamed: greenroom.load(...,"
            f" device=...) says where they are computed, or {WAY_OUT}"
        )
    before, after = (str(each)[6:] for each in (dtype, result.dtype))
    load = f"greenroom.load(..., dtype={after!r}) computes in it, or " if after in FLOATS else ""
    return f"{before} weights cannot become {after} while experts are streamed: {load}{WAY_OUT}"


def _train(module_ref: ModuleRef, mode: bool = True) -> nn.Module:
    if mode:
        raise UnsupportedCall(
            "a model whose experts are streamed cannot be trained (compiled layers have no dropout"
            f" and no gradients): {WAY_OUT}"
        )
    module: nn.Module = module_ref()
    return type(module).train(module, False)


def _refuse(message: str, *_: Any, **__: Any) -> NoReturn:
    raise UnsupportedCall(message)


def _save_to_state_dict(module_ref: ModuleRef, *args: Any, **kwargs: Any) -> None:
    """Save a guarded module's own part of `state_dict`."""
    module: nn.Module = module_ref()
    if _holds(module):
        raise UnsupportedCall(
            f"state_dict would leave out weights that are streamed or stored quantised: {WAY_OUT}"
        )
    type(module)._save_to_state_dict(module, *args, **kwargs)


def _load_from_state_dict(
    module_ref: ModuleRef, state_dict: Mapping[str, Any], prefix: str, *args: Any
) -> None:
    """Load a guarded module's own part of `load_state_dict`.

    UnsupportedCall where the state has streamed or stored weights of a module below this one.
    Parents come before their children, so nothing in the model was written yet.
    """
    module: nn.Module = module_ref()
    for name, part in module.named_modules():
        names = [each.name for each in detached_parameters(part)]
        if stored_matrix(part) is not None:
            names.append("weight")
        of_part = f"{prefix}{name}." if name else prefix
        if key := next((of_part + each for each in names if of_part + each in state_dict), None):
            raise UnsupportedCall(
                f"load_state_dict cannot set {key}, which is streamed or stored: {WAY_OUT}"
            )
    type(module)._load_from_state_dict(module, state_dict, prefix, *args)


def _num_parameters(
    module_ref: ModuleRef, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Count `PreTrainedModel.num_parameters` with the experts, which are not trainable."""
    model: PreTrainedModel = module_ref()
    total: int = type(model).num_parameters(model, only_trainable, exclude_embeddings)
    if only_trainable:
        return total
    stored: dict[int, int] = {}  # by matrix: tied modules share one
    for module in model.modules():
        total += sum(prod(each.shape) for each in detached_parameters(module))
        if (matrix := stored_matrix(module)) is not None:
            left_out = exclude_embeddings and isinstance(module, nn.Embedding)
            size = 0 if left_out else matrix.shape.numel()
            stored[id(matrix)] = min(size, stored.get(id(matrix), size))
    return total + sum(stored.values())
