"""The folder of segments: look-up, eviction, and other processes' files."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.errors import UsageError
from greenroom.server.engine.prefixes import as_ids
from greenroom.server.engine.prompts.folder import STALE_S, Match, PromptFolder
from tests.server.engine.prompts.conftest import KEY, TOKENS, make_segment, write_chain

Open = Callable[..., PromptFolder]
IDS = np.random.default_rng(7).integers(0, 999, 200).tolist()


def idle() -> None:
    pass


def look(folder: PromptFolder, ids: list[int], grid: int = 1) -> Match:
    return folder.find(as_ids(ids), len(ids), grid)


def read(folder: PromptFolder, match: Match) -> list[bytes | None]:
    buffer = np.empty(1 << 16, np.uint8)
    parts = [folder.read(each, buffer, idle) for each in match.segments]
    return [None if part is None else part.tobytes() for part in parts]


def test_the_folder_is_private(open_folder: Open) -> None:
    folder = open_folder()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (segment,) = write_chain(folder, IDS[:20])
    assert (folder.path / segment.file_name).stat().st_mode & 0o777 == 0o600


def test_the_longest_prefix_is_found_also_by_another_process(open_folder: Open) -> None:
    folder = open_folder()
    chain = write_chain(folder, IDS[:100])
    write_chain(folder, [*IDS[:40], *range(60)])
    write_chain(folder, [*range(50)])
    for each in (folder, open_folder()):
        assert look(each, IDS[:100]).tokens == 100
        assert len(look(each, IDS).segments) == 4
        assert look(each, IDS[:64]).tokens == 64
        assert look(each, IDS[:70]).tokens == 70
        assert look(each, [*IDS[:40], 5, 5]).tokens == 40
        assert look(each, [*IDS[:40], 0, 1, 2, 9]).tokens == 43
        assert look(each, [1000, *IDS]).tokens == 0
        assert look(each, []).tokens == 0
        assert look(each, IDS[:100], grid=16).tokens == 96
        assert len(look(each, IDS[:100], grid=64).segments) == 2
        names = [segment.file_name for segment in look(each, IDS).segments]
        assert names == [segment.file_name for segment in chain]


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3 * TOKENS), max_size=5),
    st.lists(st.integers(0, 1), max_size=3 * TOKENS),
)
def test_look_up_agrees_with_a_comparison_of_all(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[list[int]], prompt: list[int]
) -> None:
    folder = PromptFolder(tmp_path_factory.mktemp("all"), 1 << 30, KEY, TOKENS, (0, 0))
    for each in sequences:
        write_chain(folder, each)
    shared = (
        next((i for i, (a, b) in enumerate(zip(each, prompt, strict=False)) if a != b),
             min(len(each), len(prompt)))
        for each in sequences
    )  # fmt: skip
    assert look(folder, prompt).tokens == max(shared, default=0)


def test_a_window_state_is_used_only_at_its_end(open_folder: Open) -> None:
    folder = open_folder(windows=(0, 8))
    write_chain(folder, IDS[:100], window=8)
    assert look(folder, IDS).tokens == 100
    assert look(folder, IDS[:99]).tokens == 0
    assert look(folder, IDS, grid=64).tokens == 0


def test_a_longer_segment_replaces_the_incomplete_one_that_it_begins_with(
    open_folder: Open,
) -> None:
    folder = open_folder()
    short = write_chain(folder, IDS[:40])
    write_chain(folder, IDS[:50])
    assert folder.files == 2
    assert not (folder.path / short[-1].file_name).exists()
    assert folder.extends(make_segment(IDS[32:45], 32, short[0].name_digest)[0])
    write_chain(folder, [*IDS[:45], 0])
    assert folder.files == 3


def test_equal_tokens_with_other_bits_are_another_chain(open_folder: Open) -> None:
    folder = open_folder()
    write_chain(folder, IDS[:64])
    other = write_chain(folder, IDS[:100], seed=1)
    match = look(folder, IDS)
    assert match.tokens == 100
    assert [each.name_digest for each in match.segments] == [each.name_digest for each in other]


def test_the_least_recently_used_are_evicted_the_last_parts_first(open_folder: Open) -> None:
    size = make_segment(IDS[:TOKENS])[0].file_bytes
    folder = open_folder(limit=size * 7 // 2)
    first = write_chain(folder, IDS[:64])
    write_chain(folder, [*range(32)])
    folder.touch(first)
    write_chain(folder, [*range(100, 132)])
    assert look(folder, IDS).tokens == 64
    assert look(folder, [*range(32)]).tokens == 0
    write_chain(folder, [*range(200, 232)])
    assert look(folder, IDS).tokens == 32
    assert folder.evicted == 2
    assert folder.nbytes <= folder.limit
    assert folder.nbytes == sum(each.stat().st_size for each in folder.path.iterdir())


def test_a_sequence_larger_than_the_limit_does_not_evict_itself(open_folder: Open) -> None:
    size = make_segment(IDS[:TOKENS])[0].file_bytes
    folder = open_folder(limit=size * 5 // 2)
    chain = write_chain(folder, IDS[:64])
    segment, data = make_segment(IDS[64:96], 64, chain[-1].name_digest)
    assert not folder.write(segment, data, chain)
    assert look(folder, IDS).tokens == 64
    assert not open_folder(limit=10, name="other").write(*make_segment(IDS[:20]), [])


def test_two_processes_share_the_limit(open_folder: Open) -> None:
    size = make_segment(IDS[:TOKENS])[0].file_bytes
    one, two = open_folder(limit=3 * size), open_folder(limit=3 * size, key="f" * 32)
    for begin in range(0, 160, 32):
        write_chain(one, IDS[begin : begin + 32])
        segment, data = make_segment(IDS[begin : begin + 32], key="f" * 32)
        assert two.write(segment, data, [])
    assert one.nbytes <= one.limit
    assert len(list(one.path.iterdir())) == 3
    assert read(two, look(two, IDS[:32])) == [None]
    assert not look(two, IDS[:32]).tokens


def test_a_file_that_vanishes_is_a_miss(
    open_folder: Open, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_folder()
    chain = write_chain(folder, IDS[:100])
    (folder.path / chain[1].file_name).unlink()
    match = look(folder, IDS)
    assert match.tokens == 100
    assert [part is not None for part in read(folder, match)] == [True, False, True, True]
    assert look(folder, IDS).tokens == 32
    (folder.path / chain[0].file_name).unlink()
    folder.scan()
    assert look(folder, IDS).tokens == 0
    assert not caplog.records


def test_a_damaged_file_is_removed_with_one_line(
    open_folder: Open, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_folder()
    chain = write_chain(folder, IDS[:100])
    path = folder.path / chain[1].file_name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert read(folder, look(folder, IDS))[1] is None
    (record,) = caplog.records
    assert record.getMessage().endswith("is not used and removed: its checksum is wrong")
    assert not path.exists()
    assert folder.damaged == 1
    caplog.clear()
    (folder.path / chain[0].file_name).write_bytes(b"nothing")
    with caplog.at_level(logging.WARNING):
        again = open_folder()
    assert len(caplog.records) == again.damaged == 1
    assert look(again, IDS).tokens == 0


def test_a_file_that_cannot_be_read_is_not_used(
    open_folder: Open, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_folder()
    (segment,) = write_chain(folder, IDS[:20])
    path = folder.path / segment.file_name
    path.unlink()
    path.mkdir()
    assert read(folder, look(folder, IDS)) == [None]
    assert "cannot be read" in caplog.text
    assert look(folder, IDS).tokens == 0


def test_a_file_that_is_refused_for_a_moment_is_used_again(
    open_folder: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder()
    write_chain(folder, IDS[:20])

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("greenroom.server.engine.prompts.folder.read_data", refuse)
        assert read(folder, look(folder, IDS)) == [None]
    (record,) = caplog.records
    assert record.getMessage().endswith("is not used: it cannot be read: Too many open files")
    assert look(folder, IDS).tokens == folder.damaged == 0
    folder.scan()
    assert [part is not None for part in read(folder, look(folder, IDS))] == [True]


def test_other_files_are_left_alone(open_folder: Open, tmp_path: Path) -> None:
    folder = open_folder(limit=make_segment(IDS[:TOKENS])[0].file_bytes)
    for name in ("notes.txt", "model.safetensors", f"{'0' * 16}-{0:08d}-{'0' * 32}.bin"):
        (folder.path / name).write_text("mine")
    segment, data = make_segment(IDS[:TOKENS], key="e" * 32)
    open_folder(key="e" * 32).write(segment, data, [])
    folder.scan()
    assert len(folder) == 0  # of this model
    assert folder.files == 1
    write_chain(folder, IDS[:TOKENS])
    assert len(list(folder.path.iterdir())) == 4
    assert (folder.path / "notes.txt").read_text() == "mine"


def test_a_file_whose_key_begins_alike_is_another_models(open_folder: Open) -> None:
    other = KEY[:16] + "e" * 16
    segment, data = make_segment(IDS[:20], key=other)
    open_folder(key=other).write(segment, data, [])
    folder = open_folder()
    assert len(folder) == folder.damaged == 0
    assert folder.files == 1


def test_abandoned_drafts_are_removed_and_new_ones_stay(open_folder: Open) -> None:
    folder = open_folder()
    name = make_segment(IDS[:20])[0].file_name
    old, new = (folder.path / f".{name}.{pid}.tmp" for pid in (1, 2))
    for each in (old, new):
        each.write_bytes(b"part")
    long_ago = time.time() - STALE_S - 60
    os.utime(old, (long_ago, long_ago))
    folder.scan()
    assert not old.exists()
    assert new.exists()
    assert folder.nbytes == 4
    assert len(folder) == 0


def test_a_folder_that_cannot_be_made_is_refused(open_folder: Open, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--prompt-cache .*file"):
        open_folder(name="file")
