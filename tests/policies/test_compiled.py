"""Every policy, compiled, decides as its plain Python functions do.

Its functions are compiled once for runs and replays: each policy is tried in what it is for.
"""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.cache.cache import Cache
from greenroom.core.pieces import Pieces
from greenroom.policies import POLICIES, policy
from greenroom.sim.replay import replay
from tests.policies.plain import plain_policies
from tests.policies.streams import LAYERS, OFFSETS, as_stream, tokens

STEPS = tokens(seed=5, count=40, wide=True, rows=True, weights=True)
PIECES = Pieces.unsplit(OFFSETS, [1] * LAYERS)


def decisions(name: str) -> list[list[int]]:
    """The evictions of each step of a run; the misses of a replay for policies that need it."""
    stream = as_stream(STEPS)
    if policy(name).needs_trace:
        return [replay(stream, OFFSETS, 6, policy(name), detail=True).missed.tolist()]
    cache = Cache(PIECES, 6, policy(name), trace=stream)
    evicted = []
    for step in STEPS:
        pieces = np.array(step.pieces, np.int64)
        served = cache.serve(
            pieces,
            step.clock,
            token=step.token,
            request=step.prompt,
            prefill=step.prefill,
            rows=np.array(step.rows, np.int32),
            weights=np.array(step.weights, np.float32),
        )
        if served.pinned:
            cache.release(pieces)
        evicted.append(served.evicted.tolist())
    return evicted


@pytest.mark.parametrize("name", POLICIES)
def test_a_compiled_policy_decides_as_its_python_functions(name: str) -> None:
    with plain_policies():
        expected = decisions(name)
    assert decisions(name) == expected
    assert max(map(max, expected)) > 0  # some are evicted, or missed
