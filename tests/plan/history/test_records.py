"""What is kept of a model on a machine: never another machine's, never in the way."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.errors import OutputError
from greenroom.plan.costs import RunMeasurement
from greenroom.plan.history import files, records
from greenroom.plan.history.records import Loss, Records, StoredSetting

RUN = RunMeasurement(0.1, 0.05, 3.0, 1e9, 1.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(files.SWITCH, "on")
    return tmp_path


def save(machine: str, known: Records) -> Path | None:
    return files.update_records("abc", machine, lambda before: known)


def setting(capacity: int, by: str = "tune", tpot: float = 0.1) -> StoredSetting:
    return StoredSetting(
        capacity, {"policy": "lru", "prefetch": "off"}, by, tpot, 0.2, "2026-01-01"
    )


def test_a_round_trip_for_each_machine():
    known = Records().with_setting(setting(64)).with_runs((RUN,))
    path = save("one", known)
    assert path == files.records_path("abc")
    save("two", Records().with_runs((RUN, RUN)))
    assert files.load_records("abc", "one") == known
    assert len(files.load_records("abc", "two").runs) == 2
    assert files.load_records("abc", "three") == Records()
    assert files.load_records("abd", "one") == Records()


def test_the_nearest_size_and_measured_before_planned():
    known = Records()
    for each in (setting(100), setting(200), setting(104, "plan"), setting(300, "plan")):
        known = known.with_setting(each)
    assert known.nearest(104) == setting(100)
    assert known.nearest(190) == setting(200)
    assert known.nearest(310) == setting(300, "plan")
    assert known.nearest(150) is None


def test_a_quick_plan_gives_way_to_all_others():
    known = Records()
    for each in (setting(100, "quick"), setting(90, "plan")):
        known = known.with_setting(each)
    assert known.nearest(100) == setting(90, "plan")
    assert Records().with_setting(setting(100, "quick")).nearest(100) == setting(100, "quick")


def test_each_device_has_settings_of_its_own():
    gpu = replace(setting(100), device="cuda")
    known = Records().with_setting(setting(100)).with_setting(gpu)
    assert known.nearest(100) == setting(100)
    assert known.nearest(100, "cuda") == gpu
    save("one", known)
    assert files.load_records("abc", "one") == known
    assert Records().with_setting(gpu).nearest(100) is None


def test_the_least_of_the_last_processes_counts():
    """The first compiles; a later one that takes more counts when those before are forgotten."""
    known = Records()
    assert known.process is None
    for process_bytes, expected in (
        (700, 700),
        (600, 600),
        (605, 600),
        (650, 600),
        (650, 600),
        (650, 650),
    ):
        known = known.with_load(process_bytes)
        assert known.process == expected
    assert known.with_load(651) is known
    save("one", known)
    assert files.load_records("abc", "one").process == 650


def test_losses_by_their_thresholds():
    one = Loss("int4", 0.4, 0.0, 0.0, 0.3, 0.01, 12.5, 12.0, 700, "2026-01-01")
    again, skipped = replace(one, kl=0.02), replace(one, skip=0.1)
    known = Records().with_loss(one).with_loss(skipped).with_loss(again)
    assert known.losses == (skipped, again)
    assert known.loss("int4", 0.4, 0.0, 0.0) == again
    assert known.loss("int8", 0.4, 0.0, 0.0) is None
    save("one", known)
    assert files.load_records("abc", "one") == known


def test_the_latest_replaces_those_of_its_size():
    known = Records().with_setting(setting(100)).with_setting(setting(105, tpot=0.05))
    assert known.settings == (setting(105, tpot=0.05),)
    runs = Records().with_runs((RUN,) * (records.MOST_RUNS + 3))
    assert len(runs.runs) == records.MOST_RUNS


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
    path = files.records_path("abc")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert files.load_records("abc", "one") == Records()
    save("one", Records().with_runs((RUN,)))
    assert files.load_records("abc", "one").runs == (RUN,)


def test_a_stored_setting_runs_no_policy_s_file(tmp_path: Path):
    marker = tmp_path / "was-run"
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    for name in (f"{tmp_path}/own.py", f"{tmp_path}/own.py:x=1"):
        path = save("one", Records().with_setting(replace(setting(64), options={"policy": name})))
        assert path is not None
        assert name in path.read_text()
        assert files.load_records("abc", "one") == Records()
    assert not marker.exists()


def test_updates_at_the_same_time_all_count_and_no_change_writes_nothing():
    def add(capacity: int) -> None:
        files.update_records("abc", "one", lambda before: before.with_setting(setting(capacity)))

    threads = [threading.Thread(target=add, args=(100 * 2**n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loaded = files.load_records("abc", "one")
    assert sorted(each.capacity for each in loaded.settings) == [100 * 2**n for n in range(8)]
    path = files.records_path("abc")
    written = path.stat().st_ino
    assert files.update_records("abc", "one", lambda before: before) == path
    assert path.stat().st_ino == written


def test_switched_off(monkeypatch: pytest.MonkeyPatch):
    save("one", Records().with_runs((RUN,)))
    monkeypatch.setenv(files.SWITCH, "off")
    assert files.load_records("abc", "one") == Records()
    assert save("one", Records()) is None
    monkeypatch.setenv(files.SWITCH, "on")
    assert files.load_records("abc", "one").runs == (RUN,)


def test_names_that_are_no_files_and_folders_that_are():
    with pytest.raises(ValueError, match="is not a model's fingerprint"):
        files.records_path("../x")
    files.records_path("abc").parent.parent.mkdir(parents=True)
    files.records_path("abc").parent.write_text("in the way")
    with pytest.raises(OutputError, match="cannot write"):
        save("one", Records())
