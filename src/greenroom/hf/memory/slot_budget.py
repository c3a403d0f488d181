"""Share one memory budget: expert slots shrink as the KV cache grows.

The tokens of a pass's context are known before it runs. Their memory is taken from the slots a
block of tokens at a time, before the pass; so memory stays inside the budget, and a conversation
costs a resize every BLOCK tokens. When a prompt was read, or another one begins, slots are added
again where enough are gained.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from greenroom.core.layout import Catalog
from greenroom.errors import DeviceError
from greenroom.hf.kv import cache as kv
from greenroom.hf.kv.sizes import KVBytes
from greenroom.hf.memory.budget import PREFILL_BLOCK, SLACK, MemoryNeeds, Workspace, capacity_for
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.memory.system import trim_heap

BLOCK = kv.BLOCK  # tokens by which the KV cache's share grows
MIN_GAIN = 32  # slots are added where they gain this part of the slots: 1/32

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SlotBudget:
    """Divides a memory budget between expert slots and the forward passes of one model.

    need:      constant memory; KV cache and workspace of passes come on top of it
    min_slots: slots that a full `context` must leave, else BudgetError
    label:     the memory in words, where it is not the process's
    release:   returns unused memory to the system
    full_context_slots: slots that a full context leaves
    """

    budget: int
    need: MemoryNeeds
    catalog: Catalog
    keys_values: KVBytes
    workspace: Workspace
    context: int
    min_slots: int
    label: str = ""
    devices: int = 1
    release: Callable[[], None] = trim_heap
    full_context_slots: int = field(init=False)
    _driver: Driver = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _caches: weakref.WeakSet[Any] = field(init=False, default_factory=weakref.WeakSet)
    _last_pass: tuple[Any, ...] = field(init=False, default=())  # it has room
    _resized_for: int = field(init=False, default=0)  # bytes of needs at the last resize

    def __post_init__(self) -> None:
        self._block = min(self.context, PREFILL_BLOCK)
        self.full_context_slots = self._slots(self.full_context_needs())

    def full_context_needs(self) -> MemoryNeeds:
        """Return the memory needs besides expert slots at the end of the longest prompt."""
        return self._sequence_needs(self._block, self.context)

    def first_block_needs(self) -> MemoryNeeds:
        """Return the memory needs besides expert slots with a prompt's first block."""
        return self._sequence_needs(self._block, self._block)

    def initial_slots(self) -> int:
        """Return the number of expert slots at a run's start and with short contexts."""
        return self._slots(self.first_block_needs())

    def decode_slots(self) -> int:
        """Return the number of expert slots while decoding after a short prompt."""
        return self._slots(self._sequence_needs(1, min(BLOCK, self.context)))

    def for_slots(self, slots: int) -> SlotBudget:
        """Return a memory budget that leaves so many expert slots with a full context."""
        return replace(self, budget=self.full_context_needs().total + self._nbytes(slots))

    def bind(self, driver: Driver) -> None:
        """Resize this driver's expert slots from now on, first to `initial_slots`."""
        self._driver = driver
        driver.resize(self.initial_slots())
        self._resized_for = self.first_block_needs().total

    def make_room(self, caches: Sequence[Any], lengths: Sequence[int], batch: int = 1) -> None:
        """Shrink expert slots to make room for a pass that adds tokens to KV caches.

        The pass adds `lengths` tokens to these caches of `batch` sequences. None stands for a cache
        that the pass will make. BudgetError, before anything is changed, where not even the fewest
        slots leave room.
        """
        existing = [cache for cache in caches if cache is not None]
        lengths_before = [_tokens(cache) for cache in caches]
        after = [a + b for a, b in zip(lengths_before, lengths, strict=True)]
        blocks, length = list(map(self._round_up, after)), sum(lengths)
        this_pass = [*map(weakref.ref, existing)], batch, length, blocks
        if existing and this_pass == self._last_pass:  # as for nearly every token
            return
        sizes = self.keys_values
        with self._lock:
            nbytes = sum(sizes.held_bytes(tokens, batch) for tokens in blocks) + self._other_caches(
                existing
            )
            nbytes += max(sizes.update_bytes(tokens, batch) for tokens in blocks)
            for cache, before, tokens in zip(caches, lengths_before, after, strict=True):
                if before:  # a cache of another kind may take more than ours
                    nbytes += max(0, kv.held_bytes(cache) - sizes.held_bytes(tokens, batch))
            self._resize_slots(self._needs(nbytes, batch, length, max(blocks)))
            for cache, before, tokens in zip(caches, lengths_before, blocks, strict=True):
                if before and sizes.on_a_gpu:
                    kv.make_room(cache, tokens, self.release)
                self.track(cache)
            self._last_pass = this_pass

    def reserve(self, nbytes: int) -> None:
        """Shrink expert slots to make room for so many further bytes of KV cache."""
        with self._lock:
            nbytes += self._other_caches(())
            self._resize_slots(self._needs(nbytes, 1, self._block, self.context))
            self._last_pass = ()

    def max_kv_bytes(self) -> int:
        """Return the most bytes that the KV cache can have, with the fewest expert slots."""
        need = self._needs(0, 1, self._block, self.context)
        return max(0, self.budget - need.total - self._nbytes(self.min_slots))

    def track(self, cache: Any) -> None:
        """Count the memory of a pass's KV cache as long as the cache lives."""
        if cache is not None:
            self._caches.add(cache)

    def _round_up(self, tokens: int) -> int:
        """Round tokens up to KV cache blocks, but to no more than the context."""
        rounded = -(-tokens // BLOCK) * BLOCK
        return self.context if rounded > self.context >= tokens else rounded

    def _other_caches(self, caches: Sequence[Any]) -> int:
        """Return the bytes of all live KV caches but the given ones."""
        excluded = {id(cache) for cache in caches}
        return sum(kv.held_bytes(each) for each in list(self._caches) if id(each) not in excluded)

    def _sequence_needs(self, length: int, tokens: int) -> MemoryNeeds:
        """Return the memory needs of a forward pass of one sequence."""
        return self._needs(self.keys_values.total_bytes(tokens), 1, length, tokens)

    def _needs(self, keys_values: int, batch: int, length: int, tokens: int) -> MemoryNeeds:
        workspace = self.workspace.nbytes(batch, length, tokens) + SLACK
        return replace(self.need, kv_cache=keys_values, workspace=workspace)

    def _resize_slots(self, need: MemoryNeeds) -> None:
        """Resize the expert slots to what memory needs leave, where that gains enough."""
        driver = self._driver
        target, now = self._slots(need), driver.scheduler.capacity
        if target < now:
            if (fitting := driver.slots.fitting_capacity(target)) < now:
                driver.resize(fitting)
                self.release()
            self._resized_for = need.total
            return
        pays = (target - now) * MIN_GAIN >= now
        if pays and need.total + self._margin(now) <= self._resized_for:
            try:
                driver.resize(target)
            except DeviceError as error:
                log.warning("the expert cache stays smaller than the budget allows: %s", error)
            self._resized_for = need.total

    def _margin(self, now: int) -> int:
        """Bytes by which needs must have fallen since the last resize before slots are added.

        Memory is freed in whole segments, so a margin keeps one block of tokens from alternating
        with the next.
        """
        return max(1, now // MIN_GAIN) * self.catalog.slot_bytes

    def _nbytes(self, slots: int) -> int:
        """Bytes of slots in the budget, which is of each device where there are several."""
        return -(-slots // self.devices) * self.catalog.slot_bytes

    def _slots(self, need: MemoryNeeds) -> int:
        return capacity_for(
            self.budget, need, self.catalog, self.min_slots, self.label, self.devices
        )


def _tokens(cache: Any) -> int:
    """Count the tokens in a KV cache; 0 where no layer counts them.

    A recurrence has one state for all tokens.
    """
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:
        return 0
