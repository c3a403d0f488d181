"""The experts interface: attributes and shapes that transformers' experts implementations rely on.

transformers gives it to a class by the decorator `use_experts_implementation`. For a class without
the decorator an adapter replaces or changes the modules, on the meta device, before any weight is
loaded. Adapters use the same decorator, so "eager" and "grouped_mm" work on these modules too.
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
    """Changes that let transformers' experts implementations run an architecture's MoE modules.

    block:       the name of transformers' class whose modules are changed, if any
    adapt:       changes one such module in place; raises UnsupportedModel for a config that is not
                 served
    special:     a remark for the user, in a few words
    transforms:  filters or extends transformers' list of weight transforms
    added:       weight transforms for the changed modules, after all others
    is_unused:   tells by a tensor's name that the changed model does not need the tensor
    warning:     a text that is logged when such a model is loaded
    config_part: the attribute of a composite config that holds the served model's config
    renames:     (pattern, replacement) from tensor names of the composite model to the served one's
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
    """Make the weight converter that stacks experts stored as one tensor each.

    A `*` in a source pattern is the expert's number.
    """
    return WeightConverter(list(sources), target, [MergeModulelist(dim=0), *then])


def experts_numbered_from(first: str) -> Callable[[str, PreTrainedModel], bool]:
    """Make a predicate for names of experts numbered from a config value upwards.

    `first` is the name of the config's value.
    """

    def is_unused(name: str, model: PreTrainedModel) -> bool:
        match = _NUMBER.search(name)
        return match is not None and int(match[1]) >= getattr(model.config.get_text_config(), first)

    return is_unused


def set_interface_attributes(module: Any, model: PreTrainedModel, **flags: bool) -> None:
    """Set the attributes that transformers' experts decorator sets on an experts module.

    `flags` are as in FLAGS.
    """
    unknown = set(flags) - set(FLAGS)
    assert not unknown, unknown
    for name, value in {**FLAGS, **flags}.items():
        setattr(module, name, value)
    module.config = model.config
    module._is_expert_parallel = False


@cache
def decorate(kind: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of an experts class, with transformers' experts decorator.

    `set_interface_attributes` sets the flags of its instances.
    """
    subclass: type[nn.Module] = use_experts_implementation(
        type(kind.__name__, (kind,), {"__module__": kind.__module__})
    )
    return subclass


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace a module's forward method by making the module an instance of a subclass."""
    kind: Any = type(module)
    module.__class__ = _with_forward(kind, forward)


@cache
def _with_forward(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})


@use_experts_implementation
class _Loop(nn.Module):
    """Base class with the eager loop over experts, as in most transformers models."""

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

        The sum is [T, H]; index and weights are [T, K].
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
    """Experts module for architectures whose own class lacks the shapes of the experts interface.

    up:   [E, I or 2I, H] (transposed: [E, H, I or 2I]), on the meta device
    down: [E, H, I] (transposed: [E, I, H])

    A subclass overrides `weighted_output` and sets `own_arithmetic` where the class that it
    replaces orders the operations of an expert differently. It also sets `eager_only` where the
    operations themselves differ, so that only the eager kernel can compute them.
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
        """Return one expert's outputs for its tokens, times the gate weights.

        Outputs [n, H] for the rows `x[tokens]`, weights [n, 1].
        """
        h = self._product(x[tokens], up)
        h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
        return self._product(h, down) * weights

    def _product(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w if self.is_transposed else nn.functional.linear(x, w)
