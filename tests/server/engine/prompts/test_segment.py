"""Segment files: what is written comes back, and nothing else is believed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from greenroom.errors import OutputError
from greenroom.server.engine.prompts import segment as form
from greenroom.server.engine.prompts.segment import (
    DamagedSegment,
    read_data,
    read_segment,
    write_segment,
)
from tests.server.engine.prompts.conftest import make_segment


def idle() -> None:
    pass


def test_a_segment_comes_back(tmp_path: Path) -> None:
    segment, data = make_segment(range(20), 32, "a" * 32)
    write_segment(tmp_path, segment, data)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == segment.file_bytes
    again = read_segment(path)
    assert (again.key, again.parent, again.begin, again.end) == (segment.key, "a" * 32, 32, 52)
    assert again.ids.tolist() == list(range(20))
    assert again.blocks == segment.blocks
    assert again.name_digest == segment.name_digest
    turns: list[int] = []
    buffer = np.empty(1 << 16, np.uint8)
    assert np.array_equal(read_data(path, again, buffer, lambda: turns.append(1)), data)
    assert len(turns) == 1


def test_other_programs_can_read_a_segment(tmp_path: Path) -> None:
    segment, data = make_segment(range(20))
    write_segment(tmp_path, segment, data)
    tensors = load_file(tmp_path / segment.file_name)
    assert tensors["ids"].tolist() == list(range(20))
    assert tensors["keys.0"].shape == (2, 20, 4)
    assert tensors["keys.0"].dtype == torch.bfloat16
    expected = torch.from_numpy(data[-2 * 20 * 4 * 2 :].copy()).view(torch.bfloat16)
    assert torch.equal(tensors["values.1"].flatten().view(torch.int16), expected.view(torch.int16))


def test_no_changed_byte_is_believed(tmp_path: Path) -> None:
    segment, data = make_segment(range(20), 32, "a" * 32)
    write_segment(tmp_path, segment, data)
    path, buffer = tmp_path / segment.file_name, np.empty(1 << 16, np.uint8)
    content = path.read_bytes()
    header = len(segment.header) + segment.ids.nbytes
    for at in [*range(header), *range(header, len(content), 97)]:
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(DamagedSegment) as error:
            read_data(path, read_segment(path), buffer, idle)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1, -500])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    segment, data = make_segment(range(20))
    write_segment(tmp_path, segment, data)
    path = tmp_path / segment.file_name
    os.truncate(path, size if size >= 0 else segment.file_bytes + size)
    with pytest.raises(DamagedSegment):
        read_segment(path)


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    segment, data = make_segment(range(20))
    write_segment(tmp_path, segment, data)
    path = tmp_path / segment.file_name
    os.truncate(path, segment.file_bytes - 1)
    with pytest.raises(DamagedSegment, match="truncated"):
        read_data(path, segment, np.empty(1 << 16, np.uint8), idle)
    with pytest.raises(DamagedSegment, match="larger"):
        read_data(path, segment, np.empty(16, np.uint8), idle)


def test_another_name_is_refused(tmp_path: Path) -> None:
    segment, data = make_segment(range(20))
    other, _ = make_segment(range(1, 21))
    write_segment(tmp_path, segment, data)
    os.rename(tmp_path / segment.file_name, tmp_path / other.file_name)
    with pytest.raises(DamagedSegment, match="not the one that was written"):
        read_segment(tmp_path / other.file_name)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "VERSION", "2")
    segment, data = make_segment(range(20))
    write_segment(tmp_path, segment, data)
    monkeypatch.undo()
    with pytest.raises(DamagedSegment):
        read_segment(tmp_path / segment.file_name)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    segment, data = make_segment(range(20))
    with pytest.raises(OutputError):
        write_segment(tmp_path / "none", segment, data)
    assert not list(tmp_path.iterdir())
