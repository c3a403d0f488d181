"""Frames of a running engine, read from its counters without a lock.

All that is read is a number, an array that other threads write in place, or a list copied in one
step of the interpreter. So a frame never waits for the engine, and the engine never waits for it;
values of one frame may be a moment apart.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from greenroom import __version__
from greenroom.runtime.kernels.dense.stored import dense_bytes
from greenroom.runtime.memory.system import rss_bytes
from greenroom.server.engine.loop import ContinuousEngine
from greenroom.server.engine.sequence import Sequence
from greenroom.server.page.frames import LevelSlices, by_layer, flags_text, greeting, states_text

ROWS = 24  # requests in a frame
STALE_S = 5.0  # after which a frame has nothing of what came before
MEMORY_S = 2.0  # between two readings of the process's memory
OUTCOMES = ("prefetches", "useful", "late", "wasted", "dropped", "displaced", "failed")


class EngineFrames:
    """Makes frames of a serving engine; `controls` is whether clients may change anything."""

    def __init__(self, engine: ContinuousEngine, name: str, controls: bool) -> None:
        self._engine, self._name, self._controls = engine, name, controls
        self._at = self._memory_at = float("-inf")
        self._memory: list[int | None] = []
        self._uses: Any = None  # of the last frame
        self._slices: Any = None
        self._dense = 0

    def greeting(self) -> dict[str, Any] | None:
        """Return what stays the same, and all use levels; None before the model is loaded."""
        engine = self._engine
        if not engine.was_ready:
            return None
        greenroom, driver, pieces = engine.greenroom, engine.greenroom.driver, self._pieces
        offsets, predictor, now = np.asarray(pieces.offsets), greenroom.predictor, time.monotonic()
        return greeting(
            "live", self._name, np.diff(offsets).tolist(),
            version=__version__,
            controls=self._controls,
            context=engine.context,
            policy=driver.scheduler.policy.name,
            predictor=predictor.name if predictor is not None else None,
            kernels=greenroom.bindings.kernel_description,
            links=list(driver.links),
            slot_bytes=greenroom.setup.catalog.slot_bytes,
            levels=LevelSlices(offsets).encode_all(driver.request_counts),
            answered=[
                [round(now - ended + one.duration_s - one.ttft_s, 1), round(one.ttft_s, 4)]
                for ended, one in list(engine.totals.recent)
                if one.ttft_s is not None
            ],
        )  # fmt: skip

    @property
    def _pieces(self) -> Any:
        return self._engine.greenroom.driver.pieces

    def frame(self) -> dict[str, Any]:
        """Return the engine's state now, and what happened since the last call."""
        engine, now = self._engine, time.monotonic()
        if now - self._at > STALE_S:  # nobody has watched
            self._at, self._uses = now, None
        state, progress, _ = engine.state()
        running, waiting = engine.sequences()
        config, totals = engine.config, engine.totals
        frame: dict[str, Any] = {
            "t": round(now, 3),
            "state": [state, round(progress, 3)],
            "queue": [len(running), len(waiting), config.max_batch, config.max_queue],
            "tokens": [totals.prompt_tokens, totals.new_tokens + sum(s.new for s in running)],
            "requests": [_row(each, now) for each in (*running, *waiting)[:ROWS]],
        }
        if engine.was_ready:
            frame["answered"] = self._answered(running, now)
            frame |= self._cache(now)
        self._at = now
        return frame

    def _answered(self, running: list[Sequence], now: float) -> list[list[float]]:
        """Return the age and the TTFT of the first tokens that came since the last frame."""
        times = [(each.answered, each.arrived) for each in running if each.answered is not None]
        for ended, one in list(self._engine.totals.recent):
            if one.ttft_s is not None:
                arrived = ended - one.duration_s
                times.append((arrived + one.ttft_s, arrived))
        return [
            [round(now - first, 2), round(first - arrived, 4)]
            for first, arrived in times
            if first > self._at
        ]

    def _cache(self, now: float) -> dict[str, Any]:
        """Return the fields of a frame about the expert cache, links, memory and prefetches."""
        greenroom = self._engine.greenroom
        driver = greenroom.driver
        view, meter, offsets = driver.scheduler.view, driver.meter, np.asarray(self._pieces.offsets)
        self._slices = self._slices or LevelSlices(offsets)
        uses = driver.request_counts.copy()
        used = uses != self._uses if self._uses is not None else np.zeros(uses.size, np.bool_)
        self._uses = uses
        requests, misses = by_layer(uses, offsets), driver.miss_counts.tolist()
        states = view.expert_states()
        counts, predictions = view.counted(), driver.predictions
        return {
            "slots": [greenroom.capacity, int(np.count_nonzero(states))],
            "memory": self._read_memory(now),
            "hits": [count - missed for count, missed in zip(requests, misses, strict=True)],
            "misses": misses,
            "stalls": [round(1000 * seconds) for seconds in meter.layer_stalls],
            "links": [
                [link.nbytes, round(link.busy_s, 3), *lengths]
                for link, lengths in zip(meter.links, view.queue_lengths(), strict=True)
            ],
            "prefetch": {
                "on": predictions.foresight is not None and predictions.foresight.on,
                "verdict": predictions.guard.verdict if predictions.guard is not None else None,
                "accuracy": _rounded(view.accuracy.share()),
                **{name: getattr(counts, name) for name in OUTCOMES},
            },
            "states": states_text(states),
            "used": flags_text(used),
            "levels": self._slices.encode(uses),
        }

    def _read_memory(self, now: float) -> list[int | None]:
        """Return bytes: budget, process, dense parts, slots, keys and values, and buffers.

        With a GPU they are of its memory, and the process is None.
        """
        if now < self._memory_at + MEMORY_S:
            return self._memory
        engine = self._engine
        greenroom, admission = engine.greenroom, engine.admission
        self._dense = self._dense or dense_bytes(engine.model)
        budget = greenroom.slot_budget
        need = budget.first_block_needs() if budget is not None else None
        self._memory_at, self._memory = now, [
            greenroom.setup.budget_bytes,
            None if greenroom.setup.cuda else rss_bytes(),
            self._dense,
            greenroom.capacity * greenroom.setup.catalog.slot_bytes,
            admission.reserved + admission.prefixes.nbytes,
            need.staging + need.workspace if need is not None else None,
        ]  # fmt: skip
        return self._memory


def _row(sequence: Sequence, now: float) -> list[Any]:
    """Return a request's name, phase, tokens (prompt, computed, new, most new) and age."""
    phase = "waiting" if sequence.admitted is None else "prompt"
    if sequence.answered is not None:
        phase = "answer"
    request = sequence.request
    tokens = sequence.prompt, min(sequence.computed, sequence.prompt), sequence.new
    return [request.name, phase, *tokens, request.max_new_tokens, round(now - sequence.arrived, 1)]


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
