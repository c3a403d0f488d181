from __future__ import annotations

import os
import resource
import signal
import tracemalloc
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.errors import OutputError, TraceError
from greenroom.trace import load
from greenroom.trace.journal import Journal, convert, journal_path
from greenroom.trace.segments import Header, Segment, read_segments
from tests.trace.strategies import SETTINGS, assert_same, traces

HEADER = Header((4, 3), weights=True, token_ids=True, gate_inputs=0.5, meta={"model": "m"})


def segment(request: int, passes: list[tuple[int, bool]], last: bool = True, seed: int = 0):
    """Random routing of these passes."""
    random = np.random.default_rng([request, seed])
    tokens = sum(n for n, _ in passes)
    experts = [[random.permutation(n)[:2] for n in (4, 3)] for _ in range(tokens)]
    sampled = np.flatnonzero(random.random(tokens) < 0.5)
    arrays = {
        "experts": np.array(experts),
        "weights": random.random((tokens, 2, 2)),
        "token_ids": random.integers(0, 99, tokens),
        "sampled": sampled,
        "inputs": random.normal(size=(len(sampled), 2, 6)),
    }
    return Segment(request, f"label {request}", passes, last, arrays)


SEGMENTS = [
    segment(0, [(4, True), (1, False)], last=False),
    segment(0, [(1, False), (1, False)], seed=1),
    segment(1, [(3, True)]),
]


def write(path, segments=SEGMENTS, header=HEADER) -> list[int]:
    """A journal; where each of its records ends."""
    journal = Journal(path, header)
    ends = [path.stat().st_size]
    for each in segments:
        journal.append(each)
        ends.append(path.stat().st_size)
    journal.close()
    return ends


def test_a_journal_is_a_trace(tmp_path):
    write(tmp_path / "j")
    trace = load(tmp_path / "j")
    assert trace.request_starts.tolist() == [0, 7, 10]
    assert trace.pass_starts.tolist() == [0, 4, 5, 6, 7, 10]
    assert trace.pass_prefill.tolist() == [True, False, False, False, True]
    assert trace.labels == ("label 0", "label 1")
    assert trace.meta == {"model": "m"}
    parts = [s.arrays for s in SEGMENTS]
    np.testing.assert_array_equal(trace.experts, np.concatenate([p["experts"] for p in parts]))
    expected = np.concatenate(
        [parts[0]["sampled"], parts[1]["sampled"] + 5, parts[2]["sampled"] + 7]
    )
    np.testing.assert_array_equal(trace.gate_inputs.tokens, expected)
    assert trace.experts.dtype == np.uint8


def test_finishing_gives_the_same_trace_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "t"
    write(journal_path(path))
    before = load(journal_path(path))
    Journal(journal_path(path), HEADER).finish(path)
    assert os.listdir(tmp_path) == ["t"]
    assert_same(load(path), before)


@SETTINGS
@given(traces())
def test_any_trace_goes_through_a_journal(tmp_path, trace):
    (tmp_path / "j").unlink(missing_ok=True)
    full = trace.weights is not None
    rate = 0.5 if full else 0.0
    distances = {name: made.distance for name, made in trace.predictions.items()}
    header = Header(
        tuple(trace.experts_per_layer.tolist()), full, full, rate, trace.meta, distances, full
    )
    lengths = np.diff(trace.pass_starts)
    segments = []
    for r in range(trace.requests):
        begin, end = trace.request_starts[r : r + 2].tolist()
        inside = (trace.pass_starts[:-1] >= begin) & (trace.pass_starts[:-1] < end)
        arrays = {"experts": trace.experts[begin:end]}
        for name, made in trace.predictions.items():
            said = made.experts[begin:end].astype(np.int64)
            said[said == np.iinfo(made.experts.dtype).max] = -1
            arrays[f"predictions.{name}"] = said
        if full:
            tokens = trace.gate_inputs.tokens
            taken = (tokens >= begin) & (tokens < end)
            arrays["weights"] = trace.weights[begin:end]
            arrays["token_ids"] = trace.token_ids[begin:end]
            arrays["output_norms"] = trace.output_norms[begin:end]
            arrays["token_changes"] = trace.token_changes[begin:end]
            arrays["sampled"] = tokens[taken] - begin
            arrays["inputs"] = trace.gate_inputs.values[taken]
        passes = [
            (int(n), bool(p))
            for n, p in zip(lengths[inside], trace.pass_prefill[inside], strict=True)
        ]
        segments.append(Segment(r, trace.labels[r], passes, True, arrays))
    write(tmp_path / "j", segments, header)
    assert_same(load(tmp_path / "j"), trace)
    convert(tmp_path / "j", tmp_path / "t")
    assert_same(load(tmp_path / "t"), trace)


