"""The Triton program that copies experts from host memory to slots.

The host lists the copies in pinned memory; the program reads them and the experts' bytes there. So
all copies of a step are one launch, which is a part of a graph: to launch a copy takes the host as
long as to launch a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from greenroom.core.pieces import Ints
from greenroom.runtime.kernels.triton.kernel import Launch

if TYPE_CHECKING:  # it imports the kernels
    from greenroom.runtime.cuda.engine import Engine

BLOCK = 2048  # numbers that a program copies at once: a lane has 16 loads on their way
PROGRAMS = 16  # of a copy


@triton.jit
def copy_ranges(copies, BLOCK: tl.constexpr):
    """Copy ranges of numbers of 64 bits, in Triton.

    copies: in the host's memory, how many ranges; then for each the addresses of its source and its
            target, and its size in numbers
    """
    if tl.program_id(0) < tl.load(copies):
        copy = copies + 1 + 3 * tl.program_id(0)
        source, target = tl.load(copy).to(copies.dtype), tl.load(copy + 1).to(copies.dtype)
        size, k = tl.load(copy + 2), tl.arange(0, BLOCK)
        for first in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            inside = first + k < size
            loaded = tl.load(source + first + k, mask=inside, other=0)
            tl.store(target + first + k, loaded, mask=inside)


def launch_of(copies: Tensor) -> Launch:
    """Return the launch of listed copies; the list is in the host's memory: [1 + 3 n]."""
    most = (copies.numel() - 1) // 3
    options: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 4}
    return Launch(copy_ranges, (most, PROGRAMS), (copies,), options)


class ListedCopies:
    """A list of copies in the host's memory, and their launch, of one thread.

    memory:  the list, pinned
    numbers: its number of copies, then for each its source, its target and its size: [1 + 3 n]
    """

    def __init__(self, engine: Engine, most: int) -> None:
        """Make an empty list for at most so many copies."""
        self.memory = engine.host_numbers(1 + 3 * most)
        self.numbers: Ints = self.memory.numpy()
        self.start: Callable[[], None] = launch_of(self.memory).start
        self._engine = engine

    def capture(self) -> None:
        """Make a graph of the launch, whose kernel a launch of no copies compiles."""
        self._engine.wait(self._engine.mark())  # the list may still be read
        self.numbers[0] = 0
        self.start()
        self.start = self._engine.capture(self.start)
