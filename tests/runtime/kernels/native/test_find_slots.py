"""The compiled look-up of tokens' slots, in tables of two layers of four experts."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.resident_tables import SlotTables

SLOT_OF = [0, 1, 2, 3, 5, -1, 4, 6]  # of the cache
MEMORY = [70, 60, 50, 40, 30, 20, 10]  # of each slot of the cache
NAMES = ("sorted", "slots", "starts", "tokens", "rows")


def find(*ids: list[int]) -> tuple[dict[str, list[int]], list[list[int]]]:
    """Return the results for each token's choices in the second layer, and the recorded uses.

    The uses are (last uses, requests) of all experts.
    """
    slot_of, memory, used, requests = map(np.array, (SLOT_OF, MEMORY, [7] * 8, [3] * 8))
    chosen = np.array(ids)
    results = {name: np.full(chosen.size + 1, -9) for name in NAMES}
    counts = np.full(2, -9)
    tables = SlotTables(
        4, *(each.ctypes.data for each in (slot_of, used, requests, memory)), step=8
    )
    search = library().structure("SlotSearch")(
        ids=chosen.ctypes.data,
        count=len(ids),
        top_k=len(ids[0]),
        experts=4,
        tables=library().structure("SlotTables")(*tables),
        **{name: each.ctypes.data for name, each in results.items()},
    )
    search.found_places[:] = counts.ctypes.data, counts.ctypes.data + 8
    kernel_entry("find_slots")(ctypes.addressof(search), wide=False)
    found = search.found
    assert counts.tolist() == ([found, found] if found else [-9, -9])
    ends = {"starts": found + 1, "tokens": chosen.size, "rows": chosen.size}
    cut = {name: each[: ends.get(name, found)].tolist() for name, each in results.items()}
    return cut if found else {}, [used.tolist(), requests.tolist()]


def test_experts_of_a_token_are_sorted_with_their_slots_and_ranks() -> None:
    results, uses = find([3, 0, 2])
    assert results == {
        "sorted": [0, 2, 3], "slots": [20, 30, 10],
        "starts": [0, 1, 2, 3], "tokens": [0, 0, 0], "rows": [1, 2, 0],
    }  # fmt: skip
    assert uses == [[7, 7, 7, 7, 8, 7, 8, 8], [3, 3, 3, 3, 4, 3, 4, 4]]


def test_tokens_share_experts_and_each_expert_is_used_once() -> None:
    results, uses = find([3, 0], [0, 2], [2, 3])
    assert results == {
        "sorted": [0, 2, 3], "slots": [20, 30, 10],
        "starts": [0, 2, 4, 6], "tokens": [1, 0, 2, 1, 0, 2], "rows": [2, 1, 4, 3, 0, 5],
    }  # fmt: skip
    assert uses == [[7, 7, 7, 7, 8, 7, 8, 8], [3, 3, 3, 3, 4, 3, 4, 4]]


@given(st.data())
@settings(deadline=None)  # the first example compiles
def test_choices_are_sorted_as_a_routing_is(data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, 3))
    each = st.permutations([0, 2, 3]).map(lambda ids: ids[:top_k])
    ids = data.draw(st.lists(each, min_size=1, max_size=5))
    results, _ = find(*ids)
    routing = Routing.of(np.array(ids), 4)
    expected = {"sorted": routing.experts, "starts": routing.starts}
    expected |= {"tokens": routing.tokens, "rows": routing.rows}
    assert {name: each for name, each in results.items() if name != "slots"} == {
        name: each.tolist() for name, each in expected.items()
    }


@pytest.mark.parametrize(
    "ids",
    [[[0, 1]], [[2, 3, 2]], [[4, 0]], [[-1, 0]], [[0, 2], [3, 1]], [[0, 2], [3, 3]]],
    ids=["not loaded", "twice", "above", "negative", "second not loaded", "second twice"],
)
def test_no_use_is_recorded_if_an_expert_has_no_slot(ids: list[list[int]]) -> None:
    assert find(*ids) == ({}, [[7] * 8, [3] * 8])


def test_slot_tables_have_the_fields_of_their_structure() -> None:
    fields = library().structure("SlotTables")._fields_
    assert [name for name, _ in fields] == list(SlotTables._fields)
