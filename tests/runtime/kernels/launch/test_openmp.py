"""Kernels on real threads, whose number changes from region to region."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from greenroom.runtime.kernels.launch import openmp, sequence
from greenroom.runtime.kernels.launch.governor import Governor
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library

WIDTH = 300


class Schedule(Governor):
    """A governor that lets 1, 2 and 3 threads enter, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.readings: list[dict[int, int]] = []

    def threads(self, full: int, now: float) -> int:
        return min(full, 1 + len(self.readings) % 3) if len(self.readings) % 4 else full

    def due(self, now: float) -> bool:
        return True

    def record(self, waited: dict[int, int], now: float) -> None:
        self.readings.append(waited)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


def products(count: int) -> torch.Tensor:
    """A vector, multiplied by matrices one after another in one region."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(count, WIDTH, WIDTH, generator=draw).div(WIDTH**0.5).bfloat16()
    x = torch.empty(count + 1, WIDTH, dtype=torch.bfloat16)
    x[0] = torch.randn(WIDTH, generator=draw)
    structure = library().structure
    matrices = [structure("Matrix")(base=each.data_ptr()) for each in weights]
    calls = [
        structure("LinearCall")(
            matrix=ctypes.addressof(matrix), outputs=WIDTH, inputs=WIDTH, rows=1,
            x=x[i].data_ptr(), out=x[i + 1].data_ptr(),
        )
        for i, matrix in enumerate(matrices)
    ]  # fmt: skip
    sequence.run([(kernel_entry("linear", torch.bfloat16), call) for call in calls])
    return x[-1]


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    torch.set_num_threads(1)
    expected = products(20)
    torch.set_num_threads(3)
    monkeypatch.setattr(openmp, "GOVERNOR", schedule := Schedule())
    assert all(torch.equal(products(20), expected) for _ in range(40))
    assert {len(each) for each in schedule.readings} >= {2, 3}


def test_a_reading_has_each_thread_of_the_region(monkeypatch):
    monkeypatch.setattr(openmp, "GOVERNOR", schedule := Schedule())
    products(3)
    (waited,) = schedule.readings
    assert len(waited) == 3
    assert all(each >= 0 for each in waited.values())
