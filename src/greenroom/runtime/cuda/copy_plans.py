"""Plans of the copies that move experts from host memory to a device's slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.compiling.steady_call import SteadyCall
from greenroom.core.layout import Copy
from greenroom.core.pieces import Ints
from greenroom.runtime.cuda.slot_table import Entries, hand_over, insert, vacate

ITEMSIZE = 8  # bytes of the numbers that a kernel copies
MOST = 256  # copies of an expert in a list
UNPLANNED, UNLISTED = -1, -2  # in place of an expert's number of copies


class Plan(NamedTuple):
    """The copies that move an expert from a slot in host memory to any slot.

    It is made once: to make views of bytes takes longer than to launch the copies.

    nbytes:  the expert's, counted as on disk
    chunks:  the arguments of `DeviceSlots.launch_write`
    sources: the bytes in host memory, if all copies move bytes as they are
    bounds:  their first bytes and ends in the slot; equal ones are the same object
    """

    nbytes: int
    chunks: Sequence[tuple[tuple[Copy, ...], np.ndarray, int]]
    sources: Sequence[Tensor] | None
    bounds: tuple[tuple[int, int], ...] = ()


class _Table(NamedTuple):
    """Plans as numbers, by slot of host memory.

    counts: how many copies; or UNPLANNED, UNLISTED
    nbytes: the expert's bytes on disk
    copies: [slots, most, 3]; of each the address of its source, its first byte in a slot, its size
    """

    counts: Ints
    nbytes: Ints
    copies: Ints


class CopyPlans:
    """Plans of copies, one for each slot of host memory.

    They are also numbers for a kernel's list of copies. A kernel copies numbers of 8 bytes: a
    plan is not listed if one of its addresses or sizes is no multiple of 8.

    most: copies of an expert that a list has room for
    """

    def __init__(self, host_slots: int, most: int) -> None:
        """Make no plan yet; an expert has `most` copies."""
        self.most = min(most, MOST)
        self._plans: dict[int, Plan] = {}
        self._table = _Table(
            np.full(host_slots, UNPLANNED), np.zeros(host_slots, np.int64),
            np.zeros((host_slots, self.most, 3), np.int64),
        )  # fmt: skip

    def get(self, host_slot: int) -> Plan | None:
        """Return the plan of the expert in a slot of host memory; None before `add`."""
        return self._plans.get(host_slot)

    def add(self, host_slot: int, plan: Plan) -> None:
        """Add the plan of the expert that a slot of host memory has."""
        self._plans[host_slot] = plan
        copies = [
            (source.data_ptr(), begin, end - begin)
            for source, (begin, end) in zip(plan.sources or (), plan.bounds, strict=True)
        ]
        aligned = all(number % ITEMSIZE == 0 for copy in copies for number in copy)
        table = self._table
        table.counts[host_slot] = UNLISTED
        if copies and aligned and len(copies) <= self.most:
            for number, (source, first, nbytes) in enumerate(copies):
                table.copies[host_slot, number] = source, first, nbytes // ITEMSIZE
            table.nbytes[host_slot] = plan.nbytes
            table.counts[host_slot] = len(copies)

    def forget(self, host_slot: int) -> None:
        """Remove the plan of a slot of host memory, into which another expert is read."""
        self._table.counts[host_slot] = UNPLANNED
        self._plans.pop(host_slot, None)

    def load(
        self, loads: Ints, entries: Entries, addresses: Ints, copies: Ints, changes: Ints
    ) -> int:
        """List the copies of a step's experts, and enter these in the table of slots.

        loads:     [3, n], see `Loads`
        entries:   of the table of slots
        addresses: those of all slots
        copies:    receives the number of copies, and for each the addresses of its source and its
                   target, and its size: [1 + 3 n]
        changes:   receives the table's changes, see `slot_table.hand_over`

        Returns the experts' bytes on disk. UNPLANNED, below 0, says that an expert has no plan yet;
        UNLISTED, that a list has no room, or that a kernel cannot copy. Then nothing has changed.
        """
        nbytes: int = _load(loads, entries, self._table, addresses, copies, changes)
        return nbytes


@jit(_nrt=False)
def load_listed(
    loads: Ints, entries: Entries, plans: _Table, addresses: Ints, copies: Ints, changes: Ints
) -> int:
    """Do what `CopyPlans.load` does."""
    number = nbytes = 0
    for host_slot in loads[2]:
        count = plans.counts[host_slot]
        if count < 0:
            return count
        number, nbytes = number + count, nbytes + plans.nbytes[host_slot]
    most = entries.changed[0] + 2 * loads.shape[1]  # an expert comes, and another one goes
    if 1 + 3 * number > copies.size or 2 * most > changes.size:
        return UNLISTED
    copies[0], at = number, 1
    for i in range(loads.shape[1]):
        host_slot = loads[2, i]
        for copy in range(plans.counts[host_slot]):
            copies[at] = plans.copies[host_slot, copy, 0]
            copies[at + 1] = addresses[loads[1, i]] + plans.copies[host_slot, copy, 1]
            copies[at + 2] = plans.copies[host_slot, copy, 2]
            at += 3
    vacate(entries, loads[1])
    insert(entries, loads[0], loads[1], addresses)
    hand_over(entries, changes)
    return nbytes


_load = SteadyCall(load_listed)
