from __future__ import annotations

import errno
import json
import os
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from greenroom.errors import OutputError, TraceError
from greenroom.trace import container, load, save
from tests.trace.strategies import SETTINGS, assert_same, traces
from tests.trace.test_trace import small


@SETTINGS
@given(traces())
def test_what_is_saved_is_what_is_loaded(tmp_path, trace):
    save(trace, tmp_path / "t")
    assert_same(load(tmp_path / "t"), trace)
    assert os.listdir(tmp_path) == ["t"]


def test_the_file_is_safetensors(tmp_path):
    path = tmp_path / "t.safetensors"
    save(small(weights=np.ones((5, 2, 2), np.float16)), path)
    tensors = load_file(path)
    np.testing.assert_array_equal(tensors["experts"], small().experts)
    assert tensors["weights"].dtype == np.float16
    with safe_open(path, "np") as file:
        assert file.metadata()["format"] == "greenroom.trace"
        assert json.loads(file.metadata()["labels"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("arrays", "version"),
    [
        ({}, "1"),
        ({"weights": np.ones((5, 2, 2), np.float16)}, "1"),
        ({"output_norms": np.ones((5, 2, 2), np.float32)}, "2"),
    ],
)
def test_only_a_trace_with_output_norms_is_of_the_second_version(tmp_path, arrays, version):
    """So readers of the first version read all others."""
    trace = small(**arrays)
    save(trace, tmp_path / "t")
    with safe_open(tmp_path / "t", "np") as file:
        assert file.metadata()["version"] == version
    assert_same(load(tmp_path / "t"), trace)


def test_arrays_stay_in_the_file(tmp_path):
    save(small(), tmp_path / "t")
    experts = load(tmp_path / "t").experts
    assert not experts.flags.writeable
    base = experts
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)


def edit(path, **metadata):
    """Give a trace file other metadata."""
    tensors, text = container.read(path)
    tensors = {n: container.Tensor(a.dtype, a.shape, [a.copy()]) for n, a in tensors.items()}
    container.write(path, tensors, {**text, **metadata})


def drop(path, name):
    tensors, text = container.read(path)
    kept = {n: container.Tensor(a.dtype, a.shape, [a.copy()]) for n, a in tensors.items()}
    del kept[name]
    container.write(path, kept, text)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: os.truncate(p, p.stat().st_size - 1), "truncated: by its header"),
        (lambda p: os.truncate(p, 100), "ends inside its header"),
        (lambda p: os.truncate(p, 0), "ends inside its header"),
        (lambda p: p.write_bytes(b"hello, this is no trace"), "not a trace"),
        (lambda p: p.write_bytes(b"\x10" + bytes(7) + b"not JSON at all!"), "header is damaged"),
        (lambda p: p.write_bytes(b"\x10" + bytes(7) + b'["a", "b", "c"] '), "header is damaged"),
        (
            lambda p: edit(p, version="3"),
            "format version 3, but this Greenroom reads only versions 1 and 2",
        ),
        (lambda p: edit(p, format="other"), "this safetensors file is not a trace"),
        (lambda p: edit(p, labels="["), "the metadata of this trace are damaged"),
        (lambda p: edit(p, labels='["a"]'), "request_labels must be"),
        (lambda p: edit(p, meta="3"), "the metadata of this trace are damaged"),
        (lambda p: edit(p, predictions='{"p": 1}'), "the trace has no predictions.p"),
        (lambda p: drop(p, "pass_starts"), "the trace has no pass_starts"),
        (lambda p: p.unlink(), "cannot be read: No such file"),
    ],
)
def test_damaged_files_say_so_in_one_line(tmp_path, damage, words):
    path = tmp_path / "t"
    save(small(), path)
    damage(path)
    with pytest.raises(TraceError) as error:
        load(path)
    assert words in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@SETTINGS
@given(st.data())
def test_a_file_cut_anywhere_is_an_error_of_ours(tmp_path, data):
    save(small(), tmp_path / "t")
    size = (tmp_path / "t").stat().st_size
    os.truncate(tmp_path / "t", data.draw(st.integers(0, size - 1)))
    with pytest.raises(TraceError):
        load(tmp_path / "t")


@SETTINGS
@given(st.data())
def test_a_flipped_byte_never_escapes_as_another_error(tmp_path, data):
    path = tmp_path / "t"
    save(small(), path)
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    try:
        load(path)
    except TraceError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        load(tmp_path)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, step):
    path = tmp_path / "t"
    save(small(), path)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        save(small(labels=("c", "d")), path)
    assert os.listdir(tmp_path) == ["t"]
    assert load(path).labels == ("a", "b")


