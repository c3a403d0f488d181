"""Co-computation of one MoE layer's experts on a GPU and on the host processor.

The host's kernel computes from slots in host memory, on a copy of the layer's inputs. The host's
outputs are merged with the GPU's before the GPU sums over a token's experts, in ascending order of
their ids, as every kernel does. On the fake device both kernels are the same, so the result is bit
for bit that of the device alone; a real GPU's matrix products round differently from a CPU's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.multi_device import copy_module
from greenroom.runtime.kernels.base import Kernel, KernelStep
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.report import TokenReport
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.tier import Slots

CPU = torch.device("cpu")


@cache
def _ones(count: int) -> Tensor:
    """Return the gate weights [1, count] of experts whose outputs a GPU weighs."""
    with torch.inference_mode(False):  # passes of both modes read them
        return torch.ones(1, count)


class HostShare:
    """The part of an MoE layer's computation that the host processor performs.

    experts: those that were computed so far
    outputs: the computation that has their outputs; None: none yet
    """

    def __init__(
        self,
        layer: LayerExperts,
        inputs: Sequence[Tensor],
        routing: Routing,
        kernel: Kernel,
        engine: Engine,
    ) -> None:
        """Begin to copy the inputs of a layer's computation to the host.

        layer:  the layer's experts in host memory
        inputs: hidden states and gate weights on the GPU
        kernel: computes on the host
        """
        self.experts: list[int] = []
        self.outputs: KernelStep | None = None
        self.routing = routing
        self._layer, self._kernel, self._engine = layer, kernel, engine
        self._inputs = [engine.copy_to_host(tensor) for tensor in inputs]

    def compute(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute the given experts on the host processor, from slots in host memory."""
        if self.outputs is None:
            for _, mark in self._inputs:
                self._engine.wait(mark)
            (x, _), (weights, _) = self._inputs
            self.outputs = self._kernel.begin(self._layer, x, self.routing, weights)
        self.outputs.compute_from(experts, slots, self._layer)
        self.experts += experts

    def merge_into(self, step: KernelStep) -> None:
        """Merge the outputs of the experts that the host computed into the GPU's computation."""
        if self.experts:
            step.main_step.compute_group([], [])  # some kernels send the routing with it
            step.main_step.merge_outputs(self.outputs, self.experts, self._engine.copy_to_device)


class TokenShare:
    """The host's part of one token's experts in a layer, whose others a device computes.

    Its computations know only their own experts, so their outputs lie one after another.
    """

    def __init__(self, layer: LayerExperts, x: Tensor, kernel: Kernel, engine: Engine) -> None:
        """Begin to copy a token's hidden state to the host.

        layer:  the layer's experts in host memory
        x:      [1, H], on the GPU
        kernel: computes on the host
        """
        self._layer, self._kernel, self._engine = layer, kernel, engine
        self._input = engine.copy_to_host(x)
        self._experts, self._outputs = list[int](), list[Tensor]()

    def compute(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute distinct experts on the host processor, from slots in host memory."""
        x, mark = self._input
        self._engine.wait(mark)
        layer, routing = self._layer, Routing.of_token(experts, self._layer.num_experts)
        step = self._kernel.begin(layer, x, routing, _ones(len(experts)))
        step.compute_from(experts, slots, layer)
        self._outputs.append(step.outputs_of(experts))
        self._experts += experts

    def merge_into(self, launches: Any, report: TokenReport) -> None:
        """Merge the outputs into a token's sum, which was launched without them."""
        if self._experts:
            one, *more = self._outputs
            outputs = torch.cat([one, *more]) if more else one
            launches.merge_outputs(outputs, self._experts, report, self._engine.copy_to_device)


class ThreadShare(threading.local):
    """The host's share of the calling thread's current step."""

    current: HostShare | None = None


class CoComputeKernel(Kernel):
    """GPU expert kernel that can compute some of a layer's experts on the host processor."""

    def __init__(self, kernel: Kernel, engine: Engine, slots: Slots) -> None:
        """Extend a GPU's expert kernel by computation on the host processor.

        `slots` are the slots in host memory; `engine` is that of the first GPU.
        """
        self.kernel, self.name = kernel, kernel.name
        self._engine, self._slots = engine, slots
        self._layers: dict[
            int, LayerExperts
        ] = {}  # the host's copy of a layer, by the id() of the device's
        self._kernels: dict[int, Kernel] = {}  # of the host, by the id() of its layer
        self._share = ThreadShare()

    def prepare(self, layer: LayerExperts) -> None:
        """Register an MoE layer for computation on the GPU and on the host, before `begin`."""
        self.kernel.prepare(layer)
        module = copy_module(layer.module, CPU)
        self._layers[id(layer)] = layer.in_other_slots(module, lambda _: self._slots)

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> KernelStep:
        """Begin an MoE layer's computation on the GPU.

        x: hidden states [tokens, hidden]; weights: gate weights [tokens, top_k]
        """
        self._share.current = None
        return self.kernel.begin(layer, x, routing, weights)

    def host_job(
        self, step: KernelStep, experts: Sequence[int], slots: Sequence[int]
    ) -> Callable[[], None]:
        """Return a function that computes an expert group on the host, from host slots."""
        if (share := self._share.current) is None:
            layer, main = self._layers[id(step.layer)], step.main_step.host_kernel
            inputs = step.x, step.weights
            share = HostShare(layer, inputs, step.routing, main(layer), self._engine)
            self._share.current = share
        return partial(share.compute, experts, slots)

    def token_launches(self, layer: LayerExperts, table: Any, first: int) -> Any:
        return self.kernel.token_launches(layer, table, first)

    def token_share(self, layer: LayerExperts, launches: Any) -> TokenShare:
        """Return the host's share of a token's experts, whose others a device has launched."""
        layer = self._layers[id(layer)]
        kernel = self._kernels.get(id(layer))
        if kernel is None:
            kernel = self._kernels[id(layer)] = launches.host_kernel(layer)
        return TokenShare(layer, launches.input, kernel, self._engine)

    def combine(self, step: KernelStep) -> Tensor:
        """Return the sum of expert outputs of GPU and host: [tokens, hidden], in x's dtype."""
        share, self._share.current = self._share.current, None
        if share is not None:
            share.merge_into(step)
        return super().combine(step)
