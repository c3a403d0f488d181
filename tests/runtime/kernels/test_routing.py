"""Routing against the loop of transformers' eager forward."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from greenroom.runtime.kernels.routing import Routing


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 5)).flatmap(
        lambda shape: arrays(np.int64, shape, elements=st.integers(0, 6))
    )
)
def test_rows_have_the_order_of_the_eager_forward(index):
    routing, experts = Routing.of(index, 6), []
    for expert in range(6):
        k, t = torch.where(expert == torch.from_numpy(index).T)
        if len(k):
            experts.append(expert)
            rows = routing.entries(expert)
            assert routing.tokens[rows].tolist() == t.tolist()
            assert routing.ranks[rows].tolist() == k.tolist()
            assert routing.rows[rows].tolist() == (t * index.shape[1] + k).tolist()
    assert routing.experts.tolist() == experts
    assert routing.shape == index.shape


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_row_counts_and_weights_equal_those_of_a_trace(tokens, top_k, seed):
    random = np.random.default_rng(seed)
    index = np.argsort(random.random((tokens, 7)), axis=1)[:, :top_k]
    weights = random.random((tokens, top_k)).astype(np.float32)
    rows, sums = Routing.of(index, 7).counts_and_weights(weights)
    used = np.unique(index)
    assert rows.tolist() == [int((index == e).sum()) for e in used]
    half = weights.astype(np.float16).astype(np.float64)
    assert sums.tolist() == [np.float32(half[index == e].sum()) for e in used]
    assert (rows.dtype, sums.dtype) == (np.int32, np.float32)
