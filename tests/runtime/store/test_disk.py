from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.layout import Extent
from greenroom.errors import CheckpointChanged, CheckpointError, StoreError
from greenroom.runtime.memory.system import LARGE_PAGE
from greenroom.runtime.store.disk import BLOCK, DiskStore, Staging, cut


def read_all(store: DiskStore, expert: int) -> bytes:
    staging = Staging()
    return b"".join(store.read(c, staging).tobytes() for c in store.chunks(expert))


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("chunk_bytes", [BLOCK, 10_000, 1 << 20])
def test_chunks_give_back_the_file_s_bytes(disk, direct, chunk_bytes):
    catalog = disk()
    store = DiskStore(catalog, direct=direct, chunk_bytes=chunk_bytes)
    raw = Path(catalog.files[0]).read_bytes()
    for expert in range(catalog.experts):
        extent = catalog.extents(expert)[0]
        assert read_all(store, expert) == raw[extent.offset : extent.offset + extent.length]
    store.close()


@given(length=st.integers(1, 100_000), chunk_bytes=st.integers(BLOCK, 40_000))
def test_chunks_cover_an_extent_once(length, chunk_bytes):
    chunks = cut(Extent(0, 123, length, ()), chunk_bytes)
    assert [c.start for c in chunks] == [
        sum(c.length for c in chunks[:i]) for i in range(len(chunks))
    ]
    assert sum(c.length for c in chunks) == length
    assert all(0 < c.length < chunk_bytes + BLOCK for c in chunks)


def test_a_file_system_that_refuses_direct_reads_is_read_buffered(disk, monkeypatch):
    real_open = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    catalog = disk()
    store = DiskStore(catalog)
    assert store.direct is False
    assert len(read_all(store, 3)) == 24_000
    store.close()
    with pytest.raises(CheckpointError, match="Invalid argument"):
        DiskStore(catalog, direct="on")


def test_a_missing_file_is_named(disk):
    catalog = disk()
    Path(catalog.files[0]).unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*2-4-3000\.bin: No such file"):
        DiskStore(catalog)


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_file_cut_short_while_open_is_an_error(disk, direct):
    catalog = disk()
    store = DiskStore(catalog, direct=direct)
    os.truncate(catalog.files[0], 30_000)
    for expert in (7, 0):  # what is still there too: it may be another checkpoint's
        with pytest.raises(CheckpointChanged, match="changed while it was in use"):
            read_all(store, expert)
    store.close()


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_file_shorter_than_its_catalog_is_an_error(disk, direct):
    catalog = disk()
    os.truncate(catalog.files[0], 30_000)
    store = DiskStore(catalog, direct=direct)
    with pytest.raises(StoreError, match="is truncated"):
        read_all(store, 7)
    store.close()


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_file_overwritten_in_place_ends_all_reading(disk, direct):
    """The same size, and one byte that this reader does not ask for; it stays so, also after the
    file's times are put back."""
    catalog = disk()
    store, before = DiskStore(catalog, direct=direct), os.stat(catalog.files[0])
    assert len(read_all(store, 0)) == 24_000
    with open(catalog.files[0], "r+b") as file:
        file.write(b"\1")
    os.utime(catalog.files[0], ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(CheckpointChanged, match=r"2-4-3000\.bin changed"):
        read_all(store, 1)
    os.utime(catalog.files[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointChanged, match=r"2-4-3000\.bin changed"):
        read_all(store, 2)
    store.close()


def test_a_change_while_a_chunk_is_read_is_noticed(disk, monkeypatch):
    catalog, read = disk(), os.preadv
    store = DiskStore(catalog)

    def changing(fd, buffers, offset):
        done = read(fd, buffers, offset)
        os.utime(catalog.files[0], ns=(0, 0))
        return done

    monkeypatch.setattr(os, "preadv", changing)
    with pytest.raises(CheckpointChanged):
        store.read(store.chunks(0)[0], Staging())
    store.close()


def test_another_file_under_the_name_changes_nothing(disk):
    """The open file is still the old one, and its bytes are right."""
    catalog = disk()
    store, path = DiskStore(catalog), Path(catalog.files[0])
    before = read_all(store, 3)
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)
    assert read_all(store, 3) == before
    store.close()


def test_a_read_error_keeps_the_system_s_message(disk, monkeypatch):
    store = DiskStore(disk())

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StoreError, match="at byte 8: Input/output error") as caught:
        store.read(store.chunks(0)[0], Staging())
    assert isinstance(caught.value.__cause__, OSError)
    monkeypatch.undo()
    store.close()


def test_staging_is_aligned_and_grows():
    staging = Staging(BLOCK)
    for nbytes in (BLOCK, 5 * BLOCK):
        buffer = staging.take(nbytes)
        assert len(buffer) == nbytes
        assert np.frombuffer(buffer, np.uint8).ctypes.data % BLOCK == 0


def flags_of(address: int) -> set[str]:
    """The kernel's flags of the mapping in which an address lies ("hg": large pages are wanted)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if address_range := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(address_range[1], 16) <= address < int(address_range[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(address)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="a kernel without large pages"
)
def test_staging_asks_for_large_pages_where_they_fill_and_for_no_more():
    staging = Staging(2 * LARGE_PAGE + BLOCK)
    begin = staging.array.ctypes.data
    assert begin % LARGE_PAGE == 0
    assert "hg" in flags_of(begin)
    assert "hg" in flags_of(begin + 2 * LARGE_PAGE - 1)
    assert "hg" not in flags_of(begin + 2 * LARGE_PAGE)
    assert "hg" not in flags_of(Staging(BLOCK).array.ctypes.data)
