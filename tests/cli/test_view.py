"""`greenroom view`: what it plays, what it refuses, and how it ends."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import pytest

from greenroom.config import ZipfConfig
from greenroom.trace import save
from greenroom.trace.synth import zipf
from tests.cli.conftest import Run, start


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "zipf.trace"
    save(zipf(ZipfConfig(layers=2, experts=8, top_k=2, requests=2, tokens=9)), path)
    return path


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_trace_is_played_until_a_signal(trace: Path, number: int) -> None:
    process = start("view", trace, "--no-browser", "--cache", 4, "--policy", "lru", "--limit", 5)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line.endswith(f"plays {trace} (5 frames); Ctrl-C ends\n"), process.stderr.read()
        with urllib.request.urlopen(line.split()[0] + "/v1/live", timeout=20) as response:
            recording = json.load(response)
        assert recording["greeting"]["policy"] == "lru"
        assert recording["frames"][-1]["slots"] == [4, 4]
        process.send_signal(number)
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file"),
        (b"", "header|truncated|trace"),
        (b"nonsense", "trace"),
        (b"PK\x03\x04 and no more", "npz file is damaged"),
        (b'{"traceEvents": [', "not JSON"),
        (b'{"traceEvents": []}', "it has no events"),
        (b"[]", "not an object"),
    ],
)
def test_damaged_files_are_one_clear_line(
    cli: Run, tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    mistake = cli("view", path, "--no-browser").mistake
    assert str(path) in mistake
    assert any(part in mistake for part in why.split("|")), mistake


def test_a_cut_trace_is_one_clear_line(cli: Run, trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-20])
    assert str(trace) in cli("view", trace, "--no-browser").mistake


def test_impossible_options_are_refused(cli: Run, trace: Path, tmp_path: Path) -> None:
    assert "--cache" in cli("view", trace, "--cache", "17").mistake
    assert "--cache must be one size" in cli("view", trace, "--cache", "4,8").mistake
    assert "unknown policy" in cli("view", trace, "--policy", "none").mistake
    timeline = tmp_path / "timeline.json"
    timeline.write_text("{}")
    for option in ("--cache", "--policy", "--limit"):
        value = "lru" if option == "--policy" else "3"
        assert f"{option} is for traces" in cli("view", timeline, option, value).mistake
