"""Frames of a running engine, read from its counters without a lock."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from greenroom import __version__
from greenroom.drawing.frames import LevelSlices, all_levels, flags_text, greeting, states_text
from greenroom.hf.attach.devices import device_names
from greenroom.hf.attach.snapshot import SnapshotReader
from greenroom.server.engine.loop import ContinuousEngine
from greenroom.server.engine.sequence import Sequence

ROWS = 24  # requests in a frame
STALE_S = 5.0  # after which a frame has nothing of what came before


class EngineFrames:
    """Makes frames of a serving engine; `controls` is whether clients may change anything."""

    def __init__(self, engine: ContinuousEngine, name: str, controls: bool) -> None:
        self._engine, self._name, self._controls = engine, name, controls
        self._at = float("-inf")
        self._reader: SnapshotReader | None = None  # None before the model is loaded
        self._slices: Any = None

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
            devices=device_names(greenroom.setup, range(len(greenroom.setup.devices))),
            slot_bytes=greenroom.setup.catalog.slot_bytes,
            levels=all_levels(driver.request_counts, offsets),
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
            self._at = now
            if self._reader is not None:
                self._reader.forget()
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
            frame |= self._cache()
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

    def _cache(self) -> dict[str, Any]:
        """Return the fields of a frame about the expert cache, links, memory and prefetches."""
        engine, admission = self._engine, self._engine.admission
        if self._reader is None:
            self._reader = SnapshotReader(engine.greenroom, engine.model)
            self._slices = LevelSlices(np.asarray(self._pieces.offsets))
        now = self._reader.read(admission.reserved + admission.prefixes.nbytes)
        return {
            "slots": [now.capacity, now.present],
            "memory": list(now.memory),
            "devices": engine.greenroom.devices,
            "hits": now.hits,
            "misses": now.misses,
            "stalls": [round(1000 * seconds) for seconds in now.stalls],
            "links": [
                [link.nbytes, round(link.busy_s, 3), link.demands, link.prefetches, link.moving]
                for link in now.links
            ],
            "prefetch": {
                "on": now.prefetch.on,
                "verdict": now.prefetch.verdict,
                "accuracy": _rounded(now.prefetch.accuracy),
                **now.prefetch.outcomes,
            },
            "states": states_text(now.states),
            "used": flags_text(now.used),
            "levels": self._slices.encode(now.uses),
        }


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
