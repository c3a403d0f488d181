"""Refuse what a model cannot do right while its experts are streamed.

Changing its type or device, training, saving, copying and pickling reach the dense parts alone, or
leave compiled kernels with addresses of memory that is gone. Each of these calls goes through one
method of `nn.Module`, which `install` shadows by an attribute of the instance: classes stay
transformers' own. `remove` takes the attributes out again.
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

Kind = tuple[torch.dtype, torch.device]
Me = Callable[[], Any]  # a weak reference to the module


def install(model: PreTrainedModel, compiled: Set[nn.Module]) -> None:
    """ModuleCheck a model and all modules in it; a second call changes nothing.

    `compiled` are the modules whose weights compiled code reads. What holds none of these, and no
    streamed or stored weight, may be converted and moved: some models do so with their routers.
    """
    for module in model.modules():
        own, me = module.__dict__, weakref.ref(module)
        own["train"] = partial(_train, me)
        if any(part in compiled or _holds(part) for part in module.modules()):
            own["_apply"] = partial(_apply, me)
        own["_load_from_state_dict"] = partial(_load_from_state_dict, me)
        own["__deepcopy__"] = partial(_refuse, COPIES.format("copied"))
        own["__reduce_ex__"] = partial(_refuse, COPIES.format("pickled"))
        if _holds(module):
            own["_save_to_state_dict"] = partial(_save_to_state_dict, me)
        if isinstance(module, PreTrainedModel):
            for name in ("save_pretrained", "push_to_hub"):
                own[name] = partial(_refuse, SAVES.format(name))
            own["num_parameters"] = partial(_num_parameters, me)


def addresses(
    model: nn.Module, experts: Sequence[nn.Module], compiled: Set[nn.Module]
) -> Callable[[], None]:
    """What raises UnsupportedCall where a dense weight's memory is another than it is now.

    `weight.data = other` keeps the parameter and exchanges its memory: compiled kernels would go on
    reading the old address. Another parameter under the same name is noticed by the layers
    themselves (runtime/kernels/dense/module_check.py), and values written in place are seen by all.

    `experts` are the modules whose own parameters (biases) kernels hold, `compiled` those whose
    weights compiled dense layers read by address.
    """
    held = [
        (module if module in experts else None, name, own, weight, weight.data_ptr())
        for name, module in model.named_modules()
        if module in compiled or module in experts
        for own, weight in module.named_parameters(recurse=False)
    ]

    def check() -> None:
        for module, name, own, weight, address in held:
            exchanged = module is not None and module._parameters.get(own) is not weight
            if exchanged or weight.data_ptr() != address:
                raise UnsupportedCall(
                    f"{name}.{own} was given other memory, which compiled kernels do not see: write"
                    " values in place (weight.copy_(...) without gradients), or change it before"
                    " the model is attached"
                )

    return check


def _holds(module: nn.Module) -> bool:
    """Are a module's weights streamed or stored?"""
    return bool(detached_parameters(module)) or stored_matrix(module) is not None


def remove(model: nn.Module) -> None:
    """Give every module its class's methods back."""
    for module in model.modules():
        for name in _NAMES:
            module.__dict__.pop(name, None)


def _apply(me: Me, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, which `to`, `half`, `cuda`, `type`, `share_memory` ... call.

    A `fn` that leaves every kind of weight as it is does nothing, as in torch, but that float32
    buffers stay float32 too. Any other raises UnsupportedCall.
    """
    module: nn.Module = me()
    for dtype, device in dict.fromkeys(_kinds(module)):
        probe = torch.empty(1, dtype=dtype, device=device)
        address = probe.data_ptr()
        try:
            made = fn(probe)
        except Exception as error:  # torch without CUDA, a device that is not there
            raise UnsupportedCall(_unmoved(dtype, None)) from error
        if made is not probe or probe.data_ptr() != address:
            raise UnsupportedCall(_unmoved(dtype, made))
    return module


def _kinds(module: nn.Module) -> Iterator[Kind]:
    """Type and device of all weights in a module, the streamed and the stored ones included."""
    own = list(module.parameters())
    device = own[0].device if own else torch.device("cpu")
    yield from ((each.dtype, each.device) for each in own or module.buffers())
    for part in module.modules():
        yield from ((each.dtype, device) for each in detached_parameters(part))
        if (stored := stored_matrix(part)) is not None:
            yield stored.dtype, stored.device


def _unmoved(dtype: torch.dtype, made: Tensor | None) -> str:
    """What to say of weights of a type that were to become like `made`."""
    if made is None or made.dtype is dtype:
        return (
            "the weights cannot be moved while experts are streamed: greenroom.load(...,"
            f" device=...) says where they are computed, or {WAY_OUT}"
        )
    before, after = (str(each)[6:] for each in (dtype, made.dtype))
    load = f"greenroom.load(..., dtype={after!r}) computes in it, or " if after in FLOATS else ""
    return f"{before} weights cannot become {after} while experts are streamed: {load}{WAY_OUT}"


def _train(me: Me, mode: bool = True) -> nn.Module:
    if mode:
        raise UnsupportedCall(
            "a model whose experts are streamed cannot be trained (compiled layers have no dropout"
            f" and no gradients): {WAY_OUT}"
        )
    module: nn.Module = me()
    return type(module).train(module, False)


def _refuse(message: str, *_: Any, **__: Any) -> NoReturn:
    raise UnsupportedCall(message)


def _save_to_state_dict(me: Me, *args: Any, **kwargs: Any) -> None:
    """A module's own part of `state_dict`."""
    module: nn.Module = me()
    if _holds(module):
        raise UnsupportedCall(
            f"state_dict would leave weights out that are streamed or stored: {WAY_OUT}"
        )
    type(module)._save_to_state_dict(module, *args, **kwargs)


def _load_from_state_dict(me: Me, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
    """A module's own part of `load_state_dict`.

    UnsupportedCall where the state has weights that a module in it does not hold: parents come
    before their children, so nothing in the model was written then.
    """
    module: nn.Module = me()
    for name, part in module.named_modules():
        names = [each.name for each in detached_parameters(part)]
        if stored_matrix(part) is not None:
            names.append("weight")
        of_part = f"{prefix}{name}." if name else prefix
        if found := next((of_part + each for each in names if of_part + each in state_dict), None):
            raise UnsupportedCall(
                f"load_state_dict cannot set {found}, which is streamed or stored: {WAY_OUT}"
            )
    type(module)._load_from_state_dict(module, state_dict, prefix, *args)


def _num_parameters(me: Me, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """`PreTrainedModel.num_parameters`, experts included; none of them is trainable."""
    model: PreTrainedModel = me()
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
