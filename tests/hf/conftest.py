"""Fixtures and helpers of the tests of greenroom.hf."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """No progress bars of transformers."""
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


@pytest.fixture(autouse=True)
def _still(still: None) -> None:
    """No test's budget depends on those before it."""


NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], dtype: str = "") -> None:
    """A safetensors file with the tensors in the given order (the library's writer sorts them)."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": dtype or NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    write_raw(path, json.dumps(header).encode(), data)


def write_raw(path: Path, header: bytes, data: bytes = b"") -> None:
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    """The message of an error, which must be one line."""
    text = str(error.value)
    assert text
    assert "\n" not in text
    return text
