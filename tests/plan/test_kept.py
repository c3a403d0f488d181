"""What is kept of a model on a machine: never another machine's, never in the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.errors import OutputError
from greenroom.plan import kept
from greenroom.plan.costs import Observed
from greenroom.plan.kept import Kept, Known, Loss

RUN = Observed(0.1, 0.05, 3.0, 1e9, 1.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(kept.SWITCH, "on")
    return tmp_path


def setting(capacity: int, by: str = "tune", tpot: float = 0.1) -> Kept:
    return Kept(capacity, {"policy": "lru", "prefetch": "off"}, by, tpot, 0.2, "2026-01-01")


def test_a_round_trip_for_each_machine():
    known = Known().with_setting(setting(64)).with_runs((RUN,))
    path = kept.save("abc", "one", known)
    assert path == kept.path_of("abc")
    kept.save("abc", "two", Known().with_runs((RUN, RUN)))
    assert kept.load("abc", "one") == known
    assert len(kept.load("abc", "two").runs) == 2
    assert kept.load("abc", "three") == Known()
    assert kept.load("abd", "one") == Known()


def test_the_nearest_size_and_measured_before_planned():
    known = Known()
    for each in (setting(100), setting(200), setting(104, "plan"), setting(300, "plan")):
        known = known.with_setting(each)
    assert known.near(104) == setting(100)
    assert known.near(190) == setting(200)
    assert known.near(310) == setting(300, "plan")
    assert known.near(150) is None


def test_a_quick_plan_gives_way_to_all_others():
    known = Known()
    for each in (setting(100, "quick"), setting(90, "plan")):
        known = known.with_setting(each)
    assert known.near(100) == setting(90, "plan")
    assert Known().with_setting(setting(100, "quick")).near(100) == setting(100, "quick")


def test_each_device_has_settings_of_its_own():
    gpu = replace(setting(100), device="cuda")
    known = Known().with_setting(setting(100)).with_setting(gpu)
    assert known.near(100) == setting(100)
    assert known.near(100, "cuda") == gpu
    kept.save("abc", "one", known)
    assert kept.load("abc", "one") == known
    assert Known().with_setting(gpu).near(100) is None


def test_the_least_of_the_last_processes_counts():
    """The first compiles; a later one that takes more counts when those before are forgotten."""
    known = Known()
    assert known.process is None
    for taken, expected in ((700, 700), (600, 600), (605, 600), (650, 600), (650, 600), (650, 650)):
        known = known.with_load(taken)
        assert known.process == expected
    assert known.with_load(651) is known
    kept.save("abc", "one", known)
    assert kept.load("abc", "one").process == 650


def test_losses_by_their_thresholds():
    one = Loss("int4", 0.4, 0.0, 0.0, 0.3, 0.01, 12.5, 12.0, 700, "2026-01-01")
    again, skipped = replace(one, kl=0.02), replace(one, skip=0.1)
    known = Known().with_loss(one).with_loss(skipped).with_loss(again)
    assert known.losses == (skipped, again)
    assert known.loss("int4", 0.4, 0.0, 0.0) == again
    assert known.loss("int8", 0.4, 0.0, 0.0) is None
    kept.save("abc", "one", known)
    assert kept.load("abc", "one") == known


def test_the_latest_replaces_those_of_its_size():
    known = Known().with_setting(setting(100)).with_setting(setting(105, tpot=0.05))
    assert known.settings == (setting(105, tpot=0.05),)
    runs = Known().with_runs((RUN,) * (kept.MOST_RUNS + 3))
    assert len(runs.runs) == kept.MOST_RUNS


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": "other"}', '{"format": "greenroom-kept", "version": 9, "machines": {}}',
     '{"format": "greenroom-kept", "version": 1, "machines": {"one": {"runs": [3]}}}',
     '{"format": "greenroom-kept", "version": 1, "machines": {"one": {"loads": ["x"]}}}',
     '{"format": "greenroom-kept", "version": 1, "machines": {"one": {"settings": [{"capacity": 1,'
     ' "options": {}, "by": "luck", "tpot": 1, "plain": 1, "when": ""}]}}}',
     '{"format": "greenroom-kept", "version": 1, "machines": {"one": []}}'],
)  # fmt: skip
def test_what_cannot_be_read_is_passed_over_and_replaced(text):
    path = kept.path_of("abc")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert kept.load("abc", "one") == Known()
    kept.save("abc", "one", Known().with_runs((RUN,)))
    assert kept.load("abc", "one").runs == (RUN,)


def test_switched_off(monkeypatch: pytest.MonkeyPatch):
    kept.save("abc", "one", Known().with_runs((RUN,)))
    monkeypatch.setenv(kept.SWITCH, "off")
    assert kept.load("abc", "one") == Known()
    assert kept.save("abc", "one", Known()) is None
    monkeypatch.setenv(kept.SWITCH, "on")
    assert kept.load("abc", "one").runs == (RUN,)


def test_names_that_are_no_files_and_folders_that_are():
    with pytest.raises(ValueError, match="no fingerprint"):
        kept.path_of("../x")
    kept.path_of("abc").parent.parent.mkdir(parents=True)
    kept.path_of("abc").parent.write_text("in the way")
    with pytest.raises(OutputError, match="cannot write"):
        kept.save("abc", "one", Known())
