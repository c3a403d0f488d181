"""The look-up of one token's experts: its tiles, the order of its sum, and report for the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from greenroom.runtime.kernels.triton.look_up import look_up
from greenroom.runtime.slots.tier import ABSENT

pytestmark = pytest.mark.interpreted
FIRST, EXPERTS = 4, 6  # of the layer


class LookUp:
    """A layer's look-up, with the memory that it writes."""

    def __init__(self, top_k: int, index_type: torch.dtype = torch.int64) -> None:
        self.top_k, self._type = top_k, index_type
        self.offsets = torch.full((FIRST + EXPERTS,), ABSENT)
        self.tiles, self.computed = torch.full((top_k, 4), 99), torch.full((top_k,), 99)
        self.order, self.report = torch.full((top_k, 2), 99), torch.zeros(top_k, dtype=torch.int64)
        self._number = torch.zeros(1, dtype=torch.int64)
        self.size = 1 << (top_k - 1).bit_length()
        self.changes = torch.full((2 * self.size, 2), -1)

    def __call__(self, chosen: list[int], again: bool = False) -> list[tuple[int, int, int]]:
        """Return (number, expert, found) of each word."""
        look_up[(1, 1)](
            torch.tensor([chosen], dtype=self._type), self.offsets, self.tiles, self.computed,
            self.order, self.report, self._number, self.changes, FIRST, EXPERTS, self.top_k,
            AGAIN=again, K=self.size,
        )  # fmt: skip
        return [(word >> 32, word >> 1 & 0x7FFFFFFF, word & 1) for word in self.report.tolist()]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_experts_in_slots_get_entries_and_the_host_hears_of_the_others(kind):
    lookup = LookUp(3, kind)
    lookup.offsets[FIRST + 5], lookup.offsets[FIRST + 2] = -1000, 0
    lookup.offsets[0] = 7  # another layer's
    assert lookup([5, 0, 2]) == [(1, 5, 1), (1, 0, 0), (1, 2, 1)]
    assert lookup.tiles.tolist() == [[-1000, 5, 0, 1], [0, 0, 1, 0], [0, 2, 2, 1]]
    assert lookup.order.tolist() == [[1, 1], [2, 2], [0, 0]]  # by ascending expert


def test_a_second_look_up_leaves_out_what_was_computed():
    lookup = LookUp(3)
    lookup.offsets[FIRST + 5] = 10
    lookup([5, 0, 2])
    lookup.offsets[FIRST + 5], lookup.offsets[FIRST + 2] = (
        ABSENT,
        20,
    )  # 5 has lost its slot meanwhile
    assert lookup([5, 0, 2], again=True) == [(2, 5, 1), (2, 0, 0), (2, 2, 1)]
    assert lookup.tiles[:, 3].tolist() == [0, 0, 1]
    lookup.offsets[FIRST] = 30
    assert lookup([5, 0, 2], again=True) == [(3, 5, 1), (3, 0, 1), (3, 2, 1)]
    assert lookup.tiles[:, 3].tolist() == [0, 1, 0]
    assert lookup([5, 0, 2]) == [(4, 5, 0), (4, 0, 1), (4, 2, 1)]  # another token


def test_a_second_look_up_changes_the_table_first():
    lookup = LookUp(3)
    lookup.offsets[FIRST + 5], lookup.offsets[1] = 10, 20
    lookup([5, 0, 2])
    changes = [[1, ABSENT], [FIRST, -20], [0, 40], [FIRST + 2, 0]]  # of other layers too
    lookup.changes[:4] = torch.tensor(changes)
    before = lookup.offsets.clone()
    assert lookup([5, 0, 2]) == [(2, 5, 1), (2, 0, 0), (2, 2, 0)]
    assert torch.equal(lookup.offsets, before)  # a first one has no changes
    assert lookup([5, 0, 2], again=True) == [(3, 5, 1), (3, 0, 1), (3, 2, 1)]
    assert [lookup.offsets[expert].item() for expert, _ in changes] == [ABSENT, -20, 40, 0]
    assert lookup.tiles.tolist() == [[0, 5, 0, 0], [-20, 0, 1, 1], [0, 2, 2, 1]]
    lookup.changes[:] = torch.stack([torch.arange(8) + 1, torch.arange(8) + 100], 1)  # all places
    lookup([5, 0, 2], again=True)
    assert lookup.offsets.tolist()[1:9] == [*range(100, 108)]


def test_experts_of_other_processes_are_left_out_of_the_sum():
    lookup = LookUp(4)
    lookup.offsets[:] = 5
    report: Any = lookup([EXPERTS, 3, EXPERTS + 1, 1])
    assert [found for *_, found in report] == [1, 1, 1, 1]  # nothing is to be loaded
    assert lookup.tiles[:, 3].tolist() == [0, 1, 0, 1]
    assert lookup.order.tolist() == [[3, 3], [1, 1], [-1, -1], [-1, -1]]


def test_a_token_may_have_one_expert():
    lookup = LookUp(1)
    lookup.offsets[FIRST + 3] = 2
    assert lookup([3]) == [(1, 3, 1)]
    assert lookup.tiles.tolist() == [[2, 3, 0, 1]]
    assert lookup.order.tolist() == [[0, 0]]
