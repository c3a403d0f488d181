"""What is compiled ahead of the first import, and when it is not."""

from __future__ import annotations

import json

import pytest

from greenroom.cli.early.compilation import compile_ahead
from greenroom.config import LoadConfig
from greenroom.runtime.kernels import precompile


@pytest.mark.parametrize(
    ("stored", "options", "wanted"),
    [
        ({}, {}, ["bfloat16"]),
        ({"dtype": "float16"}, {}, ["float16"]),
        ({"torch_dtype": "float16"}, {"memory": "50%"}, ["float16"]),
        ({"dtype": "float32"}, {}, []),  # left to eager's operations
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, ["bfloat16"]),
        ({}, {"kernels": "eager"}, []),
        ({}, {"memory": "1GiB"}, []),  # a second process could break the budget
        ({}, {"memory": "3GiB"}, ["bfloat16"]),
        ("not a config", {}, ["bfloat16"]),
    ],
)
def test_what_a_model_probably_needs(tmp_path, monkeypatch, stored, options, wanted):
    started: list[str] = []
    monkeypatch.setattr(precompile, "start_compiling", started.append)
    monkeypatch.setattr("greenroom.runtime.memory.system.available_bytes", lambda: 8 << 30)
    (tmp_path / "config.json").write_text(json.dumps(stored))
    compile_ahead(str(tmp_path), LoadConfig(**options))
    assert started == wanted


def test_no_folder(monkeypatch):
    started: list[str] = []
    monkeypatch.setattr(precompile, "start_compiling", started.append)
    monkeypatch.setattr("greenroom.runtime.memory.system.available_bytes", lambda: 8 << 30)
    compile_ahead("demo", LoadConfig())
    assert started == ["bfloat16"]
