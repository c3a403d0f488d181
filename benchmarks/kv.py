"""Kinds of KV cache (`--kv`) side by side: memory, slots, and time per token by context length.

    python benchmarks/kv.py MODEL [--memory SIZE] [--contexts 1024 4096] [--rounds 3]

Each run is a process of its own with one kind, in turns. With --memory, slots and the KV cache
share this budget of the process; without it every expert has a slot. For each length a prompt of
random tokens is read, and --tokens random tokens are decoded after it (as benchmarks/context.py
does). Ratios are `dynamic` over the other kind, of times and of CPU seconds a token: above 1 the
other kind is faster. They have intervals over rounds. The KV cache is counted after the last token.
With --random, keys and values of the prompt are random numbers, which takes no time of a prompt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from common import commit, machine, note, show_ratio, table
from context import decode, measure

import greenroom
from greenroom.config import show_bytes

COLUMNS = (
    "context", "kind", "KV cache", "slots", "hit ratio", "TPOT ms", "dynamic / it",
    "CPU ms a token", "dynamic / it", "TTFT s", "dynamic / it",
)  # fmt: skip
TIMES = ("tpot_s", "cpu_s", "prompt_s")
FILL = 512  # tokens of a block of random keys and values


@torch.inference_mode()
def measure_random(model: Any, context: int, tokens: int) -> dict[str, Any]:
    """Measure decoded tokens after random keys and values of `context - tokens` tokens."""
    setup, random = model.greenroom.setup, torch.Generator().manual_seed(0)
    kind, budget = setup.keys_values.kind, model.greenroom.slot_budget
    if budget is not None:
        budget.reserve(setup.keys_values.held_bytes(context))
    cache, start = kind.cache(model.config, setup.context + 1), time.perf_counter()
    kind.make_growing(cache, setup.context + 1)
    for first in range(0, context - tokens, FILL):
        count = min(FILL, context - tokens - first)
        for number, layer in enumerate(setup.keys_values.layers):
            heads, *widths = layer.shape
            cache.update(*(
                torch.randn(1, heads, count, width, generator=random).to(model.dtype)
                for width in widths
            ), number)  # fmt: skip
    return decode(model, cache, context, tokens, time.perf_counter() - start)


def worker(args: argparse.Namespace) -> None:
    """Measure one kind at every length, and print the rows as JSON."""
    budget: dict[str, Any] = {"memory": args.memory} if args.memory else {"cache": "100%"}
    if args.threads:
        budget["threads"] = args.threads
    model, _ = greenroom.load(
        args.model, kv=args.worker, context=max(args.contexts), pressure="off", **budget
    )
    measure(model, args.tokens + 8, args.tokens)  # whatever is compiled or read at first
    chosen = measure_random if args.random else measure
    print(json.dumps([chosen(model, context, args.tokens) for context in args.contexts]))
    model.greenroom.detach()


def one_run(kind: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, args.model, "--worker", kind, "--tokens", args.tokens,
               "--contexts", *args.contexts]  # fmt: skip
    command += ["--memory", args.memory] * (args.memory is not None)
    command += ["--threads", args.threads] * (args.threads is not None)
    command += ["--random"] * args.random
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{kind}: {done.stderr.strip().splitlines()[-1]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def rows_of(results: dict[str, list[Any]], number: int, context: int) -> list[list[Any]]:
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
            f"{100 * last['hit_ratio']:.1f} %", *cells,
        ])  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model, as for greenroom run")
    parser.add_argument("--memory", help="budget of the process, as 2GiB")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096], metavar="N")
    parser.add_argument("--kinds", nargs="+", default=["int8", "int4"], help="beside dynamic")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="decoded tokens")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--random", action="store_true", help="random keys and values")
    parser.add_argument("--worker", metavar="KIND", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.contexts.sort()
    if args.worker:
        return worker(args)
    kinds = ["dynamic", *args.kinds]
    results: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for number in range(args.rounds):
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            results[kind].append(one_run(kind, args))
        note(f"round {number + 1} of {args.rounds}")
    print(f"commit {commit()}; {machine()}\n\n{args.model}, {args.memory or 'all in slots'}\n")
    print(table(COLUMNS, [
        row for i, context in enumerate(args.contexts) for row in rows_of(results, i, context)
    ]))  # fmt: skip
    return None


if __name__ == "__main__":
    main()
