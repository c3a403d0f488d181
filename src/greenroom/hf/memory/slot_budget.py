"""Slots make room for keys and values as these grow, and take it back when they are gone.

Before a pass it is known how many tokens of context it will have. What they need is taken from the
slots a block of tokens at a time, before the pass begins; so the memory is inside the budget all
the time, and a conversation costs a resize every BLOCK tokens. When a prompt has been read, or
another begins, slots come back where that is worth a resize.
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

BLOCK = kv.BLOCK  # tokens that room is made for at a time
WORTH = 32  # a share of the slots: so many must be gained at least, for slots to come back

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SlotBudget:
    """How many slots a budget leaves to the passes of one model.

    need:     what is there for good; what passes need comes on top of it
    at_least: slots that a full `context` must leave: BudgetError says what would do
    of:       what the budget is of, where that is not the process
    release:  gives unused memory back to it
    least:    slots that a full context does leave
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
    _known: tuple[Any, ...] = field(init=False, default=())  # the pass that there is room for
    _asked: int = field(init=False, default=0)  # bytes that the last resize made room for

    def __post_init__(self) -> None:
        self._block = min(self.context, PREFILL_BLOCK)
        self.full_context_slots = self._slots(self.full_context_needs())

    def full_context_needs(self) -> MemoryNeeds:
        """At the end of the longest prompt."""
        return self._of_one(self._block, self.context)

    def first_block_needs(self) -> MemoryNeeds:
        """With the first block of a prompt."""
        return self._of_one(self._block, self._block)

    def initial_slots(self) -> int:
        """Slots that a run begins with, and has with short contexts."""
        return self._slots(self.first_block_needs())

    def decode_slots(self) -> int:
        """Slots while single tokens follow a short prompt."""
        return self._slots(self._of_one(1, min(BLOCK, self.context)))

    def for_slots(self, slots: int) -> SlotBudget:
        """The same with the budget that leaves so many slots when the context is full."""
        return replace(self, budget=self.full_context_needs().total + self._nbytes(slots))

    def bind(self, driver: Driver) -> None:
        """From here on, resize its slots; they begin with what the first block of a prompt
        leaves."""
        self._driver = driver
        driver.resize(self.initial_slots())
        self._asked = self.first_block_needs().total

    def make_room(self, caches: Sequence[Any], lengths: Sequence[int], batch: int = 1) -> None:
        """A pass adds so many tokens to each of these caches, whose sequences are `batch` each.
        None stands for a cache that the pass makes.

        BudgetError, before anything is changed, where not even the fewest slots leave room.
        """
        there = [cache for cache in caches if cache is not None]
        had = [_tokens(cache) for cache in caches]
        after = [a + b for a, b in zip(had, lengths, strict=True)]
        blocks, length = list(map(self._rounded, after)), sum(lengths)
        known = [*map(weakref.ref, there)], batch, length, blocks
        if there and known == self._known:  # as after nearly every token
            return
        sizes = self.keys_values
        with self._lock:
            nbytes = sum(sizes.held_bytes(tokens, batch) for tokens in blocks) + self._others(there)
            nbytes += max(sizes.update_bytes(tokens, batch) for tokens in blocks)
            for cache, before, tokens in zip(caches, had, after, strict=True):
                if before:  # a cache of a kind that takes more than ours do
                    nbytes += max(0, kv.held_bytes(cache) - sizes.held_bytes(tokens, batch))
            self._settle(self._needs(nbytes, batch, length, max(blocks)))
            for cache, before, tokens in zip(caches, had, blocks, strict=True):
                if before and sizes.on_a_gpu:
                    kv.make_room(cache, tokens, self.release)
                self.track(cache)
            self._known = known

    def reserve(self, nbytes: int) -> None:
        """Make room for so many bytes of keys and values beside those that there are."""
        with self._lock:
            nbytes += self._others(())
            self._settle(self._needs(nbytes, 1, self._block, self.context))
            self._known = ()

    def max_kv_bytes(self) -> int:
        """Bytes that keys and values can have where the fewest slots are left."""
        need = self._needs(0, 1, self._block, self.context)
        return max(0, self.budget - need.total - self._nbytes(self.min_slots))

    def track(self, cache: Any) -> None:
        """A cache that a pass was given, or has made."""
        if cache is not None:
            self._caches.add(cache)

    def _rounded(self, tokens: int) -> int:
        """Tokens that room is made for: whole blocks, but no more than the context needs."""
        rounded = -(-tokens // BLOCK) * BLOCK
        return self.context if rounded > self.context >= tokens else rounded

    def _others(self, caches: Sequence[Any]) -> int:
        """Bytes of the caches that live, but for these."""
        given = {id(cache) for cache in caches}
        return sum(kv.held_bytes(each) for each in list(self._caches) if id(each) not in given)

    def _of_one(self, length: int, tokens: int) -> MemoryNeeds:
        """What a pass of one sequence needs."""
        return self._needs(self.keys_values.total_bytes(tokens), 1, length, tokens)

    def _needs(self, keys_values: int, batch: int, length: int, tokens: int) -> MemoryNeeds:
        workspace = self.workspace.nbytes(batch, length, tokens) + SLACK
        return replace(self.need, kv_cache=keys_values, workspace=workspace)

    def _settle(self, need: MemoryNeeds) -> None:
        """Have the slots that needs leave."""
        driver = self._driver
        wanted, now = self._slots(need), driver.scheduler.capacity
        asked = need.total
        if wanted < now:
            if (fitting := driver.slots.fitting_capacity(wanted)) < now:
                driver.resize(fitting)
                self.release()
            self._asked = asked
        elif (wanted - now) * WORTH >= now and asked + self._worth(now) <= self._asked:
            try:
                driver.resize(wanted)
            except DeviceError as error:
                log.warning("slots do not come back: %s", error)
            self._asked = asked

    def _worth(self, now: int) -> int:
        """Bytes by which less must be needed than at the last resize: segments are not had in
        parts, and what was given up for one block of tokens must not come back with the next."""
        return max(1, now // WORTH) * self.catalog.slot_bytes

    def _nbytes(self, slots: int) -> int:
        """Of the budget, which is each device's where there are several."""
        return -(-slots // self.devices) * self.catalog.slot_bytes

    def _slots(self, need: MemoryNeeds) -> int:
        return capacity_for(
            self.budget, need, self.catalog, self.min_slots, self.label, self.devices
        )


def _tokens(cache: Any) -> int:
    """Tokens in a cache; those with no layer that counts them have one state for all."""
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:
        return 0
