"""Several pools as one tier."""

from __future__ import annotations

import pytest

from greenroom.core.pieces import Pieces
from greenroom.errors import DeviceError
from greenroom.runtime.fakes import FakeSlots
from greenroom.runtime.slots.tier import MultiPoolTier

SHARES = Pieces.unsplit([0, 6, 12, 18], [1] * 3, devices=2).slots_per_device


class Full(FakeSlots):
    """A device that has no room for more than five slots."""

    def trim(self, capacity: int) -> None:
        if capacity > 5:
            raise DeviceError("the GPU has no room")
        super().trim(capacity)


def test_if_one_device_has_no_room_no_pool_changes():
    slots = MultiPoolTier([FakeSlots(2, 64, 9), Full(2, 64, 9)], 4, SHARES)
    slots.trim(10)
    assert [each.capacity for each in slots.pools] == [5, 5]
    with pytest.raises(DeviceError, match="no room"):
        slots.trim(14)
    assert [each.capacity for each in slots.pools] == [5, 5]
    assert slots.capacity == 10
    slots.trim(3)
    assert [each.capacity for each in slots.pools] == [2, 1]


def test_a_pool_that_will_be_smaller_keeps_its_slots_until_the_cache_is_resized():
    """Shares of layers are rounded, so one may shrink while the others grow; its experts move."""
    sizes = {4: [3, 1], 5: [2, 3]}.__getitem__
    slots = MultiPoolTier([FakeSlots(3, 64, 9), FakeSlots(1, 64, 9)], 4, sizes)
    slots.grow(5)
    assert [each.capacity for each in slots.pools] == [3, 3]
    slots.trim(5)
    assert [each.capacity for each in slots.pools] == [2, 3]
    slots.grow(4)
    assert [each.capacity for each in slots.pools] == [3, 3]  # `trim` allocates nothing
    slots.trim(4)
    assert [each.capacity for each in slots.pools] == [3, 1]


def test_slots_that_cannot_be_divided_anew_stay_as_they_were():
    by_scope = {"shared": [5, 5], "per-layer": [3, 7]}
    pools = [FakeSlots(5, 64, 9), Full(5, 64, 9)]
    slots = MultiPoolTier(
        pools, 10, lambda capacity: [5, 5], lambda scope: lambda capacity: by_scope[scope]
    )
    with pytest.raises(DeviceError, match="no room"):
        slots.grow(10, "per-layer")
    assert [each.capacity for each in slots.pools] == [5, 5]
    slots.trim(10)
    assert [each.capacity for each in slots.pools] == [5, 5]


class Coarse(FakeSlots):
    """Gives memory back four slots at a time."""

    def held_bytes(self, capacity: int) -> int:
        return -(-capacity // 4) * 4 * self.stride


def test_the_fitting_capacity_fits_on_every_device():
    slots = MultiPoolTier([FakeSlots(9, 64, 9), Coarse(9, 64, 9)], 18, SHARES, devices=2)
    fitting = slots.fitting_capacity(15, 2, 15)
    assert SHARES(15) == [8, 7]
    assert SHARES(fitting)[1] == 4
    assert SHARES(fitting + 1)[1] == 5 or SHARES(fitting + 2)[1] == 5


def test_pools_of_a_device_fit_into_their_memory_together():
    """One that ends within its four slots takes what another one leaves."""
    sizes = {9: [5, 4], 8: [4, 4], 7: [3, 4], 6: [3, 3], 5: [2, 3]}.__getitem__
    slots = MultiPoolTier([Coarse(5, 64, 9), Coarse(4, 64, 9)], 9, sizes)
    assert slots.fitting_capacity(9, 5, 9) == 8  # slots of 9, in place of 12
    assert slots.fitting_capacity(9, 5, 7) == 7
    assert slots.fitting_capacity(7, 5, 9) == 8  # no pool has fewer than four


def test_no_capacity_below_the_least_is_tried():
    sizes = {8: [7, 1], 7: [5, 2], 6: [5, 1]}.__getitem__  # no division of fewer
    slots = MultiPoolTier([Coarse(7, 64, 9), FakeSlots(1, 64, 9)], 8, sizes)
    slots.pools[1].held_bytes = lambda capacity: 64 * 9
    assert slots.fitting_capacity(7, 6, 7) == 6


def test_marks_are_recorded_on_the_devices_that_computed():
    class Marked(FakeSlots):
        def __init__(self) -> None:
            super().__init__(4, 64, 9)
            self.marks: list[list[int]] = []

        def mark_computed(self, slots: list[int]) -> None:
            self.marks.append(slots)

    each = [Marked(), Marked(), FakeSlots(4, 64, 9)]
    MultiPoolTier(each, 12, SHARES).mark_computed([0, 3, 4, 9, 5])
    assert each[0].marks == [[0, 1, 3]]
    assert each[1].marks == [[1]]


def test_without_a_pool_that_computes_later_no_callback_runs():
    assert MultiPoolTier([FakeSlots(4, 64), FakeSlots(4, 64)], 8, SHARES).mark_computed is None
    assert FakeSlots(4, 64).mark_computed is None
