"""Gain of a warm start: time to 90 % of the steady hit ratio, cold and warm.

    python benchmarks/warm_start.py demo bench-data/moe1.7b-zipf1.0 --cache 25%

One run answers a first prompt and stores its hot set. Then each further prompt, all of them new
to that run, is answered twice, in turns: cold (GREENROOM_LEARNED=off) and warm (with the hot set of
the first run, which is restored after each answer). Tokens are greedy, so both ask for the same
experts.

Steady is the hit ratio of decode's second half, the mean of both. It is reached at the first decode
token after which the next WINDOW tokens together have 90 % of it. `load` is `greenroom.load`
without imports, warm with the reading of the hot set; `in all` is load, prompt, and decode until
steady.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import commit, machine, table

import greenroom
from greenroom.config import SamplingConfig
from greenroom.hf.text.generate import answer
from greenroom.plan.history import files

WINDOW = 8  # decode tokens
ENOUGH = 0.9
PROMPTS = [
    "Once upon a time there was a lighthouse keeper who",
    "The history of the railway begins with",
    "def quicksort(items):\n    ",
    "Question: why is the sky blue at noon and red in the evening?\nAnswer:",
    "The committee met on Tuesday to discuss",
]


def run(model: str, prompt: str, options: argparse.Namespace) -> dict[str, Any]:
    """Load the model and answer once; return seconds, and requests and hits after each pass."""
    start = time.perf_counter()
    loaded, tokenizer = greenroom.load(model, cache=options.cache, prefetch=options.prefetch)
    took = {"load_s": time.perf_counter() - start, "warmed": loaded.greenroom.warm_experts}
    passes: list[tuple[int, int]] = []

    def note(*_: object) -> None:
        stats = loaded.greenroom.stats()
        passes.append((stats.expert_requests, stats.expert_hits))

    loaded.register_forward_hook(note)
    try:
        sampling = SamplingConfig(max_new_tokens=options.tokens, temperature=0)
        loaded.generation_config.eos_token_id = None  # answers of one length
        loaded_answer = answer(
            loaded, tokenizer, prompt, sampling, raw=True, context=options.tokens + 256
        )
    finally:
        loaded.greenroom.detach()
    return took | {"ttft_s": loaded_answer.ttft_s, "gaps": loaded_answer.gaps, "passes": passes}


def ratio(passes: list[tuple[int, int]], begin: int, end: int) -> float:
    """Hit ratio of the passes begin .. end - 1."""
    before, after = passes[begin - 1], passes[end - 1]
    return (after[1] - before[1]) / (after[0] - before[0])


def reached(one: dict[str, Any], steady: float) -> int | None:
    """Decoded tokens before 90 % of the steady hit ratio is reached; None if it never is."""
    passes = one["passes"]
    for first in range(1, len(passes) - WINDOW + 1):
        if ratio(passes, first, first + WINDOW) >= ENOUGH * steady:
            return first - 1
    return None


def compare(model: str, options: argparse.Namespace) -> list[list[str]]:
    """A row of medians for each way to start, and the tokens of each prompt."""
    os.environ.pop(files.SWITCH, None)
    run(model, PROMPTS[0], options)
    left = files.cache_folder() / "learned"
    hot_set_copy = shutil.copytree(left, left.with_name("kept"))
    rows: dict[str, list[list[float]]] = {"cold": [], "warm": []}
    for n, prompt in enumerate(PROMPTS[1:]):
        pair = {}
        for way in ("cold", "warm") if n % 2 else ("warm", "cold"):
            os.environ[files.SWITCH] = "off" if way == "cold" else "on"
            pair[way] = run(model, prompt, options)
            shutil.copytree(hot_set_copy, left, dirs_exist_ok=True)
        steady = statistics.mean(
            ratio(one["passes"], options.tokens // 2, options.tokens) for one in pair.values()
        )
        for way, one in pair.items():
            rows[way].append(figures(one, steady))
    return [
        [
            Path(model).name,
            way,
            *(f"{statistics.median(column):.3g}" for column in zip(*figures_found, strict=True)),
            ", ".join(f"{each[3]:g}" for each in figures_found),
        ]
        for way, figures_found in rows.items()
    ]


def figures(one: dict[str, Any], steady: float) -> list[float]:
    """The columns of the table; infinite if the steady hit ratio is never reached."""
    tokens, all_s = reached(one, steady), float("inf")
    if tokens is not None:
        all_s = one["load_s"] + one["ttft_s"] + sum(one["gaps"][:tokens])
    first = ratio(one["passes"], 1, 1 + WINDOW) / steady
    return [
        one["warmed"],
        one["load_s"],
        one["ttft_s"],
        float("inf") if tokens is None else tokens,
        all_s,
        100 * first,
        100 * steady,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="time to the steady hit ratio, cold and warm")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--prefetch", default="off")
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    print(f"commit {commit()}; {machine()}; cache {options.cache}, prefetch {options.prefetch}\n")
    header = ["model", "start", "experts read", "load s", "TTFT s", "tokens to 90 %", "in all s",
              f"first {WINDOW}, % of steady", "steady %", "tokens of each prompt"]  # fmt: skip
    rows = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as home:
            os.environ["XDG_CACHE_HOME"] = home
            rows += compare(model, options)
    print(table(header, rows))


if __name__ == "__main__":
    main()
