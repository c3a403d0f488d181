"""Workloads for planning: the model's own recorded routing, or synthetic traces.

The requests of a synthetic trace have topics, which prefer some experts (`trace/synth.py`). The
locality of real routing differs from model to model. So a synthetic workload has three traces: a
typical one, one with less and one with more locality than the recorded models (OLMoE, gpt-oss,
DeepSeek-V2-Lite; docs/planning.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from greenroom.config import TopicsConfig
from greenroom.errors import TraceError, UsageError
from greenroom.plan.model import Model
from greenroom.trace import Trace
from greenroom.trace.synth import topics

TYPICAL = (1.4, 0.3)  # skew and stickiness, fitted to the recordings in docs/planning.md
LOCALITIES = (TYPICAL, (1.0, 0.15), (1.7, 0.35))  # typical, less and more local routing
PROMPT = 32  # tokens of a synthetic prompt
TOKENS, REQUESTS = 1024, 8  # of a synthetic trace
MOST = 8192  # tokens used of a recording; more change nothing
ENOUGH = 256  # decoded tokens of earlier runs, at which they replace a synthetic workload


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload of a plan: routing traces to simulate, the typical one first.

    recorded:    whether the traces are recorded routing of the model, and not synthetic
    description: where the traces come from, as text for the user
    """

    traces: tuple[Trace, ...]
    recorded: bool
    description: str


def recorded_workload(trace: Trace, model: Model, where: str) -> Workload:
    """Make a planner's workload from a routing trace recorded with the model.

    `where` is the trace's file, for messages. TraceError if the trace is of another model,
    UsageError if it has no decode pass.
    """
    shape = tuple(trace.experts_per_layer.tolist())
    if shape != model.experts_per_layer or trace.top_k != model.top_k:
        raise TraceError(
            f"{where} is a trace of another model ({_shape(shape, trace.top_k)}):"
            f" {model.name} has {_shape(model.experts_per_layer, model.top_k)}"
        )
    fingerprint = trace.meta.get("fingerprint")
    if fingerprint and model.fingerprint and fingerprint != model.fingerprint:
        raise TraceError(
            f"{where} is a trace of another model of this shape,"
            f" {trace.meta.get('model', 'unnamed')}: record {model.name} with `greenroom trace"
            " record`"
        )
    if trace.pass_prefill.all():
        raise UsageError(
            f"{where} has prompts only, but a plan needs generated tokens: record some with"
            " `greenroom trace record`"
        )
    trace = trace.head(MOST)
    return Workload(
        (trace,), True,
        f"recorded, {trace.tokens:,} tokens of {trace.requests} requests in {where}",
    )  # fmt: skip


def decoded_tokens(trace: Trace) -> int:
    """Count the generated tokens of a trace: those of its decode passes."""
    return int(np.diff(trace.pass_starts)[~trace.pass_prefill].sum())


def has_enough_tokens(trace: Trace | None) -> bool:
    """Check that a trace of earlier runs is long enough to replace a synthetic workload."""
    return trace is not None and trace.requests > 1 and decoded_tokens(trace) >= ENOUGH


def earlier_workload(trace: Trace | None) -> Workload | None:
    """Make a planner's workload from the routing of earlier runs; None if it is too short.

    The trace is the one that plan/history/recent.py builds.
    """
    if trace is None or not has_enough_tokens(trace):
        return None
    return Workload(
        (trace,), True,
        f"recorded, the last {trace.tokens:,} tokens of {trace.requests} requests in earlier runs",
    )  # fmt: skip


def synthetic_workload(model: Model) -> Workload:
    """Make a planner's workload of three synthetic traces with the model's layers and experts."""
    return Workload(
        tuple(synthetic_trace(model.experts_per_layer, model.top_k, *each) for each in LOCALITIES),
        False,
        f"synthetic, with typical, little and much locality and prompts of {PROMPT} tokens: no"
        " routing of this model is recorded yet (`greenroom run` and `greenroom trace record`"
        " record it)",
    )  # fmt: skip


def synthetic_trace(
    sizes: Sequence[int], top_k: int, skew: float = TYPICAL[0], stickiness: float = TYPICAL[1]
) -> Trace:
    """Make a synthetic routing trace of a model with given numbers of experts.

    sizes:      number of experts of each layer
    top_k:      experts that a token uses in each layer
    skew:       strength of the topics' preferences for experts
    stickiness: probability that a token uses an expert of the token before again
    """
    tokens = max(256, min(TOKENS, 400_000 // (len(sizes) * top_k)))
    config = TopicsConfig(
        layers=len(sizes), experts=max(sizes), top_k=top_k, tokens=tokens, requests=REQUESTS,
        prompt_tokens=PROMPT, topics=REQUESTS // 2, skew=skew, stickiness=stickiness,
    )  # fmt: skip
    return _narrow_layers(topics(config), sizes)


def _narrow_layers(trace: Trace, sizes: Sequence[int]) -> Trace:
    """Reduce the layers of a trace, which have equally many experts, to given numbers."""
    if len(set(sizes)) == 1:
        return trace
    experts = trace.experts.copy()
    random = np.random.default_rng(0)
    for layer, count in enumerate(sizes):
        rows = experts[:, layer]
        for row in np.flatnonzero((rows >= count).any(axis=1)):
            valid = rows[row][rows[row] < count]
            free = np.setdiff1d(np.arange(count), valid)
            rows[row] = np.append(valid, random.permutation(free)[: trace.top_k - valid.size])
    return replace(trace, experts=experts, experts_per_layer=np.array(sizes, np.int64))


def _shape(experts: tuple[int, ...], top_k: int) -> str:
    return f"{sum(experts):,} experts in {len(experts)} layers, top-{top_k}"
