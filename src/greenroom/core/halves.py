"""Split experts in a step: the bottom of each request, which goes on where its top has ended."""

from __future__ import annotations

from greenroom.core.prefetching import Prefetching
from greenroom.core.step import Step


class Halves(Prefetching):
    """A request gets a slot for its bottom when it has one for its top, and is over when both are
    computed. Nothing of this happens where experts are whole."""

    def _claim_extras(self, step: Step) -> None:
        """Give slots to bottoms whose tops have theirs, in the order of the requests."""
        # Those whose tops have no slot yet, or one that is another's until that is computed.
        later = {*step.waiting, *step.blocked.values()}
        for request in list(step.lacking):
            if request in later:
                continue
            expert = int(step.experts[request])
            there, whole = expert in self.extras.slot_of, self.extras.whole(expert)
            ahead = self.extras.awaits_use(expert)
            slot = self.extras.claim(expert)
            if slot < 0:
                continue
            step.lacking.remove(request)
            step.seats[request] = slot
            piece = self._extra_of(expert)
            if whole:
                self.counts.useful += ahead
                self._extra_landed(step, request)
                continue
            if there:  # a prefetch that is under way; one that was dropped is begun again
                self.counts.late += not self.queue.entries[piece].dropped
                step.late.add(piece)
            step.missing[piece] = request
            self._add(piece, self._seat(slot))

    def _extra_landed(self, step: Step, request: int) -> None:
        """A bottom is there; it is computed when its top has been."""
        if step.stage[request] == 1:
            step.ready.append(request)

    def _goes_on(self, step: Step, request: int) -> bool:
        """A part of a request is computed: whether another one follows."""
        if not step.stage:
            return False
        expert = int(step.experts[request])
        if self.pieces.split is None:
            if request in step.seats:
                self.extras.done(expert)
                del step.seats[request]
            return False
        step.stage[request] += 1
        if step.stage[request] == 1 and self._extra_of(expert) >= 0:
            if request in step.seats and self.extras.whole(expert):
                step.ready.append(request)
            return True
        if request in step.seats:
            self.extras.done(expert)
            del step.seats[request]
        return False
