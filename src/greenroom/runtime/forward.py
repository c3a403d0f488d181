"""The forward function of streamed experts, which replaces that of a model's experts modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.core.gates import expert_tail_weights
from greenroom.core.predictor import Ids, Inputs, LayerRouting
from greenroom.errors import ClosedError
from greenroom.runtime.cuda.engine import device_errors
from greenroom.runtime.cuda.ids import to_host
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.decoder import ExpertsKey
from greenroom.runtime.kernels.resident.experts import ResidentExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.token_experts import ThreadTokenExperts
from greenroom.runtime.no_gradient import without_gradient
from greenroom.runtime.slots.resident_tables import SlotTables
from greenroom.runtime.token_step import token_step

BINDING = "_greenroom"  # attribute of an experts module: its Binding

ReadChoice = Callable[[Tensor, Tensor | None], tuple[Ids, Any]]


@dataclass(frozen=True, slots=True)
class Binding:
    """The driver, the kernel and the callbacks with which one experts module computes."""

    driver: Driver
    kernel: Any  # one of runtime.kernels.KERNELS
    layer: int
    experts: Any  # kernels.LayerExperts
    uses_weights: bool  # whether the policy uses gate weights
    approximates: bool  # whether misses may be approximated, by their gate weights
    counts_tokens: bool  # whether an option needs the number of tokens that chose an expert
    router_inputs: Callable[[bool], Inputs | None] | None  # the last inputs of the layer's router
    overlapped_work: Callable[[], object]  # work to do while the step waits for experts
    mark_computed: Callable[[Sequence[int]], None] | None  # see `SlotPool.mark_computed`
    on_routing: Callable[[int, Ids], None] | None  # called with the layer and the chosen experts
    # A router's choices and gate weights on the host; redirected where the model has variants.
    read_choice: ReadChoice = to_host
    # By tokens, top_k and the weights' type; None if the layer has no such kernel.
    resident: dict[tuple[int, int, torch.dtype], ResidentExperts | None] = field(
        default_factory=dict
    )
    token_experts: ThreadTokenExperts = field(init=False)
    # Of a kernel that reads the router's choice on a device; None: the host reads it first.
    token_launches: Any = field(init=False)

    def __post_init__(self) -> None:
        token_experts = ThreadTokenExperts(self.kernel, self.experts)
        object.__setattr__(self, "token_experts", token_experts)
        table, launches = self.driver.changes.table, None
        decides_on_host = self.uses_weights or self.approximates or self.counts_tokens
        if table is not None and not decides_on_host and self.read_choice is to_host:
            first = self.driver.pieces.offsets[self.layer]
            launches = self.kernel.token_launches(self.experts, table, int(first))
        object.__setattr__(self, "token_launches", launches)

    def resident_experts(
        self, tokens: int, top_k: int, weights: torch.dtype
    ) -> ResidentExperts | None:
        """Return the kernel for the experts of up to so many tokens.

        It is made at its first use. `weights` is the dtype of the gate weights. Returns None if the
        layer has no such kernel.
        """
        key = tokens, top_k, weights
        if key not in self.resident:
            one = ResidentExperts.of(self.kernel, self.experts, *key)
            reads_router = self.read_choice is to_host  # as this kernel does
            self.resident[key] = one if reads_router else None
        return self.resident[key]


@outside_graphs
def experts_forward(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Compute the weighted sum of the chosen experts' outputs, as an experts module's forward.

    hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, top_k] -> [tokens,
    hidden]. Resident experts are computed first, the others in groups as they arrive from disk. The
    sum over a token's experts has a fixed order, so the groups do not change a bit of the result.

    Raises ClosedError if Greenroom is not attached to the model, StoreError if an expert cannot be
    read. A backward pass through the result raises UnsupportedCall.
    """
    if not torch.is_grad_enabled():
        return _forward(module, hidden_states, top_k_index, top_k_weights)
    with torch.no_grad():
        result = _forward(module, hidden_states, top_k_index, top_k_weights)
    if hidden_states.requires_grad or top_k_weights.requires_grad:
        return without_gradient(result, hidden_states, top_k_weights)
    return result


