"""`greenroom run` as its user sees it."""

from __future__ import annotations

import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.cli.run import closing_line
from greenroom.hf.text.generate import Answer
from greenroom.runtime.driver.stats import Stats
from tests.cli.conftest import Ran, Run, start
from tests.hf.mtp.checkpoints import mtp_folder
from tests.models import cached_tiny

PROMPT = "The green room is where"
FEW = ("--max-new-tokens", 8, "--kernels", "eager")
KEYS = [
    "text",
    "token_ids",
    "prompt_tokens",
    "new_tokens",
    "ttft_s",
    "tpot_s",
    "tpot_p95_s",
    "tpot_p99_s",
    "tokens_per_s",
    "capacity",
    "capacity_least",
    "capacity_most",
    "expert_requests",
    "expert_hits",
    "hit_ratio",
    "bytes_read",
    "stall_s",
    "peak_rss_bytes",
    "memory_bytes",
    "budget_bytes",
    "policy",
    "kernels",
    "prefetch",
    "stalls",
    "links",
]
OUTCOMES = ("useful", "late", "wasted", "dropped", "displaced", "failed")


def test_streams_the_text_that_json_reports(cli: Run, folder: Path) -> None:
    streamed = cli("run", folder, PROMPT, "--cache", "25%", *FEW)
    found = cli("run", folder, PROMPT, "--cache", "25%", *FEW, "--json")
    assert (streamed.code, found.code) == (0, 0)
    assert streamed.out == found.json["text"] + "\n"
    assert list(found.json) == KEYS
    assert found.json["new_tokens"] == len(found.json["token_ids"])
    assert found.json["capacity"] == 4
    assert found.json["budget_bytes"] is None
    assert found.json["hit_ratio"] == found.json["expert_hits"] / found.json["expert_requests"]


def test_without_compiled_kernels_the_start_line_says_so(
    no_kernels: None, cli: Run, folder: Path
) -> None:
    found = [cli("run", folder, PROMPT, "--cache", "25%", *FEW[:2], *more)
             for more in ((), ("--verbose",), ("--json",), FEW[2:])]  # fmt: skip
    assert [ran.code for ran in found] == [0] * 4
    named = "eager (compiled kernels were not built)"
    for ran in found[:2]:
        assert f" · kernels: {named} · " in ran.err.splitlines()[0]
    assert found[2].json["kernels"] == named
    assert "not built" not in found[3].err  # the user chose eager
    assert found[0].out == found[3].out
    refused = cli("run", folder, PROMPT, "--cache", "25%", "--kernels", "native")
    assert refused.mistake.startswith("compiled kernels were not built: build them (`make native`")


def test_standard_error_has_a_line_before_and_a_line_after(cli: Run, folder: Path) -> None:
    before, after = cli("run", folder, PROMPT, "--cache", "25%", *FEW).err.splitlines()
    assert before.startswith(f"{folder.name}: 4 of 16 experts in slots (")
    assert before.endswith(" · --verbose says more")
    assert len(before) <= 160
    assert re.fullmatch(
        r"\d+ prompt \+ 8 new tokens · TTFT \S+ m?s · TPOT p50 \S+ m?s, p95 \S+ m?s · \S+ tokens/s"
        r" · hit ratio \S+%( · \d+ of \d+ prefetches used(, \d+ late)?)?"
        r" · \S+ [KM]?i?B read per token · peak memory \S+ [MG]iB",
        after,
    )


