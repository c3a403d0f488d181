"""The middle tier: host memory that keeps experts between the disk and a device.

In a chain of links (disk to host to device) a piece whose copy is kept here needs the last link
alone. The tier has slots and a policy of its own: what it is asked for are the device's misses and
prefetches, so what the device keeps for long grows old here and makes room. Copies are only read,
so leaving the device costs nothing: the copy is still here, or is read from disk again.

A prompt's experts are taken in where slots are free, and evict nobody: what decoding left stays.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from greenroom.core.cache.cache import Cache
from greenroom.core.events import Routed
from greenroom.core.pieces import Pieces
from greenroom.core.policy import Policy


class HostTier:
    """Which pieces have a copy in host memory, whole or on its way.

    The slots of pieces on their way to the device are pinned: from `ask` to `leave` nobody else
    gets them. A piece for which no slot can be had goes by the staging slots, and is not kept.
    On several devices each has its own part of the slots, which follow one another.
    """

    def __init__(self, pieces: Pieces, capacity: int, policy: Policy, *, seed: int = 0) -> None:
        """`capacity` is at least 1: without slots there is no tier."""
        self.pieces = pieces
        self.cache = Cache(pieces, capacity, policy, seed=seed)
        self.requests = self.hits = 0
        self._under_way: set[int] = set()  # pieces whose slots are pinned
        self._pinned = Counter[int]()  # how many of them each group has
        self._clock, self._request, self._prefill = 0, 0, False

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    @property
    def holds_all(self) -> bool:
        """Whether every piece has a slot, once it has been read."""
        return self.capacity >= len(self.pieces)

    def routed(self, event: Routed) -> None:
        """A step begins on the device: what is asked for from here on is asked for now."""
        self._clock = event.step * self.pieces.layers + event.layer
        self._request, self._prefill = event.request, event.prefill

    def ask(self, piece: int) -> tuple[int, bool]:
        """A piece is wanted on the device: (its slot here or -1, whether its bytes are in it)."""
        self.requests += 1
        state = self.cache.state
        kept, group = bool(state.slot_of[piece] >= 0), int(state.group_of[piece])
        if not kept and self._pinned[group] >= self.cache.sizes[group]:  # none that may be taken
            return -1, False
        wanted = np.array([piece], np.int64)
        served = self.cache.serve(
            wanted, self._clock, request=self._request, fill=1 if self._prefill else -1
        )
        slot = int(served.slots[0])
        if slot < 0:  # the policy, or a prompt, lets it pass by
            self.cache.release(wanted)
            return -1, False
        self._under_way.add(piece)
        self._pinned[group] += 1
        self.hits += kept
        return slot, kept

    def has(self, piece: int) -> bool:
        """Whether a piece that is not under way is here."""
        return bool(self.cache.state.slot_of[piece] >= 0)

    def leave(self, piece: int, whole: bool) -> None:
        """A piece that had a slot has arrived on the device, or was given up.

        Its copy stays where it is `whole`; half a copy is no copy.
        """
        self._under_way.remove(piece)
        self._pinned[int(self.cache.state.group_of[piece])] -= 1
        self.cache.release(np.array([piece], np.int64))
        if not whole:
            self.cache.remove(piece, self._clock)
