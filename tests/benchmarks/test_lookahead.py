"""SCH as the published code has it, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.papers.lookahead import lookahead_hits


@pytest.mark.parametrize(
    ("length", "hits"),
    [
        (3, 3),  # 0 and 1 enter for nothing; 2 evicts 0 (1 is needed too, 0 is older); 0 evicts 2
        (1, 2),  # it knows no later token, and is LRU: after 2 and 0 the last 1 misses too
    ],
)
def test_the_cache_keeps_what_the_next_tokens_use(length, hits):
    ids = np.array([[0], [1], [2], [0], [1]])
    assert lookahead_hits.py_func(ids, np.array([0, 5]), length, 2, 3) == hits


def test_each_request_begins_with_an_empty_cache():
    """Two requests of one token: their first uses find room for one of two experts."""
    ids = np.array([[0, 1], [0, 1]])
    assert lookahead_hits.py_func(ids, np.array([0, 1, 2]), 4, 1, 2) == 2


def test_a_token_is_looked_up_before_it_enters():
    """With one slot, 1 evicts 0 within the first token; then 1 is a hit, though 0 comes first."""
    ids = np.array([[0, 1], [0, 1]])
    assert lookahead_hits.py_func(ids, np.array([0, 2]), 1, 1, 2) == 2
