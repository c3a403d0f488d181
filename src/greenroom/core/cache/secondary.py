"""Secondary slots: for bottom segments of split experts, or low-precision copies.

An expert has at most one secondary piece: its bottom segment if the expert is split (MoEpic,
section 2.3), or its low-precision copy.

A secondary piece is fetched when a step (one layer of a pass) needs it, or prefetched. It keeps its
slot until it has been computed, and after that until the slot is needed: the least recently used
piece loses its slot first. Prefetches may hold at most half of the slots, so that a step always
gets some.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


class SecondarySlots:
    """The slots for split experts' bottom segments or for low-precision copies, by expert.

    slot_of: the slot of each expert's bottom segment or copy, which is complete or on its way
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.slot_of: dict[int, int] = {}
        self._free = list(range(capacity))[::-1]
        self._moving: set[int] = set()
        self._busy: set[int] = set()  # used by the current step
        self._ahead: dict[int, int] = {}  # prefetched expert -> its layer
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # complete and not needed now, oldest first

    def __bool__(self) -> bool:
        return self.capacity > 0

    def is_complete(self, expert: int) -> bool:
        """Tell whether an expert's bottom segment or low-precision copy has arrived in its slot."""
        return expert in self.slot_of and expert not in self._moving

    @property
    def room(self) -> bool:
        """Tell whether a prefetch of a bottom segment can have a slot now.

        At most half of the secondary slots hold prefetches.
        """
        few = len(self._ahead) < self.capacity // 2
        return few and bool(self._free or self._idle)

    def is_prefetched(self, expert: int) -> bool:
        """Tell whether an expert's bottom segment was prefetched for a later step of its layer."""
        return expert in self._ahead

    def claim(self, expert: int) -> int:
        """Give a layer's step the slot of an expert's bottom segment or low-precision copy.

        Returns the slot; -1 if the segment or copy has no slot, and none is free or idle. If it had
        no slot before, it counts as on its way from now on: the caller starts its transfer.
        """
        if expert not in self.slot_of and self._take(expert) < 0:
            return -1
        self._ahead.pop(expert, None)
        self._idle.pop(expert, None)
        self._busy.add(expert)
        return self.slot_of[expert]

    def begin_prefetch(self, expert: int, layer: int) -> int:
        """Reserve a slot for the prefetch of an expert's bottom segment, and return the slot.

        -1 if there is no room for a prefetch.
        """
        if not self.room:
            return -1
        self._ahead[expert] = layer
        return self._take(expert)

    def _take(self, expert: int) -> int:
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            slot = self.slot_of.pop(self._idle.popitem(last=False)[0])
        else:
            return -1
        self.slot_of[expert] = slot
        self._moving.add(expert)
        return slot

    def landed(self, expert: int) -> None:
        """Mark an expert's bottom segment or low-precision copy as complete in its slot."""
        self._moving.discard(expert)
        if expert not in self._busy and expert not in self._ahead:
            self._idle[expert] = None

    def release(self, expert: int) -> None:
        """Record that a layer's step no longer uses an expert's bottom segment or copy.

        A complete segment or low-precision copy stays in its slot until the slot is needed.
        """
        self._busy.discard(expert)
        if expert not in self._moving:
            self._idle[expert] = None

    def free(self, expert: int) -> None:
        """Free the slot of a bottom segment or copy whose transfer failed or was dropped."""
        self._moving.discard(expert)
        self._busy.discard(expert)
        self._ahead.pop(expert, None)
        self._idle.pop(expert, None)
        self._free.append(self.slot_of.pop(expert))

    def end_prefetches(self, layer: int, used: Collection[int]) -> list[tuple[int, bool]]:
        """End the prefetches of bottom segments that a layer's step does not use.

        used: the experts of the step

        Returns (expert, whether its bottom segment is complete) for each prefetch ended.
        """
        wrong = [e for e, of in self._ahead.items() if of == layer and e not in used]
        return [self._end_prefetch(expert) for expert in wrong]

    def end_all_prefetches(self) -> list[tuple[int, bool]]:
        """End all prefetches of bottom segments.

        Returns (expert, whether its bottom segment is complete) for each prefetch ended.
        """
        return [self._end_prefetch(expert) for expert in list(self._ahead)]

    def _end_prefetch(self, expert: int) -> tuple[int, bool]:
        del self._ahead[expert]
        complete = expert not in self._moving
        if complete:
            self._idle[expert] = None
        return expert, complete
