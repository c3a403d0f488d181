"""Secondary slots: for bottom segments of split experts, or low-precision copies.

An expert has at most one secondary piece: its bottom segment if the expert is split (MoEpic,
section 2.3), or its low-precision copy.

A secondary piece is fetched when a step (one layer of a pass) needs it, or prefetched. It keeps its
slot until it has been computed, and after that until the slot is needed: the least recently used
piece loses its slot first. Prefetches may hold at most half of the slots, so that a step always
gets some. Each device has slots of its own, for the pieces of its experts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence


class SecondarySlots:
    """The slots for split experts' bottom segments or for low-precision copies, by expert.

    With n devices, slot s is number s // n of device s % n.

    slot_of: the slot of each expert's bottom segment or copy, which is complete or on its way
    """

    def __init__(self, sizes: Sequence[int], home_device: Sequence[int]) -> None:
        """Make free slots; `sizes` has their number on each device, by `home_device` of experts."""
        self.capacity, self._sizes, self._home = sum(sizes), sizes, home_device
        self.slot_of: dict[int, int] = {}
        devices = len(sizes)
        # Of each device.
        self._free = [[n * devices + d for n in range(size)][::-1] for d, size in enumerate(sizes)]
        # Complete and not needed now, oldest first.
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in sizes]
        self._moving: set[int] = set()
        self._busy: set[int] = set()  # used by the current step
        self._ahead: dict[int, int] = {}  # prefetched expert -> its layer

    def __bool__(self) -> bool:
        return self.capacity > 0

    def is_complete(self, expert: int) -> bool:
        """Tell whether an expert's bottom segment or low-precision copy has arrived in its slot."""
        return expert in self.slot_of and expert not in self._moving

    def has_room(self, expert: int) -> bool:
        """Tell whether a prefetch of an expert's bottom segment can have a slot now.

        At most half of a device's secondary slots hold prefetches.
        """
        device = self._home[expert]
        ahead = sum(self._home[each] == device for each in self._ahead)
        few = ahead < self._sizes[device] // 2
        return few and bool(self._free[device] or self._idle[device])

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
        self._idle[self._home[expert]].pop(expert, None)
        self._busy.add(expert)
        return self.slot_of[expert]

    def begin_prefetch(self, expert: int, layer: int) -> int:
        """Reserve a slot for the prefetch of an expert's bottom segment, and return the slot.

        -1 if there is no room for a prefetch.
        """
        if not self.has_room(expert):
            return -1
        self._ahead[expert] = layer
        return self._take(expert)

    def _take(self, expert: int) -> int:
        free, idle = self._free[self._home[expert]], self._idle[self._home[expert]]
        if free:
            slot = free.pop()
        elif idle:
            slot = self.slot_of.pop(idle.popitem(last=False)[0])
        else:
            return -1
        self.slot_of[expert] = slot
        self._moving.add(expert)
        return slot

    def landed(self, expert: int) -> None:
        """Mark an expert's bottom segment or low-precision copy as complete in its slot."""
        self._moving.discard(expert)
        if expert not in self._busy and expert not in self._ahead:
            self._idle[self._home[expert]][expert] = None

    def release(self, expert: int) -> None:
        """Record that a layer's step no longer uses an expert's bottom segment or copy.

        A complete segment or low-precision copy stays in its slot until the slot is needed.
        """
        self._busy.discard(expert)
        if expert not in self._moving:
            self._idle[self._home[expert]][expert] = None

    def free(self, expert: int) -> None:
        """Free the slot of a bottom segment or copy whose transfer failed or was dropped."""
        self._moving.discard(expert)
        self._busy.discard(expert)
        self._ahead.pop(expert, None)
        self._idle[self._home[expert]].pop(expert, None)
        self._free[self._home[expert]].append(self.slot_of.pop(expert))

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
            self._idle[self._home[expert]][expert] = None
        return expert, complete
