"""Plans of copies from host memory, as numbers for a kernel's list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.runtime.cuda.copy_plans import MOST, UNLISTED, UNPLANNED, CopyPlans, Plan
from greenroom.runtime.cuda.slot_table import Entries
from greenroom.runtime.slots.tier import ABSENT

EXPERTS, SLOTS, HOST_SLOTS, MOST_COPIES = 12, 6, 8, 3
ADDRESSES = np.array([1 << 20, 4096, 8192, (1 << 20) + 640, 64, 0], np.int64)


def entries() -> Entries:
    return Entries(
        np.full(EXPERTS, -1), np.full(SLOTS, -1), np.zeros((EXPERTS, 2), np.int64),
        np.zeros(1, np.int64),
    )  # fmt: skip


def plan(*bounds: tuple[int, int], nbytes: int = 1000, shift: int = 0) -> Plan:
    """A plan of copies whose sources have the sizes of their bounds."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    sources = [memory[shift + 64 * n :][: b - a] for n, (a, b) in enumerate(bounds)]
    return Plan(nbytes, (), sources, bounds)


def loads(*experts: tuple[int, int, int]) -> Any:
    return np.array(experts, np.int64).reshape(-1, 3).T.copy()


class Rig:
    def __init__(self) -> None:
        self.plans, self.entries = CopyPlans(HOST_SLOTS, MOST_COPIES), entries()
        self.copies, self.changes = np.full(1 + 3 * 2 * MOST_COPIES, -7), np.full(8, -7)

    def load(self, *experts: tuple[int, int, int]) -> int:
        lists = self.copies, self.changes
        return self.plans.load(loads(*experts), self.entries, ADDRESSES, *lists)

    def check_unchanged(self) -> None:
        assert (self.copies == -7).all()
        assert (self.changes == -7).all()
        for before, after in zip(entries(), self.entries, strict=True):
            assert np.array_equal(before, after)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_copies_of_experts_are_listed_one_after_another(rig):
    first, second = plan((0, 16), (64, 88), nbytes=50), plan((8, 24), nbytes=70)
    rig.plans.add(3, first)
    rig.plans.add(5, second)
    assert rig.load((7, 1, 3), (2, 3, 5)) == 120
    assert rig.copies[0] == 3
    assert rig.copies[1:10].reshape(3, 3).tolist() == [
        [first.sources[0].data_ptr(), 4096, 2],
        [first.sources[1].data_ptr(), 4096 + 64, 3],
        [second.sources[0].data_ptr(), (1 << 20) + 648, 2],
    ]
    assert (rig.copies[10:] == -7).all()
    assert rig.entries.slot_of[[7, 2]].tolist() == [1, 3]
    assert rig.entries.expert_in[[1, 3]].tolist() == [7, 2]
    assert rig.entries.changes[:2].tolist() == [[7, (4096 - (1 << 20)) // 64], [2, 10]]
    assert rig.entries.changed[0] == 2
    assert rig.changes.tolist() == [7, (4096 - (1 << 20)) // 64, 2, 10, -1, -7, -1, -7]


def test_changes_of_before_are_handed_over_too_while_there_is_room(rig):
    """An interrupt has left them, before a look-up that would have written them."""
    rig.plans.add(3, plan((0, 16)))
    rig.entries.changes[:2], rig.entries.changed[0] = [[5, 70], [9, ABSENT]], 2
    assert rig.load((7, 1, 3)) == 1000
    assert rig.changes.tolist() == [5, 70, 9, ABSENT, 7, (4096 - (1 << 20)) // 64, -1, -7]
    assert rig.load((2, 1, 3)) == UNLISTED  # 7 goes, and 2 comes: they may need two more


def test_an_expert_without_a_plan_changes_nothing(rig):
    rig.plans.add(3, plan((0, 16)))
    assert rig.load((7, 1, 3), (2, 3, 5)) == UNPLANNED
    rig.check_unchanged()
    rig.plans.add(5, plan((0, 16)))
    rig.plans.forget(3)
    assert rig.plans.get(3) is None
    assert rig.load((7, 1, 3)) == UNPLANNED
    rig.check_unchanged()


@pytest.mark.parametrize(
    "unlisted",
    [
        plan((0, 16), shift=4),  # the source's address
        plan((0, 12)),  # its size
        plan((4, 12)),  # the target's address
        plan(*[(64 * n, 64 * n + 8) for n in range(MOST_COPIES + 1)]),  # too many
        Plan(1000, (), None),  # bytes are arranged on the way
    ],
)
def test_an_expert_that_a_kernel_cannot_copy_is_not_listed(rig, unlisted):
    rig.plans.add(3, unlisted)
    assert rig.plans.get(3) is unlisted
    assert rig.load((7, 1, 3)) == UNLISTED
    rig.check_unchanged()


def test_a_list_without_room_is_not_written(rig):
    for host_slot in range(3):
        rig.plans.add(host_slot, plan((0, 8), (64, 72), (128, 136)))
    assert rig.load((7, 1, 0), (2, 3, 1), (4, 0, 2)) == UNLISTED
    rig.check_unchanged()
    assert rig.load((7, 1, 0), (2, 3, 1)) == 2000


def test_plans_have_room_for_few_copies():
    assert CopyPlans(1, 10**6).most == MOST


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, EXPERTS - 1), st.integers(0, SLOTS - 1)),
            min_size=1, max_size=4, unique_by=(lambda t: t[0], lambda t: t[1]),
        ),
        max_size=8,
    ),
    st.lists(st.booleans(), min_size=8, max_size=8),
)  # fmt: skip
def test_entries_are_those_of_a_table_that_is_changed_expert_by_expert(steps, written):
    """Also of an expert that was in another slot, or in one that the same load gives away."""
    plans, ours = CopyPlans(HOST_SLOTS, MOST_COPIES), entries()
    plans.add(0, plan((0, 8)))
    table, device, copies = dict[int, int](), dict[int, int](), np.zeros(1 + 3 * 12, np.int64)
    listed = np.zeros(2 * (EXPERTS + 8), np.int64)
    for step, write in zip(steps, written, strict=False):
        numbers = loads(*((expert, slot, 0) for expert, slot in step))
        assert plans.load(numbers, ours, ADDRESSES, copies, listed) == 1000 * len(step)
        slots = [slot for _, slot in step]
        table = {e: s for e, s in table.items() if s not in slots} | dict(step)
        assert {e: int(s) for e, s in enumerate(ours.slot_of) if s >= 0} == table
        assert all(ours.expert_in[slot] == expert for expert, slot in table.items())
        changes = ours.changes[: ours.changed[0]].tolist()
        assert len({expert for expert, _ in changes}) == len(changes)
        assert listed.reshape(-1, 2)[: len(changes)].tolist() == changes
        assert (listed[2 * len(changes) :: 2] == -1).all()
        if write:
            device |= dict(changes)
            ours.changed[0] = 0
            expected = {e: (ADDRESSES[s] - ADDRESSES[0]) // 64 for e, s in table.items()}
            assert {e: offset for e, offset in device.items() if offset != ABSENT} == expected
