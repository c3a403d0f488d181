"""Hooks that report a model's forward passes and its routers' choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from greenroom.core.predictor import Ids, PassStart, Predictor
from greenroom.hf.attach.bindings import Bindings
from greenroom.hf.kv.batched_cache import BatchedCache
from greenroom.hf.kv.kinds import DYNAMIC
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slot_budget import SlotBudget
from greenroom.predictors import predictor as choice
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.graphs import outside_graphs

DRAFTS = 16  # more tokens than a pass that verifies drafts usually has


class Observer(Protocol):
    """Observer of a model's forward passes and of the experts that routers choose."""

    def on_pass(self, request: int, prompt: bool, sequences: int) -> None:
        """Handle the start of a forward pass.

        request:   number of the prompt, or batch of prompts, that the pass belongs to
        prompt:    whether the pass has several tokens per sequence, as a prompt has
        sequences: number of sequences in the batch
        """

    def on_routing(self, layer: int, experts: Ids) -> None:
        """Handle a router's choice of experts.

        `experts` are ids within the layer, of shape [tokens, top_k].
        """


class PassHooks:
    """Hooks that report one model's forward passes to the expert cache and to observers.

    At the start of each pass they also make room for its KV cache.
    """

    def __init__(
        self,
        setup: ModelSetup,
        driver: Driver,
        bindings: Bindings,
        observers: list[Observer],
        predictor: Predictor | None,
    ) -> None:
        self.slot_budget: SlotBudget | None = (
            None  # budget of slots and KV cache, where they share one
        )
        self._setup, self._driver, self._bindings = setup, driver, bindings
        self.observers = observers
        self.check_weights: Callable[[], None] = lambda: None  # at the start of each request
        self.between_requests: Callable[[], None] = lambda: None  # not where prompts are announced
        self._request, self._tokens = 0, 0
        # Whether a predictor reads the ids of tokens, which a GPU would have to send.
        self._reads_ids = predictor is not None and "token_ids" in choice(predictor.name).kind.needs
        self._new_prompts: int | None = None  # as announced for the next pass
        self._was_prompt = False  # the pass before had several tokens
        self._trial = False  # passes of a trial are not reported
        self._decoder: nn.Module | None = None  # of an encoder-decoder model
        self._preempting = False  # whether early routers have hooks
        self._hooks: list[Any] = []

    def install(self, model: PreTrainedModel) -> None:
        """Register hooks on a model that report its forward passes.

        An encoder-decoder model gets hooks on its encoder and its decoder instead.
        """
        passes: list[nn.Module] = [model]
        if model.config.is_encoder_decoder:  # `generate` calls the encoder by itself
            self._decoder = model.get_decoder()
            passes = [model.get_encoder(), self._decoder]
        for module in passes:
            self._hooks += [
                module.register_forward_pre_hook(self._on_pass_start, with_kwargs=True),
                module.register_forward_hook(self._on_pass_end, always_call=True),
            ]

    def detach(self) -> None:
        """Remove the hooks that report a model's forward passes."""
        for hook in self._hooks:
            hook.remove()

    def announce_prompts(self, prompts: int) -> None:
        """Announce how many prompts begin with the next forward pass.

        Without this call, a pass counts as the start of a prompt if its KV cache is empty. That is
        wrong for a prompt that reuses the KV cache of an earlier prompt with the same prefix.
        """
        self._new_prompts = prompts

    def on_routing(self, layer: int, experts: Ids) -> None:
        """Tell all observers which experts a layer's router chose.

        `experts` are ids within the layer, of shape [tokens, top_k].
        """
        for each in self.observers:
            each.on_routing(layer, experts)

    @contextmanager
    def without_experts(self) -> Iterator[None]:
        """Return a context in which experts modules return zeros and no expert is read.

        Forward passes inside it are not reported to observers or to the expert cache.
        """
        self._trial = True
        try:
            for module in self._bindings.modules:
                module.forward = lambda x, *args, **kwargs: torch.zeros_like(x)
            yield
        finally:
            self._trial = False
            for module in self._bindings.modules:
                del module.forward

    @outside_graphs
    def _on_pass_start(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Report the start of a forward pass, and prepare its KV cache.

        A pass with an empty KV cache is the first of a request. In an encoder-decoder model, the
        encoder's pass is the first, and the decoder's passes belong to the same request. A pass
        without a KV cache gets one of the type that `--kv` names. Plain KV caches are made to grow
        in place, and expert slots are given up if the KV cache needs their memory.
        """
        ids = kwargs.get("input_ids", args[0] if args else None)
        inputs = ids if ids is not None else kwargs.get("inputs_embeds")
        if inputs is None or inputs.is_meta or self._trial:
            return None
        cache, kind = kwargs.get("past_key_values"), self._setup.keys_values.kind
        if cache is None and kind.name != DYNAMIC and kwargs.get("use_cache") is not False:
            cache = kwargs["past_key_values"] = self._setup.empty_cache(model.config)
        batch, length = inputs.shape[:2]
        caches, lengths = [cache], [length]
        added = caches, lengths
        if isinstance(cache, BatchedCache):
            caches, lengths, added = cache.caches, cache.lengths, cache.additions()
        for each in caches:
            self._setup.make_growing(each)
        if (slot_budget := self.slot_budget) is not None:  # another thread may resize the cache
            slot_budget.make_room(*added, batch)
        prompt, before = max(lengths) > 1, self._request
        # A turn may go on with its KV cache. The passes that verify drafts follow each other.
        begins = prompt and (max(lengths) > DRAFTS or not self._was_prompt)
        may_begin, self._was_prompt = begins and self._new_prompts is None, prompt
        if self._new_prompts is not None:
            self._request, self._new_prompts = self._request + self._new_prompts, None
        elif model is not self._decoder and (cache is None or not cache.get_seq_length()):
            self._request += 1
            self.between_requests()
        if self._request != before or may_begin:
            self.check_weights()
            self._bindings.check_weights()
        variants = self._bindings.variants
        self._driver.deferred.settle()  # an interrupt may have left some of the pass before
        for observer in self.observers:
            observer.on_pass(self._request, prompt, len(caches) * int(batch))
        self._driver.begin_pass(
            PassStart(
                self._request,
                self._tokens,
                batch * length,
                prompt,
                ids.flatten().cpu().numpy() if self._reads_ids and ids is not None else None,
                None if variants is None else variants.rows,
            )
        )
        self._tokens += batch * length
        return args, kwargs

    @outside_graphs
    def _on_pass_end(self, model: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._trial:
            return
        self._driver.end_pass()
        if (slot_budget := self.slot_budget) is not None:
            slot_budget.track(getattr(out, "past_key_values", None))
        if self._setup.cuda:  # the host knows a router's choice only when its experts run
            return
        shared = self._bindings.shared
        if not self._preempting and shared is not None and shared.early_routers:
            self._preempting = True
            for layer, router in shared.early_routers.items():
                self._hooks.append(
                    router.register_forward_hook(partial(self._request_early, layer))
                )

    @outside_graphs
    def _request_early(
        self, layer: int, router: nn.Module, args: tuple[Any, ...], out: Any
    ) -> None:
        """Start to read the experts that a router chose, before their layer runs them.

        This is early preemption (ProMoE, section 5.2).
        """
        chosen = out[2] if isinstance(out, tuple) and len(out) > 2 else None
        if chosen is not None and not chosen.is_meta and not chosen.is_floating_point():
            variants, count = self._bindings.variants, self._bindings.experts[layer].num_experts
            if variants is None:
                ids = chosen.unique().cpu().numpy()
            else:
                ids = np.unique(variants.stored(layer, chosen.flatten(0, -2).cpu().numpy()))
            pieces = ids[ids < count] + self._driver.pieces.offsets[layer]
            self._driver.predictions.announce_routing(layer, pieces)
