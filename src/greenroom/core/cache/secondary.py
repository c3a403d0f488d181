"""Slots of extras: what computes an expert beside what the policy keeps, while a step needs it.

Of a split expert that is its bottom (MoEpic, section 2.3), of one that may be approximated its
low-precision copy (`precision`).

An extra is fetched when its expert is asked for, or ahead of that, and has a slot until it is
computed. What it leaves there stays of use until somebody needs the slot, the least recently used
first. Prefetches have at most half of the slots, so that a step always finds some.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


class SecondarySlots:
    """Which expert's extra is in which slot, whole or on its way. No slots: there are none."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.slot_of: dict[int, int] = {}
        self._free = list(range(capacity))[::-1]
        self._moving: set[int] = set()
        self._busy: set[int] = set()  # of the step being served
        self._ahead: dict[int, int] = {}  # prefetched -> the layer that it waits for
        self._idle: OrderedDict[int, None] = OrderedDict()  # whole and of no use now, oldest first

    def __bool__(self) -> bool:
        return self.capacity > 0

    def whole(self, expert: int) -> bool:
        """Whether all of it is there."""
        return expert in self.slot_of and expert not in self._moving

    @property
    def room(self) -> bool:
        """Whether a prefetch could have a slot."""
        few = len(self._ahead) < self.capacity // 2
        return few and bool(self._free or self._idle)

    def awaits_use(self, expert: int) -> bool:
        """Whether it was prefetched, and its layer has not come yet."""
        return expert in self._ahead

    def claim(self, expert: int) -> int:
        """The step needs it: its slot, -1 where none can be had. One that was not there is taken as
        on its way from now on."""
        if expert not in self.slot_of and self._take(expert) < 0:
            return -1
        self._ahead.pop(expert, None)
        self._idle.pop(expert, None)
        self._busy.add(expert)
        return self.slot_of[expert]

    def bring(self, expert: int, layer: int) -> int:
        """A prefetch for a layer begins, of one that is not there: its slot, -1 without room."""
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
        """All of it is there."""
        self._moving.discard(expert)
        if expert not in self._busy and expert not in self._ahead:
            self._idle[expert] = None

    def done(self, expert: int) -> None:
        """The step has computed it, or needs it no more."""
        self._busy.discard(expert)
        if expert not in self._moving:
            self._idle[expert] = None

    def lose(self, expert: int) -> None:
        """It did not come: its slot is free."""
        self._moving.discard(expert)
        self._busy.discard(expert)
        self._ahead.pop(expert, None)
        self._idle.pop(expert, None)
        self._free.append(self.slot_of.pop(expert))

    def passed(self, layer: int, used: Collection[int]) -> list[tuple[int, bool]]:
        """A layer's routing is known: the prefetches for it that are not among `used`, and whether
        they are whole. They wait for nothing now."""
        wrong = [e for e, of in self._ahead.items() if of == layer and e not in used]
        return [self._let_go(expert) for expert in wrong]

    def waiting(self) -> list[tuple[int, bool]]:
        """All prefetches, and whether they are whole. They wait for nothing now."""
        return [self._let_go(expert) for expert in list(self._ahead)]

    def _let_go(self, expert: int) -> tuple[int, bool]:
        del self._ahead[expert]
        whole = expert not in self._moving
        if whole:
            self._idle[expert] = None
        return expert, whole
