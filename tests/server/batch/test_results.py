"""The file of results: what a killed process leaves, and what a later one adds."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from greenroom.errors import GreenroomError, UsageError
from greenroom.server.batch import results as module
from greenroom.server.batch.requests import BatchRequest, read_requests
from greenroom.server.batch.results import Results
from tests.server.batch.conftest import MODEL, line_of, lines_of, write


@pytest.fixture
def requests(tmp_path: Path) -> list[BatchRequest]:
    return read_requests(write(tmp_path / "in.jsonl", [line_of(each) for each in "abc"]), MODEL)


def filled(path: Path, requests: Sequence[BatchRequest]) -> bytes:
    with Results(path, requests) as results:
        for each in requests:
            results.add(each, 200, {"text": f"é {each.custom_id}"}, "req_1")
    return path.read_bytes()


def test_a_line_has_openais_form(tmp_path: Path, requests: list[BatchRequest]) -> None:
    filled(tmp_path / "out.jsonl", requests[:1])
    assert lines_of(tmp_path / "out.jsonl") == [
        {
            "id": requests[0].digest,
            "custom_id": "a",
            "response": {"status_code": 200, "request_id": "req_1", "body": {"text": "é a"}},
            "error": None,
        }
    ]


def test_every_prefix_of_the_file_is_continued(
    tmp_path: Path, requests: list[BatchRequest]
) -> None:
    path = tmp_path / "out.jsonl"
    whole = filled(path, requests)
    ends = [0, *(place + 1 for place, byte in enumerate(whole) if byte == ord("\n"))]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = max(number for number, end in enumerate(ends) if end <= cut)
        with Results(path, requests) as results:
            assert results.done == set("abc"[:complete])
            for each in requests[complete:]:
                results.add(each, 200, {"text": f"é {each.custom_id}"}, "req_1")
        assert path.read_bytes() == whole


@pytest.mark.parametrize("change", ["other", "twice", "changed", "text", "list"])
def test_answers_to_other_requests_are_not_touched(
    tmp_path: Path, requests: list[BatchRequest], change: str
) -> None:
    path = tmp_path / "out.jsonl"
    filled(path, requests)
    lines: list[Any] = lines_of(path)
    lines[1] = {
        "other": lines[1] | {"custom_id": "z"}, "twice": lines[0],
        "changed": lines[1] | {"id": "batch_req_0"}, "text": "x", "list": [],
    }[change]  # fmt: skip
    before = write(path, lines).read_bytes()
    with pytest.raises(UsageError, match="line 2: not an answer to a request of this file"):
        Results(path, requests)
    path.write_bytes(before + b"no json\n")
    with pytest.raises(UsageError):
        Results(path, requests)
    assert path.read_bytes() == before + b"no json\n"


def test_one_process_writes(tmp_path: Path, requests: list[BatchRequest]) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path, requests), pytest.raises(UsageError, match="another process writes"):
        Results(path, requests)
    Results(path, requests).__exit__()
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        Results(tmp_path, requests)
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        Results(tmp_path / "missing" / "out.jsonl", requests)


def test_a_full_disk_leaves_complete_lines(
    tmp_path: Path, requests: list[BatchRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, room = tmp_path / "out.jsonl", 100

    def write_some(file: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        written = real(file, data[:room])
        room -= written
        return written

    with Results(path, requests) as results:
        results.add(requests[0], 200, {}, "req_1")
        before, real = path.read_bytes(), os.write
        monkeypatch.setattr(module.os, "write", write_some)
        with pytest.raises(GreenroomError, match=r"out.jsonl: cannot be written: No space left"):
            results.add(requests[1], 200, {"text": "x" * 1000}, "req_2")
        assert path.read_bytes() == before
        assert results.done == {"a"}
        room = 10**6
        results.add(requests[1], 200, {}, "req_2")
    assert [each["custom_id"] for each in lines_of(path)] == ["a", "b"]


def test_answers_are_synced_once_a_second(
    tmp_path: Path, requests: list[BatchRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(module.os, "fsync", synced.append)
    times = iter([0.0, 0.5, 1.0, 1.0, 1.5])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    with Results(tmp_path / "out.jsonl", requests) as results:
        counts = []
        for each in requests:
            results.add(each, 200, {}, "")
            counts.append(len(synced))
    assert counts == [0, 1, 1]
    assert len(synced) == 2
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["id"]


def test_lines_that_a_power_cut_has_damaged_are_answered_again(
    tmp_path: Path, requests: list[BatchRequest]
) -> None:
    """A write may be missing, so that zeros stand in its place, or only its first half is there."""
    path = tmp_path / "out.jsonl"
    first, second, third = filled(path, requests).splitlines(keepends=True)
    for damaged, left in (
        (bytes(len(first)) + second + third, second + third),
        (first + second[: len(second) // 2] + third, first),
        (first + bytes(len(second)) + third, first + third),
        (bytes(len(first) + len(second)), b""),
        (first[:9] + second, b""),
    ):
        path.write_bytes(damaged)
        with Results(path, requests) as results:
            assert len(results.done) == left.count(b"\n")
            for each in requests:
                if each.custom_id not in results.done:
                    results.add(each, 200, {"text": "again"}, "req_2")
        lines = path.read_bytes()
        assert lines.startswith(left)
        assert {each["custom_id"] for each in lines_of(path)} == set("abc")


def test_a_file_of_something_else_is_not_touched(
    tmp_path: Path, requests: list[BatchRequest]
) -> None:
    path = tmp_path / "model.bin"
    for content in (b"weights", b"\0\0weights", b"text\n", b"\0\1" * 99):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="line 1: not an answer"):
            Results(path, requests)
        assert path.read_bytes() == content
