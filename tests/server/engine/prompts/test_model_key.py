"""The key changes with everything that changes bits, and with nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import greenroom
from greenroom.config import ServeConfig
from greenroom.server.engine.prompts.model_key import model_key
from tests.models import cached_tiny


def key_of(folder: Path, serve: dict[str, Any] | None = None, **load: Any) -> str:
    options: dict[str, Any] = {"cache": "50%", "context": 64, **load}
    model = greenroom.load(str(folder), **options)[0]
    try:
        return model_key(model, ServeConfig(**(serve or {})), 256)
    finally:
        model.greenroom.detach()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(cached_tiny("qwen3_moe", tokenizer=True), tmp_path / "model")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_key_is_that_of_the_bits(folder: Path, threads: None) -> None:
    key = key_of(folder)
    assert len(key) == 32
    assert key == key_of(folder, cache="100%", policy="lru", prefetch="off")
    assert key == key_of(folder, {"max_batch": 3, "prefix_share": "10%"})
    others = [
        key_of(folder, kernels="eager"),
        key_of(folder, dtype="bfloat16"),
        key_of(folder, {"prefill_chunk": 64}),
        key_of(folder, prompt_block=256),
        key_of(folder, {"batch_invariant": True}),
    ]
    torch.set_num_threads(2)
    others.append(key_of(folder))
    assert len({key, *others}) == 7


def test_weights_of_the_same_size_and_time_have_other_keys(folder: Path) -> None:
    key = key_of(folder)
    path = min(folder.glob("*.safetensors"))
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    content[len(content) * 31 // 32] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert key_of(folder) != key
    os.utime(path, ns=(1, 1))
    assert key_of(folder) != key
