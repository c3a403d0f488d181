"""What was learned: comes back as it was, and whatever happens to its file harms nobody."""

from __future__ import annotations

import json
import logging
import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from greenroom.errors import OutputError
from greenroom.plan.history import files
from greenroom.plan.history.files import load_routing as load
from greenroom.plan.history.files import routing_path as path_of
from greenroom.plan.history.files import save_routing as save
from greenroom.plan.history.routing import RoutingHistory

KEY = "0123abcd"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(files.SWITCH, raising=False)
    return tmp_path / "cache" / "greenroom" / "learned"


def some(seed: int = 0) -> RoutingHistory:
    random = np.random.default_rng(seed)
    return RoutingHistory(
        random.permutation(48)[:10],
        random.random(48),
        {
            "eamc": {"eams": random.random((4, 6, 8)).astype(np.float32), "n": np.array(4)},
            "token": {"counts": random.integers(0, 9, (5, 6), dtype=np.uint16)},
            "none": {},
            "markov": {"odd.name/with slash": np.arange(3), "empty": np.empty((0, 2), np.int32)},
        },
    )


def same(one: RoutingHistory | None, two: RoutingHistory) -> None:
    assert one is not None
    np.testing.assert_array_equal(one.hot, two.hot)
    np.testing.assert_array_equal(one.popularity, two.popularity)
    expected_states = {name: state for name, state in two.states.items() if state}
    assert one.states.keys() == expected_states.keys()
    for name, state in expected_states.items():
        assert one.states[name].keys() == state.keys()
        for key, array in state.items():
            np.testing.assert_array_equal(one.states[name][key], array, strict=True)


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_it_comes_back_as_it_was(cache, caplog):
    assert load(KEY) is None
    assert save(KEY, some()) == cache / f"{KEY}.safetensors"
    same(load(KEY), some())
    assert load("other") is None
    assert save(KEY, some(1)) is not None
    same(load(KEY), some(1))
    assert [file.name for file in cache.iterdir()] == [f"{KEY}.safetensors"]
    assert warnings(caplog) == []


def test_files_of_the_safetensors_library_are_read(cache):
    """Earlier versions wrote by it."""
    arrays = some().arrays(files.LIMIT)
    own = {"format": "greenroom-learned", "version": "1", "fingerprint": KEY}
    cache.mkdir(parents=True)
    save_file(dict(arrays), path_of(KEY), {**own, "crc32": files.checksum(arrays)})
    same(load(KEY), some())


def test_other_readers_open_it():
    save(KEY, some())
    stored_arrays = load_file(path_of(KEY))
    assert stored_arrays.keys() == some().arrays(files.LIMIT).keys()
    for name, array in some().arrays(files.LIMIT).items():
        np.testing.assert_array_equal(stored_arrays[name], array, strict=True)


def test_deleting_it_is_harmless(cache):
    save(KEY, some())
    path_of(KEY).unlink()
    assert load(KEY) is None
    save(KEY, some())
    same(load(KEY), some())


