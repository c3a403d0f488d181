"""What is fetched before it is asked for: the event machine's way with predictions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection

from greenroom.core.buffer import Use
from greenroom.core.events import Action, Predicted, Routed
from greenroom.core.lookahead import Expected, Wish
from greenroom.core.queue import Urgency
from greenroom.core.residence import Residence
from greenroom.core.step import Step


class Prefetching(Residence):
    """With slots on loan from the cache, predictions are fetched while a link is free (see
    `buffer`, `lookahead`). Of a split expert what is not there is fetched, its top first."""

    def _predicted(self, event: Predicted, actions: list[Action]) -> None:
        if self.buffer.size:
            if event.certain:
                self.lookahead.decided(event.layer, event.experts)
            else:
                self.lookahead.expect(event.layer, event.experts)
            self._pump(actions)

    @abstractmethod
    def _pump(self, actions: list[Action]) -> None:
        """Begin whatever can begin now."""

    def _judge(self, event: Routed) -> Expected | None:
        """A layer's routing is known: its wrong prefetches are dropped, those under way at once."""
        resident = self.cache.state.slot_of
        expected = self.lookahead.routed(
            event.layer, event.experts, event.prefill, self._now, resident
        )
        used = set(event.experts.tolist())
        for held in self.buffer.passed(event.layer, used):
            if held.use is Use.MOVING:
                self._drop(held.piece)
            else:
                self.counts.wasted += 1
                self._give_back(held.piece)
        for expert, whole in self.extras.passed(event.layer, used):
            if whole:
                self.counts.wasted += 1
            else:
                self._drop(self._extra_of(expert))
        return expected

    def _prefetch(self) -> bool:
        """Begin the next prefetch that is worth it; False where there is none, or no way open."""
        ways = [self.queue.open_for(Urgency.PREFETCH, d) for d in range(self.pieces.devices)]
        if not any(ways):
            return False
        not_now = self._held_back()
        may = None
        if not all(ways) or not_now:
            may = lambda piece: ways[self._home[piece]] and piece not in not_now  # noqa: E731
        if self.pieces.split is None:
            wish = self.lookahead.nearest(self.cache.state.slot_of, self.buffer.held, may)
        else:
            wish = self.lookahead.nearest(None, _There(self), may, self._chunks_of)
        if wish is None:
            return False
        if not self._top_there(wish.piece):
            slot = self._loan(wish)
            if slot >= 0 or not self.buffer.full:  # where all is pinned, it is given up
                self.lookahead.fulfil(wish)
            if slot < 0:
                return False
            self.buffer.bring(wish.piece, slot, wish.layer, wish.chance)
            self._begin(wish.piece, int(self.place[slot]))
        elif self.extras.room:
            self.lookahead.fulfil(wish)
        else:
            return False
        if not self._extra_there(wish.piece):
            slot = self.extras.bring(wish.piece, wish.layer)
            if slot >= 0:
                self._begin(self._extra_of(wish.piece), self._seat(slot))
        return True

    def _held_back(self) -> Collection[int]:
        """Pieces of which nothing is to be moved now."""
        return ()

    def _begin(self, piece: int, place: int) -> None:
        self._add(piece, place, Urgency.PREFETCH)
        self.counts.prefetches += 1

    def _top_there(self, piece: int) -> bool:
        return bool(self.cache.state.slot_of[piece] >= 0) or piece in self.buffer.held

    def _extra_there(self, piece: int) -> bool:
        if self.pieces.split is None:
            return True
        return piece in self.extras.slot_of or self._extra_of(piece) < 0

    def _chunks_of(self, piece: int) -> int:
        """Chunks of an expert that are not there."""
        chunks = 0 if self._top_there(piece) else int(self.pieces.chunks[piece])
        if not self._extra_there(piece):
            chunks += int(self.pieces.chunks[self._extra_of(piece)])
        return chunks

    def _loan(self, wish: Wish) -> int:
        """A slot for a prefetch, -1 where none can be had."""
        if self.buffer.full:
            least = self.buffer.least(wish.chance)
            if least is None:
                return -1
            self.counts.displaced += 1
            self._give_back(least.piece)
        slot, evicted = self.cache.borrow(wish.piece)
        if evicted >= 0:
            self.lookahead.evicted(evicted)
        return slot

    def _note_in_time(self, step: Step, expected: Expected) -> None:
        """Of the right predictions, those that were there when they were asked for."""
        experts, n = step.experts.tolist(), self.pieces.experts
        lacking = step.waiting + step.lacking + list(step.on_host)
        here = (
            {*experts} - {p % n for p in step.missing} - {experts[request] for request in lacking}
        )
        likely = expected.ranked[: len(experts)]
        self.lookahead.accuracy.in_time[step.layer] += len(here.intersection(likely))


class _There:
    """The experts of which nothing is to be fetched."""

    def __init__(self, of: Prefetching) -> None:
        self._of = of

    def __contains__(self, piece: object) -> bool:
        assert isinstance(piece, int)
        return self._of._top_there(piece) and self._of._extra_there(piece)
