from __future__ import annotations

import threading
import time

import pytest

from greenroom.runtime.store import disk_turns
from greenroom.runtime.store.disk_turns import DiskTurns


class View:
    """What `DiskTurns` uses of a scheduler's view."""

    def __init__(self) -> None:
        self.demands, self.holds = 0, list[bool]()

    def hold_prefetches(self, hold: bool) -> None:
        self.holds.append(hold)


def test_a_turn_comes_once_no_step_waits_for_an_expert() -> None:
    view = View()
    turns = DiskTurns(view)
    turns.wait()
    view.demands = 2
    came = threading.Event()
    thread = threading.Thread(target=lambda: (turns.wait(), came.set()))
    thread.start()
    assert not came.wait(0.05)
    view.demands = 0
    assert came.wait(10)
    thread.join()


def test_demands_without_end_are_waited_for_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_turns, "MOST_S", 0.02)
    view = View()
    view.demands = 1
    begin = time.monotonic()
    DiskTurns(view).wait()
    assert time.monotonic() - begin >= 0.02


def test_prefetches_are_held_and_released_also_after_an_error() -> None:
    view = View()
    turns = DiskTurns(view)
    with turns.before_prefetches():
        assert view.holds == [True]
    assert view.holds == [True, False]
    with pytest.raises(ZeroDivisionError), turns.before_prefetches():
        1 / 0  # noqa: B018
    assert view.holds == [True, False] * 2
