"""Time per token and slots by context length (MoE-Infinity, figure 8), in one process.

    python benchmarks/context.py demo --least 25% [--options '{"read_limit": "50MB"}']
    python benchmarks/context.py bench-data/moe1.7b-zipf1.0 --memory 2GiB --contexts 512 4096 16384

Slots and the KV cache share one budget: `--memory` of the process, or the one that leaves `--least`
of the experts their slots when the longest context is full. For each length a prompt of random
tokens is read, in blocks of 512, and `--tokens` random tokens are decoded after it, so that every
length is asked for the same work. After all of them a short prompt shows that slots come back.

A row: tokens of context, slots at the end, bytes of slots and of the KV cache, their sum with the
rest against the budget, hit ratio and median time of the decoded tokens, time of the prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import commit, machine
from papers.common import COLOURS, figure, save, table

import greenroom
from greenroom.config import Amount, show_bytes
from greenroom.hf.kv import cache as kv
from greenroom.runtime.memory.system import peak_rss_bytes, rss_bytes

HEADER = (
    "context",
    "slots",
    "of slots",
    "of KV cache",
    "process",
    "hit ratio",
    "TPOT ms",
    "TTFT s",
)


def ids(model: Any, tokens: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(tokens)
    return torch.randint(2, model.config.vocab_size, (1, tokens), generator=draw)


@torch.inference_mode()
def measure(model: Any, context: int, tokens: int) -> dict[str, Any]:
    """Measure a prompt that fills the context but `tokens`, and that many decoded tokens."""
    cache = None
    start = time.perf_counter()
    for block in ids(model, context - tokens).split(model.greenroom.setup.prompt_block, 1):
        out = model(block, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
    return decode(model, cache, context, tokens, time.perf_counter() - start)


def decode(model: Any, cache: Any, context: int, tokens: int, prompt_s: float) -> dict[str, Any]:
    """Measure random tokens decoded after a prompt that took `prompt_s` seconds."""
    room, times = model.greenroom, []
    room.reset_stats()
    cpu = time.process_time()
    for token in ids(model, tokens).split(1, 1):
        start = time.perf_counter()
        model(token, past_key_values=cache, use_cache=True)
        times.append(time.perf_counter() - start)
    cpu_s, stats = (time.process_time() - cpu) / tokens, room.stats()
    return {
        "context": context,
        "slots": stats.capacity,
        "slots_bytes": stats.capacity * stats.slot_bytes,
        "kv_bytes": kv.held_bytes(cache),
        "rss_bytes": rss_bytes(),
        "hit_ratio": stats.hit_ratio,
        "read_bytes": stats.bytes_read / tokens,
        "tpot_s": statistics.median(times),
        "cpu_s": cpu_s,
        "prompt_s": prompt_s,
    }


def prepared(args: argparse.Namespace) -> Any:
    """Load the model with the requested budget."""
    options = json.loads(args.options)
    model, _ = greenroom.load(
        args.model, memory=args.memory or "auto", context=max(args.contexts), **options
    )
    room = model.greenroom
    if args.memory is None:
        slots = max(1, Amount.parse(args.least, "--least").of(room.setup.catalog.experts))
        room.use_slot_budget(room.slot_budget.for_slots(slots))
    measure(model, args.tokens + 8, args.tokens)  # whatever is compiled or read at first
    return model


def draw(rows: Sequence[dict[str, Any]], experts: int, args: argparse.Namespace) -> None:
    fig, axes = figure(1, 2, 7.0, 2.6)
    contexts = [row["context"] for row in rows]
    for axis, values, label, colour in (
        (axes[0, 0], [1e3 * row["tpot_s"] for row in rows], "time a token, ms", "LRU"),
        (axes[0, 1], [row["slots"] / experts for row in rows], "share of experts in slots", "LFU"),
    ):
        axis.plot(contexts, values, marker="o", markersize=3, color=COLOURS[colour])
        axis.set(xscale="log", xlabel="context, tokens", ylabel=label)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
    save(fig, args, "context")


def main() -> None:
    parser = argparse.ArgumentParser(description="context length against TPOT and slots")
    parser.add_argument("model", help="a folder, or demo")
    parser.add_argument("--memory", help="budget of the process, as 2GiB")
    parser.add_argument("--least", default="25%", help="else: experts in slots at the longest")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--tokens", type=int, default=32, help="decoded after each prompt")
    parser.add_argument("--options", default="{}", help="options of greenroom.load, as JSON")
    parser.add_argument("--out", type=Path, default=Path("bench-data/papers"), metavar="DIR")
    args = parser.parse_args()
    model = prepared(args)
    room = model.greenroom
    rows = [measure(model, context, args.tokens) for context in sorted(args.contexts)]
    after = measure(model, min(args.contexts), args.tokens)
    experts = room.setup.catalog.experts
    table(args, "context", HEADER, [
        (
            row["context"], f"{row['slots']} of {experts}", show_bytes(row["slots_bytes"]),
            show_bytes(row["kv_bytes"]), show_bytes(row["rss_bytes"]), row["hit_ratio"],
            1e3 * row["tpot_s"], row["prompt_s"],
        )
        for row in [*rows, after]
    ])  # fmt: skip
    print(
        f"budget {show_bytes(room.slot_budget.budget)}, peak {show_bytes(peak_rss_bytes())};"
        f" the last row is after the others. {commit()}; {machine()}"
    )
    draw(rows, experts, args)
    room.detach()


if __name__ == "__main__":
    main()
