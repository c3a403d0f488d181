"""Kernel calls in one block of memory: built once, then patched for every launch.

Building the arguments of a kernel takes Python as long as a small kernel's work. Only a few of them
change from launch to launch. So a block has a copy of all arguments, which replaces those that the
last launch has used and changed, and the caller then sets the few that differ.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.launch.sequence import Stage, address_of
from greenroom.runtime.kernels.native.library import library


class CallBlock:
    """Kernel calls that are launched many times, one after another in one parallel region.

    arguments: the arguments of all calls, as int64; `index` finds a field
    """

    __slots__ = ("_count", "_region", "_run", "_starts", "_types", "arguments", "first")

    def __init__(self, stages: Sequence[Stage]) -> None:
        """Copy the arguments of kernel calls into one block of memory."""
        structure = library().structure
        self._types = [type(arguments) for _, arguments in stages]
        region, stage = structure("StagesCall"), structure("Stage")
        sizes = [ctypes.sizeof(region), len(stages) * ctypes.sizeof(stage)]
        sizes += [memoryview(arguments).nbytes for _, arguments in stages]
        starts = [sum(sizes[:n]) // 8 for n in range(len(sizes))]
        self._starts = starts[2:]
        self.arguments = array("q", bytes(sum(sizes)))
        address = self.arguments.buffer_info()[0]
        place = structure_at(self.arguments, region, 0)
        place.count, place.stages = len(stages), address + 8 * starts[1]
        listed = structure_at(self.arguments, stage * len(stages), starts[1])
        for each, (entry, arguments), start in zip(listed, stages, self._starts, strict=True):
            each.kernel, each.call = entry.address, address + 8 * start
            ctypes.memmove(each.call, address_of(arguments), memoryview(arguments).nbytes)
        del place, listed, each
        self.first, self._region = self.arguments[:], address
        self._count = region.count.offset // 8
        self._run = kernel_entry("run_stages")

    def index(self, call: int, field: str) -> int:
        """Return the index in `arguments` of a field of eight bytes of a kernel call."""
        return int(self._starts[call] + getattr(self._types[call], field).offset // 8)

    def address(self, call: int) -> int:
        """Return the address of a kernel call's arguments."""
        return self._region + 8 * self._starts[call]

    def keep(self, *indices: int) -> None:
        """Make the present values of some arguments those that `reset` sets."""
        for index in indices:
            self.first[index] = self.arguments[index]

    def reset(self) -> array[int]:
        """Set all arguments to those of the first launch, and return them."""
        self.arguments[:] = self.first
        return self.arguments

    def launch(self, count: int = 0) -> None:
        """Run the calls; with `count`, only so many of the first ones."""
        if count:
            self.arguments[self._count] = count
        self._run(self._region)


def structure_at(memory: array[int], kind: Any, index: int) -> Any:
    """Return a structure of ctypes in the memory of an array of int64."""
    return kind.from_buffer(memory, 8 * index)
