"""Packs in segments, splits, budgets and pins as users see them; a run counts as simulate."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from greenroom.core.cache.pins import Pins
from greenroom.core.cost import Costs, Link, Work
from greenroom.policies import policy
from greenroom.sim.event_driven import EventOptions, simulate_events
from greenroom.sim.pinned import pinned_by_step
from greenroom.sim.replay import replay
from greenroom.trace import load, save, stream
from tests.cli.conftest import Run
from tests.models import cached_tiny
from tests.sim import small

SIZES = {"hidden_size": 64, "moe_intermediate_size": 512, "intermediate_size": 512}
COSTS = Costs((Link(1e6, 0.0, 1),), Work.constant(1e-3), Work.constant(1e-3))
ANSWER = ("--max-new-tokens", 8, "--temperature", 0, "--raw", "--prefetch", "off")


@pytest.fixture(scope="module")
def source() -> Path:
    return cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True, **SIZES)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    lines = [
        {"prompt": "The green room is where", "label": "stage"},
        {"prompt": "def f(x): return x", "label": "code"},
        {"prompt": "Once upon a time", "label": "stage"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def asked(text: str) -> tuple[int, int]:
    """(requests, misses) of what `trace record` says."""
    words = text.partition("expert cache: ")[2].split()
    return int(words[0].replace(",", "")), int(words[2].replace(",", ""))


def test_a_split_run_counts_what_simulate_counts(
    cli: Run, source: Path, prompts: Path, tmp_path: Path
) -> None:
    folder, out = tmp_path / "pack", tmp_path / "t"
    ran = cli("pack", source, "-o", folder, "--experts", "same", "--segments", 8)
    assert ran.code == 0, ran.err
    for split, scope in (("0.25", "shared"), ("0.5", "per-layer"), ("0.25,0.75", "2,1")):
        recorded = cli(
            "trace", "record", folder, "--prompts", prompts, "-o", out, "--cache", "50%",
            "--policy", "lru", "--split", split, "--scope", scope, "--verbose", *ANSWER,
        )  # fmt: skip
        assert recorded.code == 0, recorded.err
        assert f"--split {split}" in recorded.err
        trace = load(out)
        shares = tuple(map(float, split.split(",")))
        found = simulate_events(
            trace, stream(trace, "runtime"), int(trace.offsets[-1]) // 2, policy("lru"), COSTS,
            1 << 20, "off",
            EventOptions(
                split=shares[0] if len(shares) == 1 else shares,
                scope=(2.0, 1.0) if scope == "2,1" else scope,
            ),
        )  # fmt: skip
        assert asked(recorded.err) == (found.times.requests, found.times.misses)
        assert 0 < found.times.misses < found.times.requests
        out.unlink()


def test_budgets_and_pins_of_a_run_count_as_a_replay(
    cli: Run, source: Path, prompts: Path, tmp_path: Path
) -> None:
    first, out = tmp_path / "first", tmp_path / "t"
    budgets, pins = tmp_path / "b.json", tmp_path / "pins.json"
    options = ("--prompts", prompts, "--cache", "50%", "--policy", "lru", *ANSWER)
    assert cli("trace", "record", source, "-o", first, *options).code == 0
    assert cli("trace", "budgets", first, "--capacity", "50%", "-o", budgets).code == 0
    for tasks in ("stage", "all"):
        made = cli("trace", "hot", first, "--task", tasks, "--share", "25%", "-o", pins)
        assert "experts to pin, of" in made.out
        recorded = cli(
            "trace", "record", source, "-o", out, *options, "--scope", budgets, "--pin", pins
        )
        assert recorded.code == 0, recorded.err
        trace = load(out)
        requests = stream(trace, "runtime")
        scope = tuple(map(float, json.loads(budgets.read_text())["slots"]))
        stay = pinned_by_step(trace, requests, Pins.load(pins, trace.offsets.tolist()))
        capacity = int(trace.offsets[-1]) // 2
        found = replay(requests, trace.offsets, capacity, policy("lru"), scope=scope, pinned=stay)
        requests_asked, misses = asked(recorded.err)
        assert requests_asked == found.requests
        if tasks == "all":
            assert misses == found.misses
        else:  # the only task's experts are read before the first prompt
            assert misses <= found.misses
        row = cli(
            "simulate", out, "--policy", "lru", "--capacity", "50%", "--order", "runtime",
            "--scope", budgets, "--pin", pins, "--json",
        ).json  # fmt: skip
        assert row["misses"] == found.misses
        out.unlink()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--split", "0.5"), "--split has an effect only with --machine"),
        (
            ("--split", "2", "--machine", "auto"),
            "--split must be a share of an expert, at most 1, got 2",
        ),
        (("--pin", "never"), "unknown pin 'never': choose one of step, none, FILE"),
        (("--pin", "none.json", "--order", "runtime"), "cannot read none.json"),
        (("--pin", "none.json"), "--pin FILE works only with --order runtime"),
    ],
)
def test_mistakes_of_simulate(
    cli: Run, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    made = cli(
        "trace", "synth", "topics", "-o", tmp_path / "t", "--tokens", 8, "--layers", 2,
        "--experts", 4, "--top-k", 2, "--requests", 2,
    )  # fmt: skip
    assert made.code == 0, made.err
    ran = cli("simulate", tmp_path / "t", "--policy", "lru", "--capacity", "4", *options)
    assert said in ran.mistake


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--task", "law"), "unknown task 'law': choose one of topic"),
        (
            ("--task", "all", "--share", "5MB"),
            "--share must be a share of every layer's experts, as 10%",
        ),
        (("--task", "all", "--share", "100%"), "is 1: it must be above 0 and below 1"),
        (("--task", "all", "--score", "tcess"), "the score tcess needs gate weights"),
        (("--task", "all", "--score", "easy-ep"), "the score easy-ep needs gate weights"),
        (("--task", "all", "--score", "norms"), "invalid choice: 'norms'"),
    ],
)
def test_mistakes_of_hot(cli: Run, tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    made = cli(
        "trace", "synth", "topics", "-o", tmp_path / "t", "--tokens", 8, "--layers", 2,
        "--experts", 4, "--top-k", 2, "--requests", 2,
    )  # fmt: skip
    assert made.code == 0, made.err
    ran = cli("trace", "hot", tmp_path / "t", "-o", tmp_path / "pins.json", *options)
    assert said in ran.mistake


def test_hot_experts_by_gate_weights(cli: Run, tmp_path: Path) -> None:
    """Expert 1 is used twice, and has a tenth of the gate weights of both tokens."""
    trace = small.of([[[1, 0]], [[1, 2]]], [[1, 1]])
    weights = np.array([[[0.1, 0.9]], [[0.1, 0.9]]], np.float16)
    save(dataclasses.replace(trace, labels=("a",), weights=weights), tmp_path / "t")
    for score, experts in (("counts", [0, 1]), ("tcess", [0, 2])):
        options = ("--task", "a", "--share", "50%", "--score", score)
        assert cli("trace", "hot", tmp_path / "t", "-o", tmp_path / "p", *options).code == 0
        assert json.loads((tmp_path / "p").read_text())["tasks"]["a"]["experts"] == [experts]


def test_a_pinned_run_says_so_and_refuses_too_many(
    cli: Run, source: Path, prompts: Path, tmp_path: Path
) -> None:
    first, pins = tmp_path / "first", tmp_path / "pins.json"
    options = ("--prompts", prompts, "--cache", "50%", *ANSWER)
    assert cli("trace", "record", source, "-o", first, *options).code == 0
    assert cli("trace", "hot", first, "--task", "code", "--share", "50%", "-o", pins).code == 0
    ran = cli("run", source, "def g", "--cache", "60%", "--pin", pins, "--verbose", *ANSWER)
    assert ran.code == 0, ran.err
    assert f"--pin {pins}" in ran.err
    ran = cli("run", source, "def g", "--cache", "50%", "--pin", pins, *ANSWER)
    assert "pinned experts leave none of" in ran.mistake
    ran = cli("run", source, "def g", "--cache", "50%", "--pin", prompts, *ANSWER)
    assert "is no file of pinned experts" in ran.mistake
