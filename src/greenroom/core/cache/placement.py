"""Which expert has which slot of a tier: slots of the cache, borrowed ones, and secondary ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from greenroom.core.cache.buffer import BorrowedSlot, Buffer
from greenroom.core.cache.cache import Cache
from greenroom.core.cache.reshape import initial_tier_slots, kinds_of, reshape
from greenroom.core.cache.scope import Scope
from greenroom.core.cache.secondary import SecondarySlots
from greenroom.core.events import Action, Trim
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import Policy


class Placement:
    """The slots of one tier.

    cache:     residents under a policy, in slots that the cache numbers
    place:     the tier's slot for each slot of the cache
    buffer:    slots of the cache that prefetches and streamed experts borrow
    extras:    secondary slots, for bottom segments or low-precision copies
    """

    def __init__(
        self, pieces: Pieces, capacity: int, policy: Policy, scope: Scope, ahead: int, seed: int
    ) -> None:
        self.pieces = pieces
        self.cache = Cache(pieces.primary, capacity, policy, scope, seed)
        self.tier_slots = initial_tier_slots(self.cache)
        beside = pieces.split or pieces.copies
        self.secondary = SecondarySlots(beside.secondary_slots if beside is not None else 0)
        self._experts, self.secondary_of = pieces.experts, pieces.secondary_of
        self.home_device: list[int] = pieces.home_device.tolist()  # the device of each piece
        self._kinds = kinds_of(self.cache)
        self.wanted, self._ahead = capacity, ahead
        self._set_capacity(capacity)
        self.buffer = Buffer(self._limit_borrowed())

    # ---- what is where

    def resident(self, expert: int) -> bool:
        """Whether the expert has a slot of the cache or a borrowed one."""
        return bool(self.cache.state.slot_of[expert] >= 0) or expert in self.buffer.borrowed

    def slot(self, expert: int) -> int:
        """The tier's slot of an expert that is resident."""
        return int(self.tier_slots[self.cache.state.slot_of[expert]])

    def has_secondary(self, expert: int) -> bool:
        """Whether a split expert's bottom segment has its slot, or there is none."""
        if self.pieces.split is None:
            return True
        return expert in self.secondary.slot_of or self.secondary_of(expert) < 0

    def missing_chunks(self, expert: int) -> int:
        """Chunks of an expert that have no slot yet."""
        chunks = 0 if self.resident(expert) else int(self.pieces.chunks[expert])
        if not self.has_secondary(expert):
            chunks += int(self.pieces.chunks[self.secondary_of(expert)])
        return chunks

    def is_secondary(self, piece: int) -> bool:
        """Whether a piece is a bottom segment or a low-precision copy."""
        return self._experts <= piece < 2 * self._experts

    def secondary_tier_slot(self, slot: int) -> int:
        """The tier's slot for a secondary slot: they are the tier's last kind."""
        return slot * self._kinds + self._kinds - 1

    # ---- borrowed slots

    def return_slot(self, piece: int) -> None:
        """End the loan of a piece's slot: the slot is the cache's again."""
        self.cache.return_slot(self.buffer.release(piece))

    def vacate(self, piece: int) -> None:
        """Free the slot of a piece that did not come."""
        if self.is_secondary(piece):
            self.secondary.lose(piece - self._experts)
        elif piece in self.buffer.borrowed:
            self.return_slot(piece)

    def borrowed(self, experts: Sequence[int]) -> dict[int, BorrowedSlot]:
        """Those of a step's experts that have a borrowed slot."""
        held = self.buffer.borrowed
        return {expert: held[expert] for expert in experts if expert in held} if held else {}

    def crowding(self, experts: Ints, here: Collection[int]) -> BorrowedSlot | bool | None:
        """The loan that must end for a step to have its slots: False where none must, None where
        none can. Experts in `here` have borrowed slots already."""
        held, group_of = self.buffer.borrowed, self.cache.state.group_of
        one_group = self.cache.state.first.size == 2
        for group, asked in self.cache.asked(experts).items():
            others = set() if one_group else {p for p in held if group_of[p] != group}
            size = asked - len({*here} - others)
            if size + len(held) - len(others) > self.cache.open(group):
                return self.buffer.least(2.0, but=others.union(here))
        return False

    def exchange(self, piece: int, given: int, borrowed: int) -> None:
        """Let a cache slot that a prefetched piece was given stand for the tier's slot where its
        bytes are; the other slot is free, or a miss that has not begun."""
        other = self.tier_slots.tolist().index(borrowed)
        self.tier_slots[[given, other]] = self.tier_slots[[other, given]]

    def prompt_share(self, layer: int) -> int:
        """Misses of a prompt's step that are admitted: up to an even share of the cache a layer."""
        state, pieces = self.cache.state, slice(*self.pieces.offsets[layer : layer + 2])
        room = self.cache.room(layer)
        if self.cache.scope == "shared":
            room = -(-room // self.pieces.layers)
        return max(0, room - int((state.slot_of[pieces] >= 0).sum()))

    # ---- other sizes

    @property
    def resizing(self) -> bool:
        """Whether another capacity was asked for."""
        return self.wanted != self.capacity

    def _set_capacity(self, capacity: int) -> None:
        """Slots that there are now, of whole experts."""
        self.capacity = capacity
        # Whether every expert has a slot, once it has been loaded.
        self.holds_all = self.cache.capacity >= len(self.pieces) and not self.secondary

    def resize(self, capacity: int, ahead: int | None) -> None:
        """Ask for another capacity; borrowed slots are limited by it at once."""
        self.wanted = capacity
        if ahead is not None:
            self._ahead = ahead
        self.buffer.size = self._limit_borrowed()

    def apply_resize(self) -> list[Action]:
        """Move residents to the slots of the capacity asked for; nothing may be on its way."""
        self.tier_slots, moves = reshape(self.cache, self.tier_slots, self.wanted)
        self._set_capacity(self.wanted)
        return [*moves, Trim(self.capacity)]

    def _limit_borrowed(self) -> int:
        """Slots that may be on loan: as asked, but no more than a quarter."""
        return max(0, min(self._ahead, self.wanted // 4))
