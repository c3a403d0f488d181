"""Blocks of kernel calls: each launch begins with the first arguments, and those that are set."""

from __future__ import annotations

import ctypes
from array import array

import pytest

from greenroom.runtime.kernels.launch.call_block import CallBlock
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library


@pytest.fixture
def memory() -> list[array[int]]:
    """Two sources, and two targets."""
    return [array("q", numbers) for numbers in ([1, 2], [3, 4], [0, 0], [0, 0])]


def block_of(memory: list[array[int]]) -> tuple[CallBlock, list[object]]:
    one, other, *targets = memory
    entry, runs, stages = kernel_entry("copy_calls"), [], []
    for source, target in zip((one, other), targets, strict=True):
        run = (library().structure("Run") * 1)()
        run[0].target, run[0].source = target.buffer_info()[0], source.buffer_info()[0]
        run[0].length = 2
        runs.append(run)
        stages.append((entry, library().structure("CopyCall")(count=1, runs=ctypes.addressof(run))))
    return CallBlock(stages), runs


def test_each_launch_begins_with_the_first_arguments(memory):
    block, _runs = block_of(memory)
    for number in range(3):
        memory[0][0] = number
        block.reset()
        block.launch()
        assert [*memory[2], *memory[3]] == [number, 2, 3, 4]


def test_a_launch_of_the_first_calls_leaves_out_the_others(memory):
    block, _runs = block_of(memory)
    block.reset()
    block.launch(1)
    assert [*memory[2], *memory[3]] == [1, 2, 0, 0]
    block.reset()
    block.launch()
    assert [*memory[2], *memory[3]] == [1, 2, 3, 4]


def test_an_argument_is_set_for_one_launch_or_for_all_later_ones(memory):
    block, runs = block_of(memory)
    index = block.index(1, "runs")
    block.reset()[index] = ctypes.addressof(runs[0])  # type: ignore[arg-type]
    block.launch()
    assert memory[3].tolist() == [0, 0]
    block.reset()
    block.launch()
    assert memory[3].tolist() == [3, 4]
    memory[3][:] = array("q", [0, 0])
    block.first[index] = ctypes.addressof(runs[0])  # type: ignore[arg-type]
    block.reset()
    block.launch()
    assert memory[3].tolist() == [0, 0]
