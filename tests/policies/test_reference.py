"""Every policy equals its slow, obvious reference, request by request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cache.cache import Cache
from greenroom.core.cache.scope import split_capacity
from greenroom.core.pieces import Pieces
from greenroom.policies import policy
from greenroom.sim.replay import replay
from tests.policies import reference
from tests.policies.streams import LAYERS, OFFSETS, as_stream, steps

pytestmark = pytest.mark.usefixtures("uncompiled")
PIECES = Pieces.unsplit(OFFSETS, [1] * LAYERS)
VARIANTS = [
    *reference.REFERENCES,
    "lcp:omega=2",
    "lcp:rho=0.5,omega=3",
    "moe-infinity:matching=request",
    "moe-infinity:capacity=1",
    "moe-infinity:matching=request,capacity=2",
    "moe-infinity:tolerance=0.137",
    "moe-infinity:matching=request,capacity=3,tolerance=0.5137",
    "s3fifo:small=0.5",
    "static:part=first-half",
    "hobbit:recency=0,distance=1",
    "fate:bias=0",
    "hybrimoe:alpha=0.5",
]


def served(cache: Cache, all_steps: list[reference.Step], pin: str) -> list[tuple[bool, int]]:
    """(hit, evicted) of every request, as a run would serve it, step by step."""
    results: list[tuple[bool, int]] = []
    for step in all_steps:
        pieces = np.array(step.pieces, np.int64)
        done = cache.serve(
            pieces,
            step.clock,
            pin,
            token=step.token,
            request=step.prompt,
            prefill=step.prefill,
            rows=np.array(step.rows, np.int32),
            weights=np.array(step.weights, np.float32),
        )
        if done.pinned:
            cache.release(pieces)
        results += zip(map(bool, done.hits), done.evicted.tolist(), strict=True)
    return results


@pytest.mark.parametrize("name", VARIANTS)
@given(
    steps=steps(),
    capacity=st.integers(1, OFFSETS[-1]),
    scope=st.sampled_from(["shared", "per-layer"]),
    pin=st.sampled_from(["step", "none"]),
)
@settings(max_examples=120, deadline=None)
def test_equals_its_reference(name, steps, capacity, scope, pin):
    if scope == "per-layer":
        capacity = max(capacity, LAYERS)
    chosen, stream = policy(name), as_stream(steps)
    expected = reference.serve(
        name.partition(":")[0],
        chosen.settings,
        steps,
        OFFSETS,
        split_capacity(capacity, LAYERS, scope),
        pin,
    )
    assert served(Cache(PIECES, capacity, chosen, scope, trace=stream), steps, pin) == expected
    done = replay(stream, OFFSETS, capacity, chosen, scope=scope, pin=pin, detail=True)
    assert done.missed.tolist() == [not hit for hit, _ in expected]
    assert (done.requests, done.misses) == (len(expected), sum(not hit for hit, _ in expected))


@pytest.mark.parametrize("name", ["random", "marking"])
@given(steps=steps(), capacity=st.integers(3, 11), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_chance_falls_the_same_in_a_run_and_in_a_replay(name, steps, capacity, seed):
    stream = as_stream(steps)
    for scope in ("shared", "per-layer"):
        for pin in ("step", "none"):
            in_run = served(Cache(PIECES, capacity, policy(name), scope, seed), steps, pin)
            done = replay(
                stream,
                OFFSETS,
                capacity,
                policy(name),
                scope=scope,
                pin=pin,
                seed=seed,
                detail=True,
            )
            assert done.missed.tolist() == [not hit for hit, _ in in_run]
