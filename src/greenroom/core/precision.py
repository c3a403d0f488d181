"""Misses that are served with less than the exact expert: a low-precision copy, another expert that
is there, or nothing (HOBBIT, section 3.2). What it changes in the output is the user's choice.

A miss of decoding is judged by its expert's tail (see `gates`), and served by the first of these
that is allowed and has a threshold above the tail: left out; computed with the weights of a buddy
(see `buddies`); computed from its low-precision copy. Hits and prompts are exact, and so is what a
prefetch has begun the last chunk of; others are given up. The policy hears of exact experts alone.

Copies have slots of their own, the least recently used makes room. Where copy and expert are
nested, an exact miss whose copy is there fetches only what the copy lacks, and joins the two.
Where that was asked for, the exact expert follows a copy that was computed (`following`), whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from greenroom.core.buddies import Buddies
from greenroom.core.events import Routed
from greenroom.core.following import Following
from greenroom.core.pieces import Ints
from greenroom.core.queue import Transfer
from greenroom.core.step import Step

EXACT, LOW, LEFT_OUT = 0, 1, 2  # the part of a request that a wave computes


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Tails below which a miss is left out, replaced, or served by its copy; 0: never. `follow`:
    the exact expert comes after a copy that was computed, while the link is idle."""

    low: float = 0.0
    skip: float = 0.0
    substitute: float = 0.0
    follow: bool = False

    @property
    def most(self) -> float:
        """No tail from here on is judged."""
        return max(self.low, self.skip, self.substitute)


@dataclass(frozen=True, slots=True)
class Lesser:
    """Requests of a step that get less than the exact expert; `buddies` gives those of some."""

    low: list[int]
    left_out: list[int]
    buddies: dict[int, int]


class Precision(Following):
    """Serves misses of small tails with less. Nothing of this happens without thresholds."""

    thresholds: Thresholds
    buddies: Buddies | None
    joining: dict[int, int]  # piece -> slot of the copy that it will be joined with

    def _lessened(self, event: Routed) -> tuple[Routed, Lesser | None]:
        """What of a step is asked for exactly, and what becomes of the rest."""
        if event.prefill or event.tails is None or self.thresholds.most == 0:
            return event, None
        if self.buddies is not None:
            self.buddies.note(event.layer, event.experts)
        small = event.tails < self.thresholds.most
        small &= self.cache.state.slot_of[event.experts] < 0
        if not small.any():
            return event, None
        lesser = self._judged(event, np.flatnonzero(small).tolist())
        less = {*lesser.low, *lesser.left_out, *lesser.buddies}
        if not less:
            return event, None
        exact = np.array([e not in less for e in event.experts.tolist()])
        return replace(
            event,
            experts=event.experts[exact],
            rows=None if event.rows is None else event.rows[exact],
            weights=None if event.weights is None else event.weights[exact],
            tails=event.tails[exact],
        ), lesser

    def _judged(self, event: Routed, small: list[int]) -> Lesser:
        lesser, at = Lesser([], [], {}), self.thresholds
        assert event.tails is not None
        for request in small:
            expert, tail = int(event.experts[request]), float(event.tails[request])
            if expert in self.buffer.held and self._comes(expert):
                continue
            if tail < at.skip:
                lesser.left_out.append(expert)
            elif tail < at.substitute and (buddy := self._buddy(event, expert, lesser)) >= 0:
                lesser.buddies[expert] = buddy
            elif tail < at.low:
                lesser.low.append(expert)
        for expert in (*lesser.low, *lesser.left_out, *lesser.buddies):
            if expert in self.buffer.held:  # the prefetch of it is given up
                self._drop(expert)
        for buddy in {*lesser.buddies.values()}:  # not a victim of this step
            self.cache.state.pinned[buddy] += 1
        return lesser

    def _comes(self, expert: int) -> bool:
        """Whether a prefetched expert is there, or all that is left of it under way."""
        entry = self.queue.entries.get(expert)
        return entry is None or (entry.started == entry.chunks and not entry.dropped)

    def _buddy(self, event: Routed, expert: int, so_far: Lesser) -> int:
        """Who may stand in for an expert: resident, and not chosen in this step; -1: nobody."""
        assert self.buddies is not None
        state, offsets = self.cache.state, self.pieces.offsets
        beside = event.experts.size + len(so_far.buddies) + len(self.buffer.held)
        if beside >= self.cache.open(int(state.group_of[expert])):  # it might leave no victim
            return -1
        able = state.slot_of[offsets[event.layer] : offsets[event.layer + 1]] >= 0
        able[event.experts - offsets[event.layer]] = False
        return self.buddies.of(event.layer, expert, able)

    def _serve_lesser(self, step: Step, lesser: Lesser) -> None:
        """Add the requests that get less, after the exact ones."""
        exact, buddies = step.uncomputed, sorted(lesser.buddies)
        lows, rest = exact + len(lesser.low), lesser.left_out + buddies
        slots = [int(self.place[self.cache.state.slot_of[lesser.buddies[e]]]) for e in buddies]
        none = [-1] * (len(lesser.low) + len(lesser.left_out))
        step.experts = np.concatenate([step.experts, _ids(lesser.low), _ids(rest)])
        step.slots = np.concatenate([step.slots, _ids(none), _ids(slots)])
        step.stage = [EXACT] * exact + [LOW] * len(lesser.low)
        step.stage += [LEFT_OUT] * len(lesser.left_out) + [EXACT] * len(buddies)
        step.uncomputed = step.experts.size
        step.ready += range(lows, step.uncomputed)
        step.lacking = list(range(exact, lows))
        step.buddies = [*{*lesser.buddies.values()}]
        counts = self.counts
        counts.low += len(lesser.low)
        counts.low_hits += sum(map(self.extras.whole, lesser.low))
        counts.left_out += len(lesser.left_out)
        counts.substituted += len(buddies)
        self._claim_extras(step)

    def _unpin_buddies(self, step: Step) -> None:
        for buddy in step.buddies:
            self.cache.state.pinned[buddy] -= 1

    # ---- copies that become exact

    def _goes_on(self, step: Step, request: int) -> bool:
        if self.thresholds.follow and step.stage and step.stage[request] == LOW:
            self._note_follower(step, int(step.experts[request]))
        return super()._goes_on(step, request)

    def _ask(self, step: Step, request: int, slot: int) -> None:
        """Demand a request's expert: all of it, or what its copy lacks."""
        expert = int(step.experts[request])
        copies = self.pieces.copies
        if copies is not None and copies.rest and self.extras.whole(expert):
            piece = 2 * self.pieces.experts + expert
            self.joining[piece] = self._seat(self.extras.claim(expert))
            self.counts.joined += 1
        else:
            piece = expert
        step.missing.pop(expert, None)  # it waited for its slot
        step.missing[piece] = request
        self._add(piece, slot)

    def _joins(self, transfer: Transfer) -> int:
        """The slot of the copy that a piece is joined with as its first chunk starts; else -1."""
        slot = self.joining.pop(transfer.entry.piece, -1) if self.joining else -1
        if slot >= 0:
            self.extras.done(transfer.entry.piece % self.pieces.experts)
        return slot

    def _forget_join(self, piece: int) -> None:
        if self.joining.pop(piece, -1) >= 0:
            self.extras.done(piece % self.pieces.experts)


def _ids(values: list[int]) -> Ints:
    return np.array(values, np.int64)
