"""Kernel calls in one block of memory: built once, then patched for every launch.

Building the arguments of a kernel takes Python as long as a small kernel's work. Only a few of them
change from launch to launch. So a block has a copy of all arguments, which replaces those that the
last launch has used and changed, and the caller then sets the few that differ.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.launch.sequence import Stage, address_of
from greenroom.runtime.kernels.native.library import library


class CallBlock:
    """Kernel calls that are launched many times, one after another in one parallel region.

    first: the arguments of all calls, as int64, before a launch; `index` finds a field
    arguments: those of the present launch
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
        place = region.from_buffer(self.arguments)
        place.count, place.stages = len(stages), address + 8 * starts[1]
        listed = (stage * len(stages)).from_buffer(self.arguments, 8 * starts[1])
        for each, (entry, arguments), start in zip(listed, stages, self._starts, strict=True):
            each.kernel, each.call = entry.address, address + 8 * start
            ctypes.memmove(each.call, address_of(arguments), memoryview(arguments).nbytes)
        del place, listed, each
        self.first = self.arguments[:]
        self._region = address
        self._count = region.count.offset // 8
        self._run = kernel_entry("run_stages")

    def index(self, call: int, field: str) -> int:
        """Return the index of a field of eight bytes of a kernel call."""
        return int(self._starts[call] + getattr(self._types[call], field).offset // 8)

    def reset(self) -> array[int]:
        """Set `arguments` to `first`, and return them."""
        self.arguments[:] = self.first
        return self.arguments

    def launch(self, count: int = 0) -> None:
        """Run the calls; with `count`, only so many of the first ones."""
        if count:
            self.arguments[self._count] = count
        self._run(self._region)