@SETTINGS
@given(st.data())
def test_a_kill_at_any_byte_loses_one_segment_at_most(tmp_path, data):
    path = tmp_path / "j"
    path.unlink(missing_ok=True)
    ends = write(path)
    cut = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, cut)
    whole = sum(end <= cut for end in ends[1:])
    if whole == 0:
        with pytest.raises(TraceError):
            load(path)
        return
    trace = load(path)
    assert trace.tokens == sum(s.tokens for s in SEGMENTS[:whole])
    assert trace.meta.get("last_request") == (None if SEGMENTS[whole - 1].last else "cut short")


def test_a_damaged_segment_ends_the_trace_before_it(tmp_path):
    ends = write(tmp_path / "j")
    raw = bytearray((tmp_path / "j").read_bytes())
    raw[ends[2] - 20] ^= 1
    (tmp_path / "j").write_bytes(raw)
    assert load(tmp_path / "j").tokens == 5


def test_a_segment_that_can_be_read_only_once(tmp_path, monkeypatch):
    """A bit of the journal is read wrongly when the trace is written: no trace, and no loss."""
    path, reads = tmp_path / "t", count()
    journal = Journal(journal_path(path), HEADER)
    for each in SEGMENTS:
        journal.append(each)

    def fewer(*given):
        segments = [*read_segments(*given)]
        return segments[: len(segments) - (next(reads) == 1)]

    with monkeypatch.context() as patched:
        patched.setattr("greenroom.trace.journal.read_segments", fewer)
        with pytest.raises(TraceError, match="could not be read again"):
            journal.finish(path)
    assert [each.name for each in tmp_path.iterdir()] == [journal_path(path).name]
    journal = Journal(journal_path(path), HEADER)
    journal.finish(path)
    assert load(path).tokens == sum(each.tokens for each in SEGMENTS)


def test_finishing_holds_one_segment_in_memory(tmp_path):
    path, tokens = tmp_path / "t", 2000
    one = np.stack([np.arange(8)] * 10 * tokens).reshape(tokens, 10, 8)
    journal = Journal(journal_path(path), Header((8,) * 10))
    for number in range(40):
        journal.append(Segment(number, "", [(tokens, True)], True, {"experts": one}))
    tracemalloc.start()
    journal.finish(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 40 * one.size
    assert peak < 6 * one.size


def test_going_on_drops_the_request_that_was_not_whole(tmp_path):
    path = tmp_path / "j"
    half = segment(1, [(2, True)], last=False, seed=9)
    write(path, [*SEGMENTS[:2], half])
    with open(path, "ab") as file:
        file.write(b"torn")
    journal = Journal(path, HEADER)
    assert journal.requests == 1
    journal.append(SEGMENTS[2])
    journal.close()
    again = load(path)
    path.unlink()
    write(path)
    assert_same(again, load(path))


def test_another_recording_is_not_overwritten(tmp_path):
    write(tmp_path / "j")
    with pytest.raises(TraceError, match="is of another recording: convert it"):
        Journal(tmp_path / "j", replace(HEADER, weights=False))
    assert load(tmp_path / "j").tokens == 10


def test_two_recordings_do_not_write_to_one_file(tmp_path):
    first = Journal(tmp_path / "j", HEADER)
    with pytest.raises(OutputError, match="another recording is writing to this file"):
        Journal(tmp_path / "j", HEADER)
    first.close()
    Journal(tmp_path / "j", HEADER).close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_an_output_error():
    with pytest.raises(OutputError, match="/dev/full: cannot be written: No space left on device"):
        Journal(Path("/dev/full"), HEADER)


def test_a_disk_that_fills_up_costs_one_segment(tmp_path):
    path, limit = tmp_path / "j", 2000
    journal = Journal(path, HEADER)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    number = 0
    try:
        while number < 100:
            journal.append(segment(number, [(3, True)]))
            number += 1
    except OutputError as error:
        assert "cannot be written: File too large" in str(error)  # noqa: PT017
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, ignored)
    assert 2 < number < 100
    assert load(path).requests == number
    journal.append(segment(number, [(3, True)]))  # there is room again
    journal.close()
    assert load(path).requests == number + 1


