from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from greenroom.core.cost import Link
from greenroom.errors import OutputError
from greenroom.runtime.measure import bandwidth
from greenroom.runtime.measure.bandwidth import READ_SIZES, READ_THREADS, fit_link


@pytest.mark.parametrize("link", [Link(1.6e9, 8e-5, 2), Link(5e8, 2e-3, 4), Link(7e9, 0.0, 1)])
def test_a_link_is_found_from_reads_that_follow_it(link: Link):
    """Readers that wait out each latency, on a link that carries one chunk after another."""
    reads = {
        (size, n): min(link.bandwidth, n * size / (size / link.bandwidth + link.latency))
        for size in READ_SIZES
        for n in READ_THREADS
    }
    fitted = fit_link(reads)
    assert fitted.bandwidth == pytest.approx(link.bandwidth, rel=0.05)
    assert fitted.latency == pytest.approx(link.latency, rel=0.1, abs=1e-9)
    full = {n: rate for (size, n), rate in reads.items() if size == READ_SIZES[-1]}
    assert full[fitted.lanes] >= 0.95 * max(full.values())
    assert all(full[n] < 0.95 * max(full.values()) for n in full if n < fitted.lanes)


@pytest.mark.parametrize("direct", [True, False])
def test_reads_of_a_file(tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch):
    """Every block is read once, by as many readers as were asked for."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(10 * 4096 + 5))
    if direct and not bandwidth.reads_directly(path):
        pytest.skip("the file system refuses direct reads")
    offsets = []
    preadv = os.preadv

    def watched(handle: int, buffers: list[object], offset: int) -> int:
        offsets.append(offset)
        return preadv(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    assert bandwidth.disk_bandwidth([path], 4000, 3, direct) > 0
    assert sorted(offsets) == [4096 * i for i in range(10)]


def test_reads_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(100 * 4096))
    preadv = os.preadv

    def slow(*args: object) -> int:
        time.sleep(0.01)
        return int(preadv(*args))  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", slow)
    rate = bandwidth.disk_bandwidth([path], 4096, 1, False, seconds=0.05)
    assert rate < 4096 / 0.01


def test_a_test_file_is_deleted_afterwards(tmp_path: Path):
    with bandwidth.noise_file(tmp_path, 5 << 20) as path:
        assert path.stat().st_size == 8 << 20
        data = path.read_bytes()
        assert data[: 4 << 20] != data[4 << 20 :]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError), bandwidth.noise_file(tmp_path, 1):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_no_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(OutputError, match="no room for a test file"),
        bandwidth.noise_file(tmp_path, 1),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    with (
        pytest.raises(OutputError, match="cannot write a test file in"),
        bandwidth.noise_file(tmp_path / "none", 1),
    ):
        pass


def test_an_error_in_a_thread_is_raised():
    def fails() -> None:
        raise ValueError("in a thread")

    with pytest.raises(ValueError, match="in a thread"):
        bandwidth.run_threads([lambda: None, fails])


def test_threads_run_side_by_side():
    assert bandwidth.run_threads([lambda: time.sleep(0.2)] * 5) < 0.9


def test_memory_is_read():
    assert 1e8 < bandwidth.ram_bandwidth(2, passes=2, nbytes=1 << 20) < 1e13
