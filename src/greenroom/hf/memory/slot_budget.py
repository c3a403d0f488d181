"""Share one memory budget: the number of expert slots falls as the KV cache grows.

The number of tokens in a forward pass is known before the pass runs. Before the pass, slots are
removed to make room for their keys and values, in steps of 256 tokens. So memory stays inside the
budget, and a conversation costs one resize every 256 tokens. When the needs fall, after a prompt or
for another conversation, slots are added again if enough are gained.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from typing import Any

from greenroom.core.layout import Catalog
from greenroom.errors import BudgetError, DeviceError
from greenroom.hf.kv import cache as kv
from greenroom.hf.kv.sizes import KVBytes
from greenroom.hf.memory.budget import SLACK, MemoryNeeds, Workspace, capacity_for
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.memory.system import trim_heap

BLOCK = kv.BLOCK  # tokens by which the KV cache's share grows
MIN_GAIN = 64  # slots are added where they gain this part of the slots: 1/64

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SlotBudget:
    """Divides a memory budget between expert slots and the forward passes of one model.

    budget:    bytes; with several GPUs, of each of them
    need:      memory that is constant during the run, without KV cache and activations
    context:   most tokens of a sequence
    block:     most tokens of a prompt that a forward pass computes
    min_slots: slots that a full context must leave; otherwise BudgetError is raised. They are
               enough for a token, and for each set of experts that may be pinned
    label:     which memory the budget is of, for messages; "" for the process's memory
    devices:   number of GPUs that the slots are distributed over (`Pieces.equal_devices`)
    release:   function that returns unused memory to the system
    full_context_slots: number of slots that a full context leaves
    """

    budget: int
    need: MemoryNeeds
    catalog: Catalog
    keys_values: KVBytes
    workspace: Workspace
    context: int
    block: int
    min_slots: int
    label: str = ""
    devices: int | Fraction = 1
    release: Callable[[], None] = trim_heap
    full_context_slots: int = field(init=False)
    _driver: Driver = field(init=False)
    _in_place: bool = field(init=False, default=False)  # single tokens read quantised keys
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _caches: weakref.WeakSet[Any] = field(init=False, default_factory=weakref.WeakSet)
    _last_pass: tuple[Any, ...] = field(init=False, default=())  # it has room
    _resized_for: int = field(init=False, default=0)  # bytes of needs at the last resize
    _last_need: MemoryNeeds = field(init=False)  # of the last pass
    _limit: int | None = field(init=False, default=None)  # most slots, while memory is short
    _retired: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._block = min(self.context, self.block)
        self.full_context_slots = self._slots(self.full_context_needs())

    def full_context_needs(self) -> MemoryNeeds:
        """Return the memory needs besides expert slots for a full context's last prompt block."""
        return self._sequence_needs(self._block, self.context)

    def first_block_needs(self) -> MemoryNeeds:
        """Return the memory needs besides expert slots for the first block of a prompt."""
        return self._sequence_needs(self._block, self._block)

    def initial_slots(self) -> int:
        """Return the number of expert slots at a run's start and with short contexts."""
        return self._slots(self.first_block_needs())

    def initial_bytes(self) -> int:
        """Return the bytes that a run takes at its start, expert slots included."""
        return self.first_block_needs().total + self._nbytes(self.initial_slots())

    def decode_slots(self) -> int:
        """Return the number of expert slots while decoding after a short prompt."""
        return self._slots(self._sequence_needs(1, min(BLOCK, self.context)))

    def for_slots(self, slots: int) -> SlotBudget:
        """Return a memory budget that leaves `slots` expert slots with a full context."""
        return replace(self, budget=self.full_context_needs().total + self._nbytes(slots))

    def bind(self, driver: Driver, in_place: bool) -> None:
        """Take control of the number of expert slots of a model.

        `driver` reads experts into these slots. Their number becomes `initial_slots` now, and
        follows the KV cache from then on. `in_place` is whether the attention of single tokens
        reads quantised keys and values without decoding a layer's.
        """
        self._in_place = in_place
        self._driver, self._last_need = driver, self.first_block_needs()
        # Memory is freed in whole segments: one ends at the fewest slots.
        driver.resize(max(self.min_slots, driver.scheduler.capacity))
        driver.resize(self.initial_slots())
        self._resized_for = self._last_need.total

    def full_slots(self) -> int:
        """Return the number of slots that the last pass's needs leave."""
        return self._slots(self._last_need)

    @property
    def limited(self) -> bool:
        """Return whether `limit_slots` limits the slots now."""
        return self._limit is not None

    def limit_slots(self, slots: int) -> None:
        """Resize the expert cache to at most `slots` slots, a limit for later passes too.

        A limit of `full_slots` or more ends the limitation. It stays as it was if a DeviceError is
        raised.
        """
        with self._lock:
            full, now = self.full_slots(), self._driver.scheduler.capacity
            limit = None if slots >= full else max(slots, self.min_slots)
            target = full if limit is None else limit
            if target < now:
                self._shrink(target)
            elif target > now:
                self._driver.resize(target)
            self._limit, self._resized_for = limit, self._last_need.total

    def retire(self, slots: int) -> None:
        """Set the number of slots for good: passes and `limit_slots` do not change it any more.

        That includes passes that have begun with this budget in other threads. BudgetError or
        DeviceError, before anything changes, if there is no room.
        """
        with self._lock:
            self._driver.resize(slots)
            self._retired = True

    def release_excess(self) -> None:
        """Remove slots until the cache takes no more memory than its slots may.

        It does after its slots were divided among layers anew: of a layer that has fewer slots now,
        a part of a segment is not in use, and is not freed. Slots that pinned experts need stay.
        """
        with self._lock:
            if not self._retired:
                with contextlib.suppress(BudgetError):
                    self._shrink(self._limited(self.full_slots()))

    def use_devices(self, devices: Sequence[int]) -> None:
        """Distribute the experts over other devices, with as many slots on each as before.

        In host memory, whose bytes the budget limits, their number stays. Raises BudgetError,
        before anything is changed, if a full context would have no room.
        """
        on_devices = self._driver.pieces.on_devices(devices)
        count = on_devices.equal_devices if self.label else 1
        full_context_slots = replace(self, devices=count).full_context_slots
        with self._lock:
            slots = capacity_for(
                self.budget, self._last_need, self.catalog, self.min_slots, self.label, count
            )
            self._driver.scheduler.view.check_capacity(full_context_slots, devices=devices)
            self._driver.resize(self._limited(slots), devices=devices)
            self.devices, self.full_context_slots = count, full_context_slots

    def set_aside(self, nbytes: int) -> None:
        """Take memory from the expert slots for another use, permanently.

        Raises BudgetError, before anything is changed, if a full context would have no room.
        """
        if self.label:  # the slots are in a GPU's memory
            return
        need = replace(self.need, staging=self.need.staging + nbytes)
        slots = replace(self, need=need).full_context_slots
        with self._lock:
            self.need, self.full_context_slots = need, slots
            self._resize_slots(self.first_block_needs())
            self._last_pass = ()

    def make_room(self, caches: Sequence[Any], lengths: Sequence[int], batch: int = 1) -> None:
        """Remove or add expert slots, so that a forward pass has room for its tokens.

        caches:  KV caches of the pass; None stands for a cache that the pass will make
        lengths: new tokens for each cache
        batch:   sequences in each cache
        Raises BudgetError, before anything is changed, if even the fewest slots leave no room.
        """
        existing = [cache for cache in caches if cache is not None]
        lengths_before = [_tokens(cache) for cache in caches]
        after = [a + b for a, b in zip(lengths_before, lengths, strict=True)]
        blocks, length = list(map(self._round_up, after)), sum(lengths)
        decodes = self._decodes(max(lengths))
        this_pass = [*map(weakref.ref, existing)], batch, length, blocks, decodes
        if existing and this_pass == self._last_pass:  # as for nearly every token
            return
        sizes = self.keys_values
        with self._lock:
            nbytes = sum(sizes.held_bytes(tokens, batch) for tokens in blocks) + self._other_caches(
                existing
            )
            nbytes += max(sizes.update_bytes(tokens, batch, decodes) for tokens in blocks)
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
        """Remove expert slots to make room for `nbytes` further bytes of KV cache."""
        with self._lock:
            nbytes += self._other_caches(())
            self._resize_slots(self._needs(nbytes, 1, self._block, self.context))
            self._last_pass = ()

    def max_kv_bytes(self) -> int:
        """Return the most bytes that KV caches can take, with the fewest expert slots."""
        need = self._needs(0, 1, self._block, self.context)
        return max(0, self.budget - need.total - self._nbytes(self.min_slots))

    def track(self, cache: Any) -> None:
        """Count a KV cache's memory in the budget for as long as the cache exists."""
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
        nbytes = self.keys_values.total_bytes(tokens, decodes=self._decodes(length))
        return self._needs(nbytes, 1, length, tokens)

    def _decodes(self, length: int) -> bool:
        """Return whether a pass of `length` new tokens decodes quantised keys and values."""
        return length > 1 or not self._in_place

    def _needs(self, keys_values: int, batch: int, length: int, tokens: int) -> MemoryNeeds:
        workspace = self.workspace.nbytes(batch, length, tokens, self._block) + SLACK
        return replace(self.need, kv_cache=keys_values, workspace=workspace)

    def _resize_slots(self, need: MemoryNeeds) -> None:
        """Resize the expert slots to the number that fits beside the memory needs.

        Slots are removed whenever they must, and added only if that gains enough.
        """
        if self._retired:
            return
        driver = self._driver
        target, now = self._limited(self._slots(need)), driver.scheduler.capacity
        self._last_need = need
        pays = (target - now) * MIN_GAIN >= now
        if pays and need.total + self._margin(now) <= self._resized_for:
            try:
                driver.resize(driver.slots.fitting_capacity(target, self.min_slots, target))
            except DeviceError as error:
                log.warning(
                    "no expert slots were added, although the memory budget allows more: %s", error
                )
            self._resized_for = need.total
        elif self._shrink(target):
            self._resized_for = need.total

    def _shrink(self, target: int) -> bool:
        """Remove slots until the cache takes at most the memory of `target` slots.

        Memory is freed in whole segments, so even fewer slots may take more. Returns whether slots
        were removed.
        """
        driver, now = self._driver, self._driver.scheduler.capacity
        fitting = driver.slots.fitting_capacity(target, self.min_slots, min(target, now))
        if fitting >= now:
            return False
        driver.resize(fitting)
        self.release()
        return True

    def _limited(self, slots: int) -> int:
        return slots if self._limit is None else min(slots, self._limit)

    def _margin(self, now: int) -> int:
        """Return by how many bytes memory needs must fall before slots are added.

        Memory is freed in whole segments. Without a margin, slots would be added and removed again
        from one block of tokens to the next.
        """
        return max(1, now // MIN_GAIN) * self.catalog.slot_bytes

    def _nbytes(self, slots: int) -> int:
        """Return the bytes that `slots` expert slots take on each device."""
        return ceil(slots / self.devices) * self.catalog.slot_bytes

    def _slots(self, need: MemoryNeeds) -> int:
        return capacity_for(
            self.budget, need, self.catalog, self.min_slots, self.label, self.devices
        )


def _tokens(cache: Any) -> int:
    """Return the number of tokens in a KV cache; 0 for None.

    It is 0, too, if no layer counts tokens, as with recurrent states.
    """
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:
        return 0
