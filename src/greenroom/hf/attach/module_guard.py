"""Refuse module calls (`to`, `state_dict`, ...) that would break a model with streamed experts.

To change the dtype or device of such a model, to train, save, copy or pickle it, would leave out
the experts, or leave compiled kernels with addresses of freed memory. Each of these calls goes
through one method of `nn.Module`. `install` shadows the method by an attribute of the module
instance, and `remove` deletes the attribute. transformers' classes are unchanged.
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
from greenroom.runtime.kernels.dense.table import stored_weight

WAY_OUT = "call model.greenroom.materialize() first, which reads all experts into memory"
COPIES = (
    "a model whose experts are on disk cannot be {} (it has open files and threads):"
    f" load it again where it is needed, or {WAY_OUT}"
)
SAVES = (
    "{} would leave out the experts, which are on disk: copy the checkpoint's folder,"
    f" or {WAY_OUT}"
)
_NAMES = (
    "train", "_load_from_state_dict", "__deepcopy__", "__reduce_ex__", "_apply",
    "_save_to_state_dict", "save_pretrained", "push_to_hub", "num_parameters",
)  # fmt: skip

Placement = tuple[torch.dtype, torch.device]
ModuleRef = Callable[[], Any]  # a weak reference to the module


def install(model: PreTrainedModel, compiled: Set[nn.Module]) -> None:
    """Make all modules of a model refuse calls that would break its streamed experts.

    `compiled` are the modules whose weights compiled code reads. A module may still be
    converted and moved if it contains no compiled module, no experts and no weight stored
    quantised: some models convert their routers. A second call changes nothing.
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
    """Return a function that raises UnsupportedCall if a weight has moved in memory.

    `weight.data = other` gives a parameter other memory, and compiled kernels would go on reading
    the old address. Values that are written in place need no check. A new Parameter object in a
    compiled layer is noticed elsewhere (runtime/kernels/dense/module_check.py).

    experts:  experts modules, of which kernels read the biases
    compiled: modules whose weights compiled layers read by address
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
                    f"the memory of {name}.{parameter} was replaced, but compiled code still reads"
                    " the old memory: change values in place (weight.copy_(...) under"
                    " torch.no_grad())"
                )

    return check


def make_change_check(root: nn.Module) -> Callable[[], bool]:
    """Return a function that tells whether a module has other weights or submodules than now.

    Values that are written in place are no change.
    """

    def read() -> tuple[list[Any], list[int]]:
        modules = list(root.modules())
        weights = [
            weight
            for module in modules
            for weight in (*module._parameters.values(), *module._buffers.values())
            if weight is not None
        ]
        return [*modules, *weights], [weight.data_ptr() for weight in weights]

    objects, addresses = read()

    def changed() -> bool:
        now, at = read()
        return addresses != at or list(map(id, now)) != list(map(id, objects))

    return changed


def _holds(module: nn.Module) -> bool:
    """Check whether a module's own weights are on disk, or are stored quantised."""
    return bool(detached_parameters(module)) or stored_weight(module) is not None


def remove(model: nn.Module) -> None:
    """Let a model's modules be trained, saved, copied and moved again: undo `install`."""
    for module in model.modules():
        for name in _NAMES:
            module.__dict__.pop(name, None)


def _apply(
    module_ref: ModuleRef, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Guard `nn.Module._apply`, which `to`, `half`, `cuda`, `type`, `share_memory` ... call.

    If `fn` would change no weight's dtype, device or memory, the module is returned unchanged.
    Otherwise UnsupportedCall is raised.
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
    """Yield dtype and device of all weights in a module, including experts and quantised ones."""
    parameters = list(module.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    yield from ((each.dtype, each.device) for each in parameters or module.buffers())
    for part in module.modules():
        yield from ((each.dtype, device) for each in detached_parameters(part))
        if (stored := stored_weight(part)) is not None:
            yield stored.dtype, device


def _refusal(dtype: torch.dtype, result: Tensor | None) -> str:
    """Return the error message for converting weights of `dtype` to those of `result`."""
    if result is None or result.dtype is dtype:
        return (
            "a model whose experts are on disk cannot be moved: choose the device in"
            f" greenroom.load(..., device=...), or {WAY_OUT}"
        )
    before, after = (str(each)[6:] for each in (dtype, result.dtype))
    load = f"load it with greenroom.load(..., dtype={after!r}), or " if after in FLOATS else ""
    return (
        f"a model whose experts are on disk cannot be converted from {before} to {after}:"
        f" {load}{WAY_OUT}"
    )


def _train(module_ref: ModuleRef, mode: bool = True) -> nn.Module:
    if mode:
        raise UnsupportedCall(
            "a model whose experts are on disk cannot be trained (its compiled layers have no"
            f" dropout and no gradients): {WAY_OUT}"
        )
    module: nn.Module = module_ref()
    return type(module).train(module, False)


def _refuse(message: str, *_: Any, **__: Any) -> NoReturn:
    raise UnsupportedCall(message)


def _save_to_state_dict(module_ref: ModuleRef, *args: Any, **kwargs: Any) -> None:
    """Save a module's own part of `state_dict`; UnsupportedCall if weights would be missing."""
    module: nn.Module = module_ref()
    if _holds(module):
        raise UnsupportedCall(
            f"state_dict would leave out weights that are on disk or stored quantised: {WAY_OUT}"
        )
    type(module)._save_to_state_dict(module, *args, **kwargs)


def _load_from_state_dict(
    module_ref: ModuleRef, state_dict: Mapping[str, Any], prefix: str, *args: Any
) -> None:
    """Load a module's own part of `load_state_dict`.

    Raises UnsupportedCall if the state has experts, or weights that the model stores quantised. The
    check covers all submodules, and parents load before their children: nothing was written yet.
    """
    module: nn.Module = module_ref()
    for name, part in module.named_modules():
        names = [each.name for each in detached_parameters(part)]
        if stored_weight(part) is not None:
            names.append("weight")
        of_part = f"{prefix}{name}." if name else prefix
        if key := next((of_part + each for each in names if of_part + each in state_dict), None):
            raise UnsupportedCall(
                f"load_state_dict cannot set {key}, which is on disk or stored quantised: {WAY_OUT}"
            )
    type(module)._load_from_state_dict(module, state_dict, prefix, *args)


def _num_parameters(
    module_ref: ModuleRef, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Count parameters as `PreTrainedModel.num_parameters` does, experts included."""
    model: PreTrainedModel = module_ref()
    total: int = type(model).num_parameters(model, only_trainable, exclude_embeddings)
    if only_trainable:
        return total
    stored: dict[int, int] = {}  # by matrix: tied modules share one
    for module in model.modules():
        total += sum(prod(each.shape) for each in detached_parameters(module))
        if (weight := stored_weight(module)) is not None:
            left_out = exclude_embeddings and isinstance(module, nn.Embedding)
            size = 0 if left_out else weight.shape.numel()
            stored[id(weight)] = min(size, stored.get(id(weight), size))
    return total + sum(stored.values())
