"""Attach a cache of experts to a transformers model, and take it out again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from greenroom.config import Amount
from greenroom.core.cache import split_capacity
from greenroom.core.layout import Catalog
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler import Counts, Scheduler
from greenroom.errors import BudgetError, ClosedError
from greenroom.hf.build import IMPLEMENTATION
from greenroom.hf.kv import reserve
from greenroom.policies import policy as named_policy
from greenroom.runtime.driver import Driver, Meter
from greenroom.runtime.fakes import FakeSlots, FakeStore
from greenroom.runtime.forward import BINDING, Binding, experts_forward
from greenroom.runtime.kernels import LayerExperts, kernel
from greenroom.runtime.kernels.accelerate import Accelerated, accelerate
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.memory import peak_rss_bytes
from greenroom.runtime.slots import HostSlots
from greenroom.runtime.stats import Stats
from greenroom.runtime.store import DiskStore

COMPILED_TOKENS = 64  # enough for the kernels to take the way of a prompt

ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def slots_for(cache: str | int | Amount, catalog: Catalog, what: str = "--cache") -> int:
    """How many slots an amount of cache is; BudgetError where not even one expert fits."""
    amount = Amount.parse(cache, what)
    if amount.share is not None:
        slots = amount.of(catalog.experts)
    else:
        slots = amount.of(0) // catalog.slot_bytes
    if slots < 1:
        raise BudgetError(
            f"{what} {cache} holds no expert: one takes {catalog.slot_bytes} bytes"
            f" ({1 / catalog.experts:.2%} of the {catalog.experts} experts)"
        )
    return min(slots, catalog.experts)


@dataclass(frozen=True, slots=True)
class Parts:
    """What an attached model runs on; `fake` uses the device that poisons stale slots."""

    catalog: Catalog
    capacity: int
    policy: str = "auto"
    scope: str = "shared"
    kernels: str = "auto"
    fake: bool = False
    readers: int = 2
    direct: str = "auto"
    seed: int = 0
    budget_bytes: int | None = None
    context: int = 0  # tokens that the KV cache has room for
    kv_cache_bytes: int = 0  # what they take


class Greenroom:
    """A model's cache of experts: `model.greenroom`."""

    def __init__(self, model: PreTrainedModel, parts: Parts) -> None:
        self.parts, self._model = parts, weakref.ref(model)
        catalog, policy = parts.catalog, named_policy(parts.policy)
        disk = DiskStore(catalog, direct=parts.direct)
        self.direct = disk.direct
        store = FakeStore(disk, jitter=0.002, seed=parts.seed) if parts.fake else disk
        slots_kind = FakeSlots if parts.fake else HostSlots
        slots = slots_kind(parts.capacity, catalog.slot_bytes, reserve=catalog.experts)
        chunks = [len(store.chunks(expert)) for expert in range(catalog.experts)]
        pieces = Pieces.whole(catalog.offsets, [x.nbytes for x in catalog.layouts], chunks)
        scheduler = Scheduler(
            pieces,
            parts.capacity,
            policy,
            scope=parts.scope,
            lanes=parts.readers,
            seed=parts.seed,
        )
        self.driver = Driver(scheduler, store, slots, parts.readers)
        self._close = weakref.finalize(model, self.driver.close)
        self._base: tuple[Counts, Meter] = (Counts(), Meter())
        self._modules: list[nn.Module] = []
        self.accelerated: Accelerated | None = None
        self._listening: Any = None
        try:
            self._bind(model, slots)
        except BaseException:
            self.detach()
            raise

    def _bind(self, model: PreTrainedModel, slots: HostSlots) -> None:
        """Give every experts module what it needs to be served."""
        parts, policy = self.parts, self.driver.scheduler.cache.policy
        self.kernel = kernel("numba" if parts.kernels == "auto" else parts.kernels)
        self._modules = [model.get_submodule(name) for name in parts.catalog.layers]
        for layer, module in enumerate(self._modules):
            experts = LayerExperts(module, parts.catalog.layouts[layer], slots)
            binding = Binding(self.driver, self.kernel, layer, experts, policy.weighs)
            setattr(module, BINDING, binding)
        self._listening = model.register_forward_pre_hook(self._passes, with_kwargs=True)
        if self.kernel.name != "eager":
            self.accelerated = accelerate(model, reserve)

    def _passes(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A pass begins; one without keys and values before it is the first of a prompt."""
        cache = kwargs.get("past_key_values")
        if cache is None or not cache.get_seq_length():
            self.driver.begin_request()

    @property
    def capacity(self) -> int:
        """Slots that the cache has."""
        return self.driver.scheduler.cache.capacity

    def compile(self) -> None:
        """Have the kernels compiled now, for one token and for many."""
        binding: Binding = getattr(self._modules[0], BINDING)
        experts, slots = [0], [0]
        for tokens in (1, COMPILED_TOKENS):
            x = torch.zeros(tokens, binding.experts.hidden, dtype=binding.experts.dtype)
            routing = Routing.of(np.zeros((tokens, 1), np.int64), 1)
            step = self.kernel.begin(binding.experts, x, routing, torch.ones(tokens, 1))
            self.kernel.wave(step, experts, slots)
            self.kernel.combine(step)

    def stats(self) -> Stats:
        """What happened since the model was loaded, or since `reset_stats`."""
        counts, meter, catalog = self.driver.scheduler.counts, self.driver.meter, self.parts.catalog
        before, metered = self._base
        requests, hits = counts.requests - before.requests, counts.hits - before.hits
        return Stats(
            policy=self.driver.scheduler.cache.policy.name,
            kernels=self.kernel.name,
            capacity=self.capacity,
            experts=catalog.experts,
            slot_bytes=catalog.slot_bytes,
            passes=meter.passes - metered.passes,
            expert_requests=requests,
            expert_hits=hits,
            hit_ratio=hits / requests if requests else 0.0,
            bytes_read=meter.bytes_read - metered.bytes_read,
            stall_s=meter.stall_s - metered.stall_s,
            peak_rss_bytes=peak_rss_bytes(),
            budget_bytes=self.parts.budget_bytes,
        )

    def reset_stats(self) -> None:
        """Count from here on; what is resident stays."""
        self._base = replace(self.driver.scheduler.counts), replace(self.driver.meter)

    def resize(self, cache: str | int) -> int:
        """Give the cache another size (`25%`, `2GiB`, bytes), also while it is in use.

        Experts that no longer fit go by the policy, and their memory back to the system. Returns
        the slots that there are now.
        """
        if not self._close.alive:
            raise ClosedError("the model was detached: load it again")
        slots = slots_for(cache, self.parts.catalog, "cache")
        split_capacity(slots, len(self.parts.catalog.layers), self.parts.scope)  # or BudgetError
        self.driver.resize(slots)
        return self.capacity

    def detach(self) -> None:
        """Take out of the model what was put in, end the threads, free the slots.

        The model keeps its dense parts; its experts are gone until it is loaded again.
        """
        self._close()
        for module in self._modules:
            if hasattr(module, BINDING):
                delattr(module, BINDING)
        if self._listening is not None:
            self._listening.remove()
        if self.accelerated is not None:
            self.accelerated.detach()
        model: Any = self._model()
        if model is not None and getattr(model, "greenroom", None) is self:
            del model.greenroom
