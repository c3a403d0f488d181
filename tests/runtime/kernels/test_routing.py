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
@settings(deadline=None)
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


CHOICES = st.tuples(st.integers(0, 7), st.integers(1, 5)).flatmap(
    lambda shape: arrays(np.int64, shape, elements=st.integers(0, 6))
)


@given(CHOICES)
@settings(deadline=None)  # the first example compiles
def test_outputs_are_summed_in_the_order_of_experts(index):
    routing, (tokens, top_k) = Routing.of(index, 6), index.shape
    order = np.full((tokens, top_k, 2), 99)
    routing.write_sum_order(order)
    for token in range(tokens):
        own = sorted((e, k) for k, e in enumerate(index[token].tolist()) if e < 6)
        pairs = [pair for pair in order[token].tolist() if pair != [-1, -1]]
        assert order[token, len(pairs) :].tolist() == [[-1, -1]] * (top_k - len(own))
        assert [row for _, row in pairs] == [token * top_k + k for _, k in own]
        for (entry, row), (expert, _) in zip(pairs, own, strict=True):
            assert routing.rows[entry] == row
            rows = routing.entries(expert)
            assert rows.start <= entry < rows.stop


@given(CHOICES, st.integers(1, 4), st.randoms())
@settings(deadline=None)
def test_tiles_have_all_entries_of_a_group_of_experts(index, most, random):
    routing = Routing.of(index, 6)
    experts = [e for e in routing.experts.tolist() if random.random() < 0.7]
    tiles = routing.tiles(experts, [10 - e for e in experts], most).tolist()
    expected = []
    for expert in experts:
        rows = routing.entries(expert)
        expected += [
            [10 - expert, expert, first, min(most, rows.stop - first)]
            for first in range(rows.start, rows.stop, most)
        ]
    assert tiles == expected


def test_ids_may_have_any_layout():
    """Of a view, and of 32 bits."""
    index = np.array([[3, 1], [1, 0], [5, 3]])
    expected = Routing.of(index, 6).rows.tolist()
    assert Routing.of(np.asfortranarray(index), 6).rows.tolist() == expected
    assert Routing.of(index.astype(np.int32), 6).rows.tolist() == expected


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
