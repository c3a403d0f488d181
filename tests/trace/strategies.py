"""Random small traces, with all that a trace can hold."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from greenroom.trace import GateInputs, Prediction, Trace
from greenroom.trace.trace import OPTIONAL

# No deadline: the first example compiles or waits for a disk that others use too. A folder is
# shared by the examples of a test, which write the same names again and again.
SETTINGS = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def traces(draw, most_tokens: int = 24, even: bool = False) -> Trace:
    """A trace of up to three layers of different size; `even` gives them one size."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers = draw(st.integers(1, 3))
    top_k = draw(st.integers(1, 3))
    sizes = [draw(st.integers(top_k, 7)) for _ in range(layers)]
    if even:
        sizes = [sizes[0]] * layers
    tokens = draw(st.integers(1, most_tokens))
    experts = np.array(
        [[random.permutation(n)[:top_k] for n in sizes] for _ in range(tokens)], np.uint8
    )
    requests = cut(tokens, draw(st.sets(st.integers(1, max(tokens - 1, 1)), max_size=3)))
    passes = cut(
        tokens, draw(st.sets(st.integers(1, max(tokens - 1, 1)), max_size=8)) | set(requests)
    )
    sampled = np.flatnonzero(random.random(tokens) < 0.4)
    full = draw(st.booleans())
    guesses = random.integers(0, min(sizes), (tokens, layers, 2)).astype(np.uint8)
    guesses[:, 0] = 255
    return Trace(
        experts=experts.reshape(tokens, layers, top_k),
        experts_per_layer=np.array(sizes, np.int64),
        request_starts=np.array(requests, np.int64),
        pass_starts=np.array(passes, np.int64),
        pass_prefill=random.random(len(passes) - 1) < 0.5,
        labels=tuple(draw(st.sampled_from(["", "maths", "é"])) for _ in requests[1:]),
        weights=random.random(experts.shape).astype(np.float16) if full else None,
        token_ids=random.integers(0, 99, tokens).astype(np.int32) if full else None,
        output_norms=random.random(experts.shape).astype(np.float32) if full else None,
        token_changes=random.random((tokens, layers)).astype(np.float32) if full else None,
        gate_inputs=GateInputs(
            sampled, random.normal(size=(len(sampled), layers, 3)).astype(np.float32)
        )
        if full
        else None,
        predictions={"last": Prediction(guesses, 1)} if full else {},
        meta={"model": "random", "n": tokens},
    )


def cut(tokens: int, at: set[int]) -> list[int]:
    """Offsets from 0 to `tokens` with the cuts that lie between."""
    return sorted({0, tokens} | {c for c in at if 0 < c < tokens})


def assert_same(a: Trace, b: Trace) -> None:
    for name in ("experts", "experts_per_layer", "request_starts", "pass_starts", "pass_prefill"):
        left, right = getattr(a, name), getattr(b, name)
        assert left.dtype == right.dtype, name
        np.testing.assert_array_equal(left, right, name)
    assert a.labels == b.labels
    for name in OPTIONAL:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None)
        if left is not None:
            np.testing.assert_array_equal(left, right, name)
    assert (a.gate_inputs is None) == (b.gate_inputs is None)
    if a.gate_inputs is not None and b.gate_inputs is not None:
        np.testing.assert_array_equal(a.gate_inputs.tokens, b.gate_inputs.tokens)
        np.testing.assert_array_equal(a.gate_inputs.values, b.gate_inputs.values)
    assert a.predictions.keys() == b.predictions.keys()
    for name, made in a.predictions.items():
        assert made.distance == b.predictions[name].distance
        np.testing.assert_array_equal(made.experts, b.predictions[name].experts)
    assert a.meta == b.meta
