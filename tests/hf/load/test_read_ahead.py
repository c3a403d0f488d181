"""Dense weights are read into the page cache before loading asks for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from greenroom.hf.load.read_ahead import PIECE, _pieces, read_ahead
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.gguf_models import write
from tests.models import cached_tiny


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_all_dense_weights_are_read_but_tables(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = kind == "gguf"
    path = write(tmp_path / "a.gguf", "qwen3_moe", {"": "Q8_0"}) if gguf else cached_tiny("olmoe")
    skeleton = ModelSkeleton.of(path)
    skeleton.keep_tables_on_disk(1)
    skeleton.keep_dense_encoded()
    assert set(skeleton.dense_tensors) > set(skeleton.loaded_tensors)
    asked: list[tuple[int, int]] = []
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, at: asked.append((at, len(buffers[0]))) or
        preadv(fd, buffers, at),
    )  # fmt: skip
    for thread in read_ahead(skeleton):
        thread.join(10)
        assert not thread.is_alive()
    stored = [skeleton.checkpoint.tensors[name] for name in skeleton.loaded_tensors]
    assert sorted(asked) == sorted((part.offset, part.nbytes) for s in stored for part in s.parts)


def test_large_tensors_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = ModelSkeleton.of(cached_tiny("olmoe"))
    monkeypatch.setattr("greenroom.hf.load.read_ahead.PIECE", 1000)
    pieces = [*_pieces(skeleton)]
    assert max(nbytes for *_, nbytes in pieces) == 1000 < PIECE
    tensors = [skeleton.checkpoint.tensors[name] for name in skeleton.loaded_tensors]
    assert sum(nbytes for *_, nbytes in pieces) == sum(each.nbytes for each in tensors)


def test_a_lost_file_is_left_to_loading(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "qwen3_moe", {"": "Q8_0"})
    skeleton = ModelSkeleton.of(path)
    path.unlink()
    for thread in read_ahead(skeleton):
        thread.join(10)
        assert not thread.is_alive()
