"""Recordings of simulations for the map of experts: the cache's content after each pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenroom.core.scheduler.view import ExpertState
from greenroom.drawing.frames import all_levels, flags_text, greeting, most_frames, states_text
from greenroom.sim.study import Cell, Study

MOST_FRAMES = 3000  # longer traces have a frame for every few passes
FRAMES_PER_S = 10
SPAN = 300  # tokens of the page's charts


def recording(study: Study, cell: Cell, title: str, last: int | None = None) -> dict[str, Any]:
    """Replay a trace, and return a greeting and frames of its forward passes (or tokens).

    The trace does not say which experts were in memory. So a simulated cache that is empty at first
    serves its requests. `last` passes have frames; None: all. Costs and prefetching are ignored.
    """
    requests, trace, layers = study.requests, study.trace, study.trace.layers
    ends = np.append(np.flatnonzero(np.diff(requests.token)) + 1, requests.token.size)
    first = max(0, ends.size - (last or ends.size))
    experts = int(trace.offsets[-1])
    every = -(-(ends.size - first) // most_frames(experts, MOST_FRAMES))
    numbers = np.append(np.arange(first + every, ends.size, every), ends.size)  # served passes
    stops = ends[numbers - 1]
    begins = np.append(ends[first - 1] if first else 0, stops[:-1])
    played = study.replay(cell, detail=True, watch=stops.tolist())
    assert played.missed is not None
    step = np.repeat(np.arange(requests.layer.size), np.diff(requests.starts))
    counts = np.zeros((2, numbers.size, layers), np.int64)
    where = played.missed.astype(np.int64), np.searchsorted(stops, step, "right")
    np.add.at(counts, (*where, requests.layer[step]), 1)
    hits, misses = counts.cumsum(axis=1)
    sizes = [(0, cell.capacity), *study.resized_steps()]
    frames = []
    for i, (begin, stop) in enumerate(zip(begins.tolist(), stops.tolist(), strict=True)):
        resident, used = played.residents[i], np.zeros(experts, np.bool_)
        used[requests.pieces[requests.starts[begin] : requests.starts[stop]]] = True
        number = int(requests.token[stop - 1]) + 1
        frames.append({
            "t": int(trace.pass_starts[number]) if study.order == "runtime" else number,
            "slots": [[n for at, n in sizes if at < stop][-1], int(resident.sum())],
            "hits": hits[i].tolist(),
            "misses": misses[i].tolist(),
            "states": states_text(np.where(resident, ExpertState.RESIDENT, ExpertState.ABSENT)),
            "used": flags_text(used),
        })  # fmt: skip
    uses = trace.uses()
    begun = greeting(
        "trace", title, trace.experts_per_layer.tolist(),
        unit="tokens", span=SPAN, frames_per_s=FRAMES_PER_S, policy=cell.rule.name,
        levels=all_levels(uses, trace.offsets), uses=uses.tolist(), tokens=trace.tokens,
        about=[f"{trace.tokens:,} tokens", "simulated cache"],
    )  # fmt: skip
    return {"greeting": begun, "frames": frames}
