"""The prefetch buffer: slots of the cache on loan to what is fetched before it is asked for.

A prefetch borrows a free slot, or that of the policy's victim. While it has it the policy knows
nothing of the piece: it is told of an insertion when the piece is asked for, as if it came just
then. What nobody asked for gives its slot back, and the next miss takes it without evicting. So
prefetching costs the cache no more than the slots that are on loan at a time.

A prompt's step streams through borrowed slots too, and leaves what decoding had resident in place.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum


class BorrowState(IntEnum):
    """What a piece in the buffer waits for."""

    MOVING = 0  # prefetched, on its way
    COMPLETE = 1  # prefetched and whole: its layer has not come yet
    IN_USE = 2  # of the step being served


@dataclass(slots=True)
class BorrowedSlot:
    """A piece in a slot on loan; `layer` and `chance` of use are those of its prefetch. One that
    `stays` was asked for before it began: it is a resident once it is there."""

    piece: int
    slot: int
    use: BorrowState
    layer: int = -1
    chance: float = 0.0
    stays: bool = False


class Buffer:
    """Pieces by slot; `size` slots may be on loan at a time. No piece is resident at the same time.

    Slots are the cache's numbers. Those that a method returns are the caller's to give back.
    """

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self.borrowed: dict[int, BorrowedSlot] = {}
        self._coming: dict[int, dict[int, BorrowedSlot]] = {}  # layer -> piece -> prefetched for it

    @property
    def full(self) -> bool:
        return len(self.borrowed) >= self.size

    def bring(self, piece: int, slot: int, layer: int, chance: float, stays: bool = False) -> None:
        """A prefetch of this piece for this layer begins."""
        held = self.borrowed[piece] = BorrowedSlot(
            piece, slot, BorrowState.MOVING, layer, chance, stays
        )
        self._coming.setdefault(layer, {})[piece] = held

    def landed(self, piece: int) -> None:
        """A prefetch is complete."""
        self.borrowed[piece].use = BorrowState.COMPLETE

    def passed(self, layer: int, used: Collection[int]) -> list[BorrowedSlot]:
        """A layer's routing is known: the prefetches for it that are not among `used`."""
        coming = self._coming.get(layer)
        return [held for piece, held in coming.items() if piece not in used] if coming else []

    def least(self, chance: float, but: Collection[int] = ()) -> BorrowedSlot | None:
        """The prefetch waiting for its layer whose chance is smallest, and below this."""
        held = self.borrowed.values()
        ahead = [
            h
            for h in held
            if h.use is BorrowState.COMPLETE and h.chance < chance and h.piece not in but
        ]
        return min(ahead, key=lambda held: (held.chance, held.piece), default=None)

    def occupy(self, piece: int, slot: int = -1) -> int:
        """The step computes a piece from here: one held, or one that comes into this slot."""
        held = self.borrowed.get(piece)
        if held is None:
            held = self.borrowed[piece] = BorrowedSlot(piece, slot, BorrowState.IN_USE)
        else:
            self._unlist(held)
            held.use = BorrowState.IN_USE
        return held.slot

    def release(self, piece: int) -> int:
        """The piece leaves the buffer. Returns its slot."""
        held = self.borrowed.pop(piece)
        self._unlist(held)
        return held.slot

    def _unlist(self, held: BorrowedSlot) -> None:
        if held.layer >= 0:
            del self._coming[held.layer][held.piece]
            held.layer = -1


def default_borrow_limit(top_k: int) -> int:
    """Slots on loan at most, where nothing else is said: four layers' (docs/log/ has others)."""
    return 4 * top_k
