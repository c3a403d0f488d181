"""A small model that no checkpoint has, a machine, and a recording, for the planner's tests."""

from __future__ import annotations

from dataclasses import replace

from greenroom.config import TopicsConfig
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.machine import Machine, Processor, Route, Table
from greenroom.plan.model import Model
from greenroom.trace import Trace
from greenroom.trace.synth import topics

MIB = 1 << 20
MODEL = Model(
    name="small",
    fingerprint="abc",
    experts_per_layer=(16,) * 4,
    top_k=2,
    expert_bytes=MIB,
    slot_bytes=MIB,
    dense_bytes=8 * MIB,
    read_bytes=4 * MIB,
    overhead_bytes=20 * MIB,
    kv_bytes=2 * MIB,
    context=128,
)
# An expert takes 1 ms to compute and 4 ms to come; the rest of a layer 2 ms.
COSTS = Costs((Link(MIB / 4e-3, 0.0, 2),), Work.constant(1e-3), Work.constant(2e-3))
HOST = {"cpu": "abacus", "cores": 2, "memory_bytes": 1 << 30, "available_bytes": 1 << 29, "load": 0}
MACHINE = Machine(
    (Route("disk", "host", Link(MIB / 4e-3, 0.0, 1)),),
    (
        Processor(
            "cpu", "host", Table((MIB,), (1, 16), ((1e-3, 4e-3),)),
            Table((MIB,), (1, 16), ((1e-3, 2e-3),)), layer=1e-3, fetch=1e-4, copy=1e-4 / MIB,
        ),
    ),
    HOST,
    {"memory": {"1": 1e10, "2": 2e10}},
)  # fmt: skip


def trace(tokens: int = 240, seed: int = 0, **options) -> Trace:
    """The model's own routing: six requests with prompts of ten tokens."""
    synthetic = topics(
        TopicsConfig(layers=4, experts=16, top_k=2, tokens=tokens, requests=6, prompt_tokens=10,
                     seed=seed, **options)
    )  # fmt: skip
    return replace(synthetic, meta={"model": "small", "fingerprint": "abc"})
