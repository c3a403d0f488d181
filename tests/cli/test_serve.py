"""`greenroom serve` as its user sees it: the real engine, real signals, real clients."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import ollama
import openai
import pytest

from greenroom.cli.serve import name_of
from tests.cli.conftest import Run, start

DEMO = Path(__file__).parents[2] / "models" / "demo"
CACHE = ("--cache", "25%", "--context", 256)
ASKED: Any = [{"role": "user", "content": "Hello"}]
KEY = "sk-greenroom-test"


@contextmanager
def served(
    *argv: object, model: Path = DEMO, cache: tuple[object, ...] = CACHE, **options: Any
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server as a process: (process, URL, lines of the start), once it is ready."""
    process = start("serve", model, "--port", 0, *cache, *argv, **options)
    assert process.stderr is not None
    lines = []
    try:
        while not (lines and lines[-1].startswith("try: ")):
            line = process.stderr.readline()
            assert line, "".join(lines)
            if line.endswith(" ...\n"):
                continue
            lines.append(json.loads(line)["message"] if line[0] == "{" else line.rstrip("\n"))
        yield process, lines[0].split()[1], lines
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.mark.process
@pytest.mark.timeout(240)
def test_the_clients_curl_and_a_signal_against_the_demo_model() -> None:
    with served("--log-format", "json") as (process, url, lines):
        assert "64 of 256 experts in slots" in "\n".join(lines)
        curl = subprocess.run(
            ["sh", "-c", lines[-1].removeprefix("try: ") + " -sS"],
            capture_output=True, text=True, timeout=60,
        ) if _has_curl() else None  # fmt: skip
        if curl is not None:
            assert json.loads(curl.stdout)["choices"][0]["message"]["content"], curl.stderr
        by_openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        options: Any = {"model": "demo", "messages": ASKED, "max_tokens": 12, "temperature": 0}
        whole = by_openai.chat.completions.create(**options)
        chunks = by_openai.chat.completions.create(**options, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content != ""
        by_anthropic = anthropic.Anthropic(base_url=url, api_key="none")
        message = by_anthropic.messages.create(
            model="demo", max_tokens=12, messages=ASKED, extra_body={"temperature": 0}
        )
        assert message.content[0].text == text  # type: ignore[union-attr]
        response = by_openai.responses.create(model="demo", input="Hello", max_output_tokens=4)
        assert response.usage is not None
        _check_ollama(url, text)
        _check_tools(by_openai)
        form: Any = {"type": "json_object"}
        made = by_openai.chat.completions.create(
            model="demo", messages=ASKED, response_format=form, max_tokens=60, seed=1
        )
        if made.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(made.choices[0].message.content or ""), dict)
        assert httpx2.get(f"{url}/health").json() == {"status": "ready"}
        metrics = httpx2.get(f"{url}/metrics").text
        assert 'greenroom_expert_hits_total{layer="0"}' in metrics
        assert "greenroom_link_bytes_total" in metrics
        assert httpx2.get(f"{url}/v1/stats").json()["tokens"]["new"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        rest = [json.loads(line) for line in process.stderr.read().splitlines()]
        posts = [line for line in rest if line.get("method") == "POST"]
        answered = [line for line in posts if line["path"] != "/api/show"]
        assert len(posts) >= 5
        assert all(line["status"] == 200 for line in posts)
        assert all(line["hit_ratio"] is not None for line in answered)


def _check_tools(by_openai: openai.OpenAI) -> None:
    """Forced tool calls of the demo model are valid, and their results are rendered."""
    parameters = {
        "type": "object",
        "properties": {"place": {"enum": ["here", "there"]}},
        "required": ["place"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    options: Any = {"model": "demo", "tools": [tool], "max_tokens": 60, "temperature": 0}
    named: Any = {"type": "function", "function": {"name": "look"}}
    for choice in ("required", named):
        made = by_openai.chat.completions.create(messages=ASKED, tool_choice=choice, **options)
        assert made.choices[0].finish_reason == "tool_calls"
        message: Any = made.choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["look"]
        assert json.loads(message.tool_calls[0].function.arguments)["place"] in ("here", "there")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a wall"}
    history: Any = [*ASKED, message.model_dump(exclude_none=True), result]
    answered = by_openai.chat.completions.create(messages=history, tool_choice="none", **options)
    assert answered.choices[0].message.content


def _check_ollama(url: str, text: str) -> None:
    """The demo model by Ollama's package: the same answer, and facts about the model."""
    by_ollama = ollama.Client(host=url)
    options = {"num_predict": 12, "temperature": 0}
    complete = by_ollama.chat("demo", ASKED, options=options)
    assert complete.message.content == text
    assert complete.total_duration >= complete.prompt_eval_duration + complete.eval_duration > 0
    lines = by_ollama.generate("demo", "Hello", options=options, stream=True)
    assert "".join(line.response or "" for line in lines) == text
    made = by_ollama.generate("demo", "Hello", format="json", options={**options, "seed": 1})
    assert made.response.startswith("{")
    listed, ran = by_ollama.list().models[0], by_ollama.ps().models[0]
    assert (listed.model, listed.details.parameter_size) == ("demo", "9.4M")
    assert (listed.details.format, listed.details.family) == ("safetensors", "qwen3_moe")
    assert listed.size == 2 * 9_383_072
    assert len(listed.digest) == 64
    assert ran.context_length == 256
    assert (ran.size > listed.size, ran.size_vram) == (True, 0)
    assert ran.expires_at.year > 2900
    shown = by_ollama.show("demo").modelinfo
    assert shown["general.parameter_count"] == 9_383_072
    assert (shown["qwen3_moe.context_length"], shown["qwen3_moe.expert_count"]) == (256, 32)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_kill_and_start_again_on_the_same_port(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    with served("--api-key-file", file) as (process, url, _):
        port = url.rpartition(":")[2]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        stream = client.chat.completions.create(model="demo", messages=ASKED, stream=True)
        next(iter(stream))
        process.kill()
        process.wait()
        with pytest.raises((openai.APIError, httpx2.HTTPError)):
            list(stream)
        again = start(
            "serve", DEMO, *CACHE, "--port", port, env={**os.environ, "GREENROOM_API_KEY": KEY}
        )
        try:
            _ready(url, again)
            assert client.chat.completions.create(model="demo", messages=ASKED, max_tokens=2).usage
            resized = httpx2.post(
                f"{url}/v1/admin/cache",
                json={"cache": "50%"},
                headers={"x-api-key": KEY},
                timeout=30,
            )
            assert resized.json() == {"slots": 128}
            wrong = httpx2.post(
                f"{url}/v1/admin/cache", json={"cache": "x"}, headers={"x-api-key": KEY}
            )
            assert wrong.status_code == 400
            again.send_signal(signal.SIGINT)
            again.communicate(timeout=30)
            assert again.returncode == 0
        finally:
            if again.poll() is None:
                again.kill()
                again.communicate()


FAULT = """
import pathlib
from greenroom.hf.text.templates import Templates
Templates.__init__.__defaults__ = (1 << 20, 1)  # one second of the processor
from greenroom.server.engine.loop import ContinuousEngine as Engine
own = Engine._round
def fails(self):
    if self._running and pathlib.Path({flag!r}).exists():
        raise RuntimeError("/secret/file has a bug")
    return own(self)
Engine._round = fails
"""


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.process
@pytest.mark.timeout(240)
def test_a_template_that_loops_hangs_nothing_and_an_engine_that_breaks_ends_the_process(
    tmp_path: Path,
) -> None:
    flag, model = tmp_path / "flag", shutil.copytree(DEMO, tmp_path / "demo")
    (model / "chat_template.jinja").write_text(LOOP)
    before = FAULT.format(flag=str(flag))
    with (
        served("--max-batch", 1, model=model, before=before) as (process, url, _),
        ThreadPoolExecutor() as threads,
    ):
        chat = {"model": "demo", "messages": ASKED}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=chat, timeout=60)
        assert answer.status_code == 400
        assert "chat template" in answer.json()["error"]["message"]
        body = {"model": "demo", "prompt": "Once", "max_tokens": 200}
        ask = partial(httpx2.post, f"{url}/v1/completions", timeout=60)
        client = httpx2.Client(timeout=60)
        with client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as first:
            lines = first.iter_lines()
            next(lines)
            waiting = [threads.submit(ask, json=body) for _ in range(3)]
            flag.touch()
            rest = "".join(lines)
        assert '"error"' in rest
        assert "[DONE]" not in rest
        assert {each.result().status_code for each in waiting} == {503}
        health = httpx2.get(f"{url}/health")
        assert health.status_code == 503
        assert health.json() == {
            "status": "failed", "why": "an unexpected error (RuntimeError)",
        }  # fmt: skip
        assert process.wait(30) == 1
        assert process.stderr is not None
        said = process.stderr.read()
        assert "the model has failed, so the server ends" in said
        assert "/secret/file has a bug" in said  # the log has all


def _ready(url: str, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert process.poll() is None
        try:
            if httpx2.get(f"{url}/health").status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError("not ready in time")


def _has_curl() -> bool:
    from shutil import which

    return which("curl") is not None


def test_a_port_that_is_in_use(cli: Run, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert cli("serve", folder, "--port", port).mistake.startswith(f"port {port} is in use")


def test_an_mtp_layer_drafts_for_one_request_at_a_time(cli: Run, folder: Path) -> None:
    refused = cli("serve", folder, "--speculate", "mtp").mistake
    assert "drafts for one request at a time: add --max-batch 1" in refused


def test_others_are_let_in_only_with_a_key(
    cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GREENROOM_API_KEY", raising=False)
    assert "--api-key-file" in cli("serve", folder, "--host", "0.0.0.0").mistake
    monkeypatch.setenv("GREENROOM_API_KEY", "")
    assert "GREENROOM_API_KEY is empty" in cli("serve", folder).mistake


def test_a_key_file_that_is_missing_or_empty(cli: Run, folder: Path, tmp_path: Path) -> None:
    missing = cli("serve", folder, "--api-key-file", tmp_path / "none").mistake
    assert missing.endswith("none: No such file or directory")
    (tmp_path / "empty").touch()
    assert "is empty" in cli("serve", folder, "--api-key-file", tmp_path / "empty").mistake


def test_a_model_that_cannot_be_loaded_ends_the_server(cli: Run, tmp_path: Path) -> None:
    before, line = cli("serve", tmp_path, "--port", 0).err.splitlines()
    assert before.startswith("greenroom: http://127.0.0.1:")
    assert line.startswith(f"greenroom: {tmp_path}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--port", 70000), "--port must be at most 65535"),
        (("--max-batch", 0), "--max-batch must be at least 1"),
        (("--max-body", "10%"), "--max-body"),
        (("--log-format", "xml"), "unknown log_format"),
        (("--timeout", 0), "--timeout must be above 0"),
    ],
)
def test_options_that_cannot_be_right(
    cli: Run, folder: Path, options: tuple[object, ...], said: str
) -> None:
    assert said in cli("serve", folder, *options).mistake


def test_what_is_not_installed_is_named() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from greenroom.cli import main; sys.exit(main(['serve', 'demo']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 2
    wanted = (
        "greenroom: `greenroom serve` needs the library fastapi: pip install 'greenroom[serve]'\n"
    )
    assert ran.stderr == wanted


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("/models/mine/", "mine"),
        ("/models/mine-Q4_K_M.gguf", "mine-Q4_K_M"),
    ],
)
def test_the_last_part_of_a_model_is_its_name(model: str, name: str) -> None:
    assert name_of(model) == name
    assert re.fullmatch(r"[^/]+", name_of("."))


HALF_WRITTEN = """
import time
from greenroom.server.engine.prompts import segment as form
own = form.atomic_file
def stops_in_the_second_file(path, mode):
    context = own(path, mode)
    if "-00000000-" in path.name:
        return context
    file = context.__enter__()
    file.write(b"half of a file")
    file.flush()
    print("half", flush=True)
    time.sleep(1000)
form.atomic_file = stops_in_the_second_file
"""


@pytest.mark.process
@pytest.mark.timeout(240)
def test_prompts_survive_a_kill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    folder, ids = tmp_path / "prompts", [7 + i * i % 240 for i in range(600)]
    options: tuple[object, ...] = (
        "--prompt-cache", folder, "--batch-invariant", "--prefill-chunk", 64,
        "--log-format", "json",
    )  # fmt: skip
    cache = ("--cache", "25%", "--context", 700)
    body = {"model": "demo", "prompt": ids, "max_tokens": 8, "temperature": 0}

    def ask(url: str) -> str:
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()
        return str(answer["choices"][0]["text"])

    def counted(url: str) -> dict[str, int]:
        stats = httpx2.get(f"{url}/v1/stats").json()
        return {**stats["prompt_cache"], "reused": stats["tokens"]["reused"]}

    with served(*options, cache=cache, before=HALF_WRITTEN) as (process, url, lines):
        assert any("prompt cache: 0 files of this model" in line for line in lines)
        text = ask(url)
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.kill()
    assert sorted(path.name[-4:] for path in folder.iterdir()) == [".tmp", "sors"]
    with served(*options, cache=cache) as (process, url, lines):
        assert any("prompt cache: 1 files of this model" in line for line in lines)
        assert ask(url) == text
        assert counted(url)["reused"] == 256
        process.send_signal(signal.SIGTERM)  # what waits is written
        assert process.wait(30) == 0
    with served(*options, cache=cache) as (process, url, _):
        assert ask(url) == text
        assert counted(url)["reused"] == 576
        assert counted(url)["damaged"] == 0
        metrics = httpx2.get(f"{url}/metrics").text
        assert "greenroom_prompt_cache_hits_total 1.0" in metrics
        assert "greenroom_prompt_cache_files 4.0" in metrics  # one of them the draft


def test_options_of_the_prompt_cache_that_exclude_each_other(
    cli: Run, folder: Path, tmp_path: Path
) -> None:
    said = cli("serve", folder, "--prompt-cache", tmp_path, "--no-prefix-reuse").mistake
    assert "--prompt-cache and --no-prefix-reuse exclude each other" in said
    assert "only with --prompt-cache" in cli("serve", folder, "--prompt-cache-size", "1GiB").mistake
    said = cli("serve", folder, "--prompt-cache", tmp_path, "--prompt-cache-size", "9%").mistake
    assert said.startswith("--prompt-cache-size must be an amount, as 8GiB")
    (tmp_path / "file").touch()
    err = cli("serve", folder, "--port", 0, "--prompt-cache", tmp_path / "file").err
    assert err.splitlines()[-1].startswith("greenroom: --prompt-cache ")