def _forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    if hidden_states.is_meta:  # shapes only: the memory of activations is being computed
        return torch.empty_like(hidden_states)
    binding: Binding | None = getattr(module, BINDING, None)
    if binding is None:
        raise ClosedError(
            "Greenroom is not attached to this model, so its experts are not in memory: load the"
            " model again, or read all experts into memory with model.greenroom.materialize()"
        )
    with device_errors() if hidden_states.is_cuda else contextlib.nullcontext():
        return _step(binding, hidden_states, top_k_index, top_k_weights)


def experts_with_residual(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    residual: Tensor,
    shared: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Return an MoE layer's expert output plus a residual, on a CPU and without gradients.

    Shapes are those of `experts_forward`; the residual and the result are [tokens, hidden], or
    [1, tokens, hidden]. `shared` computes the output of a shared expert [tokens, hidden] at its
    first call, and returns it; it is added to that of the experts before the residual is.
    """
    if shared is not None:
        added = _with_shared(module, hidden_states, top_k_index, top_k_weights, shared)
        return residual + added.view(residual.shape)
    binding: Binding | None = getattr(module, BINDING, None)
    if binding is None:
        return residual + experts_forward(module, hidden_states, top_k_index, top_k_weights)
    done = _resident_sum(binding, hidden_states, top_k_index, top_k_weights, lambda: residual)
    if done is not None:
        return done
    return _step(binding, hidden_states, top_k_index, top_k_weights, residual)


def _with_shared(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    shared: Callable[[], Tensor],
) -> Tensor:
    """Return the sum of routed and shared experts; shared ones are computed in waiting time."""
    binding: Binding | None = getattr(module, BINDING, None)
    if binding is None:
        return experts_forward(module, hidden_states, top_k_index, top_k_weights) + shared()
    done = _resident_sum(binding, hidden_states, top_k_index, top_k_weights, shared)
    if done is not None:
        return done
    out = _step(binding, hidden_states, top_k_index, top_k_weights, overlapped_work=shared)
    return out + shared()


def _resident_sum(
    binding: Binding,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    added: Callable[[], Tensor],
) -> Tensor | None:
    """Return one token's sum over resident experts plus `added()`; None if some are missing."""
    if not binding.driver.all_have_slots:
        return None
    one = binding.resident_experts(1, top_k_index.shape[-1], top_k_weights.dtype)
    if one is None:
        return None
    ask = partial(binding.driver.resident_steps, (binding.layer,))
    return one(ask, hidden_states, top_k_index, top_k_weights, added())


class FusedExperts:
    """Experts of consecutive MoE layers, computed for few tokens in one OpenMP parallel region."""

    def __init__(self, bindings: Sequence[Binding], keys: Sequence[ExpertsKey]) -> None:
        self._bindings, self._keys = bindings, keys
        self._driver = bindings[0].driver
        self._layers = [binding.layer for binding in bindings]
        self._kernels: dict[int, Sequence[ResidentExperts] | None] = {}

    @property
    def all_have_slots(self) -> bool:
        """Check whether the cache has a slot for every expert of the model."""
        return self._driver.all_have_slots

    def layer_experts(self, tokens: int) -> Sequence[ResidentExperts] | None:
        """Return each layer's kernel for up to so many tokens' experts; None if one has none."""
        if tokens not in self._kernels:
            kernels = [
                one
                for binding, (_, top_k, dtype) in zip(self._bindings, self._keys, strict=True)
                if (one := binding.resident_experts(tokens, top_k, dtype)) and one.accepts(dtype)
            ]
            self._kernels[tokens] = kernels if len(kernels) == len(self._keys) else None
        return self._kernels[tokens]

    @cached_property
    def first_pieces(self) -> Sequence[int]:
        """The model-wide id of each layer's first expert."""
        offsets = self._driver.pieces.offsets
        return [int(offsets[layer]) for layer in self._layers]

    def resident_steps(self, first: int, find: Callable[[SlotTables], Sequence[int]]) -> int | None:
        """Compute consecutive layers from `first` on, while all chosen experts are resident.

        `first` is an index into this object's layers. `Driver.resident_steps` explains `find` and
        the result.
        """
        return self._driver.resident_steps(self._layers[first:], find)


def fuse_experts(keys: Sequence[ExpertsKey]) -> FusedExperts | None:
    """Fuse the experts modules of consecutive layers for the computation of one token.

    Each key is (experts module, top_k, dtype of gate weights). Returns None unless all modules are
    attached to Greenroom with the same driver.
    """
    bindings: list[Binding] = [
        binding for module, _, _ in keys if (binding := getattr(module, BINDING, None)) is not None
    ]
    if len(bindings) < len(keys) or len({id(each.driver) for each in bindings}) != 1:
        return None
    return FusedExperts(bindings, keys)


def _step(
    binding: Binding,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    residual: Tensor | None = None,
    overlapped_work: Callable[[], object] | None = None,
) -> Tensor:
    work = overlapped_work or binding.overlapped_work
    if binding.token_launches is not None and len(hidden_states) == 1:
        launches = binding.token_launches.of(hidden_states, top_k_index, top_k_weights)
        if launches is not None:
            return token_step(binding, launches, hidden_states, top_k_index, top_k_weights)
    needs_weights = binding.uses_weights or binding.approximates
    chosen, weights = binding.read_choice(top_k_index, top_k_weights if needs_weights else None)
    if len(chosen) == 1:
        chosen = chosen.copy()  # a compiled router reuses the memory
    if binding.on_routing is not None:
        binding.on_routing(binding.layer, chosen)

    def observe_routing(inputs: bool) -> LayerRouting:
        captured = binding.router_inputs(inputs) if binding.router_inputs else None
        return LayerRouting(binding.layer, chosen, inputs=captured)

    if len(chosen) == 1 and weights is None and not binding.counts_tokens:
        token = binding.token_experts.of(chosen.shape[1], top_k_weights.dtype)
        if token is not None and token.begin(chosen, hidden_states, top_k_weights, residual):
            binding.driver.step(
                binding.layer,
                token.experts,
                token.compute_group,
                observe_routing=observe_routing,
                overlapped_work=work,
            )
            return token.result
    routing, kernel = Routing.of(chosen, binding.experts.num_experts), binding.kernel
    step = kernel.begin(binding.experts, hidden_states, routing, top_k_weights)
    step.residual = residual
    read: list[int] = []  # slots that the next mark is behind

    def compute_group(experts: Any, slots: Any, *part: int) -> None:
        kernel.compute_group(step, experts.tolist(), slots.tolist(), *part)
        if binding.mark_computed is not None:
            read.extend(slots.tolist())
            binding.mark_computed(read)
            if not part:  # a bottom segment may be joined with its top, which is read again then
                read.clear()

    def prepare_host_job(experts: Any, slots: Any) -> Callable[[], None]:
        return kernel.host_job(step, experts.tolist(), slots.tolist())

    co_compute = kernel.host_job is not None
    rows, sums = (None, None) if weights is None else routing.counts_and_weights(weights)
    if rows is None and (co_compute or binding.counts_tokens):
        rows = routing.row_counts()
    binding.driver.step(
        binding.layer,
        routing.experts,
        compute_group,
        rows,
        sums,
        tail_weights=expert_tail_weights(chosen, weights, routing.experts)
        if binding.approximates
        else None,
        observe_routing=observe_routing,
        overlapped_work=work,
        prepare_host_job=prepare_host_job if co_compute else None,
    )
    return kernel.combine(step)
