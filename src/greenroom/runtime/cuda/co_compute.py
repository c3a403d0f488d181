"""Co-computation of one MoE layer's experts on a GPU and on the host processor.

The host's kernel computes from slots in host memory, on a copy of the layer's inputs. The host's
outputs are merged with the GPU's before the GPU sums over a token's experts, in ascending order of
their ids, as every kernel does. On the fake device both kernels are the same, so the result is bit
for bit that of the device alone; a real GPU's matrix products round differently from a CPU's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.multi_device import copy_module
from greenroom.runtime.kernels.base import Kernel, KernelStep
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.tier import Slots

CPU = torch.device("cpu")


class HostShare:
    """The part of an MoE layer's computation that the host processor performs."""

    def __init__(self, step: KernelStep, layer: LayerExperts, engine: Engine) -> None:
        """Begin to copy the inputs of a layer's computation to the host.

        step: the computation on the GPU
        layer: the layer's experts in host memory
        """
        self.experts: list[int] = []  # computed so far
        self._layer, self._routing, self._engine = layer, step.routing, engine
        self._inputs = [engine.copy_to_host(tensor) for tensor in (step.x, step.weights)]
        self._kernel = step.main_step.host_kernel(layer)
        self._step: KernelStep | None = None

    def compute(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute the given experts on the host processor, from slots in host memory."""
        if self._step is None:
            for _, mark in self._inputs:
                self._engine.wait(mark)
            (x, _), (weights, _) = self._inputs
            self._step = self._kernel.begin(self._layer, x, self._routing, weights)
        self._step.compute_from(experts, slots, self._layer)
        self.experts += experts

    def merge_into(self, step: KernelStep) -> None:
        """Merge the outputs of the experts that the host computed into the GPU's computation."""
        if self.experts:
            step.main_step.compute_group([], [])  # some kernels send the routing with it
            step.main_step.merge_outputs(self._step, self.experts, self._engine.copy_to_device)


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
            share = HostShare(step, self._layers[id(step.layer)], self._engine)
            self._share.current = share
        return partial(share.compute, experts, slots)

    def combine(self, step: KernelStep) -> Tensor:
        """Return the sum of expert outputs of GPU and host: [tokens, hidden], in x's dtype."""
        share, self._share.current = self._share.current, None
        if share is not None:
            share.merge_into(step)
        return super().combine(step)
