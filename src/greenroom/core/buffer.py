"""The prefetch buffer: slots beside the cache for what is fetched before it is asked for.

A prefetch never evicts a resident: it comes into the buffer. When its expert is requested, the slot
becomes the cache's and the slot of the policy's victim the buffer's: nothing is copied, and the
policy decides as it would without prefetching. What is in an idle slot (a victim, a prefetch that
was not needed) stays findable until the slot is used again, oldest first (a victim cache, Jouppi
1990).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum


class Use(IntEnum):
    """Why a slot of the buffer is occupied."""

    IDLE = 0  # what is in it may still be asked for, but nobody counts on it
    AHEAD = 1  # prefetched, and its layer has not come yet
    MOVING = 2  # on its way, prefetched
    BUSY = 3  # of the step being served


@dataclass(slots=True)
class Held:
    """A piece in the buffer; `layer` and `chance` of use are those that it is predicted for.

    `fetched`: it came by a prefetch, which has not been of use yet.
    """

    piece: int
    slot: int
    use: Use
    layer: int = -1
    chance: float = 0.0
    fetched: bool = False


class Buffer:
    """Pieces by slot. A piece is never both here and resident in the cache."""

    def __init__(self, slots: Iterable[int] = ()) -> None:
        self._empty = list(slots)[::-1]
        self.size = len(self._empty)
        self.held: dict[int, Held] = {}
        self.wasted = 0  # prefetches that were whole and not asked for
        self._idle: OrderedDict[int, Held] = OrderedDict()  # by piece, oldest first
        self._coming: dict[int, dict[int, Held]] = {}  # layer -> piece -> prefetched for it

    def spare(self) -> int | None:
        """A slot that nobody counts on, taken out of the buffer's hands; None where there is none.

        It must come back: by `bring`, `occupy` or `leave`.
        """
        if self._empty:
            return self._empty.pop()
        if self._idle:
            piece, held = self._idle.popitem(last=False)
            del self.held[piece]
            return held.slot
        return None

    def least(self, chance: float) -> Held | None:
        """The piece kept for a layer to come whose chance is smallest, and below this."""
        ahead = [h for h in self.held.values() if h.use is Use.AHEAD and h.chance < chance]
        return min(ahead, key=lambda held: (held.chance, held.piece), default=None)

    def bring(self, piece: int, slot: int, layer: int, chance: float) -> None:
        """A prefetch of this piece for this layer begins, into a slot that was spare."""
        held = self.held[piece] = Held(piece, slot, Use.MOVING, layer, chance, True)
        self._coming.setdefault(layer, {})[piece] = held

    def expect(self, piece: int, layer: int, chance: float) -> None:
        """A piece that lies idle here is predicted for a layer: keep it."""
        held = self.held[piece]
        if held.use is Use.IDLE:
            del self._idle[piece]
            held.use, held.layer, held.chance = Use.AHEAD, layer, chance
            self._coming.setdefault(layer, {})[piece] = held

    def landed(self, piece: int, wanted: bool = True) -> None:
        """A prefetch is complete; it is idle where it was given up meanwhile."""
        if wanted:
            self.held[piece].use = Use.AHEAD
        else:
            self.rest(piece)

    def passed(self, layer: int, used: Collection[int]) -> list[Held]:
        """A layer's routing is known: what was kept for it and is not among `used` becomes idle.

        Returns those still moving, which are the caller's to drop.
        """
        coming = self._coming.get(layer)
        if not coming:
            return []
        wrong = [held for piece, held in coming.items() if piece not in used]
        for held in wrong:
            if held.use is Use.AHEAD:
                self.wasted += held.fetched
                self.rest(held.piece)
        return [held for held in wrong if held.use is Use.MOVING]

    def occupy(self, piece: int, slot: int | None = None) -> int:
        """The step uses a piece from here: one held, or one that comes into this spare slot."""
        held = self.held.get(piece)
        if held is None:
            assert slot is not None
            held = self.held[piece] = Held(piece, slot, Use.BUSY)
        else:
            self._unlist(held)
            held.use, held.fetched = Use.BUSY, False
        return held.slot

    def rest(self, piece: int) -> None:
        """Nobody counts on the piece any longer: its bytes stay until the slot is needed."""
        self._unlist(self.held[piece])
        self._rest(self.held[piece])

    def give_up(self, piece: int) -> None:
        """The piece is not coming: its slot is empty."""
        held = self.held[piece]
        self._forget(held)
        self._empty.append(held.slot)

    def exchange(self, piece: int, slot: int, left: int) -> int:
        """The cache takes over a piece with its slot, and hands in one that holds `left` (or -1).

        Returns the slot taken over.
        """
        held = self.held[piece]
        self._forget(held)
        self.leave(slot, left)
        return held.slot

    def leave(self, slot: int, left: int) -> None:
        """A slot is the buffer's now; `left` is the piece whose bytes are in it, or -1."""
        if left < 0:
            self._empty.append(slot)
        else:
            held = self.held[left] = Held(left, slot, Use.IDLE)
            self._idle[left] = held

    def _rest(self, held: Held) -> None:
        held.use, held.layer, held.fetched = Use.IDLE, -1, False
        self._idle[held.piece] = held

    def _unlist(self, held: Held) -> None:
        self._idle.pop(held.piece, None)
        if held.layer >= 0:
            self._coming[held.layer].pop(held.piece, None)
            held.layer = -1

    def _forget(self, held: Held) -> None:
        self._unlist(held)
        del self.held[held.piece]


def slots_ahead(capacity: int, top_k: int) -> int:
    """Slots of the buffer where nothing else is said: two layers' experts, but an eighth at most.

    docs/log.md has what other sizes gave.
    """
    return min(2 * top_k, capacity // 8)
