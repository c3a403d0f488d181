"""The experts interface: attributes and shapes that transformers' experts implementations need.

In transformers, the decorator `use_experts_implementation` gives a class this interface. Adapters
are for architectures whose experts classes lack the decorator. An adapter replaces or changes the
experts modules while the model is on the meta device. It uses the same decorator, so
transformers' implementations "eager" and "grouped_mm" work with its modules too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightTransform,
)
from transformers.integrations.moe import use_experts_implementation

_NUMBER = re.compile(r"\.experts\.(\d+)\.")
FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """Changes to one architecture, so that transformers' experts implementations can run it.

    block:       name of the transformers class whose modules are changed; "" if none are
    adapt:       function that changes one module of that class in place; it raises UnsupportedModel
                 for a config that Greenroom does not support
    special:     remark on the architecture in the list that `greenroom models` prints
    transforms:  function that filters or extends transformers' weight transforms for the model
    added:       further weight transforms, for the changed modules
    is_unused:   function that tells from a tensor's name whether the changed model ignores it
    warning:     text that is logged when a model of this architecture is loaded
    config_part: for a model made of several models, the config's attribute for the one that writes
                 text
    renames:     (pattern, replacement) pairs that turn tensor names of the composite model into
                 those of the text model
    """

    block: str = ""
    adapt: Callable[[nn.Module, PreTrainedModel], None] = lambda module, model: None
    special: str = ""
    transforms: Callable[[list[WeightTransform]], list[WeightTransform]] = list
    added: tuple[WeightTransform, ...] = ()
    is_unused: Callable[[str, PreTrainedModel], bool] = lambda name, model: False
    warning: str = ""
    config_part: str = ""
    renames: tuple[tuple[str, str], ...] = ()


def merge_experts(
    target: str, *sources: str, then: Sequence[ConversionOps] = ()
) -> WeightConverter:
    """Make a weight converter that stacks one tensor per expert into a single parameter.

    In the patterns `sources`, `*` stands for the expert's number. The operations `then` are applied
    after stacking.
    """
    return WeightConverter(list(sources), target, [MergeModulelist(dim=0), *then])


def experts_numbered_from(first: str) -> Callable[[str, PreTrainedModel], bool]:
    """Return a function that tells which tensors belong to a model's last experts.

    It takes a tensor's name and the model, and returns True for experts from a number on. This
    number is an attribute of the model's text config, which `first` names.
    """

    def is_unused(name: str, model: PreTrainedModel) -> bool:
        match = _NUMBER.search(name)
        return match is not None and int(match[1]) >= getattr(model.config.get_text_config(), first)

    return is_unused


def set_interface_attributes(module: Any, model: PreTrainedModel, **flags: bool) -> None:
    """Set the attributes that transformers' experts decorator sets on an experts module.

    `flags` are the attributes with other values than the defaults in FLAGS, such as
    `has_bias=True`.
    """
    unknown = set(flags) - set(FLAGS)
    assert not unknown, unknown
    for name, value in {**FLAGS, **flags}.items():
        setattr(module, name, value)
    module.config = model.config
    module._is_expert_parallel = False


@cache
def decorate(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of an experts class, with transformers' experts decorator applied.

    Call `set_interface_attributes` on each instance: its flags are unknown to the decorator.
    """
    subclass: type[nn.Module] = use_experts_implementation(
        type(kind.__name__, (kind,), {"__module__": kind.__module__})
    )
    return subclass


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace one module's forward method; other modules of its class are unchanged."""
    kind: Any = type(module)
    module.__class__ = _with_forward(kind, forward)


@cache
def _with_forward(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})


@use_experts_implementation
class _Loop(nn.Module):
    """Base class with a loop over experts, as most transformers models have."""

    gate_up_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    has_gate: bool
    is_transposed: bool
    num_experts: int
    weighted_output: Callable[..., Tensor]
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token.

        hidden_states and the result are [tokens, hidden size]; top_k_index and top_k_weights are
        [tokens, top_k]. Indices that no expert has are ignored.
        """
        total = torch.zeros_like(hidden_states)
        up = self.gate_up_proj if self.has_gate else self.up_proj
        for expert in top_k_index.unique().tolist():
            if expert < self.num_experts:
                ranks, tokens = torch.nonzero(expert == top_k_index.T, as_tuple=True)
                weights = top_k_weights[tokens, ranks, None]
                out = self.weighted_output(
                    hidden_states, tokens, weights, up[expert], self.down_proj[expert], expert
                )
                total.index_add_(0, tokens, out.to(total.dtype))
        return total


class Experts(_Loop):
    """Experts module for architectures whose own class lacks the experts interface.

    Parameters of E experts, with hidden size H and intermediate size I, are on the meta device:
    up:   shape [E, 2I, H] with a gate (gate rows first), else [E, I, H]
    down: shape [E, H, I]
    With `is_transposed`, the last two axes of both are exchanged.

    If an architecture computes an expert by the same operations in another order, its subclass
    overrides `weighted_output` and sets `own_arithmetic`. If the operations differ, so that only
    the eager kernel can compute them, it also sets `eager_only`.
    """

    own_arithmetic = False
    eager_only = False

    def __init__(
        self,
        model: PreTrainedModel,
        up: tuple[int, ...],
        down: tuple[int, ...],
        dtype: torch.dtype,
        act_fn: Callable[[Tensor], Tensor],
        **flags: bool,
    ) -> None:
        nn.Module.__init__(self)  # the decorator's would set its own flags
        set_interface_attributes(self, model, **flags)
        self.num_experts = up[0]
        self.act_fn = act_fn
        name = "gate_up_proj" if self.has_gate else "up_proj"
        for each, shape in ((name, up), ("down_proj", down)):
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(each, nn.Parameter(empty, requires_grad=False))

    def weighted_output(
        self, x: Tensor, tokens: Tensor, weights: Tensor, up: Tensor, down: Tensor, expert: int
    ) -> Tensor:
        """Return one expert's outputs for its tokens, multiplied by the gate weights.

        The input is the rows `x[tokens]`, n of them; `weights` are [n, 1]. The result has n rows of
        the hidden size.
        """
        h = self._product(x[tokens], up)
        h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
        return self._product(h, down) * weights

    def _product(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w if self.is_transposed else nn.functional.linear(x, w)
