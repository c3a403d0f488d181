"""What is said in plain words follows from the figures."""

from __future__ import annotations

from dataclasses import replace

from greenroom.core.cost import Link
from greenroom.plan import summary
from tests.plan.models import HOST, MACHINE, MIB, MODEL


def test_a_machine_whose_disk_limits_and_one_whose_disk_keeps_up():
    description = " ".join(summary.machine_summary(MACHINE))
    assert "loading it from the disk takes 4 ms, 4 times as long" in description
    assert "the disk limits" in description
    assert "Memory delivers 20.0 GB/s" in description
    assert "512 MiB of 1 GiB of memory were free" in description
    assert "measure again" not in description
    fast = replace(MACHINE.routes[0], link=Link(MIB / 1e-3))
    assert "nearly as fast as the processor" in " ".join(
        summary.machine_summary(replace(MACHINE, routes=(fast,)))
    )


def test_a_predicted_gpu_was_not_measured():
    device = {"name": "RTX 4090", "memory_bytes": 24 << 30, "memory": 7e11}
    found = {"predicted": True, "device": device}
    assert "RTX 4090" not in " ".join(summary.machine_summary(replace(MACHINE, measured=found)))


def test_a_busy_machine_is_not_to_be_trusted():
    busy = replace(MACHINE, host={**HOST, "load": 1.5})
    assert "measure again when the machine is idle" in summary.machine_summary(busy)[-1]


def test_whether_a_model_fits():
    for available, expected in (
        (MODEL.memory(64), "all of it fits"),
        (MODEL.memory(20), "experts that do not fit are read from disk"),
        (MODEL.memory(2) - 3 * MIB, "it does not fit; 3 MiB more are needed"),
    ):
        assert expected in summary.model_summary(MODEL, available)[-1]
