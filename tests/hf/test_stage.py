"""One load, many settings: each has the slots for itself, and all give the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from greenroom.config import LoadConfig
from greenroom.core.machine import name_of
from greenroom.errors import UsageError
from greenroom.hf import contest as contests
from greenroom.hf import rehearse
from greenroom.hf import settled as settling
from greenroom.hf.contest import Entry, contest, entry, winner
from greenroom.hf.load import load_with
from greenroom.hf.rehearse import Shape, rehearsed
from greenroom.hf.report import startup_line
from greenroom.hf.settled import settled
from greenroom.hf.stage import Session, Stage
from greenroom.plan import kept
from greenroom.runtime.measure import host
from greenroom.trace.prompts import Prompt
from tests.hf.test_split import packed
from tests.models import cached_tiny
from tests.plan.models import MACHINE

BASE = LoadConfig(cache="50%", prefetch="off", device="cpu", context=128)
PROMPTS = [Prompt("a few words", "one"), Prompt("and some other ones", "two")]


@pytest.fixture
def stage(no_threads_left: None):
    made = Stage(str(cached_tiny("qwen3_moe", tokenizer=True)), BASE)
    try:
        yield made
    finally:
        made.close()


def test_settings_take_turns_and_give_the_same_tokens(stage: Stage):
    entries = [
        entry("plain", BASE, {"policy": "lru"}),
        entry("ours", BASE, {"policy": "next-use", "prefetch": "markov"}),
        entry("apart", BASE, {"policy": "lcp", "scope": "per-layer"}),
    ]
    said: list[str] = []
    contest(stage, entries, prompts=PROMPTS, tokens=16, rounds=2, raw=True, said=said.append)
    assert said == [
        "warming up",
        "round 1: plain", "round 1: ours", "round 1: apart",
        "round 2: ours", "round 2: apart", "round 2: plain",
    ]  # fmt: skip
    for each in entries:
        row = each.as_row(entries[0])
        assert row["same_tokens"]
        assert row["rounds"] == 2
        assert 0 <= row["miss_ratio"] <= 1
        low, high = row["ratio"][1:]
        assert low <= row["ratio"][0] <= high
    assert entries[0].as_row(entries[0])["ratio"] == (1, 1, 1)


def test_counts_are_of_the_passes_that_are_counted(stage: Stage):
    greenroom = stage.attach(BASE)
    done = stage.play(PROMPTS[:1], 16, settle=6, raw=True)
    tokens = len(done.tokens[0])
    assert len(done.gaps) == tokens - 1 - 6
    layers, top_k = len(stage.parts.catalog.layers), 2
    assert done.requests == len(done.gaps) * layers * top_k
    assert 0 < done.misses <= done.requests
    counts = greenroom.driver.scheduler.counts
    assert counts.requests > done.requests  # the prompt, and the first tokens after it
    assert done.bytes_read == done.misses * stage.parts.catalog.expert_bytes // stage.experts


def test_an_answer_shorter_than_what_is_not_counted(stage: Stage):
    stage.attach(BASE)
    with pytest.raises(UsageError, match=r"the first 8 tokens of an answer are not counted.*raise"):
        stage.play(PROMPTS[:1], 4, settle=8, raw=True)


def test_an_answer_that_the_model_would_end_is_played_to_its_last_token(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    stage.attach(BASE)
    free = stage.play(PROMPTS[:1], 16, raw=True)
    monkeypatch.setattr(stage.model.generation_config, "eos_token_id", free.tokens[0][1])
    done = stage.play(PROMPTS[:1], 16, raw=True)
    assert len(done.tokens[0]) == 16
    assert done.tpot_s > 0


def test_caches_begin_with_what_was_learned(stage: Stage):
    assert stage.attach(BASE).driver.scheduler.cache.residents().size == 0
    stage.play(PROMPTS, 16, raw=True)
    assert stage.attach(BASE).driver.scheduler.cache.residents().size == 0  # not learned yet
    stage.learn()
    again = stage.attach(BASE)
    assert again.driver.scheduler.cache.residents().size > 0
    assert again.driver.asked.sum() == 0
    whole = stage.attach(BASE, stage.experts)
    stage.fill()
    assert whole.driver.scheduler.cache.residents().size == stage.experts


def test_no_round_begins_after_the_time(stage: Stage):
    entries = [entry("plain", BASE, {"policy": "lru"})]
    contest(stage, entries, prompts=PROMPTS, tokens=16, rounds=5, seconds=1e-9, raw=True)
    assert len(entries[0].rounds) == contests.LEAST


def session(tpot: float, *others: float) -> Session:
    gaps = (tpot,) * 8 + tuple(other for other in others for _ in range(8))
    return Session((0.1,), gaps, ((1, 2),), 16, 8, 800, 0.02, 0.4)


def test_plain_wins_unless_another_is_surely_faster():
    plain = Entry("plain", BASE, [session(t) for t in (1.0, 1.1, 1.0)])
    sure = Entry("sure", BASE, [session(t) for t in (0.9, 1.0, 0.88)])
    lucky = Entry("lucky", BASE, [session(t) for t in (0.5, 1.2, 1.05)])
    assert winner([plain, sure], plain) is sure
    assert winner([plain, lucky], plain) is plain
    assert winner([plain], plain) is plain


def test_one_round_is_not_sure_and_pairs_of_the_same_tokens_are():
    """A round of a machine that slowed down says nothing; two rounds of many tokens may."""
    plain = Entry("plain", BASE, [session(1.0, 1.2, 0.9)])
    fast = Entry("fast", BASE, [session(0.9, 1.1, 0.8)])
    assert winner([plain, fast], plain) is plain
    plain.rounds.append(session(1.1, 1.0, 1.3))
    fast.rounds.append(session(1.0, 0.9, 1.2))
    assert winner([plain, fast], plain) is fast
    fast.rounds[1] = session(1.0, 0.9, 2.0)
    assert winner([plain, fast], plain) is plain


def test_a_round_as_a_plan_takes_it():
    (run,) = Entry("plain", BASE, [session(0.5)]).observed(50)
    assert (run.seconds, run.stall, run.fetched, run.carried, run.busy) == (
        0.5, 0.0025, 2.0, 800, 0.4
    )  # fmt: skip


def test_built_in_prompts_differ():
    assert len({p.content for p in contests.PROMPTS}) == len(contests.PROMPTS)


def test_a_rehearsal_tells_what_matrices_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shape = Shape(hidden=64, inner=64, layers=2, experts=8, top_k=2, words=64)
    monkeypatch.setattr(rehearse, "SMALLEST", shape)
    found = rehearsed(MACHINE, tmp_path, shape).processors[0]
    assert found.layer >= 0
    assert found.fetch >= 0
    assert found.copy >= 0
    assert found.wake >= 0
    assert found.expert.at(1 << 20).seconds(1) <= MACHINE.processors[0].expert.at(1 << 20).seconds(
        1
    )
    assert list(tmp_path.iterdir()) == []  # the model is gone


def test_every_processor_has_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On the fake device in a GPU's place; each says what it takes beyond its own matrices."""
    shape = Shape(hidden=64, inner=64, layers=2, experts=8, top_k=2, words=64)
    monkeypatch.setattr(rehearse, "SMALLEST", shape)
    known, asked = rehearse.sessions, []

    def sessions(model: str, shape: Shape, device: str) -> tuple[Session, Session, Session]:
        asked.append(device)
        return known(model, shape, device)

    monkeypatch.setattr(rehearse, "sessions", sessions)
    (cpu,) = MACHINE.processors
    gpu = replace(cpu, name="gpu", memory="device")
    both = replace(MACHINE, processors=(cpu, gpu))
    found = rehearsed(both, tmp_path, shape, {"host": "cpu", "device": "fake"})
    assert asked == ["cpu", "fake"]
    assert [each.name for each in found.processors] == ["cpu", "gpu"]
    assert found.processors != both.processors
    assert list(tmp_path.iterdir()) == []


