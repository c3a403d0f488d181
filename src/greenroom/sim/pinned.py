"""Pinned experts in a replay: the most used experts of a task are never evicted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from greenroom.core.cache.pins import Floats, Pins, Task
from greenroom.core.pieces import Ints
from greenroom.core.stream import Stream
from greenroom.errors import UnknownName, UsageError
from greenroom.trace import Trace

WINDOW = 16  # passes that replace the prompt in a trace without prompts
SCORES = ("counts", "tcess", "easy-ep")
BLOCK = 1 << 14  # tokens that are scored at a time


def expert_scores(trace: Trace, score: str) -> Floats:
    """Score how much a trace's tokens need each expert: [experts of all layers], by dense id.

    counts: the share of the tokens that use the expert
    tcess:  PreMoe's task-conditioned expected selection score: the mean over the tokens of the
            expert's share of the token's gate weights, 0 where the token did not choose it
    easy-ep: EASY-EP's score: the mean over the tokens of the expert's gate weight, times the norm
            of its output, times how much the layer's routed experts change the token

    Raises UnknownName for another score, and UsageError if the trace lacks what the score needs.
    """
    if score not in SCORES:
        raise UnknownName("score", score, SCORES)
    if score == "counts":
        return trace.uses() / trace.tokens
    if trace.weights is None:
        raise UsageError(
            f"the score {score} needs gate weights, which the trace does not have: record it with"
            " --weights, or use the score counts"
        )
    if score == "easy-ep" and (trace.output_norms is None or trace.token_changes is None):
        raise UsageError(
            "the score easy-ep needs norms of experts' outputs, which the trace does not have:"
            " record it with --weights --output-norms, or use the score counts or tcess"
        )
    sizes = trace.experts_per_layer.tolist()
    totals = [np.zeros(n) for n in sizes]
    for start in range(0, trace.tokens, BLOCK):
        tokens = slice(start, start + BLOCK)
        terms = _gate_shares(trace, tokens) if score == "tcess" else contributions(trace, tokens)
        for layer, experts in enumerate(sizes):
            ids = trace.experts[tokens, layer].ravel()
            totals[layer] += np.bincount(ids, terms[:, layer].ravel(), experts)
    return np.concatenate(totals) / trace.tokens


def _gate_shares(trace: Trace, tokens: slice) -> Floats:
    """Return each chosen expert's share of its token's gate weights: [tokens, layers, top_k]."""
    assert trace.weights is not None
    weights = np.abs(trace.weights[tokens].astype(np.float64))
    sums = weights.sum(-1, keepdims=True)
    shares: Floats = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0)
    return shares


def contributions(trace: Trace, tokens: slice) -> Floats:
    """Return EASY-EP's term of each choice: gate weight x norm of output x change of the token.

    The result is [tokens, layers, top_k].
    """
    assert trace.weights is not None
    assert trace.output_norms is not None
    assert trace.token_changes is not None
    weighted = trace.weights[tokens].astype(np.float64) * trace.output_norms[tokens]
    terms: Floats = weighted * trace.token_changes[tokens, :, None]
    return terms


def best_experts(scores: Floats, offsets: Sequence[int], share: float) -> Ints:
    """Choose the experts with the highest scores of each layer: dense ids, ascending.

    `share` of each layer's experts are chosen, at least one. Of equal scores, lower ids win.
    """
    ids = [
        a + np.argsort(-scores[a:b], kind="stable")[: max(1, round(share * (b - a)))]
        for a, b in pairwise(offsets)
    ]
    return np.sort(np.concatenate(ids))


def hot_experts(trace: Trace, tasks: Sequence[str], share: float, score: str = "counts") -> Pins:
    """Find the experts that each task's tokens need most, to pin them in the cache.

    tasks: labels of the trace's requests
    share: share of each layer's experts to pin, above 0 and below 1; at least one expert per layer
    score: the score by which experts are chosen (see `expert_scores`)

    Whatever the score, a task's pattern has the share of its tokens that used each expert: a run
    compares the pattern with a prompt's counts.
    Raises UsageError for another share, UnknownName for a label that no request has, and the errors
    of `expert_scores`.
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
        pattern = expert_scores(part, "counts")
        scores = pattern if score == "counts" else expert_scores(part, score)
        tasks_by_name[task] = Task(best_experts(scores, offsets, share), pattern)
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
