"""Decode with half of the model's size in memory: Greenroom compared with its peers.

    python benchmarks/decode.py bench-data --out decode.jsonl
    python benchmarks/decode.py bench-data --quick                    # under ten minutes
    python benchmarks/decode.py bench-data --llama-bench llama-bench  # adds llama.cpp, needs GGUF

Every run is a process of its own in a memory cgroup of its own, all with the same limit
(--share of the checkpoint's size, page cache counted), and starts cold: the page cache of the
checkpoint is dropped. Within a run: load, a warm-up of 8 + 2 tokens, a prompt of 128 random
tokens, then decode passes of one random token each. So decode starts with whatever the prompt
left in the engine's cache, as it does in real use.

Repetitions are interleaved (engine by engine within a variant, the order turning with each
repetition), and the ratio to a peer is over pairs of the same repetition. Slow peers decode fewer
tokens (--peer-tokens): their rate is a mean over what they did. llama.cpp draws its own random
tokens and starts decoding without the prompt's context.

Floor: resident bytes over RAM bandwidth + missing bytes over disk bandwidth (floor.py, measured at
the start), with the bytes that Greenroom itself read for a token; `% of floor` is how much of that
rate it reaches. Its policy decides the bytes; the floor judges how they were moved. Prefill: the
time of the prompt against the longer of computing it (measured with everything resident) and
reading the bytes that it missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from checkpoints import VARIANTS, folder_of
from common import (
    Result,
    commit,
    decode_rate,
    machine,
    median_of,
    model_bytes,
    note,
    prefill_rate,
    run_llama_bench,
    run_worker,
    show_ratio,
    table,
)
from floor import floor, pass_seconds
from memlimit import CgroupError

LIBRARIES = 900 << 20  # of the limit, what accelerate's share leaves to Python, torch and buffers
Results = dict[tuple[str, str], list[Result]]  # by (variant, engine), one a repetition


def engines(args: argparse.Namespace, folder: Path, limit: int) -> dict[str, Callable[[], Result]]:
    """How to run each engine once."""
    common: dict[str, Any] = {"threads": args.threads, "timeout_s": args.timeout}
    engines_by_name: dict[str, Callable[[], Result]] = {
        "greenroom": lambda: run_worker(
            "greenroom", folder, limit, memory=limit, tokens=args.tokens,
            options=args.options, **common,
        ),
        "accelerate": lambda: run_worker(
            "accelerate", folder, limit, memory=max(limit - LIBRARIES, 100 << 20),
            tokens=args.peer_tokens, scratch=args.scratch, **common,
        ),
    }  # fmt: skip
    gguf = folder.with_name(folder.name + ".gguf")
    if args.llama_bench and gguf.exists():
        env = dict(pair.split("=", 1) for pair in args.llama_env)
        engines_by_name["llama.cpp"] = lambda: run_llama_bench(
            args.llama_bench, gguf, limit, tokens=args.peer_tokens, env=env, **common
        )
    return {name: engines_by_name[name] for name in engines_by_name if name in args.engines}


def measure(args: argparse.Namespace) -> Results:
    """All runs, interleaved; each is appended to --out as it ends."""
    results: Results = defaultdict(list)
    for repeat in range(args.repeats):
        for variant in args.variants:
            folder = folder_of(args.root, variant)
            limit = int(model_bytes(folder) * args.share)
            runs = list(engines(args, folder, limit).items())
            turn = repeat % len(runs)
            for engine, run in runs[turn:] + runs[:turn]:
                result = run() | {"repeat": repeat, "load": os.getloadavg()[0]}
                results[variant, engine].append(result)
                outcome = result.get("error") or f"{decode_rate(result):.2f} tokens/s"
                note(f"{repeat + 1}/{args.repeats} {variant} {engine}: {outcome}")
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps(result) + "\n")
    return results


def pairs(results: Results, variant: str, peer: str) -> list[tuple[float, float]]:
    """(Greenroom, peer) tokens a second of the same repetition, where both ended well."""
    both = zip(results[variant, "greenroom"], results[variant, peer], strict=False)
    return [(decode_rate(a), decode_rate(b)) for a, b in both if "error" not in a | b]


def per_token(result: Result, counter: str) -> float:
    return float(result["decode"][counter] / len(result["token_s"]))


def prompt_s(folder: Path, args: argparse.Namespace) -> float:
    """Seconds to compute a prompt with every expert resident, a lower bound for every cache."""
    result = run_worker("greenroom", folder, threads=args.threads, repeats=3, tokens=1)
    return statistics.median(result["prefill_s"][1:])


def report(
    results: Results, measured: dict[str, Any], variants: list[str], computing: float
) -> str:
    """Three tables: every engine's rates, then Greenroom's decode and prefill and their
    bounds. `computing` is `prompt_s`."""
    speeds, against, prompts = [], [], []
    for variant in variants:
        for (of, engine), runs in results.items():
            if of != variant:
                continue
            decode, prefill = median_of(runs, decode_rate), median_of(runs, _prefill)
            if decode is None or prefill is None:
                speeds.append((variant, engine, runs[0]["error"], *["-"] * 4))
                continue
            disk = median_of(runs, lambda r: r["disk_bytes"] / 1e9)
            peak = median_of(runs, lambda r: (r["peak_bytes"] or 0) / 1e9)
            load = median_of([r for r in runs if "load_s" in r], lambda r: r["load_s"])
            figures = (decode, prefill, load, disk, peak)
            speeds.append((variant, engine, *("-" if x is None else f"{x:.3g}" for x in figures)))
        ours = [r for r in results.get((variant, "greenroom"), []) if "error" not in r]
        if not ours:
            continue
        missing = median_of(ours, lambda r: per_token(r, "bytes_read"))
        stall = median_of(ours, lambda r: per_token(r, "stall_s"))
        hits = median_of(ours, lambda r: r["decode"]["expert_hits"]
                         / r["decode"]["expert_requests"])  # fmt: skip
        rate, bound = median_of(ours, decode_rate), 1 / pass_seconds(measured, missing)
        against.append((
            variant, f"{rate:.3g}", f"{hits:.1%}", f"{missing / 1e6:.1f}", f"{stall * 1e3:.1f}",
            f"{bound:.3g}", f"{rate / bound:.0%}",
            *(show_ratio(pairs(results, variant, peer)) for peer in ("accelerate", "llama.cpp")),
        ))  # fmt: skip
        took = median_of(ours, lambda r: r["prefill_s"][0])
        read = median_of(ours, lambda r: r["prefill"]["bytes_read"])
        least = max(computing, read / measured["disk"])
        prompts.append((
            variant, f"{took:.2f}", f"{read / 1e9:.2f}", f"{computing:.2f}",
            f"{read / measured['disk']:.2f}", f"{took / least:.2f}",
        ))  # fmt: skip
    first = table(
        (
            "variant",
            "engine",
            "decode tokens/s",
            "prefill tokens/s",
            "load s",
            "read GB",
            "peak GB",
        ),
        speeds,
    )
    second = table(
        ("variant", "tokens/s", "hit ratio", "MB read a token", "ms stalled a token",
         "floor tokens/s", "% of floor", "x accelerate", "x llama.cpp"),
        against,
    )  # fmt: skip
    third = table(
        ("variant", "prompt of 128, s", "read GB", "computing alone, s", "reading alone, s",
         "x the longer"),
        prompts,
    )  # fmt: skip
    return f"{first}\n\n{second}\n\n{third}"


COLOURS = {"greenroom": "#0072b2", "accelerate": "#e69f00", "llama.cpp": "#009e73"}
NAMES = {"greenroom": "Greenroom", "accelerate": "transformers + accelerate"}


def plot(results: Results, measured: dict[str, Any], variants: list[str], path: Path) -> None:
    """Bars of every engine's decode rate, and the floor of Greenroom's reads, as a file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ran = {engine for (_, engine), runs in results.items() if runs}
    engines = [name for name in COLOURS if name in ran]
    figure, axes = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
    width = 0.8 / len(engines)
    for i, engine in enumerate(engines):
        rates = [median_of(results.get((v, engine), []), decode_rate) or 0.0 for v in variants]
        places = [n + (i - (len(engines) - 1) / 2) * width for n in range(len(variants))]
        bars = axes.bar(
            places, rates, width * 0.92, color=COLOURS[engine], label=NAMES.get(engine, engine)
        )
        axes.bar_label(bars, [f"{rate:.3g}" for rate in rates], padding=1, fontsize=8, zorder=4,
                       bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip
    for n, variant in enumerate(variants):
        ours = [r for r in results.get((variant, "greenroom"), []) if "error" not in r]
        if ours:
            bound = 1 / pass_seconds(
                measured, median_of(ours, lambda r: per_token(r, "bytes_read"))
            )
            axes.plot([n - 0.42, n + 0.42], [bound, bound], color="#333333", linestyle=":",
                      label=None if n else "floor: memory and disk, not overlapped")  # fmt: skip
    axes.set_xticks(range(len(variants)), [f"routing {variant}" for variant in variants])
    axes.set_ylabel("decode tokens/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.margins(y=0.12)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _prefill(result: Result) -> float:
    return prefill_rate({"prompt_tokens": 128, **result})


def main() -> int:
    parser = argparse.ArgumentParser(
        description="decode under a memory limit, Greenroom beside its peers"
    )
    parser.add_argument("root", type=Path, help="where checkpoints.py made its folders")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--engines", nargs="+", default=["greenroom", "accelerate", "llama.cpp"])
    parser.add_argument("--share", type=float, default=0.5, help="limit / size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--peer-tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run")
    parser.add_argument("--options", default="{}", help="options of greenroom.load, as JSON")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-bench, if you have it")
    parser.add_argument("--llama-env", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--scratch", type=Path, help="where accelerate may write 3.4 GB")
    parser.add_argument("--out", type=Path, help="append every run to this file, as JSON lines")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates into an SVG")
    parser.add_argument("--quick", action="store_true", help="1 repetition of 2 variants")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.variants = 1, ["zipf1.0", "uniform"]
        args.tokens, args.peer_tokens = 48, 4
    if args.plot and find_spec("matplotlib") is None:
        raise SystemExit("matplotlib is missing: pip install 'greenroom[bench]'")
    print(f"commit {commit()}; {machine()}; limit {args.share:.0%} of the checkpoint\n")
    measured = floor(folder_of(args.root, args.variants[0]), args.threads)
    try:
        results = measure(args)
    except CgroupError as error:
        note(str(error))
        return 2
    computing = prompt_s(folder_of(args.root, args.variants[0]), args)
    print(report(results, measured, args.variants, computing))
    if args.plot:
        plot(results, measured, args.variants, args.plot)
    disk, ram = measured["disk"] / 1e9, measured["ram"] / 1e9
    print(f"\nFloor from RAM {ram:.1f} GB/s ({args.threads} threads), disk {disk:.2f} GB/s.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
