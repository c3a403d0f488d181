"""Which models' tokens can be one CUDA graph, without a GPU or Triton: what plans ask."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from greenroom.config import LoadConfig
from greenroom.hf.load.describe import describe
from tests.models import cached_tiny


@pytest.mark.parametrize(
    ("name", "options", "has_graph"),
    [
        ("qwen3_moe", {}, True),
        ("mixtral", {}, True),
        ("qwen3_moe", {"kv": "int8"}, False),
        ("qwen3_next", {}, False),  # has layers of linear attention
    ],
)
def test_a_model_has_a_graph_or_not(name: str, options: dict[str, Any], has_graph: bool) -> None:
    folder = cached_tiny(name)
    assert describe(str(folder), LoadConfig(**options), on_a_gpu=True).token_graph == has_graph


@pytest.mark.process
def test_no_triton_is_needed() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import greenroom.hf.model.graph_decoder, greenroom.hf.load.describe"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
