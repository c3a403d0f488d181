"""`greenroom trace` as its user sees it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from greenroom.policies import policy
from greenroom.sim.pinned import hot_experts
from greenroom.sim.replay import replay
from greenroom.trace import load, save, stream
from greenroom.trace.journal import journal_path
from tests.cli.conftest import Run, start
from tests.trace.strategies import assert_same
from tests.trace.test_file import write_npz
from tests.trace.test_trace import small

FEW = ("--cache", "25%", "--max-new-tokens", 6, "--kernels", "eager")
CORPUS = Path(__file__).parents[2] / "data" / "corpus"  # see tests/fuzz
CHAT = [{"role": "user", "content": "Why?"}]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models: threads would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_recordings_that_would_take_memory_or_a_password(cli: Run) -> None:
    for name, said in {
        "npz/encrypted": "is encrypted, or compressed by a method that NumPy does not use",
        "npz/a-shape-of-a-terabyte": "but by its header it must have",
        "journal/a-length-of-4-GiB": "the recording ended before its first token",
        "journal/passes-of-text": "passes must be a list, got 'ab'",
    }.items():
        path = CORPUS / name
        line = cli("trace", "info", path).mistake
        assert line.startswith(f"{path}: ")
        assert said in line


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "tales.jsonl"
    lines = [{"prompt": "The green room is where", "label": "stage"}, {"prompt": "def f(x):"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_record_import_and_info(cli: Run, folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.trace"
    options = ("--weights", "--token-ids", "--output-norms", "--gate-inputs", 0.5)
    ran = cli("trace", "record", folder, "--prompts", prompts, "-o", out, *FEW, *options)
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"{out}: ")
    assert sorted(os.listdir(tmp_path)) == ["t.trace", "tales.jsonl"]
    trace = load(out)
    assert (trace.requests, trace.labels) == (2, ("stage", "tales"))
    assert trace.weights is not None
    assert trace.token_ids is not None
    assert trace.gate_inputs is not None
    assert trace.output_norms is not None

    found = cli("trace", "info", out, "--json", "--segments", "2,4").json
    assert (found["tokens"], found["requests"]) == (trace.tokens, 2)
    assert found["labels"] == {"stage": 1, "tales": 1}
    assert found["meta"]["model"] == str(folder)
    assert [part["length"] for part in found["locality"]["segments"]] == [2, 4]
    assert found["gate_inputs"] == len(trace.gate_inputs.tokens)
    shown = cli("trace", "info", out)
    assert shown.code == 0
    assert f"adjacent-token overlap   {found['locality']['overlap']:.3f}" in shown.out
    assert "also recorded: weights, token_ids, output_norms, gate_inputs" in shown.out

    hot = cli("trace", "hot", out, "--task", "all", "--score", "easy-ep", "-o", tmp_path / "p")
    assert hot.code == 0, hot.err
    chosen = json.loads((tmp_path / "p").read_text())["tasks"]
    expected = hot_experts(trace, ["stage", "tales"], 0.1, "easy-ep")
    assert chosen == json.loads(json.dumps(expected.as_json()["tasks"]))

    assert cli("trace", "import", out, "-o", tmp_path / "again").code == 0
    assert_same(load(tmp_path / "again"), trace)


def test_token_ids_are_those_of_the_run(
    cli: Run, folder: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t"
    greedy = (*FEW, "--temperature", 0)
    ran = cli("trace", "record", folder, "--prompts", prompts, "-o", out, *greedy, "--token-ids")
    assert ran.code == 0, ran.err
    answer = cli("run", folder, "The green room is where", *greedy, "--json").json
    ids = load(out).head(answer["prompt_tokens"] + answer["new_tokens"] - 1).token_ids
    assert ids is not None
    assert ids[answer["prompt_tokens"] :].tolist() == answer["token_ids"][:-1]


@pytest.mark.parametrize(("name", "cache"), [("lru", "10%"), ("fifo", "25%"), ("lfu", "60%")])
def test_a_run_counts_what_the_replay_of_its_trace_gives(
    cli: Run, folder: Path, tmp_path: Path, name: str, cache: str
) -> None:
    prompt, out, asked = "The green room is where the performers wait", tmp_path / "t", ["--raw"]
    options = ("--cache", cache, "--policy", name, "--max-new-tokens", 12, "--temperature", 0,
               "--prefetch", "off")  # fmt: skip
    (tmp_path / "p.txt").write_text(prompt)
    ran = cli("run", folder, prompt, *options, *asked, "--json").json
    recorded = cli(
        "trace", "record", folder, "--prompts", tmp_path / "p.txt", "-o", out, *options, *asked
    )
    assert recorded.code == 0, recorded.err
    trace = load(out)
    found = replay(stream(trace, "runtime"), trace.offsets, ran["capacity"], policy(name))
    assert trace.pass_prefill.tolist() == [True] + [False] * (ran["new_tokens"] - 1)
    assert found.requests == ran["expert_requests"]
    assert found.misses == ran["expert_requests"] - ran["expert_hits"]
    said = f"expert cache: {found.requests:,} requests, {found.misses:,} misses"
    assert said in recorded.err


@pytest.mark.parametrize(
    "name", ["moe-infinity:matching=request,capacity=1", "hybrimoe", "next-use", "hobbit", "llru"]
)
def test_policies_get_prompts_and_weights_as_in_a_replay(
    cli: Run, folder: Path, tmp_path: Path, name: str
) -> None:
    out, texts = tmp_path / "t", ["The green room", "Once upon a time there was", "The green room"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    recorded = cli(
        "trace", "record", folder, "--prompts", tmp_path / "p.jsonl", "-o", out, "--weights",
        "--cache", "40%", "--policy", name, "--max-new-tokens", 8, "--temperature", 0, "--raw",
        "--prefetch", "off",
    )  # fmt: skip
    assert recorded.code == 0, recorded.err
    trace = load(out)
    assert trace.requests == 3
    capacity = int(trace.offsets[-1]) * 40 // 100
    found = replay(stream(trace, "runtime"), trace.offsets, capacity, policy(name))
    said = f"expert cache: {found.requests:,} requests, {found.misses:,} misses"
    assert said in recorded.err
    assert 0 < found.misses < found.requests


def test_policies_that_need_the_future_do_not_run(cli: Run, folder: Path) -> None:
    ran = cli("run", folder, "The", "--policy", "opt", "--cache", "50%")
    assert ran.code == 2
    assert "opt needs the entire trace in advance" in ran.err


def test_the_shipped_model_counts_what_simulate_gives(cli: Run, tmp_path: Path) -> None:
    prompt, out = "Once upon a time there was a little dog", tmp_path / "t"
    options = ("--cache", "25%", "--policy", "lru", "--max-new-tokens", 24, "--temperature", 0,
               "--prefetch", "off")  # fmt: skip
    (tmp_path / "p.txt").write_text(prompt)
    ran = cli("run", "demo", prompt, *options, "--json").json
    recorded = cli("trace", "record", "demo", "--prompts", tmp_path / "p.txt", "-o", out, *options)
    assert recorded.code == 0, recorded.err
    found = cli(
        "simulate", out, "--policy", "lru", "--order", "runtime",
        "--capacity", ran["capacity"], "--json",
    ).json  # fmt: skip
    assert found["requests"] == ran["expert_requests"]
    assert found["misses"] == ran["expert_requests"] - ran["expert_hits"]
    assert load(out).pass_prefill[0]


def test_messages_need_a_chat_template(cli: Run, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}))
    ran = cli("trace", "record", folder, "--prompts", path, "-o", tmp_path / "t", *FEW)
    assert "has no chat template" in ran.err
    assert ran.code == 2
    assert not (tmp_path / "t").exists()


def test_messages_are_recorded_through_the_template(cli: Run, copy: Path, tmp_path: Path) -> None:
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    )
    path, text = tmp_path / "chat.jsonl", tmp_path / "chat.txt"
    path.write_text(json.dumps({"messages": CHAT}))
    text.write_text("[Why?]")
    options = (*FEW, "--temperature", 0, "--token-ids")
    a, b = tmp_path / "a", tmp_path / "b"
    assert cli("trace", "record", copy, "--prompts", path, "-o", a, *options).code == 0
    assert cli("trace", "record", copy, "--prompts", text, "-o", b, *options, "--raw").code == 0
    np.testing.assert_array_equal(load(a).token_ids, load(b).token_ids)


@pytest.mark.process
def test_what_was_recorded_outlives_a_kill(folder: Path, cli: Run, tmp_path: Path) -> None:
    """Killed with -9 in the middle, then gone on with: the same trace as without."""
    prompts, out = tmp_path / "p.txt", tmp_path / "t"
    prompts.write_text("\n".join(f"Tale number {n}" for n in range(24)))
    options = ("--cache", "25%", "--max-new-tokens", 8, "--temperature", 0, "--threads", 1)
    command = ("trace", "record", folder, "--prompts", prompts, *options, "-o")
    process = start(*command, out)
    journal = journal_path(out)
    until = time.monotonic() + 90
    while not (journal.exists() and journal.stat().st_size > 1000):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not out.exists()
    half = load(journal)
    assert 0 < half.requests < 24
    assert str(journal) in cli("trace", "info", out).mistake
    assert ("the last request was cut short" in cli("trace", "info", journal).out) == (
        "last_request" in half.meta
    )
    assert cli("trace", "info", journal, "--json").json["tokens"] == half.tokens
    again = cli(*command, out)
    assert again.code == 0, again.err
    assert "requests of an earlier run" in again.err
    assert not journal.exists()
    whole = load(out)
    assert whole.requests == 24
    np.testing.assert_array_equal(whole.experts[: half.tokens], half.experts)
    assert cli(*command, tmp_path / "u").code == 0
    assert_same(load(tmp_path / "u"), whole)


def test_import_reads_npz(cli: Run, tmp_path: Path) -> None:
    write_npz(tmp_path / "t.npz")
    assert cli("trace", "import", tmp_path / "t.npz", "-o", tmp_path / "t").code == 0
    assert_same(load(tmp_path / "t"), load(tmp_path / "t.npz"))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("zipf", ("--a", 2, "--layers", 15, "--experts", 15), "15 layers x 15 experts, top-1"),
        ("topics", ("--tokens", 300, "--requests", 3), "300 tokens of 3 requests"),
    ],
)
def test_synth(
    cli: Run, tmp_path: Path, kind: str, options: tuple[object, ...], words: str
) -> None:
    ran = cli("trace", "synth", kind, "-o", tmp_path / "t", *options)
    assert words in ran.out
    assert load(tmp_path / "t").meta["model"] == f"synthetic {kind}"
    assert cli("trace", "info", tmp_path / "t", "--segments", 4).code == 0


def test_mistakes(cli: Run, folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "t"
    save(small(), tmp_path / "small")
    mistakes = {
        ("record", folder, "--prompts", tmp_path / "none", "-o", out): "cannot be read",
        ("record", folder, "--prompts", prompts): "required: -o/--out",
        ("record", folder, "--prompts", prompts, "-o", tmp_path): "is a folder",
        ("record", folder, "--prompts", prompts, "-o", out / "t"): "there is no folder",
        ("record", folder, "--prompts", prompts, "-o", out, "--gate-inputs", 2): "from 0 to 1",
        ("import", tmp_path / "none", "-o", out): "cannot be read: No such file",
        ("import", prompts, "-o", out): "not a trace",
        ("info", prompts): "not a trace",
        (
            "info",
            tmp_path / "small",
            "--segments",
            "a",
        ): "--segments must be whole numbers separated by commas",
        ("info", tmp_path / "small", "--segments", "0"): "--segments must be at least 1",
        ("info", tmp_path / "small", "--groups", "0"): "--groups must be at least 1",
        ("synth", "zipf", "-o", out, "--top-k", 9): "--top-k 9 is more than the 8 experts",
        ("synth", "pareto", "-o", out): "invalid choice: 'pareto'",
        ("sing",): "invalid choice: 'sing'",
    }
    for arguments, words in mistakes.items():
        assert words in cli("trace", *arguments).mistake
    assert not out.exists()


def test_a_prompt_that_is_too_long_is_refused_before_the_first_answer(
    cli: Run, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("short\n" + "long " * 90)
    options = (*FEW, "--context", 32)
    ran = cli(
        "trace", "record", folder, "--prompts", tmp_path / "p.txt", "-o", tmp_path / "t", *options
    )
    assert ran.code == 2
    assert "prompt 2 has" in ran.err
    assert os.listdir(tmp_path) == ["p.txt"]


def test_help(cli: Run) -> None:
    assert "record" in cli("trace").out
    assert "zipf" in cli("trace", "synth").out
