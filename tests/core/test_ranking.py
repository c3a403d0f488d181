"""The highest scores of each row, against a sort."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.ranking import top


@settings(deadline=None)  # the first call compiles
@given(st.integers(1, 5), st.integers(1, 40), st.data())
def test_top_is_the_head_of_a_stable_sort(rows: int, columns: int, data: st.DataObject) -> None:
    width = data.draw(st.integers(1, columns))
    few = st.integers(-3, 3)  # so that many are equal
    drawn = data.draw(st.lists(few, min_size=rows * columns, max_size=rows * columns))
    scores = np.array(drawn, np.float32).reshape(rows, columns)
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :width]
    assert top(scores, width).tolist() == expected.tolist()
