"""Consecutive decoder layers for a few tokens, in one OpenMP parallel region.

If there is a slot for every expert, nothing is decided between two layers, and Python between them
takes a tenth of the time of reading the weights. So the forward of the first layer also computes
the layers that follow, and these return their finished outputs. A first pass observes whether each
layer gets exactly the output of the one before. The results are bit for bit those of the layers one
by one. If torch must choose a layer's experts (dense/blocks/router.py), or a chosen expert is not
loaded yet, the region ends at that layer and starts again after it.

The tokens of a pass are one, or one of each of several sequences (`batched_cache`). Those of a
draft are of one sequence, whose KV cache then occurs several times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.accelerate import FEW
from greenroom.runtime.kernels.dense.attention import KeyValueView
from greenroom.runtime.kernels.dense.decoder import ExpertsKey, FusedDecoderLayer
from greenroom.runtime.kernels.dense.module_check import ModuleCheck
from greenroom.runtime.kernels.resident.launch_plan import LaunchPlan
from greenroom.runtime.slots.resident_tables import SlotTables

if TYPE_CHECKING:
    from greenroom.runtime.forward import FusedExperts

# An argument of a layer, in passes that change hidden states between two layers.
BETWEEN_LAYERS = "changes_between_layers"

Forward = Callable[..., Any]
RemoveToken = Callable[[Any, int], None]


def fuse_layers(
    model: nn.Module,
    layers: Mapping[nn.Module, FusedDecoderLayer],
    make_experts: Callable[[Sequence[ExpertsKey]], FusedExperts | None],
    remove_token: RemoveToken,
) -> list[FusedLayers]:
    """Fuse consecutive decoder layers of one kind in each module list of a model.

    layers: the model's fused decoder layers, by module
    make_experts: makes the experts of consecutive layers; None if they cannot be computed in one
                  parallel region
    remove_token: removes a layer's last token from a KV cache
    """

    def kind(layer: nn.Module) -> Any:
        return layers[layer].kind if layer in layers else None

    fused = []
    for each in [part for part in model.modules() if isinstance(part, nn.ModuleList)]:
        for alike, run in groupby(each, kind):
            decoder_layers = [layers[layer] for layer in run] if alike is not None else []
            if len(decoder_layers) > 1:
                keys = [
                    key
                    for decoder_layer in decoder_layers
                    if (key := decoder_layer.experts_key()) is not None
                ]
                if (experts := make_experts(keys)) is not None:
                    fused.append(FusedLayers(decoder_layers, experts, remove_token))
    return fused


class _Pass(threading.local):
    """A thread's state in the present pass."""

    def __init__(self) -> None:
        self.before: tuple[int, Tensor, Tensor, dict[str, Any]] | None = None
        self.outputs_ahead: tuple[dict[str, Any], Sequence[Tensor]] | None = None
        self.plans: dict[bool, LaunchPlan] = {}  # for one token, and for several
        self.is_watched = False
        self.last_token: LastToken | None = None


class LastToken(NamedTuple):
    """Inputs of the first layer for a token, and the output of the last one."""

    x: Tensor
    kwargs: dict[str, Any]
    output: Tensor


