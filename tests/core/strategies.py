"""Hypothesis strategies for the state machines: steps of a run over layers of experts."""

from __future__ import annotations

from hypothesis import strategies as st

Steps = st.SearchStrategy[list[tuple[int, set[int], int]]]


def steps(layers: int, experts: int, most: int = 20) -> Steps:
    """Lists of steps: (layer, requested experts, a digit).

    The digit decides whether the step is a prompt's, whether it fails, and what follows it.
    """
    requested = st.sets(st.integers(0, experts - 1), min_size=1, max_size=experts)
    each = st.tuples(st.integers(0, layers - 1), requested, st.integers(0, 9))
    return st.lists(each, max_size=most)
