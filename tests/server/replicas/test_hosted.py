"""A server without a socket: each variant of its model answers under its own name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from greenroom.config import LoadConfig, ServeConfig
from greenroom.errors import UsageError
from greenroom.server.replicas.hosted import HostedServer
from greenroom.server.web.calls import Call
from tests.adapters import make_adapter, merge
from tests.models import cached_tiny

PROMPT = list(range(20, 45))
MATH, LAW = {0: [0, 3, 4], 2: [5]}, {0: [3], 2: [1, 2]}


def ask(server: HostedServer, model: str) -> tuple[int, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 0}
    head = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    call = Call("POST", "/v1/completions", head, json.dumps(body).encode())
    name, status, _, answer = asyncio.run(server.answer_at_once(call))
    assert name == "one"
    return status, json.loads(answer)


def choices(folder: Path, *models: str, adapters: tuple[str, ...] = ()) -> list[Any]:
    """The answers of a server's models, and None for one that it does not have."""
    load = LoadConfig(device="cpu", threads=1, context=128, adapter=adapters or None)
    server = HostedServer("one", str(folder), "base", load, ServeConfig(), None)
    try:
        found = [ask(server, model) for model in models]
    finally:
        server.close()
    return [answer["choices"] if status == 200 else None for status, answer in found]


def test_a_request_is_answered_by_the_variant_that_it_names(
    tmp_path: Path, no_threads_left: None
) -> None:
    folder = cached_tiny("qwen3_moe", tokenizer=True)
    math = make_adapter(folder, tmp_path / "math", MATH, seed=1)
    law = make_adapter(folder, tmp_path / "law", LAW, seed=2)
    of_base, of_math, of_law, none = choices(
        folder, "base", "math", "law", "poems", adapters=(f"math={math}", f"law={law}")
    )
    assert none is None
    assert of_base not in (of_math, of_law)
    assert of_math != of_law
    assert choices(folder, "base") == [of_base]
    assert choices(merge(folder, math, tmp_path / "merged"), "base") == [of_math]


def test_an_adapter_with_the_models_name_is_refused() -> None:
    load = LoadConfig(adapter=("base=adapter",))
    with pytest.raises(UsageError, match="the model has this name"):
        HostedServer("one", "demo", "base", load, ServeConfig(), None)
