"""The defaults of a run: what is stored for its size, else a quick plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from greenroom.plan import defaults
from greenroom.plan.defaults import default_setting
from greenroom.plan.history import files, recent
from greenroom.plan.history.records import StoredSetting
from greenroom.plan.history.routing import RoutingHistory
from greenroom.plan.quick import QuickPlan
from greenroom.plan.settings import DEFAULT
from tests.sim import small

SIZES = (8, 8)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(files.SWITCH, "on")
    return tmp_path


@pytest.fixture
def planned_slots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of what each quick plan went by; LRU wins all of them."""
    tokens: list[int] = []

    def quick(trace, room: int) -> QuickPlan:
        tokens.append(trace.tokens)
        return QuickPlan(replace(DEFAULT, policy="lru"), 1.0, 1.0)

    monkeypatch.setattr(defaults, "quick_plan", quick)
    return tokens


def leave(requests: int) -> None:
    """Routing of earlier runs: 200 decoded tokens a request."""
    trace = small.trace([[1] * 200] * requests)
    state = {
        "experts": trace.experts,
        "lengths": np.diff(trace.pass_starts),
        "requests": np.repeat(np.arange(requests), 200),
        "prompts": np.zeros(200 * requests, np.uint8),
    }
    history = RoutingHistory(np.empty(0, np.int64), np.zeros(16), {recent.NAME: state})
    files.save_routing("abc", history)


def setting_of_a_run(room: int = 8, device: str = "cpu") -> StoredSetting | None:
    return default_setting("abc", "here", SIZES, 2, room, device)


def test_a_quick_plan_is_made_once_and_again_where_more_is_known(planned_slots: list[int]):
    first = setting_of_a_run()
    assert first is not None
    assert (first.by, first.options["policy"], first.options["prefetch"]) == (
        "quick",
        "lru",
        "auto",
    )
    assert setting_of_a_run() == first
    assert len(planned_slots) == 1  # a stand-in's
    leave(1)
    assert setting_of_a_run() == first  # one request is not enough
    leave(2)
    assert setting_of_a_run().tokens == 400
    leave(3)
    assert setting_of_a_run().tokens == 400
    leave(4)
    assert setting_of_a_run().tokens == 800
    assert planned_slots[1:] == [400, 800]


def test_each_size_and_device_has_its_own(planned_slots: list[int]):
    assert setting_of_a_run(8) != setting_of_a_run(12) != setting_of_a_run(12, "cuda")
    assert len(planned_slots) == 3


def test_what_was_measured_or_planned_goes_first(planned_slots: list[int]):
    sure = StoredSetting(8, {"policy": "lcp"}, "plan", 0.08, 0.1, "2026-01-02")
    files.update_records("abc", "here", lambda records: records.with_setting(sure))
    assert setting_of_a_run() == sure
    assert planned_slots == []


def test_there_is_no_default_without_stored_history_or_enough_slots(
    planned_slots: list[int], monkeypatch: pytest.MonkeyPatch
):
    assert setting_of_a_run(1) is None
    monkeypatch.setenv(files.SWITCH, "off")
    assert setting_of_a_run() is None
    assert planned_slots == []
