"""Connect a model's experts modules to the code that reads and computes experts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from greenroom.core.plan import LOW
from greenroom.core.predictor import Ids
from greenroom.hf.attach.routers import ChangedRouters
from greenroom.hf.attach.shared import SharedModules
from greenroom.hf.checkpoint.pack.catalog import PackCatalog
from greenroom.hf.kv.cache import ROOM
from greenroom.hf.kv.single_token import append_token, remove_token
from greenroom.hf.memory.approximate import approximate_layer
from greenroom.hf.memory.budget import experts_per_token
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.mtp.layer import mtp_layer_of
from greenroom.hf.variants.routing import VariantRouting
from greenroom.runtime.cuda.calibrate import calibrate, trial_step
from greenroom.runtime.cuda.co_compute import CoComputeKernel
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.ids import to_host
from greenroom.runtime.cuda.multi_device import MultiDeviceKernel
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.forward import (
    BINDING,
    Binding,
    experts_with_residual,
    fuse_experts,
)
from greenroom.runtime.kernels.approximate import ApproximateKernel
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.cpu import CpuKernel
from greenroom.runtime.kernels.cpu_layer import layer_plan
from greenroom.runtime.kernels.dense.accelerate import Accelerated, accelerate
from greenroom.runtime.kernels.dense.stored import restore_weights
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.resident.decode_pass import DecodePass
from greenroom.runtime.kernels.resident.fused_layers import fuse_layers
from greenroom.runtime.kernels.segments import SegmentedExperts, SegmentedKernel
from greenroom.runtime.kernels.table import GPU_KERNEL, describe_kernel
from greenroom.runtime.probes.inputs import GateInputProbe
from greenroom.runtime.slots.tier import SlotPool

COMPILED_TOKENS = 64  # enough for kernels to take their code path for prompts

log = logging.getLogger(__name__)


class Bindings:
    """Connections of one model's experts modules to the kernel and the expert cache.

    The kernel computes experts, and the driver reads them from disk into slots of the cache.
    """

    def __init__(
        self,
        kernel: Kernel,
        modules: Sequence[nn.Module],
        setup: ModelSetup,
        engines: Sequence[Engine],
        driver: Driver,
    ) -> None:
        """Store what `bind` needs; `engines` are the GPUs that compute experts, empty on a CPU."""
        self.kernel, self.modules = kernel, modules
        self.accelerated: Accelerated | None = None
        self.shared: SharedModules | None = None
        self._routers: ChangedRouters | None = None
        self._graph: Any = None  # of a token on a GPU, where there is one
        self._setup, self._driver, self._slots = setup, driver, driver.slots
        self._engines, self._engine = engines, engines[0] if engines else Engine()
        # Redirects tokens to the experts of their variants; None: the model has none.
        self.variants = None if setup.variants is None else VariantRouting(setup.variants)
        # Slots of host memory that the host's processor computes from.
        self._slab = None if driver.host_memory is None else driver.host_memory.slots
        self.kernel_description = kernel.name  # the kernels in words, also after `detach`

    def bind(
        self,
        model: PreTrainedModel,
        inputs: GateInputProbe | None,
        on_routing: Callable[[int, Ids], None] | None,
    ) -> None:
        """Make every experts module of a model compute from the expert cache.

        `inputs` captures the hidden states that enter the routers. `on_routing(layer, experts)` is
        called with the experts that a layer's router chose, [tokens, top_k].
        """
        self._routers = ChangedRouters(model, self._setup.catalog, self._driver)
        if isinstance(self.kernel, CpuKernel):
            self.accelerated = accelerate(
                model, append_token, experts_with_residual, self.kernel.name
            )
        else:
            restore_weights(model)
        self.shared = SharedModules(model, self.modules, bool(self._engines))
        driver, kernel = self._driver, self._wrapped_kernel(model)
        for layer, module in enumerate(self.modules):
            experts = self._experts(layer, module)
            kernel.prepare(experts)
            if layer == 0:
                self._calibrate(kernel, experts)
            binding = Binding(
                driver,
                kernel,
                layer,
                experts,
                driver.scheduler.policy.weighs,
                self._setup.approximates_misses,
                any(each.counts_tokens for each in driver.scheduler.options),
                router_inputs=partial(inputs.take_if_captured, layer) if inputs else None,
                overlapped_work=self.shared.compute_early[layer],
                mark_computed=self._slots.mark_computed,
                on_routing=on_routing,
                read_choice=to_host
                if self.variants is None
                else partial(self.variants.read_choice, layer),
            )
            setattr(module, BINDING, binding)
        if self.accelerated is not None and self.variants is None:
            layers = self.accelerated.layers
            for fused in fuse_layers(model, layers, fuse_experts, remove_token):
                for module in list(model.modules()):
                    if (decode_pass := DecodePass.of(module, fused)) is not None:
                        self.accelerated.add_pass(module, decode_pass.forward)
        if self.kernel.name == GPU_KERNEL:
            self._replace_pass(model, inputs)
        self.kernel_description = describe_kernel(
            self.kernel, self.experts, self._setup.kernel_fallback
        )

    def _replace_pass(self, model: PreTrainedModel, inputs: GateInputProbe | None) -> None:
        """Let single tokens of a model's decoder be CUDA graphs, where they can be."""
        from greenroom.hf.attach.graph_pass import GraphPass  # which imports Triton

        room, top_k = max(self._setup.context, ROOM), experts_per_token(model)
        exact, hooks = self._setup.approximation is None, inputs.hooks if inputs else ()
        self._graph = GraphPass.of(model, self.modules, self._engine, top_k, room, exact, hooks)

    def _wrapped_kernel(self, model: PreTrainedModel) -> Kernel:
        """Wrap the kernel for several GPUs, for CPU and GPU, for segments or approximation."""
        setup, slots, kernel = self._setup, self._slots, self.kernel
        devices = len(setup.devices)
        pools = len(slots.pools) // devices
        if setup.catalog.layouts[0].segments:
            kernel = SegmentedKernel(kernel, pools)
        elif setup.approximates_misses:
            kernel = ApproximateKernel(kernel, pools)
        if devices > 1:
            targets = [engine.device for engine in self._engines] or [model.device] * devices
            kernel = MultiDeviceKernel(kernel, slots, targets)
        return kernel if self._slab is None else CoComputeKernel(kernel, self._engine, self._slab)

    def _experts(self, layer: int, module: nn.Module) -> LayerExperts:
        """Return a layer's experts, with the layout of their weights in cache slots."""
        setup, slots = self._setup, self._slots
        if setup.catalog.layouts[0].segments:
            return self._in_segments(layer, module)
        if setup.approximates_misses:
            return approximate_layer(setup, module, layer, self._first_pools)
        layout, numbers = setup.catalog.layouts[layer], None
        if setup.variants is not None:
            numbers = torch.from_numpy(setup.variants.originals[layer][:-1])
        return LayerExperts(module, layout, slots.pools[0], numbers=numbers)

    @property
    def _first_pools(self) -> Sequence[SlotPool]:
        """The pools of slots on the first device: exact experts or segments, then copies."""
        return self._slots.pools[:: len(self._setup.devices)]

    def _in_segments(self, layer: int, module: nn.Module) -> SegmentedExperts:
        """Return a layer's experts whose weights are in segments, in one slot each or in two."""
        catalog, pools = self._setup.catalog, self._first_pools
        layout = catalog.layouts[layer]
        if self._setup.split is None:
            return SegmentedExperts(module, layout, pools, 0)
        assert isinstance(catalog, PackCatalog)
        tops = pools[0 if self._setup.scope == "shared" else layer]
        cut = catalog.cuts[layer]
        of = [tops, pools[-1]] if cut < len(layout.segments) else [tops]
        return SegmentedExperts(module, layout, of, cut)

    def _calibrate(self, kernel: Any, experts: LayerExperts) -> None:
        """Measure how fast CPU and GPU compute an expert; warn if the GPU kernel cannot.

        With `--co-compute`, the scheduler divides missing experts between CPU and GPU by these
        times until it has measured steps of its own. Otherwise nothing is measured.
        """
        if self._slab is not None:
            costs = calibrate(kernel, experts, self._engine, self._slots, self._slab)
            for option in self._driver.scheduler.options:
                option.calibrated(costs)
        if self.kernel.name == GPU_KERNEL:
            from greenroom.runtime.kernels.triton import fallback_reason

            if (reason := fallback_reason(experts)) is not None:
                log.warning(
                    "--kernels triton cannot compute these experts (%s): the slower eager kernels"
                    " compute them on the GPU",
                    reason,
                )

    @property
    def experts(self) -> list[LayerExperts]:
        """Return every MoE layer's experts, with the layout of their weights in the cache."""
        return [getattr(module, BINDING).experts for module in self.modules]

    @property
    def has_eight_bit_inputs(self) -> bool:
        """Return whether compiled kernels round the inputs of any experts to 8 bits."""
        kernel = self.kernel
        if not isinstance(kernel, CpuKernel):
            return False
        plans = [layer_plan(each, kernel.name) for each in self.experts if kernel.supports(each)]
        return any(1 in (plan.up_planes, plan.down_planes) for plan in plans)

    def batch_invariant(self) -> AbstractContextManager[None]:
        """Return a context in which batching does not change a token's result.

        Only CPU kernels guarantee this; with other kernels the context has no effect.
        """
        return (
            self.kernel.batch_invariant() if isinstance(self.kernel, CpuKernel) else nullcontext()
        )

    def is_token_wise(self, model: PreTrainedModel) -> bool:
        """Return whether compiled code computes all layers, independently for each token."""
        layers = model.config.get_text_config().num_hidden_layers
        layers += mtp_layer_of(model) is not None
        compiled = 0 if self.accelerated is None else self.accelerated.counts.get("layer", 0)
        return bool(compiled == layers) and not any(
            experts.fallback_reason for experts in self.experts
        )

    @property
    def reads_in_place(self) -> bool:
        """Return whether compiled attention computes single tokens in all quantised layers."""
        compiled = 0 if self.accelerated is None else self.accelerated.counts.get("attention", 0)
        return compiled >= sum(layer.decoded > 0 for layer in self._setup.keys_values.layers)

    def compile(self, top_k: int) -> None:
        """Compile the expert kernels now, by trial computations of 1 and of 64 tokens.

        `top_k` is the number of experts that a token uses in a layer.
        """
        binding: Binding = getattr(self.modules[0], BINDING)
        kernel = binding.kernel
        calls: list[tuple[Any, ...]] = [([0], [0])]
        if self._setup.copies is not None:
            calls.append(([0], [len(self._setup.devices)], LOW))  # the first slot of copies
        for tokens in (1, COMPILED_TOKENS):
            for arguments in calls:
                step = trial_step(kernel, binding.experts, self._engine, tokens)
                kernel.compute_group(step, *arguments)
                kernel.combine(step)
        if self._graph is not None:
            self._graph.compile()
        if binding.token_launches is not None:
            x, weights = (
                torch.zeros(1, n, dtype=binding.experts.dtype, device=self._engine.device)
                for n in (binding.experts.hidden, top_k)
            )
            index = torch.arange(top_k, device=self._engine.device)[None]
            launches = binding.token_launches.of(x, index, weights)
            for _ in range(2):  # the second call needs more kernels
                launches.start(x, index, weights)

    def check_weights(self) -> None:
        """Let the graph of a token follow weights that were replaced since the last request."""
        if self._graph is not None:
            self._graph.check_weights()

    def detach(self) -> None:
        """Disconnect all experts modules and remove compiled layers; a second call does nothing."""
        for module in self.modules:
            if hasattr(module, BINDING):
                delattr(module, BINDING)
        for part in (self.shared, self.accelerated, self._routers, self._graph):
            if part is not None:
                part.detach()
        self._graph = None
