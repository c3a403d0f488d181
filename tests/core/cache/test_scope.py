from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.config import scope_of
from greenroom.core.cache.cache import Cache
from greenroom.core.cache.scope import name_of, proportional, split_capacity
from greenroom.core.cache.state import group_sizes
from greenroom.core.pieces import Pieces
from greenroom.errors import BudgetError, UnknownName, UsageError
from greenroom.policies import policy


def test_slots_that_add_up_to_the_capacity_are_not_changed():
    assert split_capacity(9, 3, (5, 1, 3), [8, 8, 8]) == [5, 1, 3]


def test_other_capacities_are_divided_in_proportion():
    assert split_capacity(18, 3, (5, 1, 3), [18] * 3) == [10, 2, 6]
    assert split_capacity(10, 3, (1, 1, 1), [8] * 3) == [4, 3, 3]


def test_no_layer_has_more_slots_than_experts_or_none():
    assert split_capacity(10, 3, (100, 1, 1), [4, 4, 4]) == [4, 3, 3]
    assert split_capacity(3, 3, (100, 1, 1), [4, 4, 4]) == [1, 1, 1]
    assert split_capacity(12, 3, (100, 1, 1), [4, 4, 4]) == [4, 4, 4]


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 20)), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_all_slots_are_divided_within_bounds(layers, share):
    shares, most = [s for s, _ in layers], [n for _, n in layers]
    capacity = len(layers) + int(share * (sum(most) - len(layers)))
    sizes = proportional(capacity, shares, most)
    assert sum(sizes) == capacity
    assert all(1 <= n <= top for n, top in zip(sizes, most, strict=True))
    for i, a in enumerate(sizes):  # who asks for more has no less, where both could have it
        for j, b in enumerate(sizes):
            if shares[i] > shares[j] and a < most[i]:
                assert a + 1 >= b


def test_slot_groups_have_the_scope_s_sizes_and_resize_in_proportion():
    pieces = Pieces.unsplit([0, 6, 12], [1, 1])
    cache = Cache(pieces, 6, policy("lru"), (4.0, 2.0))
    assert cache.sizes == [4, 2]
    cache.serve(np.arange(4), 0)
    cache.release(np.arange(4))
    cache.resize(3)
    assert cache.sizes == [2, 1]
    assert cache.residents().tolist() == [2, 3]


def test_each_layer_s_slots_are_divided_among_devices():
    pieces = Pieces.unsplit([0, 6, 12], [1, 1], devices=2)
    assert group_sizes(pieces, 8, (3.0, 1.0)) == [3, 1, 3, 1]


def test_invalid_scopes_are_refused():
    with pytest.raises(UsageError, match="--scope has 2 numbers, but the model has 3 layers"):
        split_capacity(9, 3, (1, 2))
    with pytest.raises(UsageError, match="--scope must have numbers above 0, got 0"):
        split_capacity(9, 3, (1, 2, 0))
    with pytest.raises(
        BudgetError, match=r"--scope N,N,... needs a cache slot for each of 3 layers, got 2"
    ):
        split_capacity(2, 3, (1, 2, 1))


def test_scope_accepts_names_numbers_and_files(tmp_path):
    assert scope_of("per-layer") == "per-layer"
    assert scope_of("12, 8,0.5") == (12.0, 8.0, 0.5)
    file = tmp_path / "budgets.json"
    file.write_text(json.dumps({"format": "greenroom-budgets", "version": 1, "slots": [2, 1]}))
    assert scope_of(str(file)) == (2.0, 1.0)
    assert (name_of("shared"), name_of((2.0, 1.0))) == ("shared", "given")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("global", "unknown scope 'global': choose one of shared, per-layer, N,N,..., FILE"),
        pytest.param("a" * 3000, f"unknown scope '{'a' * 96}...: choose", id="too-long"),
        ("1,,2", "--scope must be numbers, one for each layer"),
        ("1,0", "--scope must be numbers above 0, one for each layer"),
        ("none.json", "cannot read none.json: No such file"),
    ],
)
def test_scope_refuses_other_text(text, message):
    with pytest.raises(UsageError) as raised:
        scope_of(text)
    assert message in str(raised.value)
    assert isinstance(raised.value, UnknownName) == ("unknown" in message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is not JSON"),
        ('{"format": "greenroom-budgets", "slots": [1, 0]}', "slots must be numbers above 0"),
        ('{"format": "greenroom-budgets", "slots": "12"}', "slots must be a list"),
        ('{"format": "other"}', "greenroom trace budgets makes such files"),
        ('{"format": "greenroom-budgets"}', "slots is missing"),
        ('{"format": "greenroom-budgets", "slots": [1, -1]}', "must be a number from 0"),
    ],
)
def test_damaged_files(tmp_path, content, message):
    file = tmp_path / "budgets.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        scope_of(str(file))
