"""Kinds of KV cache (`--kv`) side by side: memory, slots, and time per token by context length.

    python benchmarks/kv.py MODEL [--contexts 1024 4096] [--rounds 8]
    python benchmarks/kv.py MODEL --memory 8GiB --contexts 32768 --rounds 3

Without --memory every expert has a slot, and one process has a cache of each kind: a round computes
a prompt of random tokens with each, and decodes --tokens random tokens after it, in turns of 8.
With --memory slots and the KV cache share this budget of a process, so each kind has processes of
its own, in turns; keys and values of the prompt are random numbers, which takes no time of a
prompt.

Ratios are `dynamic` over the other kind, of times and of CPU seconds: above 1 the other kind is
faster. They have intervals over turns, or over rounds. The KV cache is that after the last token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

# isort: off
import greenroom  # before torch: it sets how OpenMP's threads wait

import numpy as np
import torch

# isort: on
from common import commit, machine, note, show_ratio, table
from context import decode, ids, measure

from greenroom.config import show_bytes
from greenroom.hf.kv.cache import truncate
from greenroom.hf.kv.kinds import CacheKind

COLUMNS = (
    "context", "kind", "KV cache", "slots", "MB read a token", "TPOT ms", "dynamic / it",
    "CPU ms a token", "dynamic / it", "prompt s", "dynamic / it",
)  # fmt: skip
TIMES = ("tpot_s", "cpu_s", "prompt_s")
FILL = 512  # tokens of a block of random keys and values
BLOCK = 8  # tokens that a kind decodes before it is another's turn

Rows = list[dict[str, Any]]


def random_cache(model: Any, tokens: int) -> Any:
    """Return a KV cache with random keys and values of some tokens."""
    setup, random = model.greenroom.setup, torch.Generator().manual_seed(0)
    kind, budget = setup.keys_values.kind, model.greenroom.slot_budget
    budget.reserve(setup.keys_values.held_bytes(setup.context))
    cache = kind.cache(model.config, setup.context + 1)
    kind.make_growing(cache, setup.context + 1)
    for first in range(0, tokens, FILL):
        count = min(FILL, tokens - first)
        for number, layer in enumerate(setup.keys_values.layers):
            heads, *widths = layer.shape
            cache.update(*(
                torch.randn(1, heads, count, width, generator=random).to(model.dtype)
                for width in widths
            ), number)  # fmt: skip
    return cache


@torch.inference_mode()
def worker(args: argparse.Namespace) -> None:
    """Measure one kind within a budget at every length, and print the rows as JSON."""
    model, _ = greenroom.load(
        args.model, kv=args.worker, context=max(args.contexts), pressure="off",
        memory=args.memory, threads=args.threads,
    )  # fmt: skip
    measure(model, args.tokens + 8, args.tokens)  # whatever is compiled or read at first
    rows = []
    for context in args.contexts:
        cache = random_cache(model, context - args.tokens)
        decode(model, cache, context, args.tokens, 0.0)  # the slots fill
        truncate(cache, context - args.tokens)
        rows.append(decode(model, cache, context, args.tokens, float("nan")))
        del cache
    print(json.dumps(rows))
    model.greenroom.detach()


def run_worker(kind: str, args: argparse.Namespace) -> Rows:
    command = [sys.executable, __file__, args.model, "--worker", kind, "--tokens", args.tokens,
               "--memory", args.memory, "--contexts", *args.contexts]  # fmt: skip
    command += ["--threads", args.threads] * (args.threads is not None)
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{kind}: {done.stderr.strip().splitlines()[-1]}")
    rows: Rows = json.loads(done.stdout.splitlines()[-1])
    return rows


def within_a_budget(kinds: list[str], args: argparse.Namespace) -> dict[str, list[Rows]]:
    """Measure each kind in processes of its own, in turns: rows by round and context."""
    results: dict[str, list[Rows]] = {kind: [] for kind in kinds}
    for number in range(args.rounds):
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            results[kind].append(run_worker(kind, args))
        note(f"round {number + 1} of {args.rounds}")
    return results


@torch.inference_mode()
def read_prompt(model: Any, cache: Any, tokens: int) -> float:
    """Compute a prompt with an empty cache; return the seconds."""
    begin = time.perf_counter()
    for block in ids(model, tokens).split(model.greenroom.setup.prompt_block, 1):
        model(block, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - begin


@torch.inference_mode()
def decode_in_turns(
    model: Any, caches: dict[str, Any], context: int, tokens: int, first: int
) -> list[dict[str, dict[str, Any]]]:
    """Decode blocks of tokens after one prompt, of all kinds in turns: rows by block and kind.

    The turns of prompts begin with kind number `first`.
    """
    kinds, prompt = list(caches), context - BLOCK
    order = kinds[first % len(kinds) :] + kinds[: first % len(kinds)]
    seconds = {kind: read_prompt(model, caches[kind], prompt) for kind in order}
    blocks = []
    for number in range(1 + max(1, tokens // BLOCK)):
        rows = {}
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            rows[kind] = decode(model, caches[kind], context, BLOCK, seconds[kind])
            truncate(caches[kind], prompt)
        blocks.append(rows)
    for cache in caches.values():
        truncate(cache, 0)
    return blocks[1:]  # the first one warms up


def all_in_slots(kinds: list[str], args: argparse.Namespace) -> dict[str, list[Rows]]:
    """Measure all kinds in one process: rows by block of tokens and context."""
    room = max(args.contexts)
    model, _ = greenroom.load(
        args.model, cache="100%", context=room, pressure="off", threads=args.threads
    )
    caches = {kind: CacheKind(kind).cache(model.config, room + 1) for kind in kinds}
    decode_in_turns(model, caches, min(args.contexts), args.tokens, 0)
    results: dict[str, list[Rows]] = {kind: [] for kind in kinds}
    for number in range(args.rounds):
        of_contexts = [
            decode_in_turns(model, caches, each, args.tokens, number) for each in args.contexts
        ]
        for blocks in zip(*of_contexts, strict=True):
            for kind in kinds:
                results[kind].append([rows[kind] for rows in blocks])
        note(f"round {number + 1} of {args.rounds}")
    model.greenroom.detach()
    return results


def rows_of(results: dict[str, list[Rows]], number: int, context: int) -> list[list[Any]]:
    """Return the table's rows for one length: one for each kind."""
    rows = []
    for kind in results:
        measured, plain = ([each[number] for each in results[k]] for k in (kind, "dynamic"))
        last, cells = measured[-1], list[str]()
        for name in TIMES:
            scale = 1 if name == "prompt_s" else 1e3
            cells.append(f"{scale * np.median([each[name] for each in measured]):.2f}")
            pairs = [(a[name], b[name]) for a, b in zip(plain, measured, strict=True)]
            cells.append("" if kind == "dynamic" else show_ratio(pairs))
        rows.append([
            context, kind, show_bytes(last["kv_bytes"]), last["slots"],
            f"{last['read_bytes'] / 1e6:.0f}", *cells,
        ])  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model, as for greenroom run")
    parser.add_argument("--memory", help="budget of a process, as 2GiB")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096], metavar="N")
    parser.add_argument("--kinds", nargs="+", default=["int8", "int4"], help="beside dynamic")
    parser.add_argument("--rounds", type=int, default=8, metavar="N")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="decoded tokens")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--worker", metavar="KIND", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.contexts.sort()
    if args.worker:
        return worker(args)
    kinds = ["dynamic", *args.kinds]
    results = (within_a_budget if args.memory else all_in_slots)(kinds, args)
    print(f"commit {commit()}; {machine()}\n\n{args.model}, {args.memory or 'all in slots'}\n")
    columns = COLUMNS[:-2] if args.memory else COLUMNS
    print(table(columns, [
        row[: len(columns)]
        for i, context in enumerate(args.contexts) for row in rows_of(results, i, context)
    ]))  # fmt: skip
    return None


if __name__ == "__main__":
    main()
