"""Byte ranges of files are read directly or through the page cache, with the same bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenroom.runtime.store import ranges
from greenroom.runtime.store.disk import CHUNK_BYTES
from greenroom.runtime.store.ranges import LEAST_DIRECT, RangeReader

SIZE = 3 * CHUNK_BYTES + 12_345
Preadv = Callable[[int, list[Any], int], int]


@pytest.fixture(scope="module")
def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.fixture(scope="module")
def path(content: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("ranges") / "file"
    content.tofile(file)
    return str(file)


def read(path: str, offset: int, nbytes: int, step: int) -> tuple[bytes, bool]:
    """Read a range in steps; return its bytes, and whether its last read was direct."""
    out = np.zeros(nbytes, np.uint8)
    with RangeReader(path, offset, nbytes) as reader:
        for start in range(0, nbytes, step):
            assert reader.fill(out[start : start + step])
        return out.tobytes(), reader._is_direct


def refuses(error: int) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return call


RANGES = [
    (0, SIZE), (1, LEAST_DIRECT), (4096, LEAST_DIRECT + 4095), (31, CHUNK_BYTES + 7),
    (SIZE - LEAST_DIRECT, LEAST_DIRECT), (5, LEAST_DIRECT - 1), (SIZE - 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
@pytest.mark.parametrize("step", [SIZE, 700_001])
def test_any_range(path: str, content: np.ndarray, offset: int, nbytes: int, step: int) -> None:
    got, _ = read(path, offset, nbytes, step)
    assert got == content[offset : offset + nbytes].tobytes()


@pytest.mark.parametrize("refused", ["open", "preadv"])
def test_a_file_system_without_direct_reads(
    path: str, content: np.ndarray, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may refuse O_DIRECT in open, or accept it there and refuse it in the first read."""
    opened: set[int] = set()
    original_open, preadv = os.open, os.preadv

    def open_file(name: str, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, "")
        fd = original_open(name, flags, *more)
        opened.discard(fd)
        if flags & os.O_DIRECT:
            opened.add(fd)
        return fd

    def read_into(fd: int, buffers: list[Any], at: int) -> int:
        if fd in opened:
            raise OSError(errno.EINVAL, "")
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "preadv", read_into)
    before = len(os.listdir("/proc/self/fd"))
    got, is_direct = read(path, 17, SIZE - 17, 3 * CHUNK_BYTES)
    assert got == content[17:].tobytes()
    assert not is_direct
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nbytes", [LEAST_DIRECT - 5, LEAST_DIRECT])
def test_the_end_of_a_file_inside_a_range(path: str, nbytes: int) -> None:
    with RangeReader(path, SIZE - nbytes + 1, nbytes) as reader:
        assert not reader.fill(np.zeros(nbytes, np.uint8))
    with RangeReader(path, SIZE + 8192, nbytes) as reader:
        assert not reader.fill(np.zeros(nbytes, np.uint8))


@pytest.mark.parametrize("nbytes", [LEAST_DIRECT - 5, LEAST_DIRECT])
def test_a_disk_that_fails(path: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(ranges.os, "preadv", refuses(errno.EIO))
    with (
        pytest.raises(OSError, match="Input/output error"),
        RangeReader(path, 0, nbytes) as reader,
    ):
        reader.fill(np.zeros(nbytes, np.uint8))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_large_range_leaves_nothing_in_the_page_cache(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not read(path, 0, SIZE, SIZE)[1]:
        pytest.skip("this file system refuses direct reads")
    lengths: list[int] = []
    preadv: Preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, b, at: lengths.append(at % 4096) or preadv(fd, b, at)
    )
    read(path, 100, SIZE - 100, SIZE)
    assert set(lengths) == {0}
    assert len(lengths) == 4
