"""Routing against the loop of transformers' eager forward."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from greenroom.runtime.kernels import Routing


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 5)).flatmap(
        lambda shape: arrays(np.int64, shape, elements=st.integers(0, 6))
    )
)
def test_rows_come_in_the_order_eager_takes_them(index):
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
