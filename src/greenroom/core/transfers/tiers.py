"""The host tier: slots in host memory that cache experts between disk and device.

In a chain of links (disk to host to device), an expert that is in host memory needs the last link
only. The host tier has its own slots and eviction policy. Its requests are the device's misses and
prefetches, so experts that stay on the device for long become old in host memory and are evicted
from it. Nothing is ever written back: an expert that leaves the device is still in host memory, or
is read from disk again.

Experts of a prompt are inserted into free slots only, so that those that decoding has left in host
memory stay.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from greenroom.core.cache.cache import Cache
from greenroom.core.events import Routed
from greenroom.core.pieces import Pieces
from greenroom.core.policy import Policy


class HostTier:
    """A cache of experts in host memory, between disk and device.

    Experts in its slots are complete or on their way from disk. An expert that is on its way to the
    device has a pinned slot, from `request` to `release`. An expert without a slot passes through
    staging slots, and is not cached. Each of several devices has its own part of the slots, one
    after another.
    """

    def __init__(self, pieces: Pieces, capacity: int, policy: Policy, *, seed: int = 0) -> None:
        """Build an empty cache of experts in host memory.

        `capacity` is its number of slots, at least 1: without slots there is no host tier.
        """
        self.pieces = pieces
        self.cache = Cache(pieces, capacity, policy, seed=seed)
        self.requests = self.hits = 0
        self._under_way: set[int] = set()  # pieces whose slots are pinned
        self._pinned = Counter[int]()  # how many pinned slots each group has
        self._clock, self._request, self._prefill = 0, 0, False

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    @property
    def holds_all(self) -> bool:
        """Tell whether host memory has enough slots for all experts at the same time."""
        return self.capacity >= len(self.pieces)

    def routed(self, event: Routed) -> None:
        """Set the logical time of host-memory requests to the current layer and pass."""
        self._clock = event.step * self.pieces.layers + event.layer
        self._request, self._prefill = event.request, event.prefill

    def request(self, piece: int) -> tuple[int, bool]:
        """Request an expert in host memory, for its transfer to the device.

        Returns (its slot, whether its bytes are in the slot). The slot is -1 if the expert is not
        cached: all slots are pinned, or none is free for a prompt.
        """
        self.requests += 1
        state = self.cache.state
        resident, slot_group = bool(state.slot_of[piece] >= 0), int(state.group_of[piece])
        if (
            not resident and self._pinned[slot_group] >= self.cache.sizes[slot_group]
        ):  # all are pinned
            return -1, False
        pieces = np.array([piece], np.int64)
        served = self.cache.serve(
            pieces, self._clock, request=self._request, fill=1 if self._prefill else -1
        )
        slot = int(served.slots[0])
        if slot < 0:  # not inserted by the policy, or in a prompt
            self.cache.release(pieces)
            return -1, False
        self._under_way.add(piece)
        self._pinned[slot_group] += 1
        self.hits += resident
        return slot, resident

    def has(self, piece: int) -> bool:
        """Tell whether an expert has a slot in host memory."""
        return bool(self.cache.state.slot_of[piece] >= 0)

    def release(self, piece: int, complete: bool) -> None:
        """Unpin an expert in host memory once its transfer to the device has ended.

        Unless its bytes are `complete`, the expert is removed from host memory.
        """
        self._under_way.remove(piece)
        self._pinned[int(self.cache.state.group_of[piece])] -= 1
        self.cache.release(np.array([piece], np.int64))
        if not complete:
            self.cache.remove(piece, self._clock)
