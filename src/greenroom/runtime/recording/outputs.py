"""Measurement of experts' outputs while a model runs: their norms, and the change of each token.

The kernels that serve a model keep an expert's output only until it is summed. So each expert group
is computed a second time here, by the eager kernel, while its slots are still pinned. Nothing is
read twice, and the model's own result does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from greenroom.errors import TraceError, UsageError
from greenroom.runtime.cuda.co_compute import CoComputeKernel
from greenroom.runtime.cuda.multi_device import MultiDeviceKernel
from greenroom.runtime.forward import BINDING, Binding
from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.base import Kernel, KernelStep, PooledKernel
from greenroom.runtime.kernels.eager import EagerStep
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing


class OutputProbe:
    """Measures experts' outputs in a model's MoE layers until `detach`.

    modules:    the experts modules, in the model's order, attached to an expert cache
    neighbours: for each layer, the modules beside the experts and beside what contains them; the
                one that returns the experts' input is the norm that reads the hidden state

    Raises UsageError if the kernels compute experts in parts, approximately or in several memories.
    """

    def __init__(
        self, modules: Sequence[nn.Module], neighbours: Sequence[Sequence[nn.Module]]
    ) -> None:
        check_kernels(modules)
        self._norms: list[Tensor] = [torch.empty(0)] * len(modules)
        self._changes: list[Tensor] = [torch.empty(0)] * len(modules)
        self._calls: list[tuple[Tensor, Tensor]] = []  # inputs and outputs of neighbours, in order
        self._bindings: list[tuple[nn.Module, Binding]] = []
        self._hooks: list[Any] = []
        for layer, (module, others) in enumerate(zip(modules, neighbours, strict=True)):
            binding: Binding = getattr(module, BINDING)
            kernel = _NormKernel(binding.kernel, self._norm_setter(layer))
            setattr(module, BINDING, replace(binding, kernel=kernel, resident={}))
            self._bindings.append((module, binding))
            self._hooks += [
                other.register_forward_hook(self._capture, with_kwargs=True) for other in others
            ]
            self._hooks.append(
                module.register_forward_hook(self._change_hook(layer), with_kwargs=True)
            )

    def take(self) -> dict[str, NDArray[np.float32]]:
        """Return the latest pass's arrays `output_norms` and `token_changes` of a trace.

        Raises TraceError if an output is not finite.
        """
        arrays = {
            "output_norms": torch.stack(self._norms, 1).numpy(),
            "token_changes": torch.stack(self._changes, 1).numpy(),
        }
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise TraceError(
                "an expert's output is not finite: record without --output-norms, or load the model"
                " with a wider --dtype"
            )
        return arrays

    def detach(self) -> None:
        """Remove the hooks, and give the experts modules their own kernels again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module, binding in self._bindings:
            if hasattr(module, BINDING):
                setattr(module, BINDING, binding)
        self._bindings.clear()

    def _norm_setter(self, layer: int) -> Callable[[Tensor], None]:
        def set_norms(norms: Tensor) -> None:
            self._norms[layer] = norms.cpu()

        return set_norms

    @outside_graphs
    def _capture(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note a neighbour's call that turns one tensor into another of the same shape."""
        state = next(iter((*args, *kwargs.values())), None)
        if not isinstance(state, Tensor) or not isinstance(output, Tensor) or output.is_meta:
            return
        if state.shape == output.shape:
            self._calls.append((state, output))

    def _change_hook(self, layer: int) -> Any:
        @outside_graphs
        def measure(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
        ) -> None:
            calls, self._calls = self._calls, []
            x = args[0] if args else kwargs["hidden_states"]
            if not x.is_meta:
                self._changes[layer] = token_changes(_state_before(x, calls, layer), output)

        return measure


def check_kernels(modules: Sequence[nn.Module]) -> None:
    """Raise UsageError unless experts are computed whole and exactly, in slots of one memory."""
    in_parts = PooledKernel, CoComputeKernel, MultiDeviceKernel
    if any(isinstance(getattr(module, BINDING).kernel, in_parts) for module in modules):
        raise UsageError(
            "--output-norms needs experts that are computed whole and exactly, on one device: leave"
            " out --split, approximation of misses, --co-compute and several devices, and do not"
            " record a pack with segments"
        )


def token_changes(before: Tensor, added: Tensor) -> Tensor:
    """Return how much a sum of routed experts' outputs changes each token: float32 [tokens].

    It is 1 - cos(h, h + y), at least 0: h is the hidden state `before`, y the sum `added`; both
    have a row for each token.
    """
    h = before.detach().reshape(added.shape).double()
    cosine = nn.functional.cosine_similarity(h, h + added.detach().double(), dim=-1)
    return (1 - cosine).clamp(min=0).float().cpu()


def _state_before(x: Tensor, calls: Sequence[tuple[Tensor, Tensor]], layer: int) -> Tensor:
    """Return the hidden state whose norm is the input of a layer's experts.

    Raises TraceError if no module returned the experts' input.
    """
    for state, output in calls:  # the first one: later ones may return what they get
        if output.data_ptr() == x.data_ptr() != state.data_ptr() and output.numel() == x.numel():
            return state
    raise TraceError(
        f"--output-norms: the hidden state before the experts of MoE layer {layer} was not found,"
        " because no norm of the decoder layer returns their input: record without --output-norms"
    )


class _NormKernel(Kernel):
    """Kernel that also computes the norm of every expert's output, before gate weights."""

    def __init__(self, kernel: Kernel, set_norms: Callable[[Tensor], None]) -> None:
        self._kernel, self._set_norms, self.name = kernel, set_norms, kernel.name

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> KernelStep:
        self._norms = torch.zeros(weights.shape, device=x.device)
        self._eager = EagerStep(layer, x, routing, torch.ones_like(weights))
        return self._kernel.begin(layer, x, routing, weights)

    def compute_group(self, step: Any, experts: Sequence[int], slots: Sequence[int]) -> None:
        self._kernel.compute_group(step, experts, slots)
        self._eager.compute_group(experts, slots)
        routing = self._eager.routing
        for expert, (tokens, out) in self._eager.outputs.items():
            ranks = torch.from_numpy(routing.ranks[routing.entries(expert)]).to(tokens.device)
            self._norms[tokens, ranks] = out.float().norm(dim=-1)
        self._eager.outputs.clear()

    def combine(self, step: Any) -> Tensor:
        self._set_norms(self._norms)
        return self._kernel.combine(step)
