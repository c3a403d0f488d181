"""A fused decoder layer for one token, in two OpenMP parallel regions.

The first region computes norm, attention, residual sum and second norm, up to the input of the MoE
block. It also chooses the experts if the router is of a known kind (blocks/router.py). The second
region computes the experts and the layer's output. If all chosen experts are resident, Python
computes nothing between the regions: after a group of experts has evicted the CPU caches, each
small operation takes as long as a matrix. A shared expert (blocks/mlp.py) has a region of its own,
which runs while missing experts are read. The result is bit for bit that of the accelerated modules
called one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.attention import (
    KeyValueView,
    OneTokenAttention,
    Positions,
    Style,
)
from greenroom.runtime.kernels.dense.batch_calls import BatchMemory, batch_calls
from greenroom.runtime.kernels.dense.blocks.few_tokens import call_for_tokens
from greenroom.runtime.kernels.dense.blocks.mlp import CompiledMlp, MlpOutput
from greenroom.runtime.kernels.dense.blocks.moe import MoeBlock
from greenroom.runtime.kernels.dense.blocks.router import CompiledRouter
from greenroom.runtime.kernels.dense.blocks.router_call import RouterCall
from greenroom.runtime.kernels.dense.module_check import ModuleCheck
from greenroom.runtime.kernels.dense.stored import thread_scratch
from greenroom.runtime.kernels.dense.token_calls import TokenCalls
from greenroom.runtime.kernels.launch import sequence
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library

# (experts module, x [1, H], index, weights [1, K], residual, shared) -> residual + (the experts'
# result + shared()), or without `shared`, if it is None
AddExperts = Callable[
    [nn.Module, Tensor, Tensor, Tensor, Tensor, Callable[[], Tensor] | None], Tensor
]


class TokenFields(NamedTuple):
    """Fields of a decoder layer's kernel calls that change from token to token.

    Each is (index of a kernel call, name of a field of its structure).
    """

    x: Sequence[tuple[int, str]]
    cos: Sequence[tuple[int, str]]
    sin: Sequence[tuple[int, str]]
    key: Sequence[tuple[int, str]]  # address of the token's own key
    value: Sequence[tuple[int, str]]
    tokens: Sequence[tuple[int, str]]


# (experts module, top_k, type of the routing weights)
ExpertsKey = tuple[nn.Module, int, torch.dtype]


class FusedDecoderLayer:
    """A decoder layer's compiled forward for one token: attention, norms, router and experts."""

    # Stages up to the choice: input norm, projections, attention, residual sum and second norm.
    token_fields = TokenFields(
        x=((0, "x"), (3, "x")),
        cos=((1, "cos"),),
        sin=((1, "sin"),),
        key=((1, "keys"),),
        value=((1, "values"),),
        tokens=((2, "context"),),
    )
    # All that depends on a token's KV cache.
    key_value_fields = (
        *((1, name) for name in ("keys", "values", "key_step", "value_step", "format")),
        *((2, name) for name in ("context", "keys", "key_step", "key_row")),
        *((2, name) for name in ("values", "value_step", "value_row", "format")),
    )

    def __init__(
        self,
        layer: nn.Module,
        attention: OneTokenAttention,
        names: tuple[str, str, str],
        styles: tuple[Style, Style],
        add_experts: AddExperts | None,
        kernels: str = "native",
    ) -> None:
        """Make a decoder layer's compiled forward for one token.

        names: the layer's names of its first norm, its second norm and the block (MLP or MoE) after
               the second norm
        styles: how each of the norms applies its weight, and its epsilon
        add_experts: computes the layer's experts and adds them to the residual
        kernels: products of encoded matrices: native, precise or rounded (matrix.py)
        """
        self._layer, self.attention = layer, attention
        parts: dict[str, Any] = dict(layer._modules)
        first, second, self._name = names
        self._block: nn.Module = parts[self._name]
        norms = parts[first], parts[second]
        self._parts_check = ModuleCheck()  # norms, attention and block
        for name in (first, second, self._attention_name(), self._name):
            self._parts_check.require_same(layer._modules, name, parts[name])
        for norm in norms:
            self._parts_check.require_weight(norm)
        for part in (*norms, attention.module):
            self._parts_check.require_no_hooks(part)
        self._parts_check.include(attention.check)
        self._norm_entry = kernel_entry("add_and_norm", attention.dtype)
        self._norm = library().structure("NormCall")
        self._input_norm, self._post_norm = (
            self._norm_call(norm.weight, style) for norm, style in zip(norms, styles, strict=True)
        )
        self._add_experts = add_experts
        self._moe = MoeBlock.of(self._block, attention.hidden, attention.dtype, kernels)
        self._computes_choice = self.router is not None and add_experts is not None
        self._local = threading.local()  # the thread's `TokenCalls`
        self.forward = layer_forward(self, layer)

    def _attention_name(self) -> str:
        return next(n for n, part in self._layer._modules.items() if part is self.attention.module)

    def _norm_call(self, weight: Tensor, style: Style) -> Any:
        """Make the constant part of a norm's call."""
        kind, eps = style
        columns = self.attention.hidden
        return self._norm(weight=weight.data_ptr(), columns=columns, style=kind, eps=eps)

    @property
    def router(self) -> CompiledRouter | None:
        """Return the compiled router of the layer's experts, or None."""
        return None if self._moe is None else self._moe.router

    @property
    def shared(self) -> CompiledMlp | None:
        """Return the compiled shared expert, whose output is added to that of the experts."""
        return None if self._moe is None else self._moe.shared

    def shared_output(self, x: Tensor) -> MlpOutput | None:
        """Return what computes the shared expert for x [tokens, hidden], if there is one."""
        return None if self.shared is None else MlpOutput(self.shared, x)

    def residual_sum(self, residual: int, tokens: int) -> sequence.Stage:
        """Make the kernel call that adds residuals [tokens, hidden] at an address to `y`."""
        columns = self.attention.hidden
        return self._norm_entry, self._norm(x=residual, columns=columns, more=tokens - 1)

    def stride(self, tokens: int) -> int:
        """Return how many bytes of scratch memory the kernel calls need per thread."""
        shared = self.shared.stride(tokens) if self.shared is not None else 0
        return max(self.attention.stride, shared)

    @property
    def _takes_choice(self) -> bool:
        """Tell whether the layer's experts are computed here, from a router's choice."""
        return self._moe is not None and self._add_experts is not None and self._moe.check.passes()

    def accepts(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Check that compiled code can compute a call of the decoder layer.

        The layer's submodules must be unchanged and without hooks, and x must be one token in
        the layer's dtype.
        """
        return self._parts_check.passes() and self.attention.accepts_inputs(
            x,
            kwargs.get("position_embeddings"),
            kwargs.get("attention_mask"),
            kwargs.get("past_key_values"),
        )

    def __call__(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Return a decoder layer's output for one token x [1, 1, hidden].

        Return None, and do nothing, if the KV cache cannot reserve space for the token.
        """
        view = self.attention.reserve(kwargs["past_key_values"])
        if view is None:
            return None
        positions = kwargs["position_embeddings"]
        moe = self._moe
        if self._computes_choice and moe is not None and moe.observed_check.passes():
            out = self._compute_token(x, positions, view)
            return out if out.dim() == x.dim() else out.view(x.shape)
        residual, state = (torch.empty(1, self.attention.hidden, dtype=x.dtype) for _ in range(2))
        work = self.workspace(view.tokens)
        sequence.run(self.stages(x, positions, view, residual, state, work))
        if moe is None or not self._takes_choice:
            return residual.view(x.shape) + self._block(state.view(x.shape))
        index, weights = moe.choose(state)
        shared = self.shared_output(state)
        return self.compute_from_choice(state, index, weights, residual, shared).view(x.shape)

    def _compute_token(self, x: Tensor, positions: Positions, view: KeyValueView) -> Tensor:
        """Compute a layer whose experts a compiled router chooses: `hidden` numbers."""
        calls: TokenCalls | None = getattr(self._local, "calls", None)
        if calls is None or not calls.fits(positions, view):
            calls = self._local.calls = TokenCalls(self, x, positions, view)
        index, weights = calls.run(x, positions, view.tokens)
        assert self.router is not None
        for hook in self.router.input_hooks:
            hook.observe(calls.state)
        return self.compute_from_choice(calls.state, index, weights, calls.residual, calls.shared)

    def replace_forward(self, forward: Callable[..., Any]) -> None:
        """Replace a decoder layer's forward by a function that wraps the present forward."""
        self.forward = self._layer.forward = forward

    @property
    def module(self) -> nn.Module:
        """Return the decoder layer's module."""
        return self._layer

    @property
    def check(self) -> ModuleCheck:
        """Return a check that a decoder layer's submodules, forward and hooks are unchanged."""
        assert self._moe is not None
        assert self.router is not None
        guard = ModuleCheck()
        guard.require_same(vars(self._layer), "forward", self.forward)
        for each in (self.router.check, self._moe.check, self._parts_check):
            guard.include(each)
        return guard

    def experts_key(self) -> ExpertsKey | None:
        """Return the key of the experts that a parallel region can compute with this layer.

        The key is (experts module, top_k, type of the gate weights). It is None if the layer has no
        experts or no compiled router.
        """
        if self._moe is None or self.router is None or self._add_experts is None:
            return None
        return self._moe.experts, self.router.top_k, self.router.dtype

    @property
    def kind(self) -> tuple[Any, ...] | None:
        """Return a key that is equal for decoder layers which accept the same calls.

        The key is None if one parallel region cannot compute the layer and its experts.
        """
        attention = self.attention
        kind = type(attention.module), attention.hidden, attention.width, attention.dtype
        return None if self.experts_key() is None else kind

    def workspace(self, tokens: int) -> Tensor:
        """Allocate memory for the kernel calls before a layer's experts.

        `tokens` is the number of tokens in the context.
        """
        # In addition to the attention's memory: two rows of the model's type.
        return self.attention.workspace(tokens, extra=self.attention.hidden)

    def stages_to_choice(
        self,
        x: Tensor,
        positions: Positions,
        view: KeyValueView,
        residual: Tensor,
        state: Tensor,
        work: Tensor,
    ) -> tuple[Sequence[sequence.Stage], RouterCall]:
        """Return a layer's kernel calls up to its choice of experts, and its `RouterCall`.

        The kernel calls write residual = x + attention and state = norm of residual, both [1,
        hidden]. All tensors passed must stay alive until the calls have ended.
        """
        assert self.router is not None
        thread_scratch(self.stride(1))  # grows before its address is used
        stages = self.stages(x, positions, view, residual, state, work)
        call = RouterCall(self.router, state.data_ptr())
        return (*stages, *call.stages), call

    def compute_from_choice(
        self,
        state: Tensor,
        index: Tensor,
        weights: Tensor,
        residual: Tensor,
        shared: Callable[[], Tensor] | None,
    ) -> Tensor:
        """Compute a layer's experts for some tokens; return the layer's output [tokens, hidden].

        state: the experts' input [tokens, hidden]
        index, weights: the chosen expert ids and their gate weights [tokens, top_k]
        shared: returns the shared expert's output [tokens, hidden], if the layer has one
        """
        assert self._moe is not None
        assert self._add_experts is not None
        return self._add_experts(self._moe.experts, state, index, weights, residual, shared)

    def accepts_batch(self, x: Tensor, kwargs: dict[str, Any], batched_cache: Any) -> bool:
        """Check that compiled code can compute a call for several tokens.

        Each is the next token of a sequence. `batched_cache` (`hf.kv.batch.BatchedCache`) has the
        sequences' KV caches.
        """
        positions = batched_cache.positions(kwargs["position_embeddings"])
        first = {"position_embeddings": positions[0], "past_key_values": batched_cache.caches[0]}
        return self.accepts(x[:, :1], {**kwargs, **first})  # the others are alike

    def reserve_batch(self, caches: Sequence[Any]) -> list[KeyValueView] | None:
        """Reserve space for one more token in each KV cache; None if the caches cannot."""
        views = [view for cache in caches if (view := self.attention.reserve(cache)) is not None]
        if views and len(views) < len(caches):
            raise AssertionError(
                f"{len(views)} of {len(caches)} KV caches have room for a token: all or none"
                " must have it"
            )
        return views or None

    def batch_forward(self, x: Tensor, kwargs: dict[str, Any], batched_cache: Any) -> Tensor | None:
        """Compute a decoder layer for one token of each of T sequences.

        Return the layer's output for x [1, T, hidden]. The experts of all tokens are computed in
        one step. Return None, and do nothing, if compiled code cannot compute the tokens.

        For every token, the result up to the router and in the experts is bit for bit that of a
        batch of one. For the rest of an MLP or MoE block, this is so only if `batched_cache.exact`
        is set.
        """
        if not self.accepts_batch(x, kwargs, batched_cache):
            return None
        views = self.reserve_batch(batched_cache.caches)
        if views is None:
            return None
        positions = batched_cache.positions(kwargs["position_embeddings"])
        total, state = torch.empty_like(x), torch.empty_like(x)
        memory = BatchMemory([self], [view.tokens for view in views])
        calls = batch_calls(self, x, positions, views, total, state, memory)
        moe = self._moe
        if moe is None or not self._computes_choice or not moe.unobserved_check.passes():
            sequence.run(calls.stages)
            return self._add_block(total, state, batched_cache.exact)
        assert self.router is not None
        choice = RouterCall(self.router, state.data_ptr(), len(views))
        sequence.run((*calls.stages, *choice.stages))
        shared = self.shared_output(state[0])
        out = self.compute_from_choice(state[0], *choice.result(), total[0], shared)
        return out.view(x.shape)

    def _add_block(self, total: Tensor, state: Tensor, exact: bool) -> Tensor:
        """Return total + block(state), [1, T, hidden]."""
        if self._moe is None or not self._takes_choice:
            return total + (call_for_tokens(self._block, state) if exact else self._block(state))
        row_by_row = exact or self.router is not None  # a compiled router takes one token
        rows = state[0].split(1) if row_by_row else (state[0],)
        chosen = [self._moe.choose(row) for row in rows]
        index, weights = (torch.cat(each) for each in zip(*chosen, strict=True))
        shared = self.shared_output(state[0])
        out = self.compute_from_choice(state[0], index, weights, total[0], shared)
        return out.view(state.shape)

    def stages(
        self,
        x: Tensor,
        positions: Positions,
        view: KeyValueView,
        total: Tensor,
        out: Tensor,
        work: Tensor,
    ) -> tuple[sequence.Stage, ...]:
        """Return kernel calls for total = x + attention(norm(x)), out = norm(total)."""
        attention = self.attention
        normed = work.data_ptr() + 4 * (work.numel() - attention.hidden)
        attended = normed + attention.hidden * x.itemsize
        copied = self._norm.from_buffer_copy
        input_norm, post_norm = copied(self._input_norm), copied(self._post_norm)
        input_norm.x, input_norm.out = x.data_ptr(), normed
        post_norm.x, post_norm.y = input_norm.x, attended
        post_norm.sum, post_norm.out = total.data_ptr(), out.data_ptr()
        stages = attention.stages(normed, positions, view, work, attended)
        return (self._norm_entry, input_norm), *stages, (self._norm_entry, post_norm)


def layer_forward(decoder_layer: FusedDecoderLayer, module: nn.Module) -> Callable[..., Any]:
    """Make a decoder layer's forward, compiled for one token."""
    original = type(module).forward

    @outside_graphs
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            return original(module, hidden_states, *args, **kwargs)
        if decoder_layer.accepts(hidden_states, kwargs):
            out = decoder_layer(hidden_states, kwargs)
            if out is not None:
                return out
        batched_cache = kwargs.get("batched_cache")
        if batched_cache is not None and batched_cache.one_token_each:
            out = decoder_layer.batch_forward(hidden_states, kwargs, batched_cache)
            if out is not None:
                return out
        return original(module, hidden_states, **kwargs)

    return forward
