"""Misses that are computed where they are: the event machine's way with the host's processor.

Before the cache is asked for a step, its misses are shared out between their devices and the host
(`processors`), by what is queued for each link and processor and by how long things take (`rates`).
What the host computes gets no slot on the device and moves nothing: it is read in its slot of the
tier between two links, first from the store where it is not there.

Left at that, what is asked for often would be computed on the host for ever. So what it has
computed of a token follows to its device while the link is idle (`following`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from greenroom.core.buffer import Held, Use
from greenroom.core.cache import NOBODY, Flags
from greenroom.core.events import HOST, Action, Routed
from greenroom.core.following import Following
from greenroom.core.processors import Miss, Queues, assign
from greenroom.core.queue import Entry
from greenroom.core.rates import Rates
from greenroom.core.step import Step
from greenroom.core.tiers import HostTier
from greenroom.errors import UsageError


class CoCompute(Following):
    """Without `rates` nothing of this happens."""

    def __init__(self, *args: Any, rates: Rates | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rates = rates
        if rates is not None and self.queue.host is None:
            raise UsageError("co-compute needs experts in host memory: give it slots there")

    @property
    def _tier(self) -> HostTier:
        assert self.queue.host is not None
        return self.queue.host

    # ---- a step's misses

    def _share_out(self, event: Routed, here: dict[int, Held]) -> dict[int, tuple[int, bool]]:
        """Requests that the host computes -> (slot between the links, whether it is there)."""
        if self.rates is None or event.moved:
            return {}
        misses, queues = self._asked(self.rates, event, here)
        if not misses:
            return {}
        found = {}
        for request in assign(misses, queues):
            slot, kept = self._tier.ask(int(event.experts[request]))
            if slot >= 0:  # else it is moved: there is no slot where it could be read
                found[request] = slot, kept
        if not found:
            self.rates.unused()
        return found

    def _asked(
        self, rates: Rates, event: Routed, here: dict[int, Held]
    ) -> tuple[list[Miss], Queues]:
        """A step's misses, and what is asked of everybody before them."""
        rows = [1] * event.experts.size if event.rows is None else event.rows.tolist()
        resident = (self.cache.state.slot_of[event.experts] >= 0).tolist()
        known: dict[tuple[int, bool, int], Miss] = {}  # of a token's experts all are alike
        misses, queues = [], Queues.empty(self.pieces.devices)
        nbytes = int(self.pieces.nbytes[event.experts[0]])
        for request, piece in enumerate(event.experts.tolist()):
            home, there = self._home[piece], resident[request] or piece in here
            kind = rows[request], there or self._tier.has(piece), home
            if kind not in known:
                known[kind] = rates.miss(request, rows[request], nbytes, *kind[1:])
            if there:
                queues.devices[home] += known[kind].there
            elif piece not in self.queue:
                misses.append(known[kind]._replace(request=request))
        self._add_transfers(rates, queues, here)
        return misses, queues

    def _add_transfers(self, rates: Rates, queues: Queues, here: dict[int, Held]) -> None:
        """What links have to carry first: what is left of the step's own that are under way, and of
        others what is on a lane."""
        moving = [piece for piece, held in here.items() if held.use is Use.MOVING]
        for link, piece, chunks in self.queue.load(moving):
            seconds = rates.link(link, chunks * self._chunk_bytes(piece))
            if link:
                queues.links[link - 1] += seconds
            else:
                queues.store += seconds

    def _chunk_bytes(self, piece: int) -> float:
        return float(self.pieces.nbytes[piece] / self.pieces.chunks[piece])

    def _aside(self, size: int, on_host: dict[int, tuple[int, bool]]) -> Flags:
        """Which of a step's requests get no slot on a device."""
        if not on_host:
            return NOBODY
        aside = np.zeros(size, np.bool_)
        aside[list(on_host)] = True
        return aside

    def _leave_there(self, step: Step, on_host: dict[int, tuple[int, bool]]) -> None:
        """Have them computed on the host as soon as their bytes are there."""
        for request, (slot, kept) in on_host.items():
            piece = int(step.experts[request])
            step.on_host[request], step.slots[request] = slot, slot
            self._followers.pop(piece, None)
            if kept:
                step.lent.add(piece)
                step.ready.append(request)
            else:
                step.missing[piece] = request
                self.queue.bring(piece, slot, int(self.pieces.chunks[piece]), self._home[piece])
        self.counts.on_host += len(on_host)

    def _place_of(self, step: Step, request: int) -> int:
        """What computes a request: a device, or the host."""
        return HOST if request in step.on_host else self._home[int(step.experts[request])]

    def _left(self, step: Step, piece: int) -> None:
        """The host has computed a piece: its slot there may be another's."""
        step.lent.remove(piece)
        self._tier.leave(piece, True)
        self._note_follower(step, piece)

    def _return(self, step: Step) -> None:
        """The step is over, computed or not: slots between the links that it still keeps."""
        for piece in step.lent:
            self._tier.leave(piece, True)

    def _held_back(self) -> set[int]:
        """What the host computes, or will: it has the slots that a transfer would come from."""
        step = self.step
        return set() if step is None else {int(step.experts[r]) for r in step.on_host}

    # ---- what is measured

    def _start(self, actions: list[Action]) -> None:
        before = len(actions)
        super()._start(actions)
        if self.rates is not None:
            for chunk in actions[before:]:
                self.rates.starts(chunk.link, chunk.lane, self._now)  # type: ignore[union-attr]

    def _note_landed(self, link: int, lane: int, entry: Entry) -> None:
        if self.rates is not None:
            self.rates.lands(link, lane, self._chunk_bytes(entry.piece), self._now)

    def _note_computed(self, step: Step, device: int, wave: list[int]) -> None:
        """A wave of a device took from when it was ordered until now."""
        if self.rates is None:
            return
        rows = [1 if step.rows is None else int(step.rows[request]) for request in wave]
        nbytes = int(self.pieces.nbytes[step.experts[wave[0]]])
        self.rates.computed(device, rows, nbytes, self._now - step.began[device])