def test_what_waits_cost_is_told_by_two_runs_that_wait():
    """Ten tokens with three misses each: waits of 1 ms against 2 ms; of longer ones 4 ms count."""

    def ran(wait: float, computed: float) -> Session:
        stall = 10 * 3 * wait
        gaps = (computed + 3 * wait,) * 10
        return Session((0.1,), gaps, ((1,),), 80, 30, 0, stall, 0.0)

    short, long = ran(1e-3, 0.010), ran(2e-3, 0.0106)
    assert rehearse.waited(long) == pytest.approx(6e-3)
    assert rehearse.waiting(short, long) == pytest.approx(0.2)
    assert rehearse.waiting(long, short) == 0
    assert rehearse.waiting(short, ran(1.0, 0.0118)) == pytest.approx(0.2)
    assert rehearse.waiting(short, ran(2e-3, 0.009)) == 0


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(kept.SWITCH, "on")
    return str(cached_tiny("qwen3_moe", tokenizer=True))


def keep(fingerprint: str, capacity: int, machine: str | None = None, **options: str) -> None:
    found = kept.Kept(capacity, options, "tune", 0.08, 0.1, "2026-01-02")
    name = machine or name_of(host())
    kept.save(fingerprint, name, kept.Known().with_setting(found))


def test_a_run_takes_what_was_measured_and_says_so(remembered: str, no_threads_left: None):
    config = LoadConfig(cache="50%", device="cpu", kernels="eager")
    model, _ = load_with(remembered, config, remember=True)
    digest = model.greenroom.parts.fingerprint
    assert "settings" not in startup_line(remembered, model, config, verbose=True)
    model.greenroom.detach()
    keep(digest, 8, policy="lcp", scope="per-layer", prefetch="off")
    model, _ = load_with(remembered, config, remember=True)
    line = startup_line(remembered, model, config, verbose=True)
    model.greenroom.detach()
    assert "settings measured by tune on 2026-01-02, 20% less time a token than LRU" in line
    assert "--policy lcp" in line
    assert "--prefetch off" in line
    assert "--scope per-layer" in line


