"""One load, many settings: each has the slots for itself, and all give the same tokens."""

from __future__ import annotations

from dataclasses import replace

from greenroom.hf.measure.entries import LEAST, Entry
from greenroom.hf.measure.harness import Harness
from greenroom.hf.measure.rounds import PROMPTS as BUILT_IN
from greenroom.hf.measure.rounds import run_rounds
from greenroom.trace.prompts import Prompt
from tests.hf.measure.conftest import BASE

PROMPTS = [Prompt("a few words", "one"), Prompt("and some other ones", "two")]


def test_settings_take_turns_and_give_the_same_tokens(harness: Harness):
    entries = [
        Entry("plain", replace(BASE, policy="lru")),
        Entry("ours", replace(BASE, policy="next-use", prefetch="markov")),
        Entry("apart", replace(BASE, policy="lcp", scope="per-layer")),
    ]
    stages: list[str] = []
    run_rounds(
        harness, entries, prompts=PROMPTS, tokens=16, rounds=2, raw=True, report=stages.append
    )
    assert stages == [
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


def test_no_round_begins_after_the_time(harness: Harness):
    entries = [Entry("plain", replace(BASE, policy="lru"))]
    run_rounds(harness, entries, prompts=PROMPTS, tokens=16, rounds=5, seconds=1e-9, raw=True)
    assert len(entries[0].rounds) == LEAST


def test_built_in_prompts_differ():
    assert len({p.content for p in BUILT_IN}) == len(BUILT_IN)
