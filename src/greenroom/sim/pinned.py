"""Pinned experts in a replay: each task's hot experts never leave the cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from greenroom.core.cache.pins import Pins, Task
from greenroom.core.pieces import Ints
from greenroom.core.stream import Stream
from greenroom.errors import UnknownName, UsageError
from greenroom.trace import Trace

WINDOW = 16  # tokens that replace the prompt where a trace has none


def hot_experts(trace: Trace, tasks: Sequence[str], share: float) -> Pins:
    """Find the experts that each task's tokens use most.

    A share of every layer's experts is returned, at least one.

    A task is a label of the trace's requests. UnknownName lists the labels.
    """
    if not 0 < share < 1:
        raise UsageError(f"the share of experts to pin must be above 0 and below 1: {share:g}")
    offsets = trace.offsets.tolist()
    tasks_by_name = {}
    for task in tasks:
        if task not in trace.labels:
            raise UnknownName("task", task, sorted(set(trace.labels)))
        chosen = [r for r, label in enumerate(trace.labels) if label == task]
        part = trace.select(chosen)
        pattern = part.uses() / part.tokens
        ids = [
            a + np.argsort(-pattern[a:b], kind="stable")[: max(1, round(share * (b - a)))]
            for a, b in pairwise(offsets)
        ]
        tasks_by_name[task] = Task(np.sort(np.concatenate(ids)), pattern)
    return Pins(tasks_by_name, tuple(offsets))


def pinned_by_step(trace: Trace, stream: Stream, pins: Pins) -> list[tuple[int, Ints]]:
    """List (step, pinned experts) for a replay; `stream` is the trace in `runtime` order.

    With one task its experts are pinned from the start. With several, from a request's first
    decoded token on, those of the task nearest to its prompt; in a trace without prompts, nearest
    to the request's first WINDOW tokens.
    """
    if len(pins.tasks) == 1:
        return [(0, pins.first)]
    changes = []
    for begin, end in pairwise(trace.first_passes.tolist()):
        decodes = np.flatnonzero(~trace.pass_prefill[begin:end])
        prompt = int(decodes[0]) if decodes.size else end - begin
        at = begin + prompt if prompt else min(begin + WINDOW, end)
        counts = trace.uses(trace.pass_starts[begin], trace.pass_starts[at])
        step = int(np.searchsorted(stream.token, at))
        changes.append((step, pins.tasks[pins.nearest(counts)].experts))
    return changes
