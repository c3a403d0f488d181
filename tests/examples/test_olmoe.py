"""examples/olmoe.py on a tiny OLMoE, offline: every step, and what it says where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from tests.models import cached_tiny

SCRIPT = Path(__file__).parents[2] / "examples" / "olmoe.py"
FAKE = """#!/bin/sh
# llama-bench's output, as far as it is read
echo '[{"model_type": "olmoe BF16", "n_gen": 4, "avg_ts": 20.0}]'
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("olmoe_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def call(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)  # four processes, each of which imports torch
def test_it_verifies_measures_and_reports(tmp_path: Path):
    program, gguf, out = tmp_path / "llama-bench", tmp_path / "m.gguf", tmp_path / "report"
    program.write_text(FAKE)
    program.chmod(0o755)
    gguf.write_bytes(b"GGUF")
    folder = cached_tiny("olmoe", tokenizer=True)
    done = call(
        folder, "-o", out, "--budgets", "100%,25%", "--tokens", 5, "--repeat", 1, "--threads", 1,
        "--limit", 0, "--llama-bench", program, "--gguf", gguf,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(out / "report.json"), str(out / "report.md")]
    facts = json.loads((out / "report.json").read_text())
    assert facts["verify"]["identical"] is True
    assert [(c["engine"], c["skipped"]) for c in facts["cases"]] == [
        ("Greenroom", ""), ("Greenroom", ""), ("transformers", ""), ("llama.cpp", ""),
    ]  # fmt: skip
    full, quarter, theirs, llama = (case["runs"][0] for case in facts["cases"])
    assert full["token_ids"] == quarter["token_ids"] == theirs["token_ids"]
    assert len(full["token_ids"]) == 5
    assert full["capacity"] == 4 * quarter["capacity"]
    assert llama["tpot_s"] == pytest.approx(0.05)
    page = (out / "report.md").read_text()
    assert "gave the same 5 tokens at every size" in page
    assert "the same first 5" in page
    assert "| llama.cpp | everything | 20 | 50 ms |" in page
    assert not list(out.glob(".*"))


@pytest.mark.slow  # a process that imports torch
def test_what_is_no_model_is_one_line(script, monkeypatch, capsys, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    words = ["olmoe.py", str(tmp_path / "empty"), "-o", str(tmp_path / "report")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()[-1:]
    assert said.startswith("olmoe: greenroom verify: greenroom: ")
    assert not (tmp_path / "report" / "report.md").exists()


def test_what_cannot_be_downloaded_is_one_line(tmp_path: Path):
    done = call("nobody/there-is-no-such-model", "-o", tmp_path / "report")
    assert done.returncode == 2
    assert "is no folder, and could not be downloaded" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--budgets", "half"), "'half' is no share"),
        (("--limit", "130%"), "'130%' is no share"),
        (("--tokens", "1"), "--tokens 1 is too few"),
        (("--repeat", "0"), "--repeat 0 is too few"),
        (("--llama-bench", __file__), "--llama-bench and --gguf go together"),
        (("--llama-bench", __file__, "--gguf", "/none.gguf"), "/none.gguf is not a file"),
    ],
)
def test_options_that_mean_nothing_are_refused(script, words, why, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["olmoe.py", *words])
    with pytest.raises(SystemExit) as caught:
        script.arguments()
    assert caught.value.code == 2
    assert why in capsys.readouterr().err


def test_what_has_no_room_or_no_cgroup_is_skipped_with_the_reason(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "available", lambda: 1 << 30)
    big = script.Case("Greenroom", "100%", lambda: script.fits(2 << 30))
    big.once()
    big.once()
    assert big.skipped == "takes 2.0 GiB, 1.0 GiB are available"
    assert "skipped: takes 2.0 GiB" in script.row(big)

    refusal = "cannot make a memory cgroup (/sys/fs/cgroup: Permission denied): run as root"
    monkeypatch.setattr(script, "process", lambda command: (2, "", f"{refusal}\n"))
    small = script.Case("Greenroom", "1 GiB", lambda: script.limited(["true"], 1 << 30, tmp_path))
    small.once()
    assert small.skipped == refusal
    monkeypatch.setattr(script, "MEMLIMIT", tmp_path / "none.py")
    with pytest.raises(script.Unavailable, match="run this from a checkout"):
        script.limited(["true"], 1 << 30, tmp_path)


def test_what_a_limited_run_leaves_is_read(script, monkeypatch, tmp_path):
    measured = {"returncode": 0, "killed": False, "peak_bytes": 7}
    out = "an answer\n" + json.dumps(measured) + "\n"
    monkeypatch.setattr(script, "process", lambda command: (0, out, ""))
    assert script.limited(["x"], 1, tmp_path) == ("an answer", measured)
    out = json.dumps(measured | {"returncode": -9, "killed": True})
    with pytest.raises(script.Unavailable, match="killed for want of memory"):
        script.limited(["x"], 1, tmp_path)


def test_different_tokens_are_said(script):
    cases = [
        script.Case("Greenroom", "100%", dict, [{"token_ids": [1, 2]}]),
        script.Case("Greenroom", "25%", dict, [{"token_ids": [1, 3]}]),
    ]
    assert "different tokens" in script.same_tokens(cases)
    assert "none of these sizes" in script.same_tokens([])