@pytest.mark.parametrize(
    "options",
    [
        ("--cache", "40%", "--policy", "lfu", "--scope", "per-layer", "--kernels", "eager"),
        ("--memory", "3GiB", "--readers", 1, "--dtype", "bfloat16", "--kernels", "eager"),
        ("--cache", "30%", "--direct", "off", "--device", "fake", "--context", 64),
        ("--cache", "40%", "--prefetch", "markov:2", "--no-guard", "--kernels", "eager"),
        ("--cache", "40%", "--prefetch", "markov", "--prefetch-rule", "top-k"),
        ("--cache", "40%", "--prefetch", "markov", "--predict-in", "worker"),
        ("--cache", "40%", "--prefetch", "off", "--read-limit", "20MB", "--kernels", "eager"),
    ],
)
def test_the_flags_of_the_start_up_line_reproduce_it(
    cli: Run, folder: Path, options: tuple[object, ...]
) -> None:
    first = cli("run", folder, PROMPT, *options, "--max-new-tokens", 3, "--json", "--verbose")
    line = first.err.splitlines()[0]
    flags = shlex.split(line.partition("same again: ")[2])
    assert re.fullmatch(r"\d+(\.\d{1,3})?[KMG]iB|\d{1,3}B", flags[1])
    again = cli("run", folder, PROMPT, *flags, "--max-new-tokens", 3, "--json", "--verbose")
    for key in ("capacity", "policy", "kernels", "token_ids"):
        assert again.json[key] == first.json[key]
    assert again.err.splitlines()[0].partition("same again: ")[2] == shlex.join(flags)


def test_another_thread_of_the_predictor_is_refused(cli: Run) -> None:
    mistake = cli("run", "demo", PROMPT, "--predict-in", "process").mistake
    assert "unknown predict_in 'process': choose one of auto, worker, inline" in mistake


def test_a_budget_is_reported_beside_the_peak(cli: Run, folder: Path) -> None:
    ran = cli("run", folder, PROMPT, "--memory", "3GiB", *FEW)
    before, after = ran.err.splitlines()
    assert re.search(r" · memory [\d.]+ [MG]iB of budget 3 GiB · ", before)
    assert "16 of 16 experts in slots" in before
    assert after.endswith("of 3 GiB budget")


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, terminal: bool = False) -> None:
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", stream)


def test_a_prompt_from_standard_input(
    cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = cli("run", folder, PROMPT, "--cache", "25%", *FEW, "--json").json
    stdin(monkeypatch, f"{PROMPT}\n".encode())
    read = cli("run", folder, "--cache", "25%", *FEW, "--json").json
    assert read["token_ids"] == given["token_ids"]
    assert read["prompt_tokens"] == given["prompt_tokens"]


def test_no_prompt_on_a_terminal(cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, b"", terminal=True)
    assert cli("run", folder).mistake.startswith("no prompt: give one after MODEL")


def test_prompts_that_are_no_text(cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, b"\xff\xfe")
    assert "not valid UTF-8" in cli("run", folder).mistake
    assert "not valid UTF-8" in cli("run", folder, "\udcff").mistake


def test_raw_switches_the_chat_template_off(cli: Run, copy: Path) -> None:
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}Q: {{ m.content }} A:{% endfor %}"
    )
    options = ("--cache", "25%", *FEW, "--json")
    chat = cli("run", copy, PROMPT, *options).json
    raw = cli("run", copy, PROMPT, "--raw", *options).json
    assert chat["prompt_tokens"] > raw["prompt_tokens"]
    written = cli("run", copy, f"Q: {PROMPT} A:", "--raw", *options).json
    assert written["token_ids"] == chat["token_ids"]


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ 'a' * 10**10 }}", "{{ messages[9].x }}"])
def test_a_template_that_fails_is_one_line(cli: Run, copy: Path, template: str) -> None:
    (copy / "chat_template.jinja").write_text(template)
    ran = cli("run", copy, PROMPT, "--cache", "25%", *FEW)
    assert ran.code == 2
    start, said = ran.err.splitlines()
    assert "experts in slots" in start
    assert said.startswith("greenroom: the model's chat template fails on these messages: ")


@pytest.mark.parametrize("temperature", ["3e-38", "1e-45", "1e-300"])
def test_the_smallest_temperatures_take_the_likeliest_token(
    cli: Run, folder: Path, temperature: str
) -> None:
    options = ("--cache", "25%", *FEW, "--json", "--temperature")
    found = cli("run", folder, PROMPT, *options, temperature).json["token_ids"]
    assert found == cli("run", folder, PROMPT, *options, "0").json["token_ids"]
    assert "--temperature" in cli("run", folder, PROMPT, "--temperature", "nan").mistake


