"""Which disks a power cut may leave, worked out by hand."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

from tests.faults.disk import HEAD, NEVER, Change, Disk, certain_from, read_log, states
from tests.faults.shim import numbers

DRAFT, FILE = "/d/draft", "/d/file"
Contents = frozenset[tuple[str, bytes]]


def change(what: str, path: str, data: bytes = b"", size: int = 0) -> Change:
    return Change(what, path, size, data)


def found(changes: list[Change]) -> set[Contents]:
    """The files of every disk; it begins with an old file."""
    begin = Disk({"/d": None, FILE: bytearray(b"old")})
    return {
        frozenset(
            (name, bytes(content))
            for name, content in disk.names.items()
            if isinstance(content, bytearray)
        )
        for disk in states(changes, begin, Random(0))
    }


SAFE = [
    change("c", DRAFT),
    change("w", DRAFT, b"newest"),
    change("s", DRAFT),
    change("r", DRAFT, FILE.encode()),
    change("s", "/d"),
]


def test_a_synced_draft_replaces_a_file_at_once() -> None:
    assert {dict(each)[FILE] for each in found(SAFE)} == {b"old", b"newest"}


def test_without_the_sync_the_file_may_be_empty_or_torn() -> None:
    without = [each for each in SAFE if each != change("s", DRAFT)]
    assert {dict(each)[FILE] for each in found(without)} == {b"old", b"", b"new", b"newest"}


def test_a_name_is_certain_after_the_sync_of_its_folder() -> None:
    assert certain_from(SAFE) == [2, 2, NEVER, 4, NEVER]
    assert certain_from(SAFE[:4]) == [2, 2, NEVER, NEVER]


def test_writes_beyond_a_missing_one_leave_zeros() -> None:
    writes = [change("w", FILE, b"ab", 3), change("w", FILE, b"cd", 5)]
    contents = {dict(each)[FILE] for each in found(writes)}
    assert contents == {b"old", b"olda", b"oldab", b"old\0\0c", b"old\0\0cd", b"oldabc", b"oldabcd"}


def test_renaming_a_folder_takes_its_files_along() -> None:
    disk = Disk({"/d": None, "/d/work": None, "/d/work/a": bytearray(b"a")})
    disk.apply(change("r", "/d/work", b"/d/done"))
    assert sorted(disk.names) == ["/d", "/d/done", "/d/done/a"]


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert HEAD.size == struct.calcsize("<c") + 8 + 8
    path = tmp_path / "log"
    path.write_bytes(HEAD.pack(b"w", 7, 2, 3) + b"/a" + b"xyz" + HEAD.pack(b"s", 0, 2, 0) + b"/a")
    assert read_log(path) == [Change("w", "/a", 7, b"xyz"), Change("s", "/a", 0, b"")]


def test_numbers_are_all_or_the_ends_and_some_between() -> None:
    assert list(numbers(5, 9)) == [1, 2, 3, 4, 5]
    chosen = list(numbers(1000, 12))
    assert len(chosen) == 12
    assert chosen[:3] == [1, 2, 3]
    assert chosen[-3:] == [998, 999, 1000]
