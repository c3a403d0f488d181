"""Benchmark rounds: settings of one model take turns on real tokens, so that a machine that slows
down slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from greenroom.errors import ModelError, PredictorError, UsageError
from greenroom.hf.measure.calibration import calibrate
from greenroom.hf.measure.entries import LEAST, Entry
from greenroom.hf.measure.harness import Harness
from greenroom.hf.memory.devices import co_compute_obstacle
from greenroom.trace.prompts import Prompt

PROMPTS = tuple(
    Prompt(text, label)
    for label, text in (
        ("general", "Explain how a library decides which books to keep on the front shelves."),
        ("coding", "def merge(a, b):\n    # merges two sorted lists into one sorted list\n"),
        ("math", "A train leaves at nine and travels 180 km in two hours and a half. How fast"
                 " is it, and when does it arrive if it goes on for another 90 km?"),
        ("story", "Once upon a time there was a stage manager who could not find the lead"),
        ("facts", "List the planets of the solar system with one fact about each of them."),
        ("letter", "Dear neighbours, next Saturday we would like to invite all of you to"),
    )
)  # fmt: skip


def run_rounds(
    harness: Harness,
    entries: Sequence[Entry],
    *,
    prompts: Sequence[Prompt],
    tokens: int,
    rounds: int,
    seconds: float = float("inf"),
    raw: bool,
    report: Callable[[str], object] = lambda text: None,
) -> None:
    """Rounds of all entries, each on the next prompt, begun by another entry each time. No round
    is begun after `seconds`, but the first LEAST. What a round asked for is what caches begin with
    in the next one; the last prompt, which is not counted, is played for the first.

    Of several entries those that this model or machine cannot have are left out, and say why; the
    error of a single one is raised.
    """
    end = time.perf_counter() + seconds
    report("warming up")
    calibrate(harness, entries, prompts[-1], tokens, raw)
    harness.learn()
    alone = len(entries) == 1
    if alone and entries[0].skip_reason:
        raise UsageError(entries[0].skip_reason)
    for number in range(rounds):
        there = [entry for entry in entries if not entry.skip_reason]
        if not there or (number >= LEAST and time.perf_counter() > end):
            break
        prompt = prompts[number % len(prompts)]
        turn = number % len(there)
        for entry in (*there[turn:], *there[:turn]):
            report(f"round {number + 1}: {entry.name}")
            try:
                _check_both(harness, entry, alone)
                harness.attach(entry.config, pins=entry.pins)
            except (UsageError, ModelError, PredictorError) as error:
                if alone or number:
                    raise
                entry.skip_reason = str(error)
                continue
            entry.rounds.append(harness.play([prompt], tokens, raw=raw))
        harness.learn()


def _check_both(harness: Harness, entry: Entry, alone: bool) -> None:
    """UsageError where an entry beside others would have misses computed by a second processor, and
    there is none: its row would say nothing of that. Alone it is told so by its run."""
    if entry.config.uses_host() and not alone and (why := co_compute_obstacle(harness.setup)):
        raise UsageError(
            f"misses computed where they are need a GPU, and room for experts in host memory: {why}"
        )
