"""The prefetch buffer: the cache slots that prefetched experts borrow.

A piece is an unsplit expert or the top segment of a split one. Its prefetch borrows a free slot, or
evicts the policy's victim and borrows the victim's slot. The policy does not know the piece while
it is in the buffer; when a step requests the piece, the policy sees an insertion, as if the piece
had just arrived. If no step requests the piece, its slot is returned, and the next miss takes the
slot without an eviction. So prefetching costs the cache at most the slots that are borrowed at a
time.

Experts of a prompt that find no free cache slot pass through borrowed slots too. So the experts
that decoding has made resident stay.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum


class BorrowState(IntEnum):
    """The state of a cache slot borrowed for a prefetch: loading, loaded, or in use."""

    MOVING = 0  # its prefetch is not complete
    COMPLETE = 1  # its prefetch is complete; its layer has not come yet
    IN_USE = 2  # the current step computes it


@dataclass(slots=True)
class BorrowedSlot:
    """A cache slot borrowed for a prefetch, and the expert (or top segment) in it.

    piece:     the id of the unsplit expert, or of the top segment of a split one
    layer:     the layer that the prefetch is for; -1 once a step uses the slot
    chance:    the estimated probability that the layer's next step uses the piece
    promotion: the piece becomes resident when its transfer is complete
    idle:      the transfer began while no request was computed
    """

    piece: int
    slot: int
    state: BorrowState
    layer: int = -1
    chance: float = 0.0
    promotion: bool = False
    idle: bool = False


class PrefetchBuffer:
    """The cache slots borrowed by prefetched experts or their top segments, up to a limit.

    size:     how many slots prefetches may borrow at a time; callers check `full` first
    borrowed: the borrowed slots, by the id of the expert or segment in them; the eviction policy
              does not know these experts

    Slots have the numbers of the cache's slots. The caller returns the slots that a method releases
    to the cache.
    """

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self.borrowed: dict[int, BorrowedSlot] = {}
        self._coming: dict[int, dict[int, BorrowedSlot]] = {}  # layer -> piece -> its prefetch

    @property
    def full(self) -> bool:
        return len(self.borrowed) >= self.size

    def begin_prefetch(
        self,
        piece: int,
        slot: int,
        layer: int,
        chance: float,
        promotion: bool = False,
        idle: bool = False,
    ) -> None:
        """Record that the prefetch of an expert (or segment) into a borrowed slot begins."""
        entry = self.borrowed[piece] = BorrowedSlot(
            piece, slot, BorrowState.MOVING, layer, chance, promotion, idle
        )
        self._coming.setdefault(layer, {})[piece] = entry

    def complete(self, piece: int) -> None:
        """Record that the prefetch of an expert (or segment) is complete."""
        self.borrowed[piece].state = BorrowState.COMPLETE

    def unused_prefetches(self, layer: int, used: Collection[int]) -> list[BorrowedSlot]:
        """Return the borrowed slots of a layer's prefetched experts that its router did not choose.

        `used` are the ids that the router chose. Slots that a step uses already are not returned.
        """
        coming = self._coming.get(layer)
        return [entry for piece, entry in coming.items() if piece not in used] if coming else []

    def least_likely(self, chance: float, excluded: Collection[int] = ()) -> BorrowedSlot | None:
        """Find the complete prefetch least likely to be used, below a given chance.

        Experts in `excluded` are not considered. None if no complete prefetch has a lower chance.
        """
        entries = self.borrowed.values()
        waiting = [
            e
            for e in entries
            if e.state is BorrowState.COMPLETE and e.chance < chance and e.piece not in excluded
        ]
        return min(waiting, key=lambda e: (e.chance, e.piece), default=None)

    def occupy(self, piece: int, slot: int = -1) -> int:
        """Mark the borrowed slot of an expert (or segment) as in use; return the slot.

        If the expert has no slot in the prefetch buffer yet, `slot` becomes its borrowed slot.
        """
        entry = self.borrowed.get(piece)
        if entry is None:
            entry = self.borrowed[piece] = BorrowedSlot(piece, slot, BorrowState.IN_USE)
        else:
            self._unlist(entry)
            entry.state = BorrowState.IN_USE
        return entry.slot

    def release(self, piece: int) -> int:
        """Remove an expert (or segment) from the prefetch buffer; return its borrowed slot."""
        entry = self.borrowed.pop(piece)
        self._unlist(entry)
        return entry.slot

    def _unlist(self, entry: BorrowedSlot) -> None:
        if entry.layer >= 0:
            del self._coming[entry.layer][entry.piece]
            entry.layer = -1


def default_borrow_limit(top_k: int) -> int:
    """Return the default number of cache slots that prefetches may borrow at a time.

    The number is four times `top_k`, the experts of four layers for one token; docs/log/
    compares other limits.
    """
    return 4 * top_k