def spoil(how: str) -> None:
    path = path_of(KEY)
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    def again(**metadata):
        header["__metadata__"] |= metadata
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    if how == "empty":
        path.write_bytes(b"")
    elif how == "cut off":
        path.write_bytes(raw[: len(raw) // 2])
    elif how == "one bit":
        raw[-5] ^= 4
        path.write_bytes(raw)
    elif how == "text":
        path.write_text("not at all\n" * 100)
    elif how == "of the future":
        again(version="2")
    elif how == "another model's":
        again(fingerprint="another")
    elif how == "foreign":
        save_file({"hot": np.arange(3), "popularity": np.ones(48)}, path)
    elif how == "without its arrays":
        metadata = dict(header["__metadata__"], crc32=files.checksum({"a": np.arange(3)}))
        save_file({"a": np.arange(3)}, path, metadata)
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "huge":
        with open(path, "ab") as file:
            file.truncate(files.LIMIT * 2)


KINDS = (
    "empty", "cut off", "one bit", "text", "of the future", "another model's", "foreign",
    "without its arrays", "huge",
)  # fmt: skip


@pytest.mark.parametrize("how", KINDS)
def test_what_cannot_be_used_is_ignored_with_a_warning_and_replaced(how, caplog):
    save(KEY, some())
    spoil(how)
    assert load(KEY) is None
    (warning,) = warnings(caplog)
    assert str(path_of(KEY)) in warning
    assert "\n" not in warning
    assert save(KEY, some(1)) is not None
    same(load(KEY), some(1))


def test_a_folder_of_its_name_is_a_warning_and_one_error(caplog):
    save(KEY, some())
    spoil("a folder")
    assert load(KEY) is None
    assert len(warnings(caplog)) == 1
    with pytest.raises(OutputError, match="Is a directory"):
        save(KEY, some())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_change_of_its_bytes_is_noticed(data, tmp_path_factory):
    """Flipped bytes anywhere: what was kept comes back whole or not at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        save(KEY, some())
        raw = bytearray(path_of(KEY).read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path_of(KEY).write_bytes(raw)
        stored_arrays = load(KEY)
        if stored_arrays is not None:
            same(stored_arrays, some())


def test_the_largest_states_are_left_out(monkeypatch, caplog):
    monkeypatch.setattr(files, "LIMIT", 4000)
    big = {f"p{n}": {"x": np.zeros(n * 100, np.uint8)} for n in (3, 20, 9, 15)}
    save(KEY, RoutingHistory(np.arange(3), np.ones(48), big))
    stored_arrays = load(KEY)
    assert stored_arrays is not None
    assert sorted(stored_arrays.states) == ["p15", "p3", "p9"]
    assert warnings(caplog) == ["what p20 has learned is too large to be stored for later runs"]
    assert path_of(KEY).stat().st_size < 4000 + files._OVERHEAD


@pytest.mark.parametrize("value", ["off", "0", "OFF"])
def test_it_can_be_switched_off(value, cache, monkeypatch):
    save(KEY, some())
    monkeypatch.setenv(files.SWITCH, value)
    assert load(KEY) is None
    assert save("second", some()) is None
    assert [file.name for file in cache.iterdir()] == [f"{KEY}.safetensors"]


def test_a_place_that_cannot_be_written_is_one_error(cache, caplog):
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where the folder would be")
    with pytest.raises(OutputError, match="cannot write"):
        save(KEY, some())
    assert load(KEY) is None
    assert warnings(caplog) == []


def test_the_folder_is_this_user_s_alone(cache):
    save(KEY, some())
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_save_that_is_cut_off_leaves_the_old_one(cache, monkeypatch):
    save(KEY, some())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        save(KEY, some(1))
    same(load(KEY), some())
    assert len(list(cache.iterdir())) == 1


def test_drafts_of_the_dead_are_removed_those_of_the_living_are_not(cache):
    save(KEY, some())
    old, new = (cache / f".{KEY}.safetensors.{pid}.tmp" for pid in (99998, 99999))
    for draft in (old, new):
        draft.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    save(KEY, some())
    assert not old.exists()
    assert new.exists()


def test_savers_at_the_same_time_do_not_mix():
    several, wrong = [some(seed) for seed in range(4)], []

    def work(mine: RoutingHistory) -> None:
        for _ in range(10):
            save(KEY, mine)
            stored_arrays = load(KEY)
            try:
                assert stored_arrays is not None
                same(
                    stored_arrays,
                    next(s for s in several if np.array_equal(s.hot, stored_arrays.hot)),
                )
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(each,)) for each in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("bad", ["", "../x", "a/b", ".hidden", "x" * 200])
def test_a_fingerprint_must_be_a_name(bad):
    for use in (lambda: load(bad), lambda: save(bad, some())):
        with pytest.raises(ValueError, match="is not a model's fingerprint"):
            use()


def test_the_routing_is_stored_in_the_cache_folder(monkeypatch):
    from greenroom.cli.estimate.machine import default_profile

    assert files.cache_folder() == default_profile().parent
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_folder() == default_profile().parent


OFFSETS = [0, 4, 8, 12]


def test_the_hot_set_is_what_was_resident_then_what_was_popular():
    popularity = np.array([0, 9, 0, 1, 5, 0, 0, 0, 7, 0, 2, 0], np.float64)
    kept = RoutingHistory(np.array([10, 3, 10, -1, 99]), popularity)
    assert kept.hot_set(OFFSETS, 4).tolist() == [10, 3, 1, 8]
    assert kept.hot_set(OFFSETS, 1).tolist() == [10]
    assert kept.hot_set(OFFSETS, 12).tolist() == [10, 3, 1, 8, 4]
    assert kept.hot_set(OFFSETS, 4, "per-layer").tolist() == [10, 3, 1, 4]
    assert RoutingHistory(np.arange(3), np.zeros(5)).hot_set(OFFSETS, 4).tolist() == []
    nothing = RoutingHistory.of_counts(np.zeros(12))
    assert nothing.hot_set(OFFSETS, 4).tolist() == []
    assert nothing.hot_set(OFFSETS, 4, "per-layer").tolist() == []


@given(
    hot=st.lists(st.integers(-2, 14), max_size=20),
    popularity=st.lists(st.floats(0, 10), min_size=12, max_size=12),
    capacity=st.integers(3, 12),
    scope=st.sampled_from(["shared", "per-layer"]),
)
def test_a_hot_set_fits_the_cache_for_any_stored_history(hot, popularity, capacity, scope):
    history = RoutingHistory(np.array(hot, np.int64), np.array(popularity))
    chosen = history.hot_set(OFFSETS, capacity, scope)
    assert len(chosen) <= capacity
    assert len(set(chosen.tolist())) == len(chosen)
    assert ((chosen >= 0) & (chosen < 12)).all()
    if scope == "per-layer":
        shares = [capacity // 3 + (i < capacity % 3) for i in range(3)]
        assert (np.bincount(chosen // 4, minlength=3) <= shares).all()