def test_a_run_takes_a_split_that_was_measured(remembered: str, no_threads_left: None):
    folder = str(packed())
    config = LoadConfig(cache="60%", device="cpu", kernels="eager")
    model, _ = load_with(folder, config, remember=True)
    made, capacity = model.greenroom.parts, model.greenroom.capacity
    model.greenroom.detach()
    assert made.split is None
    keep(made.fingerprint, capacity, policy="lru", scope="per-layer", prefetch="off", split="0.5")
    model, _ = load_with(folder, config, remember=True)
    line, parts = startup_line(folder, model, config, verbose=True), model.greenroom.parts
    model.greenroom.detach()
    assert parts.split is not None
    assert parts.split.tops[0] < parts.split.whole
    assert "settings measured by tune" in line
    flag = line.partition("--split ")[2].split()[0]
    assert [float(share) for share in flag.split(",")] == pytest.approx([0.5, 0.5], abs=0.15)
    skipping = LoadConfig(cache="60%", device="cpu", kernels="eager", skip_below=0.1)
    model, _ = load_with(folder, skipping, remember=True)
    assert model.greenroom.parts.split is None  # misses of split experts are not judged
    model.greenroom.detach()


@pytest.mark.parametrize(
    ("config", "capacity", "machine"),
    [
        (LoadConfig(cache="50%", device="cpu", policy="fifo"), 8, None),  # the user said it
        (LoadConfig(cache="50%", device="cpu", prefetch="off"), 8, None),
        (LoadConfig(cache="50%", device="cpu"), 12, None),  # of another size
        (LoadConfig(cache="50%", device="cpu"), 8, "abacus"),  # of another machine
        (LoadConfig(cache="100%", device="cpu"), 16, None),  # nothing to choose
    ],
)
def test_what_is_kept_stays_out_of_the_way(
    remembered: str, config: LoadConfig, capacity: int, machine: str | None, no_threads_left: None
):
    model, _ = load_with(remembered, LoadConfig(cache="50%", device="cpu"), remember=False)
    parts = model.greenroom.parts
    model.greenroom.detach()
    keep(parts.fingerprint, capacity, machine, policy="lcp", prefetch="off")
    model, _ = load_with(remembered, config, remember=True)
    assert model.greenroom.parts.chosen == ""
    assert model.greenroom.driver.scheduler.cache.policy.name != "lcp"
    model.greenroom.detach()


def test_nothing_is_taken_where_nothing_is_remembered(remembered: str, no_threads_left: None):
    config = LoadConfig(cache="50%", device="cpu")
    model, _ = load_with(remembered, config, remember=False)
    parts = model.greenroom.parts
    model.greenroom.detach()
    keep(parts.fingerprint, 8, policy="lcp")
    assert settled(parts, config, 8, 2) is parts
    assert settling.TOLD[0] == "policy"
    assert np.isfinite(parts.capacity)
