"""The expert cache, with shorter ways for the steps of one token."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenroom.core.cache import serving
from greenroom.core.cache.cache import Cache
from greenroom.core.pieces import Ints
from greenroom.core.policy import NO_ROWS, NO_WEIGHTS, Rows, Weights


class TokenCache(Cache):
    """The expert cache, with shorter ways for the steps of one token.

    They do what `serve` does, for steps that wait for nothing. After other work their code and
    arrays are no longer in the processor's caches, so what they do without is time saved.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._loaded, self._row = np.empty((3, 64), np.int64), np.zeros((1, 8), np.int64)
        self._flags = np.empty(64, np.bool_)

    def serve_hits(
        self,
        pieces: Ints,
        layer: int,
        token: int,
        request: int,
        prefill: bool,
        rows: Rows | None,
        weights: Weights | None,
    ) -> Ints | None:
        """Serve a step as `serve` does with pin "none", if all pieces are resident.

        Returns their cache slots; None, and nothing changes, if one is missing."""
        slots: Ints = self.state.slot_of[pieces]
        if -1 in slots.tolist():  # faster than NumPy's minimum
            return None
        now, log = token * self._layers + layer, self._unreported[0]
        if self.pieces.devices > 1 or len(log) + 1 >= self._most_hits:
            self.serve(
                pieces, now, "none", request=request, prefill=prefill, rows=rows, weights=weights
            )
            return slots
        (last, index), self.now = self._last_seen[0], (now, token, request, layer, int(prefill))
        log.append((pieces, (*self.now, index, request != last, pieces.size)))
        self._last_seen[0] = request, index + pieces.size
        return slots

    def pin_step(self, pieces: Ints) -> None:
        """Pin the pieces of a step that `serve_hits` has served, until `release`."""
        self.pin_hits()
        self._unpinned = pieces  # which costs nothing, unless a victim is chosen

    def load(
        self,
        pieces: Ints,
        layer: int,
        token: int,
        request: int,
        host_slot_of: Ints,
        memory_slots: Ints,
        moved: int = -1,
    ) -> Ints | None:
        """Serve a decode step on one device, whose missing pieces are in host memory.

        layer, token, request: those of the step
        host_slot_of: for each piece its slot there, or -1
        memory_slots: for each cache slot its slot in memory
        moved: how many missing pieces get slots, the first ones; -1: all

        Returns the missing pieces, their slots in memory and those in host memory: [3, misses].
        Returns None, and nothing changes, if a piece is in neither memory, or the step is larger
        than its slot group."""
        if self._unpinned.size or self._unreported[0]:
            self.report_hits()
        (last, index), size, out = self._last_seen[0], pieces.size, self._loaded
        at = token * self._layers + layer, token, request, layer, 0
        if size > out.shape[1]:
            out = self._loaded = np.empty((3, 2 * size), np.int64)
            self._flags = np.empty(2 * size, np.bool_)
        misses = self._bound.load(
            self.state, self._policy_states[0], pieces, (*at, index, int(request != last), size),
            self._row, NO_ROWS, NO_WEIGHTS, self._flags, host_slot_of, memory_slots, moved, out,
        )  # fmt: skip
        if misses < 0:
            if misses == serving.ELSEWHERE:
                return None
            raise RuntimeError("no expert can be evicted: all are pinned")
        self.now, self._last_seen[0] = at, (request, index + size)
        return out[:, :misses].copy()
