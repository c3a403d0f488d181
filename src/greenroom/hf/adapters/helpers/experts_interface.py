"""The socket: what an experts module must look like for an implementation to compute it.

transformers' decorator `use_experts_implementation` makes one of a class. A class that is not
decorated gets an adapter, which gives its modules this form: on the meta device, before any weight
is loaded, and by transformers' own decorator, so that "eager" and "grouped_mm" work there too.
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
    """How an architecture is given the form of the socket.

    block:       the name of transformers' class whose modules are changed, if any
    adapt:       changes one of them, in place; UnsupportedModel where its config asks for what is
                 not served
    special:     what a user should know, in a few words
    conversions: from transformers' list of weight conversions to what is left of it
    added:       conversions of what was changed, after all others
    unused:      says of a tensor's name whether the changed model has no use for it
    warning:     said when such a model is loaded
    part:        where a config of several models has that of the one that is served
    names:       how the names of that one's tensors differ there: (pattern, replacement)
    """

    block: str = ""
    adapt: Callable[[nn.Module, PreTrainedModel], None] = lambda module, model: None
    special: str = ""
    conversions: Callable[[list[WeightTransform]], list[WeightTransform]] = list
    added: tuple[WeightTransform, ...] = ()
    unused: Callable[[str, PreTrainedModel], bool] = lambda name, model: False
    warning: str = ""
    part: str = ""
    names: tuple[tuple[str, str], ...] = ()


def merge_experts(
    target: str, *sources: str, then: Sequence[ConversionOps] = ()
) -> WeightConverter:
    """The conversion of experts that are stored one by one; patterns have `*` for their number."""
    return WeightConverter(list(sources), target, [MergeModulelist(dim=0), *then])


def experts_numbered_from(first: str) -> Callable[[str, PreTrainedModel], bool]:
    """Says of a tensor's name whether it is an expert's whose number is not below this value of
    the text's config."""

    def unused(name: str, model: PreTrainedModel) -> bool:
        found = _NUMBER.search(name)
        return found is not None and int(found[1]) >= getattr(model.config.get_text_config(), first)

    return unused


def set_interface_attributes(module: Any, model: PreTrainedModel, **flags: bool) -> None:
    """What transformers' decorator sets on an instance; `flags` as in FLAGS."""
    unknown = set(flags) - set(FLAGS)
    assert not unknown, unknown
    for name, value in {**FLAGS, **flags}.items():
        setattr(module, name, value)
    module.config = model.config
    module._is_expert_parallel = False


@cache
def decorate(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass with transformers' experts decorator, whose flags are not set yet."""
    made: type[nn.Module] = use_experts_implementation(
        type(kind.__name__, (kind,), {"__module__": kind.__module__})
    )
    return made


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module another forward: it becomes an instance of a subclass of its class."""
    kind: Any = type(module)
    module.__class__ = _with_forward(kind, forward)


@cache
def _with_forward(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})


@use_experts_implementation
class _Loop(nn.Module):
    """transformers' common eager loop over experts."""

    gate_up_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    has_gate: bool
    is_transposed: bool
    num_experts: int
    weighted_output: Callable[..., Tensor]
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum [T, H] of the experts chosen: x [T, H], index and weights [T, K]."""
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
    """Experts in the form of the socket, for a class that keeps its own in another form.

    up:   [E, I or 2I, H] (transposed: [E, H, I or 2I]), on the meta device
    down: [E, H, I] (transposed: [E, I, H])

    A subclass says by `weighted_output` what an expert gives, where the class that it stands for
    has operations of its own (`own_arithmetic`): the same in another order, or (`eager_only`)
    others, which no other kernel knows.
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
        """One expert's outputs for its rows `x[tokens]`, times their weights [n, 1]: [n, H]."""
        h = self._product(x[tokens], up)
        h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
        return self._product(h, down) * weights

    def _product(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w if self.is_transposed else nn.functional.linear(x, w)
