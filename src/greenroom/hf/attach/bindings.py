"""What a model's experts modules are bound to: the kernel, the layers' places, what runs beside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from greenroom.core.plan import LOW
from greenroom.core.predictor import Ids
from greenroom.hf.attach.shared import SharedModules
from greenroom.hf.checkpoint.pack.catalog import PackCatalog
from greenroom.hf.kv.cache import append_token, remove_token
from greenroom.hf.memory.approximate import approximate_layer
from greenroom.hf.memory.setup import ModelSetup
from greenroom.runtime.cuda.both import CoComputeKernel
from greenroom.runtime.cuda.calibrate import calibrate, trial_step
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.spread import SpreadKernel
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.forward import (
    BINDING,
    Binding,
    experts_of_layers,
    experts_onto,
)
from greenroom.runtime.kernels.approximate import ApproximateKernel
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.cpu import CpuKernel
from greenroom.runtime.kernels.dense.accelerate import Accelerated, accelerate
from greenroom.runtime.kernels.dense.stored import restore_weights
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.resident.fused_layers import fuse_layers
from greenroom.runtime.kernels.segments import SegmentedExperts, SegmentedKernel
from greenroom.runtime.kernels.table import GPU_KERNEL, describe_kernel
from greenroom.runtime.probes.inputs import GateInputs

COMPILED_TOKENS = 64  # enough for the kernels to take the way of a prompt

log = logging.getLogger(__name__)


class Bindings:
    """The experts modules of one model, from `bind` to `detach`."""

    def __init__(
        self,
        kernel: Kernel,
        modules: Sequence[nn.Module],
        setup: ModelSetup,
        engines: Sequence[Engine],
        driver: Driver,
    ) -> None:
        """`engines` are the GPUs, if there are any."""
        self.kernel, self.modules = kernel, modules
        self.accelerated: Accelerated | None = None
        self.shared: SharedModules | None = None
        self._setup, self._driver, self._slots = setup, driver, driver.slots
        self._engines, self._engine = engines, engines[0] if engines else Engine()
        # Slots of host memory that the host's processor computes from.
        self._slab = None if driver.between is None else driver.between.slots
        self.described = kernel.name  # what computes the experts, or did so before `detach`

    def bind(
        self,
        model: PreTrainedModel,
        inputs: GateInputs | None,
        chosen: Callable[[int, Ids], None] | None,
    ) -> None:
        """Give every module what it needs to be served. `inputs` are those of the routers, `chosen`
        is told what each step's tokens chose."""
        if isinstance(self.kernel, CpuKernel):
            self.accelerated = accelerate(model, append_token, experts_onto, self.kernel.rounded)
        else:
            restore_weights(model)
        self.shared = SharedModules(model, self.modules)
        driver, computing = self._driver, self._computing(model)
        for layer, module in enumerate(self.modules):
            experts = self._experts(layer, module)
            computing.prepare(experts)
            if layer == 0:
                self._begin(computing, experts)
            binding = Binding(
                driver,
                computing,
                layer,
                experts,
                driver.scheduler.policy.weighs,
                self._setup.approximation is not None,
                inputs=partial(inputs.latest, layer) if inputs else None,
                meanwhile=self.shared.meanwhile[layer],
                computed=self._slots.computed,
                chosen=chosen,
            )
            setattr(module, BINDING, binding)
        if self.accelerated is not None:
            fuse_layers(model, self.accelerated.layers, experts_of_layers, remove_token)
        self.described = describe_kernel(self.kernel, self.experts)

    def _computing(self, model: PreTrainedModel) -> Kernel:
        """The kernel, or what has it compute on several devices, on the host too, or in parts."""
        setup, slots, kernel = self._setup, self._slots, self.kernel
        if (devices := len(setup.devices)) > 1:
            there = [engine.device for engine in self._engines] or [model.device] * devices
            kernel = SpreadKernel(kernel, slots, there)
        if self._slab is not None:
            return CoComputeKernel(kernel, self._engine, self._slab)
        if setup.catalog.layouts[0].segments:
            return SegmentedKernel(kernel, len(slots.pools))
        return (
            ApproximateKernel(kernel, len(slots.pools))
            if setup.approximation is not None
            else kernel
        )

    def _experts(self, layer: int, module: nn.Module) -> LayerExperts:
        """A layer's experts as they lie in the slots."""
        setup, slots = self._setup, self._slots
        if setup.catalog.layouts[0].segments:
            return self._in_segments(layer, module)
        if setup.approximation is not None:
            return approximate_layer(setup, module, layer, slots)
        return LayerExperts(module, setup.catalog.layouts[layer], slots.pools[0])

    def _in_segments(self, layer: int, module: nn.Module) -> SegmentedExperts:
        """A layer whose experts lie in segments, all in one slot or in those of two parts."""
        catalog, pools = self._setup.catalog, self._slots.pools
        layout = catalog.layouts[layer]
        if self._setup.split is None:
            return SegmentedExperts(module, layout, pools, 0)
        assert isinstance(catalog, PackCatalog)
        tops = pools[0 if self._setup.scope == "shared" else layer]
        cut = catalog.cuts[layer]
        of = [tops, pools[-1]] if cut < len(layout.segments) else [tops]
        return SegmentedExperts(module, layout, of, cut)

    def _begin(self, computing: Any, experts: LayerExperts) -> None:
        """Measure on the first layer what the scheduler shares misses out by (from there on it sees
        for itself), and say what a GPU's kernel leaves to the slower, eager one."""
        if self._slab is not None:
            costs = calibrate(computing, experts, self._engine, self._slots, self._slab)
            for option in self._driver.scheduler.options:
                option.calibrated(costs)
        if self.kernel.name == GPU_KERNEL:
            from greenroom.runtime.kernels.triton import fallback_reason

            if (reason := fallback_reason(experts)) is not None:
                log.warning("%s: the kernels eager compute them, on the GPU too", reason)

    @property
    def experts(self) -> list[LayerExperts]:
        """Every layer's."""
        return [getattr(module, BINDING).experts for module in self.modules]

    def batch_invariant(self) -> AbstractContextManager[None]:
        """For the while a token's experts give the bits that they give it alone, whoever is beside
        it in a pass."""
        return self.kernel.sequential() if isinstance(self.kernel, CpuKernel) else nullcontext()

    def is_token_wise(self, model: PreTrainedModel) -> bool:
        """Has every layer a way of its own for single tokens, whatever is beside them in a pass?"""
        layers = model.config.get_text_config().num_hidden_layers
        known = 0 if self.accelerated is None else self.accelerated.counts.get("layer", 0)
        return bool(known == layers) and not any(
            experts.fallback_reason for experts in self.experts
        )

    def compile(self) -> None:
        """Have the kernels compiled now, for one token and for many."""
        binding: Binding = getattr(self.modules[0], BINDING)
        several = len(self._setup.devices) > 1
        kernel = self.kernel if self._engines or several else binding.kernel
        ways: list[tuple[Any, ...]] = [([0], [0])]
        if self._setup.copies is not None:
            ways.append(([0], [1], LOW))
        for tokens in (1, COMPILED_TOKENS):
            for way in ways:
                step = trial_step(kernel, binding.experts, self._engine, tokens)
                kernel.compute_group(step, *way)
                kernel.combine(step)

    def detach(self) -> None:
        """Take out what was put in; a second call does nothing."""
        for module in self.modules:
            if hasattr(module, BINDING):
                delattr(module, BINDING)
        for part in (self.shared, self.accelerated):
            if part is not None:
                part.detach()
