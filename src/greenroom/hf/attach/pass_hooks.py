"""Hooks on a model's passes: where they begin and end, and what its routers choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from greenroom.core.predictor import Ids, PassStart
from greenroom.hf.attach.bindings import Bindings
from greenroom.hf.kv.batch import BatchedCache
from greenroom.hf.kv.cache import ROOM, make_growing
from greenroom.hf.kv.kinds import DYNAMIC
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slot_budget import SlotBudget
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.graphs import outside_graphs


class Observer(Protocol):
    """Is told of passes, and of what routers choose in them."""

    def on_pass(self, request: int, prompt: bool, sequences: int) -> None:
        """A pass of so many sequences begins."""

    def on_choice(self, layer: int, experts: Ids) -> None:
        """A layer's router has chosen these experts, [T, K]."""


class PassHooks:
    """Tells the driver, and those beside it, of the passes of one model, until `detach`."""

    def __init__(
        self,
        setup: ModelSetup,
        driver: Driver,
        bindings: Bindings,
        observers: list[Observer],
    ) -> None:
        self.slot_budget: SlotBudget | None = (
            None  # of keys and values, where they share the slots' budget
        )
        self._setup, self._driver, self._bindings = setup, driver, bindings
        self.observers = observers  # of what routers choose
        self.check_weights: Callable[[], None] = lambda: None  # at the start of each request
        self._request, self._tokens = 0, 0
        self._begin: int | None = None  # prompts that begin with the next pass, where it was said
        self._unnoted = False  # are passes those of a trial?
        self._decoder: nn.Module | None = None  # of an encoder-decoder model
        self._preempting = False  # are routers listened to, after which something else runs?
        self._hooks: list[Any] = []

    def install(self, model: PreTrainedModel) -> None:
        """Begin."""
        passes: list[nn.Module] = [model]
        if model.config.is_encoder_decoder:  # `generate` calls the encoder by itself
            self._decoder = model.get_decoder()
            passes = [model.get_encoder(), self._decoder]
        for module in passes:
            self._hooks += [
                module.register_forward_pre_hook(self._begins, with_kwargs=True),
                module.register_forward_hook(self._ends, always_call=True),
            ]

    def detach(self) -> None:
        """Take the hooks out again."""
        for hook in self._hooks:
            hook.remove()

    def announce_prompts(self, prompts: int) -> None:
        """So many prompts begin with the next pass; else that is told by keys and values, which a
        prompt may have of an earlier one."""
        self._begin = prompts

    def on_choice(self, layer: int, experts: Ids) -> None:
        """A layer's router has chosen these experts, [T, K]."""
        for each in self.observers:
            each.on_choice(layer, experts)

    @contextmanager
    def without_experts(self) -> Iterator[None]:
        """Experts give nothing for the while, nothing is read, and no pass is noted."""
        self._unnoted = True
        try:
            for module in self._bindings.modules:
                module.forward = lambda x, *args, **kwargs: torch.zeros_like(x)
            yield
        finally:
            self._unnoted = False
            for module in self._bindings.modules:
                del module.forward

    @outside_graphs
    def _begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A pass begins; one without keys and values before it is the first of a prompt. Of an
        encoder-decoder model that is the encoder's, and the answer's first one goes on with it.

        Keys and values are of the kind that was asked for, where none are given; those of the usual
        kind grow in place, and slots make room for them."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        given = ids if ids is not None else kwargs.get("inputs_embeds")
        if given is None or given.is_meta or self._unnoted:
            return None
        cache, kind = kwargs.get("past_key_values"), self._setup.keys_values.kind
        if cache is None and kind.name != DYNAMIC and kwargs.get("use_cache") is not False:
            cache = kwargs["past_key_values"] = kind.cache(model.config)
        batch, length = given.shape[:2]
        caches, lengths = [cache], [length]
        if isinstance(cache, BatchedCache):
            caches, lengths = cache.caches, cache.lengths
        for each in caches:
            make_growing(each, max(self._setup.context, ROOM) + 1, in_blocks=self._setup.cuda)
        if (slot_budget := self.slot_budget) is not None:  # a resize may take it away meanwhile
            slot_budget.make_room(caches, lengths, batch)
        before = self._request
        if self._begin is not None:
            self._request, self._begin = self._request + self._begin, None
        elif model is not self._decoder and (cache is None or not cache.get_seq_length()):
            self._request += 1
        if self._request != before:
            self.check_weights()
        prompt = max(lengths) > 1
        for observer in self.observers:
            observer.on_pass(self._request, prompt, len(caches) * int(batch))
        self._driver.begin_pass(
            PassStart(
                self._request,
                self._tokens,
                batch * length,
                prompt,
                None if ids is None else ids.flatten().cpu().numpy(),
            )
        )
        self._tokens += batch * length
        return args, kwargs

    @outside_graphs
    def _ends(self, model: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._unnoted:
            return
        self._driver.end_pass()
        if (slot_budget := self.slot_budget) is not None:
            slot_budget.track(getattr(out, "past_key_values", None))
        if self._setup.cuda:  # a router's choice is known here when its experts run
            return
        shared = self._bindings.shared
        if not self._preempting and shared is not None and shared.early_routers:
            self._preempting = True
            for layer, router in shared.early_routers.items():
                self._hooks.append(router.register_forward_hook(partial(self._decided, layer)))

    @outside_graphs
    def _decided(self, layer: int, router: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        """A router has chosen, and something else runs before its experts: they come meanwhile
        (early preemption; ProMoE, 5.2)."""
        chosen = out[2] if isinstance(out, tuple) and len(out) > 2 else None
        if chosen is not None and not chosen.is_meta and not chosen.is_floating_point():
            ids = chosen.unique().cpu().numpy()
            self._driver.decided(layer, ids[ids < self._bindings.modules[layer].num_experts])