def test_a_journal_of_another_version(tmp_path, monkeypatch):
    monkeypatch.setattr("greenroom.trace.segments.VERSIONS", (3, 4))
    write(tmp_path / "j")
    monkeypatch.undo()
    with pytest.raises(
        TraceError, match="format version 3, but this Greenroom reads only versions 1 and 2"
    ):
        load(tmp_path / "j")


@pytest.mark.parametrize(("norms", "version"), [(False, 1), (True, 2)])
def test_only_a_journal_with_output_norms_is_of_the_second_version(tmp_path, norms, version):
    write(tmp_path / "j", [], replace(HEADER, output_norms=norms))
    assert f'"version":{version},'.encode() in (tmp_path / "j").read_bytes()
    Journal(tmp_path / "j", replace(HEADER, output_norms=norms)).close()


def test_a_recording_that_did_not_end_is_named(tmp_path):
    write(journal_path(tmp_path / "t"))
    with pytest.raises(TraceError, match=r"an unfinished recording is in .*t\.journal"):
        load(tmp_path / "t")
    write(tmp_path / "empty", [])
    with pytest.raises(TraceError, match="the recording ended before its first token"):
        load(tmp_path / "empty")


@pytest.mark.parametrize(("experts", "kind"), [(255, np.uint8), (256, np.uint16)])
def test_the_id_of_the_last_expert_is_not_taken_for_no_prediction(tmp_path, experts, kind):
    header = Header((experts,), predictions={"oracle": 1})
    said = np.array([[[experts - 1]], [[-1]]])
    arrays = {"experts": np.array([[[0]], [[1]]]), "predictions.oracle": said}
    write(tmp_path / "j", [Segment(0, "", [(2, True)], True, arrays)], header)
    made = load(tmp_path / "j").predictions["oracle"].experts
    assert made.dtype == kind
    assert made.ravel().tolist() == [experts - 1, np.iinfo(kind).max]


def test_a_journal_from_before_predictions_and_norms_were_recorded(tmp_path):
    """Its header has no such entries."""
    import json
    import zlib

    write(tmp_path / "j", [])
    data = (tmp_path / "j").read_bytes()
    info = json.loads(data[12 : 12 + int.from_bytes(data[4:8], "little")])
    del info["predictions"], info["output_norms"]
    text = json.dumps(info).encode()
    sizes = len(text).to_bytes(4, "little") + bytes(4)
    (tmp_path / "j").write_bytes(data[:4] + sizes + text + zlib.crc32(text).to_bytes(4, "little"))
    write_on = Journal(tmp_path / "j", HEADER)
    write_on.append(SEGMENTS[2])
    write_on.close()
    assert load(tmp_path / "j").predictions == {}


def test_a_journal_knows_the_tokens_of_the_requests_that_are_whole(tmp_path):
    write(tmp_path / "j", [*SEGMENTS, segment(2, [(5, True)], last=False)])
    journal = Journal(tmp_path / "j", HEADER)
    assert (journal.requests, journal.tokens) == (2, 10)
    journal.close()


def test_a_header_that_a_power_cut_has_torn_is_written_again(tmp_path):
    path = tmp_path / "j"
    (begin, *_) = write(path)
    whole = path.read_bytes()
    for torn in (whole[: begin // 2], bytes(begin), whole[:9] + bytes(begin - 9)):
        path.write_bytes(torn)
        write(path)
        assert path.read_bytes() == whole


def test_zeros_behind_a_segment_end_the_trace(tmp_path):
    path = tmp_path / "j"
    ends = write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: ends[2]] + bytes(ends[3] - ends[2]))
    assert load(path).requests == 1
    write(path, SEGMENTS[2:])
    assert path.read_bytes() == whole


def test_a_file_of_something_else_is_no_journal(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b"notes of mine")
    with pytest.raises(TraceError, match="no recording's journal"):
        Journal(path, HEADER)
    assert path.read_bytes() == b"notes of mine"
