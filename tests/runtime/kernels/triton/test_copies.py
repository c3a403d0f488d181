"""Copies from lists in the host's memory, by one launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.kernels.triton.copies import BLOCK, PROGRAMS, ListedCopies, launch_of

pytestmark = pytest.mark.interpreted
SIZES = (1, 7, BLOCK, BLOCK + 1, PROGRAMS * BLOCK + 5)


def address(memory: torch.Tensor, first: int) -> int:
    return memory.data_ptr() + 8 * first


def test_each_range_goes_to_its_place_and_no_byte_further() -> None:
    total = sum(SIZES) + 2 * len(SIZES)
    source, target = torch.arange(1, 1 + total), torch.zeros(total, dtype=torch.int64)
    copies, expected = ListedCopies(Engine(), len(SIZES) + 3), torch.zeros_like(target)
    at, numbers = 0, [len(SIZES)]
    for size in SIZES:
        first = total - at - size - 1  # in the order from the end, with a gap
        numbers += [address(source, at), address(target, first), size]
        expected[first : first + size] = source[at : at + size]
        at += size + 1
    copies.numbers[: len(numbers)] = numbers
    copies.numbers[len(numbers) :] = 1  # not read: no addresses
    copies.start()
    assert torch.equal(target, expected)


def test_a_list_without_copies_copies_nothing() -> None:
    source, target = torch.arange(1, 9), torch.zeros(8, dtype=torch.int64)
    copies = ListedCopies(Engine(), 1)
    copies.numbers[:] = 0, address(source, 0), address(target, 0), 8
    copies.start()
    assert not target.any()


def test_a_launch_has_programs_for_the_whole_list() -> None:
    launch = launch_of(torch.zeros(1 + 3 * 7, dtype=torch.int64))
    assert launch.grid == (7, PROGRAMS)


def test_a_graph_is_made_of_a_list_that_nobody_reads() -> None:
    """The first launch compiles the kernel, for no copy."""
    did = list[str]()

    class Device(Engine):
        def mark(self) -> str:
            return "work before"

        def wait(self, mark: str) -> None:
            did.append(f"wait for {mark}")

        def capture(self, work):  # type: ignore[no-untyped-def]
            did.append("capture")
            return work

    target = torch.zeros(2, dtype=torch.int64)
    copies, source = ListedCopies(Device(), 1), torch.ones(2, dtype=torch.int64)
    copies.numbers[:] = 1, address(source, 0), address(target, 0), 2
    copies.capture()
    assert did == ["wait for work before", "capture"]
    assert not target.any()
    copies.numbers[0] = 1
    copies.start()
    assert np.array_equal(target, source)
