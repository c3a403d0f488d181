"""Pinned experts in a replay: the most used experts of a task are never evicted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from greenroom.core.cache.pins import Pins, Task
from greenroom.core.pieces import Ints
from greenroom.core.stream import Stream
from greenroom.errors import UnknownName, UsageError
from greenroom.trace import Trace

WINDOW = 16  # passes that replace the prompt in a trace without prompts


def hot_experts(trace: Trace, tasks: Sequence[str], share: float) -> Pins:
    """Find the experts that each task's tokens use most, to pin them in the cache.

    tasks: labels of the trace's requests
    share: share of each layer's experts to pin, above 0 and below 1; at least one expert per layer

    Raises UsageError for another share, and UnknownName for a label that no request has.
    """
    if not 0 < share < 1:
        raise UsageError(
            f"the share of experts to pin is {share:g}: it must be above 0 and below 1"
        )
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
    """List the steps of a replay at which the pinned experts change, with the experts.

    `stream` has one step per forward pass and layer. A single task's experts are pinned from the
    start. Of several tasks, the one is chosen whose expert usage is most similar to that of the
    request's prompt, and pinned from the first decoded token on. In a trace without prompts, the
    request's first 16 forward passes stand for the prompt.
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
