"""The slow, obvious versions of what the package computes over a trace."""

from __future__ import annotations

from collections import Counter

from greenroom.trace import Trace


def ranges(starts) -> list[range]:
    """The tokens of each request, or of each pass."""
    return [range(a, b) for a, b in zip(starts.tolist(), starts.tolist()[1:], strict=False)]


def index_of(parts: list[range], token: int) -> int:
    return next(i for i, part in enumerate(parts) if token in part)


def requests_in(trace: Trace, order: str) -> list[tuple]:
    """Each step as (now, layer, token or pass, request, prefill, [(piece, rows, weight)])."""
    L, offset = trace.layers, trace.offsets.tolist()
    requests, passes = ranges(trace.request_starts), ranges(trace.pass_starts)

    def used(token: int, layer: int) -> list[tuple[int, int, float]]:
        ids = trace.experts[token, layer].tolist()
        weights = [0.0] * len(ids) if trace.weights is None else trace.weights[token, layer]
        return [(offset[layer] + e, 1, float(w)) for e, w in zip(ids, weights, strict=True)]

    steps = []
    if order == "runtime":
        for p, tokens in enumerate(passes):
            request = index_of(requests, tokens[0])
            for layer in range(L):
                rows, weights = Counter(), Counter()
                for token in tokens:
                    for piece, _, weight in used(token, layer):
                        rows[piece] += 1
                        weights[piece] += weight
                step = [(piece, rows[piece], weights[piece]) for piece in sorted(rows)]
                steps.append((p * L + layer, layer, p, request, trace.pass_prefill[p], step))
        return steps
    for token in range(trace.tokens):
        request = index_of(requests, token)
        prefill = trace.pass_prefill[index_of(passes, token)]
        if order == "natural":
            for layer in range(L):
                now = token * L + layer
                steps.append((now, layer, token, request, prefill, used(token, layer)))
        else:
            for rank in range(trace.top_k):
                for layer in range(L):
                    step = [used(token, layer)[rank]]
                    steps.append((len(steps), layer, token, request, prefill, step))
    return steps


def overlap(trace: Trace, layer: int) -> float:
    shared = total = 0
    for tokens in ranges(trace.request_starts):
        for token in tokens[1:]:
            now = set(trace.experts[token, layer].tolist())
            before = set(trace.experts[token - 1, layer].tolist())
            shared += len(now & before)
            total += len(now)
    return shared / total if total else 0.0


def uses(trace: Trace, layer: int) -> list[tuple[int, int]]:
    """(token, expert) of each use in a layer, in order."""
    return [(t, e) for t in range(trace.tokens) for e in trace.experts[t, layer].tolist()]


def reuse(trace: Trace, layer: int) -> tuple[Counter, Counter]:
    """(distinct experts between, tokens between) of each use that is not a first one."""
    order, distances, gaps = uses(trace, layer), Counter(), Counter()
    for i, (token, expert) in enumerate(order):
        earlier = [j for j in range(i) if order[j][1] == expert]
        if earlier:
            distances[len({e for _, e in order[earlier[-1] + 1 : i]})] += 1
            gaps[token - order[earlier[-1]][0]] += 1
    return distances, gaps


def windows(trace: Trace, length: int) -> list[range]:
    return [
        range(first, first + length)
        for tokens in ranges(trace.request_starts)
        for first in range(tokens.start, tokens.stop - length + 1)
    ]


def srp(trace: Trace, layer: int, length: int) -> float:
    """The best F1 of groups that hold the experts used at least `least` times in a window."""
    counted = [
        Counter(e for t in window for e in trace.experts[t, layer].tolist())
        for window in windows(trace, length)
    ]
    used = sum(sum(counts.values()) for counts in counted)
    scores = []
    for least in range(1, length + 1):
        hits = sum(n for counts in counted for n in counts.values() if n >= least)
        taken = sum(length for counts in counted for n in counts.values() if n >= least)
        scores.append(2 * hits / (taken + used))
    return max(scores)


def sch(trace: Trace, length: int, slots: int, layers: list[int]) -> float:
    """Hits of a cache of `slots` over these layers that holds the window's most used experts."""
    hits = total = 0
    for window in windows(trace, length):
        counts = Counter(
            (layer, e) for layer in layers for t in window for e in trace.experts[t, layer].tolist()
        )
        hits += sum(n for _, n in counts.most_common(slots))
        total += sum(counts.values())
    return hits / total
