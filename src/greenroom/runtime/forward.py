"""The experts forward: what a model calls in place of its own loop over experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from greenroom.core.predictor import Ids, Inputs, Seen
from greenroom.errors import ClosedError
from greenroom.runtime.driver import Driver
from greenroom.runtime.kernels.routing import Routing

BINDING = "_greenroom"  # attribute of an experts module: its Binding


@dataclass(frozen=True, slots=True)
class Binding:
    """What one experts module needs to be served."""

    driver: Driver
    kernel: Any  # one of runtime.kernels.KERNELS
    layer: int
    experts: Any  # kernels.LayerExperts
    weighs: bool = False  # does the policy look at gate weights?
    inputs: Callable[[], Inputs | None] | None = None  # of the router
    meanwhile: Callable[[], None] | None = None  # what can be computed while experts are awaited

    def seen(self, experts: Ids, inputs: bool) -> Seen:
        """What predictors are told: the experts chosen, [T, K], and what the router was given."""
        given = self.inputs() if inputs and self.inputs is not None else None
        return Seen(self.layer, experts, inputs=given)


@torch.no_grad()
def experts_forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Sum of the chosen experts' outputs: x [T, H], index and weights [T, K] -> [T, H].

    The resident experts are computed in one call, then those in flight as they land; the sum over
    a token's experts is taken in a fixed order, so waves do not change a bit.
    """
    if hidden_states.is_meta:  # shapes only: a budget is being made
        return torch.empty_like(hidden_states)
    binding: Binding | None = getattr(module, BINDING, None)
    if binding is None:
        raise ClosedError("this model is not attached: its experts were never loaded or detached")
    chosen = top_k_index.numpy()
    routing = Routing.of(chosen, int(module.num_experts))  # type: ignore[arg-type]
    kernel = binding.kernel
    step = kernel.begin(binding.experts, hidden_states, routing, top_k_weights)
    counted = routing.counted(top_k_weights.float().numpy()) if binding.weighs else (None, None)
    binding.driver.step(
        binding.layer,
        routing.experts,
        lambda experts, slots: kernel.wave(step, experts.tolist(), slots.tolist()),
        *counted,
        seen=lambda inputs: binding.seen(chosen, inputs),
        meanwhile=binding.meanwhile,
    )
    return kernel.combine(step)
