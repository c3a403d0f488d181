"""A server on a real socket over a fake engine, and tokenizers for fake models."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest

from greenroom.config import ServeConfig
from greenroom.server.http.request_log import RequestLog
from greenroom.server.http.service import Service
from greenroom.server.web.connection import Connection
from greenroom.server.web.listen import Server, make_server, open_socket, url_of
from tests.server.fakes import FakeEngine

DEMO = Path(__file__).parents[2] / "models" / "demo"
NAME = "tiny"
# The demo model's template as it was trained, without tools.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@cache
def demo_tokenizer() -> Any:
    """The demo model's tokenizer: byte-level, with a chat template that knows no tools."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template, tokenizer.response_template = PLAIN, None
    return tokenizer


@cache
def thinker_tokenizer() -> Any:
    """The demo model's tokenizer with a template for reasoning and tools, as Qwen3 has."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.response_template = None
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]}
    )
    tokenizer.chat_template = (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
        "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
        "{% endif %}"
        "{% endif %}"
    )
    return tokenizer


def answer_ids(text: str, tokenizer: Any = None, end: str | None = "<|end|>") -> list[int]:
    """Return the tokens of an answer, and its end token."""
    tokenizer = tokenizer or demo_tokenizer()
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids + ([tokenizer.convert_tokens_to_ids(end)] if end else [])


def fake_engine(text: str, **options: Any) -> FakeEngine:
    """Make an engine whose every answer is `text`."""
    return FakeEngine(demo_tokenizer(), answer_ids(text), end_ids=(1,), **options)


def reasoning_engine(text: str, **options: Any) -> FakeEngine:
    """Make an engine whose every answer is `text`, with reasoning and tools."""
    tokenizer = thinker_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    script = answer_ids(text, tokenizer, "<|im_end|>")
    return FakeEngine(tokenizer, script, end_ids=(end,), model_type="qwen3_moe", **options)


@dataclass
class Running:
    """A server in a thread."""

    service: Service
    server: Server
    url: str
    thread: threading.Thread
    lines: list[str] = field(default_factory=list)

    @property
    def engine(self) -> FakeEngine:
        assert isinstance(self.service.engine, FakeEngine)
        return self.service.engine

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=100, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=100, **options)

    def line(self, count: int = 1) -> str:
        """Return the last line of the log, once it has `count` lines."""
        wait_for(lambda: len(self.lines) >= count)
        return self.lines[-1]

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(15)
        assert not self.thread.is_alive()


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until `condition` is true; AssertionError after `seconds`."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.005)


Serve = Callable[..., Running]


def launch(
    engine: FakeEngine,
    key: str | None = None,
    head_s: float | None = None,
    slow_s: float | None = None,
    linger_s: float | None = None,
    adapters: Sequence[str] = (),
    wrap: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Running:
    """Start a server in a thread; `options` are those of ServeConfig, `wrap` wraps the app."""
    config = ServeConfig(**{"port": 0, "grace": 1.0, **options})
    lines: list[str] = []
    log = RequestLog(config.log_format, lines.append)
    service = Service(engine, config, config.model_name or NAME, key, log, adapters)
    sock = open_socket(config.host, config.port)
    http_server = make_server(service)
    if wrap is not None:
        http_server.config.app = wrap(http_server.config.app)
    limits = {"head_s": head_s, "slow_s": slow_s, "linger_s": linger_s}
    if limits := {name: value for name, value in limits.items() if value is not None}:
        http_server.config.http = type("Impatient", (Connection,), limits)
    http_server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    thread = threading.Thread(target=http_server.run, args=([sock],), daemon=True)
    thread.start()
    wait_for(lambda: http_server.started)
    return Running(service, http_server, url_of(sock), thread, lines)


@pytest.fixture
def serve(no_threads_left: None) -> Iterator[Serve]:
    """`serve(engine, ...)` starts a server for one test (see `launch`)."""
    running: list[Running] = []

    def start(engine: FakeEngine, **options: Any) -> Running:
        running.append(launch(engine, **options))
        return running[-1]

    yield start
    for each in running:
        if each.thread.is_alive():
            each.stop()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server whose every answer is Hi, for all tests of a file."""
    instance = launch(fake_engine("Hi"))
    yield instance
    instance.stop()