def test_speculation_keeps_the_text_and_is_reported(cli: Run) -> None:
    folder = cached_tiny("qwen3_moe", tokenizer=True, dtype="bfloat16", hidden_size=64, head_dim=16)
    options = ("--cache", "50%", "--max-new-tokens", 40, "--json")
    plain = cli("run", folder, PROMPT, *options)
    drafted = cli("run", folder, PROMPT, *options, "--speculate", "lookup")
    assert drafted.json["token_ids"] == plain.json["token_ids"]
    assert list(drafted.json["speculation"]) == ["passes", "drafted", "accepted", "on", "verdict"]
    assert "speculation" not in plain.json
    assert "speculation by lookup" in drafted.err
    assert "speculation" not in plain.err


def test_an_mtp_layer_keeps_the_text_and_is_reported(cli: Run) -> None:
    folder, options = mtp_folder(), ("--cache", "50%", "--max-new-tokens", 30, "--json")
    plain = cli("run", folder, PROMPT, *options)
    drafted = cli("run", folder, PROMPT, *options, "--speculate", "mtp")
    assert drafted.json["token_ids"] == plain.json["token_ids"]
    assert list(drafted.json["speculation"]) == ["passes", "drafted", "accepted", "on", "verdict"]
    assert "speculation by an MTP layer" in drafted.err


def test_a_model_without_an_mtp_layer_is_refused(cli: Run, folder: Path) -> None:
    found = cli("run", folder, PROMPT, "--cache", "25%", *FEW, "--speculate", "mtp")
    assert "--speculate mtp does not work with Qwen3MoeForCausalLM" in found.mistake


def test_a_model_without_speculation_says_why(cli: Run, folder: Path) -> None:
    found = cli("run", folder, PROMPT, "--cache", "25%", *FEW, "--speculate", "lookup")
    assert found.code == 0
    assert "no speculation: " in found.err


def test_a_seed_repeats_a_sample(cli: Run, folder: Path) -> None:
    options = ("--cache", "25%", *FEW, "--temperature", 1.5, "--top-k", 50, "--json", "--seed")
    one, again, other = (cli("run", folder, PROMPT, *options, s).json["text"] for s in (1, 1, 2))
    assert one == again != other


def test_live_is_plain_text_where_there_is_no_terminal(cli: Run, folder: Path) -> None:
    plain = cli("run", folder, PROMPT, "--cache", "25%", *FEW)
    ran = cli("run", folder, PROMPT, "--cache", "25%", *FEW, "--live")
    assert ran.out == plain.out
    assert "\x1b" not in ran.out + ran.err
    assert len(ran.err.splitlines()) == 3
    assert ran.err.splitlines()[1] == "--live needs a terminal: this is plain text"


def test_an_answer_that_the_context_ends(cli: Run, folder: Path) -> None:
    ran = cli("run", folder, PROMPT, "--cache", "25%", "--context", 20, "--kernels", "eager")
    assert ran.err.endswith("the answer stopped at the end of --context\n") or "1 new" in ran.err


def test_a_closing_line_of_one_token() -> None:
    assert closing_line(Answer("a", [1], 2, 1.5), stats()) == (
        "2 prompt + 1 new tokens · TTFT 1.50 s · hit ratio 50.0% · 1 MiB read per token"
        " · peak memory 1 GiB"
    )


def test_a_closing_line_of_misses_that_were_shared_out() -> None:
    both = {"moved": 1500, "on_host": 500, "on_host_share": 0.25}
    line = closing_line(Answer("a", [1], 2, 1.5), replace(stats(), co_compute=both))
    assert " · misses: 500 computed in host memory (25.0%), 1,500 moved to the device · " in line


def stats(**did: int) -> Stats:
    prefetch = {"began": 0, "useful": 0, "late": 0, **did}
    return Stats(
        "lru", "eager", 1, 2, 3, 1, 4, 2, 0.5, 3 << 20, 0.25, 1 << 30, None, None, prefetch, {}, []
    )


