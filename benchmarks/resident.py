"""Decode and prefill with everything resident: Greenroom, its peers, and a time breakdown.

    python benchmarks/resident.py bench-data [--llama-bench PATH] [--quick]

No memory limit; Greenroom's cache holds all experts (cache="100%"). Every run is a process of its
own: load (cold), warm-up (Greenroom: prompts until one reads nothing, so that all experts are in
memory), then --inner times a prompt of 128 random tokens and --tokens decode passes; medians are
over the inner repeats from the second on. The first calls of the kernels fall into the
warm-up. Runs are interleaved; ratios are over pairs of the same repetition.

The breakdown is one more run of each Python engine with timing hooks (breakdown.py): exclusive
milliseconds a decode pass by kind of module.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import defaultdict
from pathlib import Path

from checkpoints import VARIANTS, folder_of
from common import (
    Result,
    commit,
    machine,
    median_of,
    note,
    run_llama_bench,
    run_worker,
    show_ratio,
    table,
)
from floor import ram_bandwidth, token_bytes

ENGINES = ("greenroom", "transformers", "transformers:eager", "llama.cpp")
KINDS = ("layer", "linear", "experts", "router", "attention", "norm", "rest", "total")


def decode_rate(result: Result, tokens: int) -> float:
    """Tokens a second of the median decode pass, from the second inner repeat on."""
    return 1 / statistics.median(result["token_s"][tokens:] or result["token_s"])


def prefill_rate(result: Result, prompt: int) -> float:
    return prompt / statistics.median(result["prefill_s"][1:] or result["prefill_s"])


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[Result]]:
    results: dict[str, list[Result]] = defaultdict(list)
    gguf = folder.with_name(folder.name + ".gguf")
    names = [e for e in args.engines if e != "llama.cpp" or (args.llama_bench and gguf.exists())]
    for repeat in range(args.repeats):
        turn = repeat % len(names)
        for engine in names[turn:] + names[:turn]:
            if engine == "llama.cpp":
                result = run_llama_bench(
                    args.llama_bench, gguf, threads=args.threads, prompt=args.prompt,
                    tokens=args.tokens, repeats=args.inner + 1,
                )  # fmt: skip
            else:
                result = run_worker(
                    engine, folder, threads=args.threads, prompt=args.prompt, tokens=args.tokens,
                    repeats=args.inner + 1, breakdown=int(repeat == 0),
                    options=args.options if engine == "greenroom" else None,
                )  # fmt: skip
            results[engine].append(result)
            outcome = result.get("error") or f"{decode_rate(result, args.tokens):.1f} tokens/s"
            note(f"{repeat + 1}/{args.repeats} {engine}: {outcome}")
    return results


def report(results: dict[str, list[Result]], args: argparse.Namespace, floor_rate: float) -> str:
    def pairs(peer: str, rate: str) -> list[tuple[float, float]]:
        of = decode_rate if rate == "decode" else prefill_rate
        size = args.tokens if rate == "decode" else args.prompt
        both = zip(results["greenroom"], results[peer], strict=False)
        return [(of(a, size), of(b, size)) for a, b in both if "error" not in a | b]

    rows, kinds = [], []
    for engine, runs in results.items():
        decode = median_of(runs, lambda r: decode_rate(r, args.tokens))
        prefill = median_of(runs, lambda r: prefill_rate(r, args.prompt))
        if decode is None or prefill is None:
            rows.append((engine, runs[0]["error"], *["-"] * 5))
            continue
        peak = median_of(runs, lambda r: r.get("peak_rss_bytes", 0) / 1e9)
        rows.append((
            engine, f"{decode:.3g}", f"{decode / floor_rate:.0%}", f"{prefill:.3g}",
            f"{peak:.2f}" if peak else "-",
            show_ratio(pairs(engine, "decode")), show_ratio(pairs(engine, "prefill")),
        ))  # fmt: skip
        parts = next((run["breakdown"] for run in runs if run.get("breakdown")), None)
        if parts:
            kinds.append((engine, *(f"{parts.get(kind, 0):.1f}" for kind in KINDS)))
    rates = table(
        ("engine", "decode tokens/s", "% of floor", "prefill tokens/s", "peak GB",
         "greenroom x, decode", "greenroom x, prefill"),
        rows,
    )  # fmt: skip
    return f"{rates}\n\nMilliseconds a decode pass:\n\n{table(('engine', *KINDS), kinds)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="decode and prefill with everything in memory")
    parser.add_argument("root", type=Path, help="where checkpoints.py made its folders")
    parser.add_argument("--variant", default="zipf1.0", choices=list(VARIANTS))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--inner", type=int, default=3, help="repeats within a process")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--options", default="{}", help="options of greenroom.load, as JSON")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-bench, if you have it")
    parser.add_argument("--quick", action="store_true", help="one repetition")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.inner, args.tokens = 1, 2, 16
    folder = folder_of(args.root, args.variant)
    print(f"commit {commit()}; {machine()}; {args.variant}, {args.threads} threads\n")
    ram, need = ram_bandwidth(args.threads), token_bytes(folder)
    floor_rate = ram / need.total
    results = measure(args, folder)
    print(report(results, args, floor_rate))
    print(
        f"\nFloor of decode: {need.total / 1e6:.0f} MB a token at {ram / 1e9:.1f} GB/s,"
        f" {floor_rate:.1f} tokens/s."
    )


if __name__ == "__main__":
    main()
