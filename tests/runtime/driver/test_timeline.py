"""The timeline's file: valid for Chrome's trace event format, whole, and bounded."""

from __future__ import annotations

import itertools
import json
import threading
import time

import numpy as np
import pytest

from greenroom.errors import OutputError
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.driver.timeline import COMPUTE, Timeline, lane


def saved(timeline, tmp_path):
    path = tmp_path / "out.json"
    timeline.save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]  # no draft is left

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def check(trace) -> None:
    """Check the fields that the trace format requires of each kind of event."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
                key = "sort_index" if event["name"] == "thread_sort_index" else "name"
                assert list(event["args"]) == [key]
                named.add((event["pid"], event["tid"]))
            case "X":
                assert event["dur"] >= 0
                assert (event["pid"], event["tid"]) in named
            case "i":
                assert event["s"] in ("g", "p", "t")
            case other:
                raise AssertionError(f"unknown phase {other}")
        if event["ph"] != "M":
            assert isinstance(event["ts"], int | float)


def of(trace, kind):
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_spans_in_their_rows(tmp_path):
    timeline = Timeline()
    t = timeline.origin
    timeline.add_span(
        lane("disk -> host", 1), "demand", t + 2e-3, t + 3e-3, piece=np.int64(7), chunk=0
    )
    timeline.add_span(COMPUTE, "group", t + 1e-3, t + 1.5e-3, layer=2, experts=np.array([1, 5]))
    trace = saved(timeline, tmp_path)
    check(trace)
    rows = {e["args"]["name"]: e["tid"] for e in of(trace, "M") if e["name"] == "thread_name"}
    assert rows == {"compute": 0, "disk -> host, lane 1": 1}
    chunk, group = of(trace, "X")
    assert (chunk["tid"], chunk["ts"], chunk["dur"]) == (1, 2000.0, 1000.0)
    assert chunk["args"] == {"piece": 7, "chunk": 0}
    assert (group["tid"], group["ts"], group["dur"]) == (0, 1000.0, 500.0)
    assert group["args"] == {"layer": 2, "experts": [1, 5]}
    assert trace["otherData"]["dropped"] == 0


def test_rows_are_in_order_compute_first(tmp_path):
    timeline, t = Timeline(), time.perf_counter()
    for row in (lane("host -> device", 0), lane("disk -> host", 1), lane("disk -> host", 0)):
        timeline.add_span(row, "demand", t, t)
    trace = saved(timeline, tmp_path)
    check(trace)
    names = {e["tid"]: e["args"]["name"] for e in of(trace, "M") if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in of(trace, "M") if "sort_index" in e["args"]}
    assert [names[tid] for tid in sorted(order, key=order.__getitem__)] == [
        "compute", "disk -> host, lane 0", "disk -> host, lane 1", "host -> device, lane 0",
    ]  # fmt: skip


def test_an_empty_timeline_is_valid(tmp_path):
    trace = saved(Timeline(), tmp_path)
    check(trace)
    assert of(trace, "X") == []


def test_memory_is_bounded_and_the_file_says_what_is_missing(tmp_path):
    timeline = Timeline(limit=50)
    for i in range(120):
        timeline.add_span(COMPUTE, "group", timeline.origin + i, timeline.origin + i + 0.5, layer=i)
    assert len(timeline) == 50
    trace = saved(timeline, tmp_path)
    check(trace)
    assert [e["args"]["layer"] for e in of(trace, "X")] == list(range(70, 120))
    assert trace["otherData"]["dropped"] == 70
    assert "first 70 events were dropped" in trace["otherData"]["note"]
    (mark,) = of(trace, "i")
    assert (mark["name"], mark["s"]) == ("70 earlier events were dropped", "g")


def test_threads_append_at_once_and_nothing_is_lost(tmp_path):
    timeline, threads, each = Timeline(), 8, 2000
    barrier = threading.Barrier(threads + 1)

    def work(number: int) -> None:
        barrier.wait()
        for i in range(each):
            begin = time.perf_counter()
            timeline.add_span(lane("disk -> host", number), "demand", begin, begin + 1e-6, piece=i)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    timeline.save(tmp_path / "early.json")  # while they append
    for worker in workers:
        worker.join()
    check(json.loads((tmp_path / "early.json").read_text()))
    (tmp_path / "early.json").unlink()
    trace = saved(timeline, tmp_path)
    check(trace)
    by_row: dict[int, list[int]] = {}
    for event in of(trace, "X"):
        by_row.setdefault(event["tid"], []).append(event["args"]["piece"])
    assert sorted(by_row) == list(range(1, threads + 1))
    assert all(pieces == list(range(each)) for pieces in by_row.values())


def test_infinite_times_leave_the_file_valid(tmp_path):
    timeline, t = Timeline(), time.perf_counter()
    timeline.add_span(COMPUTE, "group", t, t - 1e-9, ratio=float("nan"), most=np.float32("inf"))
    trace = saved(timeline, tmp_path)
    check(trace)
    (group,) = of(trace, "X")
    assert group["dur"] == 0
    assert group["args"] == {"ratio": "nan", "most": "inf"}


def test_a_file_that_cannot_be_written_is_an_error_and_the_old_file_stays(tmp_path):
    timeline = Timeline()
    with pytest.raises(OutputError):
        timeline.save(tmp_path / "nowhere" / "out.json")
    path = tmp_path / "out.json"
    path.write_text("old")
    timeline.add_span(COMPUTE, "group", 0.0, 1.0, what=object())  # nothing that JSON knows
    with pytest.raises(TypeError):
        timeline.save(path)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


def test_a_recording_that_ends_during_a_step_disturbs_nothing(rig, monkeypatch):
    """Another thread may end it at any time: here after each time that the driver looks for it."""
    looks = itertools.cycle([Timeline(), None])
    look = property(lambda self: next(looks), lambda self, value: None)
    monkeypatch.setattr(Driver, "timeline", look, raising=False)
    r = rig(4, lanes=1)
    for _ in range(2):
        r.begin()
        for layer in (0, 1):
            for experts in ((0,), (1, 2), (0,)):
                r.step(layer, *experts)
        r.driver.end_pass()
    r.settle()
    r.check()
