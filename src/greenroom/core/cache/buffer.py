"""The prefetch buffer: slots that prefetches borrow from the cache.

A prefetch borrows a free slot, or that of the policy's victim. The policy knows nothing of the
piece while it is in the buffer: an insertion is reported when a step requests the piece, as if it
had just arrived. A piece that no step requests returns its slot, and the next miss takes this slot
without an eviction. So prefetching costs the cache at most the slots that are borrowed at a time.

The steps of a prompt stream through borrowed slots too; experts resident for decoding stay.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum


class BorrowState(IntEnum):
    """The state of a piece in the buffer."""

    MOVING = 0  # its prefetch is not complete
    COMPLETE = 1  # its prefetch is complete; its layer has not come yet
    IN_USE = 2  # the current step computes it


@dataclass(slots=True)
class BorrowedSlot:
    """A borrowed slot, and the piece in it.

    layer, chance: of its prefetch: the layer that it is for, and the chance of use
    promotion:     the piece becomes resident on arrival
    """

    piece: int
    slot: int
    state: BorrowState
    layer: int = -1
    chance: float = 0.0
    promotion: bool = False


class PrefetchBuffer:
    """Borrowed slots by piece, at most `size` at a time; none of these pieces is resident.

    Slots are numbered as in the cache. The caller returns the slots that a method releases.
    """

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self.borrowed: dict[int, BorrowedSlot] = {}
        self._coming: dict[int, dict[int, BorrowedSlot]] = {}  # layer -> piece -> its prefetch

    @property
    def full(self) -> bool:
        return len(self.borrowed) >= self.size

    def begin_prefetch(
        self, piece: int, slot: int, layer: int, chance: float, promotion: bool = False
    ) -> None:
        """Begin a prefetch of a piece into a slot."""
        entry = self.borrowed[piece] = BorrowedSlot(
            piece, slot, BorrowState.MOVING, layer, chance, promotion
        )
        self._coming.setdefault(layer, {})[piece] = entry

    def complete(self, piece: int) -> None:
        """Complete a prefetch."""
        self.borrowed[piece].state = BorrowState.COMPLETE

    def unused_prefetches(self, layer: int, used: Collection[int]) -> list[BorrowedSlot]:
        """Prefetches for a layer, now routed, that are not among the `used` pieces."""
        coming = self._coming.get(layer)
        return [entry for piece, entry in coming.items() if piece not in used] if coming else []

    def least_likely(self, chance: float, excluded: Collection[int] = ()) -> BorrowedSlot | None:
        """The complete prefetch with the lowest chance of use below `chance`, if there is one."""
        entries = self.borrowed.values()
        waiting = [
            e
            for e in entries
            if e.state is BorrowState.COMPLETE and e.chance < chance and e.piece not in excluded
        ]
        return min(waiting, key=lambda e: (e.chance, e.piece), default=None)

    def occupy(self, piece: int, slot: int = -1) -> int:
        """Have the step compute a piece from its borrowed slot, or from `slot`."""
        entry = self.borrowed.get(piece)
        if entry is None:
            entry = self.borrowed[piece] = BorrowedSlot(piece, slot, BorrowState.IN_USE)
        else:
            self._unlist(entry)
            entry.state = BorrowState.IN_USE
        return entry.slot

    def release(self, piece: int) -> int:
        """Remove a piece from the buffer; returns its slot."""
        entry = self.borrowed.pop(piece)
        self._unlist(entry)
        return entry.slot

    def _unlist(self, entry: BorrowedSlot) -> None:
        if entry.layer >= 0:
            del self._coming[entry.layer][entry.piece]
            entry.layer = -1


def default_borrow_limit(top_k: int) -> int:
    """The default limit of borrowed slots: those of four layers (docs/log/ has others)."""
    return 4 * top_k
