"""Batch files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODEL = "tiny"


def line_of(name: str, **changes: Any) -> dict[str, Any]:
    """Return a request of a batch file; `changes` replace its fields."""
    body = {
        "model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": f"Hi, {name}"}]
    }  # fmt: skip
    request = {
        "custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body
    }  # fmt: skip
    return request | changes


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
