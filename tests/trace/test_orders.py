from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.errors import TraceError, UnknownName
from greenroom.trace import ORDERS, orders, stream
from tests.trace import reference
from tests.trace.strategies import SETTINGS, traces
from tests.trace.test_trace import small


def as_steps(s) -> list[list[int]]:
    return [s.pieces[a:b].tolist() for a, b in zip(s.starts[:-1], s.starts[1:], strict=True)]


def test_a_hand_worked_trace_in_each_order():
    trace = small().head(3)  # tokens 0 and 1 are one pass; layer 1 begins at dense id 4
    assert as_steps(stream(trace, "natural")) == [[0, 1], [4, 6], [1, 3], [5, 4], [2, 1], [6, 4]]
    rounds = stream(trace, "rounds")
    assert rounds.pieces.tolist() == [0, 4, 1, 6, 1, 5, 3, 4, 2, 6, 1, 4]
    assert rounds.now.tolist() == list(range(12))
    assert rounds.layer.tolist() == [0, 1] * 6
    runtime = stream(trace, "runtime")
    assert as_steps(runtime) == [[0, 1, 3], [4, 5, 6], [1, 2], [4, 6]]
    assert runtime.rows.tolist() == [1, 2, 1, 2, 1, 1, 1, 1, 1, 1]
    assert runtime.now.tolist() == [0, 1, 2, 3]
    assert runtime.prefill.tolist() == [True, True, False, False]


TYPES = {
    "pieces": np.int32, "starts": np.int64, "now": np.int64, "layer": np.int32, "token": np.int64,
    "request": np.int32, "prefill": np.bool_, "rows": np.int32, "weights": np.float32,
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@SETTINGS
@given(trace=traces(), bins=st.sampled_from([1, 20, 1 << 18]))
def test_equals_the_reference(order, trace, bins):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "_BINS", bins)
        found = stream(trace, order)
    steps = reference.requests_in(trace, order)
    assert found.now.tolist() == [step[0] for step in steps]
    assert found.layer.tolist() == [step[1] for step in steps]
    assert found.token.tolist() == [step[2] for step in steps]
    assert found.request.tolist() == [step[3] for step in steps]
    assert found.prefill.tolist() == [step[4] for step in steps]
    assert as_steps(found) == [[piece for piece, _, _ in step[5]] for step in steps]
    asked = [request for step in steps for request in step[5]]
    if order == "runtime":
        assert found.rows.tolist() == [rows for _, rows, _ in asked]
    else:
        assert found.rows.size == 0
    if trace.weights is None:
        assert found.weights.size == 0
    else:
        np.testing.assert_allclose(found.weights, [w for _, _, w in asked], rtol=1e-6)
    for name, kind in TYPES.items():
        array = getattr(found, name)
        assert array.dtype == kind, name
        assert array.flags.c_contiguous, name


@pytest.mark.parametrize("order", ORDERS)
@SETTINGS
@given(trace=traces(), limit=st.integers(1, 30))
def test_a_limit_is_the_head(order, trace, limit):
    limited, head = stream(trace, order, limit), stream(trace.head(limit), order)
    for a, b in zip(limited, head, strict=True):
        np.testing.assert_array_equal(a, b)


@SETTINGS
@given(traces())
def test_one_token_passes_differ_from_natural_only_within_a_step(trace):
    alone = np.arange(trace.tokens + 1)
    from dataclasses import replace

    decoded = replace(trace, pass_starts=alone, pass_prefill=np.zeros(trace.tokens, bool))
    natural, runtime = stream(decoded, "natural"), stream(decoded, "runtime")
    assert [sorted(step) for step in as_steps(natural)] == as_steps(runtime)
    assert natural.now.tolist() == runtime.now.tolist()


def test_unknown_orders_and_empty_limits():
    with pytest.raises(UnknownName, match="unknown order 'sideways': choose one of natural"):
        stream(small(), "sideways")
    with pytest.raises(TraceError, match="at least 1 token"):
        stream(small(), "natural", 0)
