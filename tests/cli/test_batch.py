"""`greenroom batch` as its user sees it: answers, a second run, a killed process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.terminal import progress
from tests.adapters import make_adapter
from tests.cli.conftest import Run, start
from tests.server.batch.conftest import line_of, lines_of, write
from tests.server.conftest import DEMO, fake_engine, launch

CACHE = ("--cache", "25%", "--context", 128)


def requests(folder: Path, count: int, tokens: int = 4, **body: Any) -> Path:
    lines = []
    for number in range(count):
        line = line_of(f"r{number}", url="/v1/completions")
        line["body"] = {"model": "demo", "prompt": f"Once {number}", "max_tokens": tokens} | body
        lines.append(line)
    return write(folder / "in.jsonl", lines)


def test_a_batch_is_answered_once(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    source, out = requests(tmp_path, 5, temperature=0), tmp_path / "out.jsonl"
    command = ("batch", "demo", source, "-o", out, *CACHE)
    first = cli(*command)
    assert first.code == 0, first.err
    shares = [line for line in first.progress if line.startswith("answering")]
    assert [line.split(",")[0].split(" ...")[0] for line in shares] == [
        f"answering {share}%" for share in (20, 40, 60, 80, 100)
    ]
    assert first.out.startswith(f"5 of 5 requests have answers in {out}; ")
    assert "tokens/s\n" in first.out
    texts = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in lines_of(out)
    }
    assert set(texts) == {f"r{number}" for number in range(5)}
    written = out.read_bytes()
    second = cli(*command)
    assert second.out == f"all 5 requests have their answers in {out}\n"
    assert second.err == ""
    out.write_bytes(b"".join(written.splitlines(keepends=True)[:2]) + b'{"torn')
    third = cli(*command, "--max-batch", 1, "--batch-invariant")
    assert third.code == 0
    assert "(2 from before)" in third.out
    assert len(lines_of(out)) == 5


def test_mistakes_are_named_before_the_model_is_loaded(cli: Run, tmp_path: Path) -> None:
    source, out = requests(tmp_path, 1, stream=True), tmp_path / "out.jsonl"
    assert "leave out stream" in cli("batch", "demo", source, "-o", out).mistake
    source = requests(tmp_path, 1)
    assert "has the requests" in cli("batch", "demo", source, "-o", source).mistake
    assert (
        "--model-name demo" in cli("batch", "demo", source, "-o", out, "--model-name", "x").mistake
    )
    assert "cannot be read" in cli("batch", "demo", tmp_path / "no", "-o", out).mistake
    assert (
        "--max-batch must be at least 1"
        in cli("batch", "demo", source, "-o", out, "--max-batch", 0).mistake
    )
    assert (
        "one request at a time"
        in cli("batch", "demo", source, "-o", out, "--speculate", "mtp").mistake
    )
    assert not out.exists()


def test_a_request_is_answered_by_the_adapter_that_it_names(cli: Run, tmp_path: Path) -> None:
    every_third = {layer: range(layer, 32, 3) for layer in range(9)}
    adapters: list[object] = []
    for seed, name in enumerate(("math", "law"), 1):
        folder = make_adapter(DEMO, tmp_path / name, every_third, seed)
        adapters += ["--adapter", f"{name}={folder}"]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    models = ("demo", "law", "math", "demo")
    write(source, [line_of(f"r{number}", url="/v1/completions", body={**body, "model": model})
                   for number, model in enumerate(models)])  # fmt: skip
    command = ("batch", "demo", source, "-o", out, *CACHE)
    assert "--split cannot be used" in cli(*command, *adapters, "--split", "auto").mistake
    assert "'law', but 'demo' answers" in cli(*command).mistake
    ran = cli(*command, *adapters)
    assert ran.code == 0, ran.err
    answers = {each["custom_id"]: each["response"]["body"] for each in lines_of(out)}
    texts = [answers[f"r{number}"]["choices"][0]["text"] for number in range(4)]
    assert [answers[f"r{number}"]["model"] for number in range(4)] == [*models]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3


def test_refused_requests_are_counted(cli: Run, tmp_path: Path) -> None:
    source, out = requests(tmp_path, 2, temperature="hot"), tmp_path / "out.jsonl"
    ran = cli("batch", "demo", source, "-o", out, *CACHE)
    assert ran.code == 0
    assert "2 of them were refused" in ran.out


def test_a_server_answers_with_its_own_options(cli: Run, tmp_path: Path) -> None:
    source, out = requests(tmp_path, 5, model="tiny"), tmp_path / "out.jsonl"
    server = launch(fake_engine("Hello"))
    try:
        command = ("batch", "tiny", source, "-o", out, "--url", server.url)
        assert "leave out --cache" in cli(*command, "--cache", "25%").mistake
        ran = cli(*command, "--max-batch", 2)
    finally:
        server.stop()
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"5 of 5 requests have answers in {out}; ")
    assert {each["custom_id"] for each in lines_of(out)} == {f"r{number}" for number in range(5)}


def test_a_key_needs_a_server(cli: Run, tmp_path: Path) -> None:
    source = requests(tmp_path, 1)
    command = ("batch", "demo", source, "-o", tmp_path / "out.jsonl", "--api-key-file", source)
    assert "give its address with --url" in cli(*command).mistake


@pytest.mark.process
def test_a_killed_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    source, out = requests(tmp_path, 60, tokens=24), tmp_path / "out.jsonl"
    command = ("batch", "demo", source, "-o", out, *CACHE, "--max-batch", 4)
    before: list[dict[str, Any]] = []
    for wanted in (3, 20):
        process = start(*command)
        until = time.monotonic() + 100
        while not out.exists() or out.read_bytes().count(b"\n") < wanted:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        process.kill()
        process.communicate()
        complete = out.read_text().rpartition("\n")[0].splitlines()
        lines = [json.loads(each) for each in complete]
        assert lines[: len(before)] == before
        before = lines
    process = start(*command)
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert f"({len(before)} from before)" in printed
    lines = lines_of(out)
    assert lines[: len(before)] == before
    assert sorted(each["custom_id"] for each in lines) == sorted(f"r{n}" for n in range(60))
