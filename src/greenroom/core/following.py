"""What follows to the slots after it was computed without one: on the host, or from a copy.

Such experts would never become residents, though they are asked for. So what was computed last of a
token follows while the link is idle, behind every demand and prefetch, into a slot on loan, and is
a resident once it is there. What its layer's next step does not ask for is dropped on its way.
"""

from __future__ import annotations

from typing import Any

from greenroom.core.halves import Halves
from greenroom.core.queue import Urgency
from greenroom.core.step import Step


class Following(Halves):
    """Nothing follows where nobody notes any."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._followers: dict[int, int] = {}  # pieces to be brought -> layer, the latest last

    def _note_follower(self, step: Step, piece: int) -> None:
        """A piece was computed without a slot."""
        if not step.prefill and self.buffer.size and self.cache.policy.preload is None:
            self._followers.pop(piece, None)
            self._followers[piece] = step.layer
            if len(self._followers) > self.buffer.size:
                del self._followers[next(iter(self._followers))]

    def _follow(self) -> bool:
        """Begin to move what was computed last; False where there is none, or no way open."""
        while self._followers:
            piece, layer = next(reversed(self._followers.items()))
            if self.buffer.full or not self.queue.open_for(Urgency.PREFETCH, self._home[piece]):
                return False
            del self._followers[piece]
            if self._top_there(piece) or piece in self.queue:
                continue
            slot, _ = self.cache.borrow(piece)
            if slot < 0:
                return False
            self.buffer.bring(piece, slot, layer, 1.0, stays=True)
            self._begin(piece, int(self.place[slot]))
            return True
        return False

    def _ahead_landed(self, piece: int) -> None:
        """A piece has come into a slot on loan before it was asked for again."""
        if self.buffer.held[piece].stays:
            self.cache.admit(piece, self.buffer.release(piece))
            self.counts.adopted += 1
        else:
            self.buffer.landed(piece)
