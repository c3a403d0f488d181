"""Signals that memory is short, from files of a made-up system and of this one."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.runtime.memory import pressure as module
from greenroom.runtime.memory.cgroups import MemoryCgroup
from greenroom.runtime.memory.pressure import PressureSensor, stalled_s

LINES = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 total=1\n"


class Made:
    """A system with a file of PSI and one cgroup, and a clock that the test moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now = folder, 100.0
        self.group = MemoryCgroup.v2(folder / "job")
        self.group.folder.mkdir()
        self.write("pressure", LINES.format(0))
        self.write("job/memory.pressure", LINES.format(0))
        self.write("job/memory.events", "high 0\nmax 0\n")
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.sensor = PressureSensor(folder / "pressure", lambda: [self.group])

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def stalled(self, seconds: float) -> bool:
        """Whether processes have waited, so many seconds after the last reading."""
        self.now += seconds
        reading = self.sensor.read()
        assert reading is not None
        assert reading.at == self.now
        return reading.stalled


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    system = Made(tmp_path, monkeypatch)
    yield system
    system.sensor.close()


@pytest.mark.parametrize("name", ["pressure", "job/memory.pressure"])
def test_waiting_for_a_tenth_of_the_time_is_a_stall(made: Made, name: str) -> None:
    made.write(name, LINES.format(90_000))
    assert not made.stalled(1.0)
    made.write(name, LINES.format(200_000))  # 110 ms in the second
    assert made.stalled(1.0)
    assert not made.stalled(1.0)  # none since then


def test_a_limit_that_was_reached_is_no_stall(made: Made) -> None:
    made.write("job/memory.events", "high 1\nmax 0\n")
    readings = [made.sensor.read() for _ in range(2)]
    assert [(each.at_limit, each.stalled) for each in readings if each is not None] == [
        (True, False),
        (False, False),
    ]


def test_the_narrowest_memory_counts(made: Made) -> None:
    machine = made.sensor.read()
    assert machine is not None
    assert machine.free > 1 << 20
    made.write("job/memory.max", str(5 << 20))
    made.write("job/memory.current", str(4 << 20))
    reading = made.sensor.read()
    assert reading is not None
    assert reading.free == 1 << 20
    assert reading.resident > 1 << 20


def test_a_reading_without_its_cgroup_or_own_size_does_not_count(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.write("job/memory.max", str(5 << 20))
    made.write("job/memory.current", str(4 << 20))
    assert made.sensor.read() is not None
    group = made.group
    made.sensor._cgroups = list
    assert made.sensor.read() is None
    made.sensor._cgroups = lambda: [group]
    made.write("job/memory.max", "")
    assert made.sensor.read() is None
    made.write("job/memory.max", "max")  # the limit was taken away
    assert made.sensor.read() is not None
    monkeypatch.setattr(module, "own_rss_bytes", lambda: 0)
    assert made.sensor.read() is None


def test_files_that_are_missing_or_strange_count_as_no_wait(tmp_path: Path) -> None:
    assert stalled_s(tmp_path / "nothing") == 0
    (tmp_path / "strange").write_text("strange\n")
    assert stalled_s(tmp_path / "strange") == 0
    (tmp_path / "pressure").write_text(LINES.format(2_500_000))
    assert stalled_s(tmp_path / "pressure") == 2.5


def test_waiting_ends_after_its_time_and_at_once_when_it_is_stopped() -> None:
    sensor = PressureSensor()
    try:
        sensor.wait(0.01)
        thread = threading.Thread(target=sensor.wait, args=(600.0,))
        thread.start()
        sensor.stop_waiting()
        thread.join(60)
        assert not thread.is_alive()
        begin = time.monotonic()
        sensor.wait(600.0)  # it stays stopped
        assert time.monotonic() - begin < 60
    finally:
        sensor.close()


def test_a_forked_child_does_not_end_its_parents_wait() -> None:
    sensor = PressureSensor()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.os, "getpid", lambda: -1)  # as in the child
            sensor.stop_waiting()
        assert not select.select([sensor._wake_end], [], [], 0)[0]
        os.write(sensor._wake, b"\0")
        sensor.wait(600.0)
        assert not select.select([sensor._wake_end], [], [], 0)[0]  # the next one waits
    finally:
        sensor.close()


def test_a_sensor_that_cannot_be_made_leaves_no_file_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    pipe = os.pipe

    def record() -> tuple[int, int]:
        made.extend(ends := pipe())
        return ends

    def fail(self: PressureSensor, path: Path) -> None:
        raise ValueError("strange")

    monkeypatch.setattr(module.os, "pipe", record)
    monkeypatch.setattr(PressureSensor, "_add_trigger", fail)
    with pytest.raises(ValueError, match="strange"):
        PressureSensor()
    assert len(made) == 2
    for each in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)


def test_a_trigger_is_set_where_the_kernel_allows_it() -> None:
    try:
        handle = module.PRESSURE.open("r+b", buffering=0)
        with handle:
            handle.write(module.TRIGGER)
    except OSError as error:
        pytest.skip(f"this kernel sets no trigger here: {error}")
    sensor = PressureSensor()
    try:
        assert sensor.triggers >= 1
    finally:
        sensor.close()
