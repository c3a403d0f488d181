"""The compiled look-up of a token's slots, in tables of two layers of four experts."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library
from greenroom.runtime.slots.resident_tables import SlotTables

SLOT_OF = [0, 1, 2, 3, 5, -1, 4, 6]  # of the cache
MEMORY = [70, 60, 50, 40, 30, 20, 10]  # of each slot of the cache


def find(ids: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return (experts, slots, ranks), and (last uses, requests), of the second layer's `ids`."""
    slot_of, memory, used, requests = map(np.array, (SLOT_OF, MEMORY, [7] * 8, [3] * 8))
    chosen, results = np.array(ids), np.full((3, len(ids)), -9)
    tables = SlotTables(
        4, *(each.ctypes.data for each in (slot_of, used, requests, memory)), step=8
    )
    search = library().structure("SlotSearch")(
        ids=chosen.ctypes.data,
        top_k=len(ids),
        experts=4,
        tables=library().structure("SlotTables")(*tables),
        **dict(
            zip(("sorted", "slots", "ranks"), (row.ctypes.data for row in results), strict=True)
        ),
    )
    kernel_entry("find_slots")(ctypes.addressof(search), wide=False)
    found = search.found
    assert found in (0, len(ids))
    return results.tolist() if found else [], [used.tolist(), requests.tolist()]


def test_experts_are_sorted_with_their_slots_and_ranks() -> None:
    results, uses = find([3, 0, 2])
    assert results == [[0, 2, 3], [20, 30, 10], [1, 2, 0]]
    assert uses == [[7, 7, 7, 7, 8, 7, 8, 8], [3, 3, 3, 3, 4, 3, 4, 4]]


@pytest.mark.parametrize(
    "ids", [[0, 1], [2, 3, 2], [4, 0], [-1, 0]], ids=["not loaded", "twice", "above", "negative"]
)
def test_no_use_is_recorded_if_an_expert_has_no_slot(ids: list[int]) -> None:
    assert find(ids) == ([], [[7] * 8, [3] * 8])


def test_slot_tables_have_the_fields_of_their_structure() -> None:
    fields = library().structure("SlotTables")._fields_
    assert [name for name, _ in fields] == list(SlotTables._fields)