class FusedLayers:
    """Forwards that compute consecutive decoder layers of one kind together."""

    def __init__(
        self,
        decoder_layers: Sequence[FusedDecoderLayer],
        experts: FusedExperts,
        remove_token: RemoveToken,
    ) -> None:
        self._decoder_layers, self._experts, self._remove_token = (
            tuple(decoder_layers),
            experts,
            remove_token,
        )
        self._in_order: bool | None = None  # not known yet
        self._check: ModuleCheck | None = None
        self._pass = _Pass()
        for number, decoder_layer in enumerate(decoder_layers):
            decoder_layer.replace_forward(self._forward(number, decoder_layer.forward))

    def _forward(self, number: int, original: Forward) -> Forward:
        """Make a layer's forward; `original` computes the layer by itself."""

        @outside_graphs
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not args and BETWEEN_LAYERS not in kwargs:
                out = self(number, hidden_states, kwargs)
                if out is not None:
                    return out
                if self._pass.before is not None:
                    return self._observe(number, original, hidden_states, kwargs)
            return original(hidden_states, *args, **kwargs)

        return forward

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Return the modules of the fused layers."""
        return tuple(each.module for each in self._decoder_layers)

    @property
    def is_ready(self) -> bool:
        """Tell whether the order of layers is known, and every expert has a slot."""
        return self._in_order is True and self._experts.all_have_slots

    def watch(self, run: Callable[[], Any]) -> tuple[Any, LastToken | None]:
        """Run a function; return its result, and the token that it computed in all layers.

        The token is None if not all layers were computed in regions.
        """
        state = self._pass
        state.is_watched, state.last_token = True, None
        try:
            return run(), state.last_token
        finally:
            state.is_watched, state.last_token = False, None  # a token keeps its KV cache alive

    def __call__(self, number: int, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the output of decoder layer `number` for tokens x [1, tokens, hidden].

        The call for layer 0 computes as many layers as possible; later calls return their finished
        outputs. Return None if the layer must compute its output itself.
        """
        state = self._pass
        if number == 0:
            return self._begin(x, kwargs)
        outputs_ahead, state.outputs_ahead = state.outputs_ahead, None
        if outputs_ahead is None or number >= len(outputs_ahead[1]):
            return None
        expected_kwargs, outputs = outputs_ahead
        if x is not outputs[number - 1] or not _same(kwargs, expected_kwargs):
            self._in_order = False
            self._forget(_caches(expected_kwargs), number, len(outputs))
            return None
        if number < len(outputs) - 1:
            state.outputs_ahead = outputs_ahead
        return outputs[number]

    def _begin(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Compute as many layers as possible; return the first one's output."""
        state = self._pass
        state.before = state.outputs_ahead = None
        if self._in_order is False or not self._experts.all_have_slots:
            return None
        if self._in_order is None:
            state.before = -1, x, x, kwargs  # observe this pass
            return None
        outputs = self.compute(x, kwargs)
        if outputs is None:
            return None
        each = outputs.unbind()
        if state.is_watched and len(each) == len(self._decoder_layers) and x.shape[1] == 1:
            state.last_token = LastToken(x, kwargs, each[-1])
        if len(each) > 1:
            state.outputs_ahead = kwargs, each
        return each[0]

    def compute(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Compute as many layers as possible for tokens x [1, tokens, hidden].

        kwargs: the other arguments of a layer

        Returns the outputs of the computed layers [layers, 1, tokens, hidden]; None if there are
        none.
        """
        if not self._is_unchanged() or not self._accepts(0, x, kwargs):
            return None
        tokens = _Tokens(self._decoder_layers, self._experts, self._pass, x, kwargs)
        try:
            while tokens.next < len(self._decoder_layers) and tokens.advance():
                pass
        finally:
            self._forget(tokens.caches, tokens.next, len(tokens.views))
        return tokens.outputs[: tokens.next] if tokens.next else None

    def _accepts(self, number: int, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Check that compiled code can compute a call of decoder layer `number`."""
        layer, batched = self._decoder_layers[number], kwargs.get("batched_cache")
        if batched is None:
            return layer.accepts(x, kwargs)
        contiguous = all(each.is_contiguous() for each in (x, *kwargs["position_embeddings"]))
        return (
            contiguous
            and batched.one_token_each
            and x.shape[1] <= FEW
            and layer.accepts_batch(x, kwargs, batched)
        )

    def _observe(self, number: int, original: Forward, x: Tensor, kwargs: dict[str, Any]) -> Any:
        """Compute layer `number` by itself; check that its x is the last layer's output."""
        before, self._pass.before = self._pass.before, None
        assert before is not None
        last, expected, copy, expected_kwargs = before
        if last != number - 1 or not self._accepts(number, x, kwargs):
            return original(x, **kwargs)
        if x is not expected or not torch.equal(x, copy) or not _same(kwargs, expected_kwargs):
            self._in_order = False
            return original(x, **kwargs)
        out = original(x, **kwargs)
        if number < len(self._decoder_layers) - 1:
            self._pass.before = number, out, out.clone(), kwargs
        else:
            self._in_order = self._experts.layer_experts(1) is not None
        return out

    def _is_unchanged(self) -> bool:
        """Are all layers unchanged since the first check, and without hooks?"""
        if self._check is None:
            check = ModuleCheck()
            for decoder_layer in self._decoder_layers:
                check.include(decoder_layer.check)
            if not check.passes():
                return False
            self._check = check
        return self._check.passes()

    def _forget(self, caches: Sequence[Any], first: int, end: int) -> None:
        """Remove a token from each KV cache in layers first .. end - 1."""
        for decoder_layer in self._decoder_layers[first:end]:
            for cache in caches:
                self._remove_token(cache, decoder_layer.attention.module.layer_idx)


def _same(kwargs: dict[str, Any], expected_kwargs: dict[str, Any]) -> bool:
    """Do two layers get the same inputs besides hidden states?"""
    names = ("position_embeddings", "past_key_values", "attention_mask", "batched_cache")
    return all(kwargs.get(name) is expected_kwargs.get(name) for name in names)


def _caches(kwargs: dict[str, Any]) -> Sequence[Any]:
    """Return the KV cache of each token that a layer gets."""
    batched = kwargs.get("batched_cache")
    return [kwargs["past_key_values"]] if batched is None else batched.caches


class _Tokens:
    """Tokens of a pass on their way through the layers.

    next:    number of the next layer to compute
    caches:  each token's KV cache
    outputs: the layers' outputs [layers, 1, tokens, hidden]
    views:   each layer's keys and values with these tokens, one for each token
    """

    def __init__(
        self,
        decoder_layers: Sequence[FusedDecoderLayer],
        experts: FusedExperts,
        state: _Pass,
        x: Tensor,
        kwargs: dict[str, Any],
    ) -> None:
        self._decoder_layers, self._experts, self._pass = decoder_layers, experts, state
        self._x, self._positions = x, kwargs["position_embeddings"]
        self.next, self.views = 0, list[list[KeyValueView]]()
        self.caches = _caches(kwargs)
        self._used: LaunchPlan | None = None
        self._memory: Tensor  # of outputs, for all rows of the plan

    @property
    def outputs(self) -> Tensor:
        return self._memory[:, :, : self._x.shape[1]]

    def advance(self) -> bool:
        """Compute the next decoder layers in one region, and one more layer in Python.

        Of that layer, Python computes what follows the choice of experts. Return False if no layer
        can be computed.
        """
        done = self._experts.resident_steps(self.next, self._run_region)
        if done is None or (plan := self._used) is None:
            return False
        self.next += done
        if self.next < len(self._decoder_layers):
            # The next token reuses the plan's memory.
            count = self._x.shape[1]
            index, weights = (each.clone() for each in plan.choice(self.next))
            decoder_layer = self._decoder_layers[self.next]
            shared = plan.shared(self.next)
            out = decoder_layer.compute_from_choice(
                plan.state[:count], index, weights, plan.residual[:count], shared
            )
            self.outputs[self.next].copy_(out.view(self._x.shape))
            self.next += 1
        return True

    def _run_region(self, tables: SlotTables) -> Sequence[int]:
        """Compute the next layers; return how many experts each had, up to one with none."""
        if not self.views and not self._reserve():
            return []
        plan = self._plan()  # again after Python has run, which may have moved memory
        if plan is not self._used:
            if self._used is None:
                self._memory = plan.empty_outputs()
            of_tokens = [list(views) for views in zip(*self.views, strict=True)]
            plan.set_tokens(self._x, self._positions, of_tokens, self._memory)
            self._used = plan
        return plan.run(self.next, tables)

    def _plan(self) -> LaunchPlan:
        """Return the last plan for as many tokens if it fits, else a new one."""
        count = self._x.shape[1]
        plan = self._pass.plans.get(count > 1)
        most = max(view.tokens for view in self.views[0])
        if plan is None or plan.rows < count or not plan.fits(self._positions, most):
            rows = max(1 << (count - 1).bit_length(), plan.rows if plan else 1)
            experts = self._experts.layer_experts(rows)
            assert experts is not None
            plan = LaunchPlan(
                self._decoder_layers,
                experts,
                self._experts.first_pieces,
                self._positions,
                [max(views, key=lambda view: view.tokens) for views in self.views],
            )
            self._pass.plans[count > 1] = plan
        return plan

    def _reserve(self) -> bool:
        """Reserve space for the tokens in every layer's caches; False if one cannot."""
        for decoder_layer in self._decoder_layers:
            views = decoder_layer.reserve_batch(self.caches)
            if views is None:
                return False
            self.views.append(views)
        return True
