"""Reads of experts as they lie, beside one range for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.core.layout import Catalog, Extent
from greenroom.errors import StoreError
from greenroom.runtime.measure import expert_reads
from greenroom.runtime.measure.expert_reads import measure_expert_reads
from greenroom.runtime.store.disk import Chunk, DiskStore

SIZE, EXPERTS = 1 << 16, 24  # bytes of each of an expert's two ranges


def catalog(folder: Path, ranges: int = 2) -> Catalog:
    """One layer, whose experts have their ranges in different halves of the file."""
    path = folder / "weights"
    path.write_bytes(bytes(ranges * EXPERTS * SIZE))

    def locate(layer: int, expert: int) -> tuple[Extent, ...]:
        places = (expert + part * EXPERTS for part in range(ranges))
        return tuple(Extent(0, place * SIZE, SIZE, ()) for place in places)

    return Catalog((str(path),), ("experts",), (0, EXPERTS), (), locate)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Chunk]:
    """The chunks that are read; a clock on which a read takes 1 s and 1 s for each MiB."""
    done: list[Chunk] = []
    monkeypatch.setattr(Catalog, "slot_bytes", 2 * SIZE)
    monkeypatch.setattr(expert_reads, "ROUND_BYTES", 4 * SIZE)

    def seconds(works: list) -> float:
        before = len(done)
        for work in works:
            work()
        return sum(1 + chunk.length / (1 << 20) for chunk in done[before:])

    monkeypatch.setattr(expert_reads, "run_threads", seconds)
    monkeypatch.setattr(DiskStore, "read", lambda self, chunk, staging: done.append(chunk))
    return done


def test_one_range_saves_the_time_of_a_second_read(tmp_path: Path, reads: list[Chunk]) -> None:
    experts = catalog(tmp_path)
    found = measure_expert_reads(experts, experts.files, 2, 60.0)
    assert found is not None
    transfer = 2 * SIZE / (1 << 20)
    assert found.gain == pytest.approx((2 + transfer) / (1 + transfer) - 1)
    assert (found.ranges, found.steady, found.nbytes) == (2, True, 2 * EXPERTS * SIZE)
    assert found.contiguous / found.as_stored == pytest.approx(1 + found.gain)
    one = [chunk for chunk in reads if chunk.length == 2 * SIZE]
    assert len(one) * 2 == len(reads) - len(one) == EXPERTS
    assert all(chunk.extent.offset + chunk.length <= found.nbytes for chunk in reads)


def test_the_time_is_bounded(tmp_path: Path, reads: list[Chunk]) -> None:
    experts = catalog(tmp_path)
    assert measure_expert_reads(experts, experts.files, 2, 0.0) is not None
    assert len(reads) == 5 * (2 * 2 + 2)  # five rounds of two experts in each way


def test_experts_of_one_range_are_not_measured(tmp_path: Path, reads: list[Chunk]) -> None:
    experts = catalog(tmp_path, ranges=1)
    assert measure_expert_reads(experts, experts.files, 2, 60.0) is None
    assert reads == []


def test_too_few_experts_are_not_measured(
    tmp_path: Path, reads: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = catalog(tmp_path)
    monkeypatch.setattr(expert_reads, "ROUND_BYTES", EXPERTS * SIZE)
    assert measure_expert_reads(experts, experts.files, 2, 60.0) is None


def test_real_reads_and_a_file_that_is_too_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Catalog, "slot_bytes", 2 * SIZE)
    monkeypatch.setattr(expert_reads, "ROUND_BYTES", 4 * SIZE)
    experts = catalog(tmp_path)
    found = measure_expert_reads(experts, experts.files, 2, 60.0)
    assert found is not None
    assert min(found.as_stored, found.contiguous) > 0
    (tmp_path / "weights").write_bytes(bytes(SIZE))
    with pytest.raises(StoreError, match="truncated"):
        measure_expert_reads(experts, experts.files, 2, 60.0)
