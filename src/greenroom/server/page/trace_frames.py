"""Frames of a routing trace: its requests, served by a simulated expert cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenroom.core.cache.cache import Cache
from greenroom.core.pieces import Pieces
from greenroom.core.policy import Policy
from greenroom.core.scheduler.view import ExpertState
from greenroom.server.page.frames import LevelSlices, flags_text, greeting, most_frames, states_text
from greenroom.trace import Trace, stream

MOST_FRAMES = 3000  # longer traces have a frame for every few passes
FRAMES_PER_S = 10
SPAN = 300  # tokens of the page's charts


def trace_frames(trace: Trace, title: str, capacity: int, policy: Policy) -> dict[str, Any]:
    """Return a recording of a trace for the live page: a greeting, and frames of forward passes.

    The trace does not say which experts were in memory. So a cache of `capacity` slots that is
    empty at first serves the trace's requests, as `greenroom simulate --order runtime` does.
    """
    steps, offsets, layers = stream(trace, "runtime"), trace.offsets, trace.layers
    pieces = Pieces.unsplit(offsets.tolist(), [1] * layers)
    cache = Cache(pieces, capacity, policy, trace=steps if policy.needs_trace else None)
    uses, used = np.zeros(pieces.experts, np.int64), np.zeros(pieces.experts, np.bool_)
    hits, misses = [0] * layers, [0] * layers
    slices, frames = LevelSlices(offsets), []
    every = -(-trace.passes // most_frames(pieces.experts, MOST_FRAMES))
    for step in range(steps.now.size):
        part = slice(steps.starts[step], steps.starts[step + 1])
        ids, layer = steps.pieces[part].astype(np.int64), int(steps.layer[step])
        served = cache.serve(
            ids, int(steps.now[step]), token=int(steps.token[step]),
            request=int(steps.request[step]), prefill=bool(steps.prefill[step]),
            rows=steps.rows[part] if steps.rows.size else None,
            weights=steps.weights[part] if steps.weights.size else None,
        )  # fmt: skip
        if served.pinned:
            cache.release(ids)
        misses[layer] += served.misses
        hits[layer] += ids.size - served.misses
        uses[ids] += 1
        used[ids] = True
        number = int(steps.token[step])
        if layer < layers - 1 or ((number + 1) % every and number < trace.passes - 1):
            continue
        resident = cache.state.slot_of >= 0
        frames.append({
            "t": int(trace.pass_starts[number + 1]),
            "slots": [capacity, int(resident.sum())],
            "hits": [*hits],
            "misses": [*misses],
            "states": states_text(np.where(resident, ExpertState.RESIDENT, ExpertState.ABSENT)),
            "used": flags_text(used),
            "levels": slices.encode(uses),
        })  # fmt: skip
        used[:] = False
    first = greeting(
        "trace", title, trace.experts_per_layer.tolist(),
        unit="tokens", span=SPAN, frames_per_s=FRAMES_PER_S, policy=policy.name,
        levels=LevelSlices(offsets).encode_all(np.zeros_like(uses)),
        about=[f"{trace.tokens:,} tokens", "simulated cache"],
    )  # fmt: skip
    return {"greeting": first, "frames": frames}
