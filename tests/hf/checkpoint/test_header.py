"""Safetensors headers: read as the library reads them, and each damage gets its own clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from greenroom.errors import CheckpointError
from greenroom.hf.checkpoint import header as module
from greenroom.hf.checkpoint.header import BITS, DTYPES, read_header
from tests.hf.conftest import one_line, write_raw


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write(tmp_path: Path, header: object, data: bytes = b"") -> Path:
    path = tmp_path / "model.safetensors"
    write_raw(path, header if isinstance(header, bytes) else json.dumps(header).encode(), data)
    return path


def test_agrees_with_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.zeros(0, 4),
        "d": torch.tensor(2.5, dtype=torch.float16),
        "e": torch.arange(6).reshape(1, 2, 3),
        "f": torch.tensor([True, False]),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    found = read_header(path, 4)
    raw = path.read_bytes()
    with safe_open(path, "pt") as file:
        assert set(found) == set(file.keys())
    for name, tensor in tensors.items():
        stored = found[name]
        assert (stored.file, stored.shape) == (4, tuple(tensor.shape))
        assert stored.dtype == str(tensor.dtype)[6:]
        data = raw[stored.offset : stored.offset + stored.nbytes]
        assert data == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_dtype_is_torchs_or_none() -> None:
    for name, torch_name in DTYPES.items():
        if name not in BITS:
            assert isinstance(getattr(torch, torch_name, None), torch.dtype), name


DAMAGED = {
    "not JSON": (b"{no json", b"", "not JSON"),
    "not text": (b'{"a\xff": 1}', b"", "not JSON"),
    "no table": ([1, 2], b"", "must be a JSON object, but is a list"),
    "entry is a list": ({"a": []}, b"", "entry for the tensor a is damaged"),
    "no dtype": (
        {"a": {"shape": [], "data_offsets": [0, 0]}},
        b"",
        "entry for the tensor a is damaged",
    ),
    "three offsets": (
        {"a": entry(offsets=(0, 8, 9))},
        bytes(9),
        "entry for the tensor a is damaged",
    ),
    "negative shape": ({"a": entry(shape=(-2,))}, bytes(8), "entry for the tensor a is damaged"),
    "negative offset": (
        {"a": entry(offsets=(-8, 0))},
        bytes(8),
        "entry for the tensor a is damaged",
    ),
    "fraction": ({"a": entry(shape=(2.0,))}, bytes(8), "entry for the tensor a is damaged"),  # type: ignore[arg-type]
    "unknown dtype": ({"a": entry("F31")}, bytes(8), "unknown dtype 'F31'"),
    "dtype no name": ({"a": entry(["F32"])}, bytes(8), "unknown dtype"),  # type: ignore[arg-type]
    "wrong size": (
        {"a": entry(shape=(3,))},
        bytes(8),
        "has 8 bytes, but dtype F32 and shape [3] need 12",
    ),
    "reversed": ({"a": entry(offsets=(8, 0))}, bytes(8), "has -8 bytes"),
    "overlap": (
        {"a": entry(), "b": entry(offsets=(4, 12))},
        bytes(12),
        "the tensors a and b overlap",
    ),
    "truncated": (
        {"a": entry(), "b": entry(offsets=(8, 16))},
        bytes(15),
        "truncated: the tensor b ends at",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    header, data, message = DAMAGED[name]
    path = write(tmp_path, header, data)
    with pytest.raises(CheckpointError) as error:
        read_header(path, 0)
    assert message in one_line(error)
    assert str(path) in one_line(error)


@pytest.mark.parametrize("size", [0, 5, 8, 40])
def test_cut_off_in_the_header(tmp_path: Path, size: int) -> None:
    path = write(tmp_path, {"a": entry(), "b": entry(offsets=(8, 16))}, bytes(16))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError) as error:
        read_header(path, 0)
    assert "ends inside its header" in one_line(error)


def test_a_header_that_claims_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", 20)
    path = write(tmp_path, {"a": entry()}, bytes(8))
    with pytest.raises(CheckpointError) as error:
        read_header(path, 0)
    assert str(path) in one_line(error)


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        read_header(tmp_path / "none.safetensors", 0)
    assert "No such file" in one_line(error)
