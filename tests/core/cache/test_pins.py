from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cache.cache import Cache
from greenroom.core.cache.pins import Pins, Task
from greenroom.core.pieces import Pieces
from greenroom.errors import BudgetError, UsageError
from greenroom.policies import POLICIES, policy
from tests.policies.plain import plain_policies

PIECES = Pieces.unsplit([0, 4, 8], [1, 1])


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int64)


def test_a_pinned_expert_stays_once_it_is_resident():
    cache = Cache(PIECES, 3, policy("lru"))
    cache.pin(ids(0))
    for number, expert in enumerate((0, 1, 2, 3, 1, 2)):
        cache.serve(ids(expert), number)
        cache.release(ids(expert))
    assert cache.residents().tolist() == [0, 1, 2]
    cache.pin(ids())
    cache.serve(ids(3), 9)
    assert 0 not in cache.residents()


def test_a_step_fits_only_in_the_slots_that_pinned_experts_leave():
    cache = Cache(PIECES, 3, policy("lru"))
    cache.pin(ids(0))
    assert cache.serve(ids(1, 2), 0).pinned
    cache.release(ids(1, 2))
    assert not cache.serve(ids(1, 2, 3), 1).pinned
    assert cache.serve(ids(0, 1, 2), 2).pinned


def test_pinned_experts_may_not_take_all_slots():
    cache = Cache(PIECES, 4, policy("lru"), "per-layer")
    with pytest.raises(BudgetError, match="2 pinned experts leave none of 2 cache slots"):
        cache.pin(ids(0, 1))
    cache.pin(ids(0, 5))
    with pytest.raises(BudgetError, match="1 pinned experts leave none of 1 cache slots"):
        cache.resize(2)


@pytest.mark.parametrize("name", sorted(n for n, p in POLICIES.items() if not p.needs_trace))
@given(st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=3), max_size=25), st.integers(3, 7))
@settings(max_examples=25, deadline=None)
@plain_policies()
def test_no_policy_evicts_a_pinned_expert(name, steps, capacity):
    cache = Cache(PIECES, capacity, policy(name))
    cache.pin(ids(1, 6))
    pinned: set[int] = set()
    for number, chosen in enumerate(steps):
        requested = ids(*(4 * (number % 2) + e for e in sorted(chosen)))
        served = cache.serve(requested, number)
        if served.pinned:
            cache.release(requested)
        pinned |= {1, 6} & {*requested.tolist()}
        assert pinned <= {*cache.residents().tolist()}


def pins() -> Pins:
    a, b = np.array([3.0, 0, 0, 1, 2, 0, 0, 0]), np.array([0, 0, 3.0, 0, 0, 0, 1, 0])
    return Pins({"a": Task(ids(0, 4), a), "b": Task(ids(2, 6), b)}, (0, 4, 8))


def test_the_task_with_the_nearest_pattern_is_found():
    assert pins().nearest(np.array([0, 0, 5, 1, 0, 0, 0, 0])) == "b"
    assert pins().nearest(np.array([9, 0, 5, 1, 0, 0, 0, 0])) == "a"
    assert pins().nearest(np.zeros(8)) == "a"
    assert pins().first.size == 0


def test_pins_survive_their_file(tmp_path):
    file = tmp_path / "pins.json"
    file.write_text(json.dumps(pins().as_json()))
    loaded = Pins.load(file, [0, 4, 8])
    assert loaded.tasks["b"].experts.tolist() == [2, 6]
    assert loaded.tasks["a"].pattern.tolist() == pins().tasks["a"].pattern.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "it is not JSON"),
        ({"format": "x"}, "greenroom trace hot makes such files"),
        ({"version": 2}, "pinned experts of version 2, but this Greenroom reads version 1"),
        ({"tasks": {}}, "has no task with pinned experts"),
        (
            {"tasks": {"a": {"experts": [[0]], "pattern": [[0]]}}},
            "does not have the model's numbers of layers",
        ),
        (
            {"tasks": {"a": {"experts": [[0], [9]], "pattern": [[0] * 4, [0] * 4]}}},
            "must be different numbers from 0 to 3",
        ),
        (
            {"tasks": {"a": {"experts": [[0], [1]], "pattern": [[-1] * 4, [0] * 4]}}},
            r"pattern\[0\]\[0\] must be a number from 0",
        ),
    ],
)
def test_damaged_files(tmp_path, change, message):
    file = tmp_path / "pins.json"
    text = change if isinstance(change, str) else json.dumps({**pins().as_json(), **change})
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        Pins.load(file, [0, 4, 8])
    with pytest.raises(UsageError, match="cannot read"):
        Pins.load(tmp_path / "none", [0, 4, 8])