def test_a_link_in_the_draft_s_place_is_not_followed(tmp_path):
    """In a folder that others may write, it would lead to a file of this user."""
    (victim := tmp_path / "victim").write_text("precious")
    (tmp_path / f".t.{os.getpid()}.tmp").symlink_to(victim)
    with pytest.raises(OutputError, match="cannot be written"):
        save(small(), tmp_path / "t")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "t").exists()


def test_no_folder_to_write_to(tmp_path):
    with pytest.raises(OutputError, match="No such file or directory"):
        save(small(), tmp_path / "missing" / "t")


def write_npz(path, **changes):
    """The npz of published recordings."""
    arrays = {
        "experts": small().experts,
        "offsets": np.array([0, 3, 5]),
        "labels": np.array(["a", "b"]),
        "phase": np.array("decode"),
        "meta": np.array(json.dumps({"model": "m", "experts_per_layer": 4})),
        **changes,
    }
    np.savez_compressed(path, **{name: a for name, a in arrays.items() if a is not None})


def test_an_npz_of_decoding(tmp_path):
    write_npz(tmp_path / "t.npz", weights=np.ones((5, 2, 2)), token_ids=np.arange(5))
    trace = load(tmp_path / "t.npz")
    assert trace.pass_starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert not trace.pass_prefill.any()
    assert trace.labels == ("a", "b")
    assert trace.meta["model"] == "m"
    assert trace.experts_per_layer.tolist() == [4, 4]
    assert (trace.weights.dtype, trace.token_ids.dtype) == (np.float16, np.int32)


def test_an_npz_of_prompts(tmp_path):
    wide = small().experts.astype(np.int64)
    write_npz(tmp_path / "t.npz", phase=np.array("prefill"), labels=None, experts=wide)
    trace = load(tmp_path / "t.npz")
    assert trace.pass_starts.tolist() == trace.request_starts.tolist() == [0, 3, 5]
    assert trace.pass_prefill.all()
    assert trace.labels == ("", "")
    assert trace.experts.dtype == np.uint8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": None}, "the arrays experts are missing"),
        ({"meta": None, "phase": None}, "the arrays phase, meta are missing"),
        ({"phase": np.array("both")}, "phase is 'both', not decode or prefill"),
        ({"meta": np.array("{}")}, "JSON text with experts_per_layer"),
        ({"meta": np.array("no")}, "JSON text with experts_per_layer"),
        ({"meta": np.array('{"experts_per_layer": 3}')}, "which has 3 experts"),
        ({"meta": np.array('{"experts_per_layer": [4]}')}, "the array experts has shape"),
        ({"offsets": np.array([0, 3, 3, 5])}, "request 1 has no tokens"),
        (
            {"offsets": np.array([[0, 5]])},
            "request_starts, the first token of each request, must begin",
        ),
        ({"experts": np.full((5, 2, 2), -1)}, "the expert id -1 is not from 0"),
        ({"experts": np.zeros((5, 2, 2))}, "expert ids must be integers"),
        ({"experts": np.zeros((5, 4), np.uint8)}, "the array experts has shape"),
        ({"offsets": np.array(["a"])}, "offsets has the dtype <U1, but must have integers"),
        ({"weights": np.array(["a"])}, "weights has the dtype <U1, but must have floats"),
        ({"token_ids": np.ones(5)}, "token_ids has the dtype float64, but must have integers"),
        ({"labels": np.array(["a"])}, "1 labels, but must have one for each of the 2"),
        ({"labels": np.array([{}, {}], object)}, "npz file is damaged or truncated"),
    ],
)
def test_npz_files_that_are_no_traces(tmp_path, changes, words):
    write_npz(tmp_path / "t.npz", **changes)
    with pytest.raises(TraceError) as error:
        load(tmp_path / "t.npz")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
def test_a_truncated_npz(tmp_path, share):
    path = tmp_path / "t.npz"
    write_npz(path)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(TraceError, match="npz file is damaged or truncated"):
        load(path)


def test_an_npz_of_python_2_gives_no_warning(tmp_path, recwarn):
    path = tmp_path / "t.npz"
    write_npz(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    old = members["experts.npy"].replace(b"(5, 2, 2), }   ", b"(5L, 2L, 2L), }")
    assert old != members["experts.npy"]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, old if name == "experts.npy" else data)
    assert load(path).tokens == 5
    assert not recwarn.list
