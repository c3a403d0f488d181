"""The placement of experts in memory slots: resident, borrowed and secondary slots.

Prefetches borrow cache slots. Secondary slots hold bottom segments or low-precision copies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from greenroom.core.cache.buffer import BorrowedSlot, BorrowState, PrefetchBuffer
from greenroom.core.cache.reshape import (
    check_new_devices,
    check_new_scope,
    evict_moving,
    initial_tier_slots,
    kinds_of,
    reshape,
)
from greenroom.core.cache.scope import Scope
from greenroom.core.cache.secondary import SecondarySlots
from greenroom.core.cache.token_cache import TokenCache
from greenroom.core.events import Action, Trim
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import Policy


class Placement:
    """The slots for experts in one memory, and the experts in them.

    cache:      the experts that are resident under the eviction policy
    tier_slots: for each cache slot, the number of its slot in memory
    buffer:     the cache slots that prefetches and experts of prompts borrow
    secondary:  the slots for bottom segments of split experts, or for low-precision copies
    capacity:   the number of slots, counted in unsplit experts
    target_capacity: the requested number of slots; it differs from `capacity` until a resize is
                     applied
    resizing:   whether a requested resize, another scope or other devices are still to be applied
    """

    def __init__(
        self, pieces: Pieces, capacity: int, policy: Policy, scope: Scope, ahead: int, seed: int
    ) -> None:
        self.pieces = pieces
        self.cache = TokenCache(pieces.primary, capacity, policy, scope, seed)
        self.tier_slots = initial_tier_slots(self.cache)
        self._experts, self.secondary_of = pieces.experts, pieces.secondary_of
        self.home_device: list[int] = pieces.home_device.tolist()  # the device of each piece
        self.secondary = SecondarySlots(pieces.secondary_slots, self.home_device)
        self._kinds = kinds_of(self.cache)
        self.target_capacity, self._ahead = capacity, ahead
        self.resizing = self._rescoped = False
        self._new_home: Ints | None = None  # home devices that a requested resize brings
        self._set_capacity(capacity)
        self.buffer = PrefetchBuffer(self._borrow_limit())

    # ---- lookups

    def has_slot(self, expert: int) -> bool:
        """Tell whether an expert has a cache slot: as a resident, or borrowed by a prefetch.

        The expert's bytes may still be on their way to the slot.
        """
        return bool(self.cache.state.slot_of[expert] >= 0) or expert in self.buffer.borrowed

    def slot(self, expert: int) -> int:
        """Return the memory slot of an expert that is resident in the cache."""
        return int(self.tier_slots[self.cache.state.slot_of[expert]])

    def has_secondary(self, expert: int) -> bool:
        """Tell whether a split expert's bottom segment has a slot, or is empty."""
        if self.pieces.split is None:
            return True
        return expert in self.secondary.slot_of or self.secondary_of(expert) < 0

    def missing_chunks(self, expert: int) -> int:
        """Count the chunks of an expert, split or not, that have no slot yet."""
        chunks = 0 if self.has_slot(expert) else int(self.pieces.chunks[expert])
        if not self.has_secondary(expert):
            chunks += int(self.pieces.chunks[self.secondary_of(expert)])
        return chunks

    def is_secondary(self, piece: int) -> bool:
        """Tell whether `piece` is a bottom segment or a low-precision copy of an expert."""
        return self._experts <= piece < 2 * self._experts

    def secondary_tier_slot(self, slot: int) -> int:
        """Return the memory slot of a secondary slot (for a bottom segment or low-precision copy).

        Slots of several kinds alternate in a memory: slot s is of kind s % kinds. Secondary slots
        are the last kinds, one for each device.
        """
        devices = self.pieces.devices
        number, device = divmod(slot, devices)
        return number * self._kinds + self._kinds - devices + device

    # ---- borrowed slots

    def return_slot(self, piece: int) -> None:
        """Return to the cache the slot that a prefetched expert (or top segment) has borrowed."""
        self.cache.return_slot(self.buffer.release(piece))

    def vacate(self, piece: int) -> None:
        """Free the slot of an expert, segment or copy whose transfer failed or was dropped.

        Only a secondary or borrowed slot is freed; a resident keeps its slot.
        """
        if self.is_secondary(piece):
            self.secondary.free(piece - self._experts)
        elif piece in self.buffer.borrowed:
            self.return_slot(piece)

    def borrowed(self, experts: Sequence[int]) -> dict[int, BorrowedSlot]:
        """Return the cache slots that the prefetches of given experts have borrowed, by expert."""
        slots = self.buffer.borrowed
        return {expert: slots[expert] for expert in experts if expert in slots} if slots else {}

    def slot_to_reclaim(
        self, experts: Ints, prefetched: Collection[int]
    ) -> BorrowedSlot | bool | None:
        """Find a prefetch's borrowed slot that the experts of a layer's step need.

        prefetched: those of the step's experts that have borrowed slots already

        False if there is room for all of them already; None if there is not, and no complete
        prefetch can be displaced.
        """
        borrowed, group_of = self.buffer.borrowed, self.cache.state.group_of
        one_group = self.cache.state.first.size == 2
        for slot_group, needed in self.cache.slots_needed(experts).items():
            others = set() if one_group else {p for p in borrowed if group_of[p] != slot_group}
            size = needed - len({*prefetched} - others)
            if size + len(borrowed) - len(others) > self.cache.unpinned_slots(slot_group):
                return self.buffer.least_likely(2.0, excluded=others.union(prefetched))
        return False

    def leaves_slots(self, experts: Ints) -> bool:
        """Tell whether prefetches under way leave a slot in each slot group of a step."""
        group_of, entries = self.cache.state.group_of, self.buffer.borrowed.values()
        moving = [int(group_of[e.piece]) for e in entries if e.state is not BorrowState.COMPLETE]
        groups = self.cache.slots_needed(experts)
        return all(self.cache.unpinned_slots(each) > moving.count(each) for each in groups)

    def exchange(self, slot: int, tier_slot: int) -> None:
        """Exchange the memory slots of two cache slots, so that prefetched bytes stay in place.

        Cache slot `slot` gets the memory slot `tier_slot`, which holds the prefetched bytes. The
        cache slot that had `tier_slot` gets the memory slot of `slot`, whose bytes are not needed.
        """
        other = self.tier_slots.tolist().index(tier_slot)
        self.tier_slots[[slot, other]] = self.tier_slots[[other, slot]]

    def prompt_share(self, layer: int) -> int:
        """Return how many missing experts of one layer of a prompt the cache may insert.

        The number is the layer's share of the slots, less its residents. Layers that share slots
        have equal shares of them.
        """
        state, pieces = self.cache.state, slice(*self.pieces.offsets[layer : layer + 2])
        room = self.cache.room(layer)
        if self.cache.scope == "shared":
            room = -(-room // self.pieces.layers_beside(layer))
        return max(0, room - int((state.slot_of[pieces] >= 0).sum()))

    # ---- resizing

    def _set_capacity(self, capacity: int) -> None:
        """Set the number of slots, in unsplit experts."""
        self.capacity = capacity
        # Every expert has a slot, once it has been loaded.
        self.holds_all = self.cache.capacity >= len(self.pieces) and not self.secondary

    def resize(
        self,
        capacity: int,
        ahead: int | None,
        scope: Scope | None = None,
        devices: Sequence[int] | None = None,
    ) -> None:
        """Request another capacity, scope or devices, which `apply_resize` applies later.

        `ahead` is the number of slots that prefetches may borrow at a time. This limit changes at
        once. None keeps the present limit, scope or devices. UsageError or BudgetError for an
        impossible scope, or for devices that cannot have the experts.
        """
        if devices is not None:
            self._new_home = check_new_devices(self.cache, capacity, devices)
        if scope is not None:
            check_new_scope(self.cache, capacity, scope)
            self.cache.scope, self._rescoped = scope, True
        self.target_capacity = capacity
        self.resizing = self._rescoped or self._new_home is not None or capacity != self.capacity
        if ahead is not None:
            self._ahead = ahead
        self.buffer.size = self._borrow_limit()

    def apply_resize(self) -> list[Action]:
        """Apply the requested resize; return moves of residents, then a `Trim`.

        No transfer may be under way.
        """
        if self._new_home is not None:
            evict_moving(self.cache, self._new_home)
            # In place: the queue, the kernels' slots and the cache read the same arrays.
            self.pieces.home_device.reshape(-1, self._experts)[:] = self._new_home
            self.home_device[:] = self.pieces.home_device.tolist()
            self.secondary = SecondarySlots(self.pieces.secondary_slots, self.home_device)
            self._new_home = None
        self.tier_slots, moves = reshape(self.cache, self.tier_slots, self.target_capacity)
        self._set_capacity(self.target_capacity)
        self.resizing = self._rescoped = False
        return [*moves, Trim(self.capacity)]

    def _borrow_limit(self) -> int:
        """Return how many slots may be borrowed at a time: at most a quarter of all."""
        return max(0, min(self._ahead, self.target_capacity // 4))