def test_the_closing_line_counts_prefetches() -> None:
    did = stats(began=1899, useful=553, late=15)
    assert " · 553 of 1,899 prefetches used, 15 late · 1" in closing_line(
        Answer("a", [1], 2, 1), did
    )
    late = closing_line(Answer("a", [1], 2, 1), stats(began=3, useful=1))
    assert " · 1 of 3 prefetches used · 1" in late
    assert "prefetch" not in closing_line(Answer("a", [1], 2, 1), stats())


def test_json_says_what_became_of_every_prefetch(cli: Run, folder: Path) -> None:
    options = ("--cache", "40%", "--prefetch", "markov", "--no-guard", *FEW, "--json")
    found = cli("run", folder, PROMPT, *options).json
    did = found["prefetch"]
    assert (did["predictor"], did["distance"], did["on"], did["verdict"]) == (
        "markov",
        1,
        True,
        None,
    )
    assert 0 <= did["accuracy"] <= 1
    assert sum(did[name] for name in OUTCOMES) <= did["began"]
    assert sum(found["stalls"].values()) == pytest.approx(found["stall_s"])
    assert [link["link"] for link in found["links"]] == ["disk -> host"]
    assert found["links"][0]["bytes"] == found["bytes_read"]
    assert found["tpot_s"] <= found["tpot_p95_s"] <= found["tpot_p99_s"]
    off = cli("run", folder, PROMPT, "--cache", "40%", "--prefetch", "off", *FEW, "--json").json
    assert (off["prefetch"]["predictor"], off["prefetch"]["began"]) == ("off", 0)
    assert off["token_ids"] == found["token_ids"]


def test_what_the_guard_decides_is_said_once(
    cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("greenroom.core.prefetch.guard.LOOKS", (2,))  # its first trial is over soon
    options = ("--cache", "40%", "--kernels", "eager", "--temperature", 5, "--seed", 1)
    ran = cli("run", folder, PROMPT, *options, "--prefetch", "markov", "--max-new-tokens", 40)
    _, verdict, closing = ran.err.splitlines()
    assert re.fullmatch(r"prefetching (on|off): tokens took .* with it \(.*, \d+ pairs\)", verdict)
    assert " new tokens · " in closing


def test_reads_stay_below_the_read_limit(cli: Run, folder: Path) -> None:
    options = ("--cache", "13%", "--prefetch", "off", *FEW, "--json")
    free = cli("run", folder, PROMPT, *options).json
    ran = cli("run", folder, PROMPT, *options, "--read-limit", "1MB", "--verbose")
    assert "no faster than 1MB/s)" in ran.err
    assert ran.json["token_ids"] == free["token_ids"]
    assert ran.json["bytes_read"] == free["bytes_read"]
    took = ran.json["ttft_s"] + ran.json["tpot_s"] * (ran.json["new_tokens"] - 1)
    assert took > 0.9 * ran.json["bytes_read"] / 1e6  # stalls are less: what is there is computed


def test_a_timeline_is_written_beside_the_answer(cli: Run, folder: Path, tmp_path: Path) -> None:
    path, options = tmp_path / "out.json", ("--cache", "40%", "--device", "fake", *FEW)
    ran = cli("run", folder, PROMPT, *options, "--timeline", path)
    assert ran.code == 0
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    seen = {rows[e["tid"]] for e in events if e["ph"] == "X"}
    assert {"compute", "passes", "disk -> host, lane 0", "host -> device, lane 0"} <= seen
    passes = [e["name"] for e in events if e["ph"] == "X" and rows[e["tid"]] == "passes"]
    assert passes == ["prompt"] + ["token"] * 7
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.process
def test_as_a_process(folder: Path) -> None:
    process = start("run", folder, PROMPT, "--cache", "25%", *FEW, "--json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert list(json.loads(out)) == KEYS
    ran = Ran.of(0, out, err)
    assert ran.progress[0] == f"{folder}: starting ..."
    assert len(ran.err.splitlines()) == 1  # no progress bar, no warning
    assert ran.json["new_tokens"] == 8
