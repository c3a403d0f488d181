"""What a plan goes by: the model's own recorded routing, or stand-ins of its shape.

A stand-in is a synthetic trace of requests that have topics (`trace/synth.py`). How local real
routing is differs from model to model, so there are three of them: what is expected, and what
brackets the models that were recorded (OLMoE, gpt-oss, DeepSeek-V2-Lite; docs/planning.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from greenroom.config import TopicsConfig
from greenroom.errors import TraceError, UsageError
from greenroom.plan.model import Model
from greenroom.trace import Trace
from greenroom.trace.synth import topics

TYPICAL = (1.4, 0.3)  # skew and stickiness; docs/planning.md has what they were fitted to
LOCALITIES = (TYPICAL, (1.0, 0.15), (1.7, 0.35))  # and of less and of more local routing
PROMPT = 32  # tokens of a stand-in's prompts
TOKENS, REQUESTS = 1024, 8  # of a stand-in
MOST = 8192  # tokens of a recording that are looked at: more change nothing


@dataclass(frozen=True, slots=True)
class Evidence:
    """Traces to simulate, the first for what is expected; `own` says whose, `said` in words."""

    traces: tuple[Trace, ...]
    own: bool
    said: str


def recorded(trace: Trace, model: Model, where: str) -> Evidence:
    """A recording of the model itself; TraceError where it is of another, UsageError where it has
    no decode pass."""
    theirs = tuple(trace.experts_per_layer.tolist())
    if theirs != model.experts_per_layer or trace.top_k != model.top_k:
        raise TraceError(
            f"{where} is a trace of another model ({_shape(theirs, trace.top_k)}):"
            f" {model.name} has {_shape(model.experts_per_layer, model.top_k)}"
        )
    made = trace.meta.get("fingerprint")
    if made and model.fingerprint and made != model.fingerprint:
        raise TraceError(
            f"{where} is a trace of another model of this shape,"
            f" {trace.meta.get('model', 'unnamed')}: record {model.name} itself (trace record)"
        )
    if trace.pass_prefill.all():
        raise UsageError(f"{where} has prompts only: a plan needs tokens that were decoded")
    trace = trace.head(MOST)
    return Evidence(
        (trace,), True,
        f"its own routing, {trace.tokens:,} tokens of {trace.requests} requests in {where}",
    )  # fmt: skip


def stand_ins(model: Model) -> Evidence:
    """Synthetic traces of the model's shape."""
    widest = max(model.experts_per_layer)
    tokens = max(256, min(TOKENS, 400_000 // (model.layers * model.top_k)))
    traces = tuple(
        _cut(
            topics(
                TopicsConfig(
                    layers=model.layers, experts=widest, top_k=model.top_k, tokens=tokens,
                    requests=REQUESTS, prompt_tokens=PROMPT, topics=REQUESTS // 2, skew=skew,
                    stickiness=stickiness,
                )
            ),
            model,
        )
        for skew, stickiness in LOCALITIES
    )  # fmt: skip
    return Evidence(
        traces, False,
        "synthetic stand-ins of its shape, of typical, little and much locality: none of its own"
        " is recorded (trace record)",
    )  # fmt: skip


def _cut(trace: Trace, model: Model) -> Trace:
    """A trace of layers that are all as wide as the widest, as one of this model's layers."""
    if len(set(model.experts_per_layer)) == 1:
        return trace
    from dataclasses import replace

    experts = trace.experts.copy()
    random = np.random.default_rng(0)
    for layer, count in enumerate(model.experts_per_layer):
        rows = experts[:, layer]
        for row in np.flatnonzero((rows >= count).any(axis=1)):
            kept = rows[row][rows[row] < count]
            free = np.setdiff1d(np.arange(count), kept)
            rows[row] = np.append(kept, random.permutation(free)[: trace.top_k - kept.size])
    return replace(
        trace, experts=experts, experts_per_layer=np.array(model.experts_per_layer, np.int64)
    )


def _shape(experts: tuple[int, ...], top_k: int) -> str:
    return f"{sum(experts):,} experts in {len(experts)} layers, top-{top_k}"
