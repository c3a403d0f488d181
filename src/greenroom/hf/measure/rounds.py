"""Benchmark several settings of one model in rounds, in which they take turns.

If the machine becomes slower, for example because it heats up, all settings suffer alike.
"""

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
    """Measure all benchmark entries in rounds; each round has its own prompt and order.

    Before the first round, the last prompt is answered as a warm-up that is not measured. Every
    expert cache starts with the experts that the warm-up and earlier rounds used most. No round
    begins after `seconds`, except the first two. `report` is called with each stage.

    Of several entries, one that this model or machine cannot run gets a `skip_reason`. If there is
    only one entry, its error is raised.
    """
    end = time.perf_counter() + seconds
    report("warming up")
    calibrate(harness, entries, prompts[-1], tokens, raw)
    harness.learn()
    single = len(entries) == 1
    if single and entries[0].skip_reason:
        raise UsageError(entries[0].skip_reason)
    for number in range(rounds):
        active = [entry for entry in entries if not entry.skip_reason]
        if not active or (number >= LEAST and time.perf_counter() > end):
            break
        prompt = prompts[number % len(prompts)]
        turn = number % len(active)
        for entry in (*active[turn:], *active[:turn]):
            report(f"round {number + 1}: {entry.name}")
            try:
                _check_co_compute(harness, entry, single)
                harness.attach(entry.config, pins=entry.pins)
            except (UsageError, ModelError, PredictorError) as error:
                if single or number:
                    raise
                entry.skip_reason = str(error)
                continue
            entry.rounds.append(harness.play([prompt], tokens, raw=raw))
        harness.learn()


def _check_co_compute(harness: Harness, entry: Entry, single: bool) -> None:
    """Raise UsageError if a benchmark entry computes on CPU and GPU, and that cannot work here.

    The entry's row would be misleading. A single entry is not checked, since attaching it logs a
    warning.
    """
    if entry.config.uses_host() and not single and (why := co_compute_obstacle(harness.setup)):
        raise UsageError(
            f"--co-compute auto needs a GPU, and room for experts in host memory: {why}"
        )
