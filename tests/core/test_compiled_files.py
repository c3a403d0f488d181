"""Two processes that keep compiled code at once: each finds its own again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from numba.core.caching import IndexDataCacheFile

from greenroom.core.compiled_files import LOCKED, take_turns


class Slow(IndexDataCacheFile):
    """Gives another the time to look at the index too before either writes it."""

    met: threading.Barrier

    def _load_index(self) -> Any:
        found = super()._load_index()
        try:
            self.met.wait(0.3)
        except threading.BrokenBarrierError:  # it was alone
            self.met.reset()
        return found


def saved(folder: Path, save: Any) -> dict[str, Any]:
    """What two that save at once find again."""
    Slow.met = threading.Barrier(2)
    files = [Slow(str(folder), "kernel", "stamp") for _ in range(2)]
    threads = [
        threading.Thread(target=save, args=(file, key, f"code of {key}"))
        for file, key in zip(files, "ab", strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fresh = IndexDataCacheFile(str(folder), "kernel", "stamp")
    return {key: fresh.load(key) for key in "ab"}


def test_both_find_their_own(tmp_path: Path) -> None:
    assert saved(tmp_path, IndexDataCacheFile.save) == {"a": "code of a", "b": "code of b"}


def test_without_turns_they_do_not(tmp_path: Path) -> None:
    """What Numba does by itself, and why there are turns."""
    alone: Any = IndexDataCacheFile.save
    assert saved(tmp_path, alone.__wrapped__) != {"a": "code of a", "b": "code of b"}


def test_they_are_taken_once() -> None:
    before: Any = IndexDataCacheFile.save
    take_turns()
    assert IndexDataCacheFile.save is before
    assert getattr(before, LOCKED)
    assert not hasattr(before.__wrapped__, LOCKED)


def test_a_folder_without_a_lock_is_read_all_the_same(tmp_path: Path) -> None:
    file = IndexDataCacheFile(str(tmp_path), "kernel", "stamp")
    file.save("a", "code")
    (tmp_path / "kernel.nbi.lock").unlink()
    assert IndexDataCacheFile(str(tmp_path), "kernel", "stamp").load("a") == "code"
