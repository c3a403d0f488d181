"""NUMA: what Linux tells of nodes, and memory that is asked for at one."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path

import numpy as np
import pytest

from greenroom.runtime.memory import numa


@pytest.fixture
def machine(tmp_path: Path):
    """A /sys of a machine with so many nodes, and GPUs at them."""

    def make(count: int, **gpus: int) -> Path:
        for node in range(count):
            (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / "devices/system/node/possible").write_text("0-3\n")
        for number, node in gpus.items():
            folder = tmp_path / f"bus/pci/devices/0000:{number}:00.0"
            folder.mkdir(parents=True)
            (folder / "numa_node").write_text(f"{node}\n")
        return tmp_path

    return make


def test_nodes_are_what_linux_lists(machine, tmp_path):
    assert numa.nodes(machine(3)) == [0, 1, 2]
    assert numa.nodes(tmp_path / "nothing") == []


def test_a_device_has_the_node_of_its_pci_entry(machine):
    sys = machine(2, a3=1, b4=-1)
    assert numa.node_of("0000:A3:00.0", sys) == 1
    assert numa.node_of("0000:b4:00.0", sys) is None  # the firmware does not say
    assert numa.node_of("0000:ff:00.0", sys) is None


@pytest.mark.skipif(not numa.nodes(), reason="Linux tells of no NUMA nodes here")
def test_memory_is_asked_for_at_a_node_that_there_is():
    memory = mmap.mmap(-1, 1 << 20)
    all_bytes = np.frombuffer(memory, np.uint8)
    refused = numa.prefer(all_bytes.ctypes.data, all_bytes.size, numa.nodes()[0])
    if refused is not None:
        pytest.skip(f"this system lets nobody place memory: {refused}")
    all_bytes[:] = 7
    assert numa.prefer(all_bytes.ctypes.data, all_bytes.size, 1000) is not None  # no such node


def test_each_part_goes_to_its_own_node_and_refusals_are_logged(machine, monkeypatch, caplog):
    calls = []

    def prefer(address: int, nbytes: int, node: int) -> str | None:
        calls.append((address, nbytes, node))
        return "Operation not permitted" if node == 1 else None

    monkeypatch.setattr(numa, "prefer", prefer)
    sys = machine(2)
    with caplog.at_level(logging.WARNING):
        numa.place(4096, [(8192, 0), (0, 1), (4096, 1), (4096, None)], sys)
    assert calls == [(4096, 8192, 0), (12288, 4096, 1)]
    assert [record.args for record in caplog.records] == [
        ("Operation not permitted",),
        ("the device's node is unknown",),
    ]


def test_a_machine_of_one_node_has_nothing_to_place(machine, monkeypatch, caplog):
    monkeypatch.setattr(numa, "prefer", lambda *_: pytest.fail("asked"))
    numa.place(4096, [(8192, 0), (4096, None)], machine(1))
    assert not caplog.records
