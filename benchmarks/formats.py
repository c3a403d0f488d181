"""Decode from stored formats: Greenroom compared with llama.cpp on the same file.

    python benchmarks/formats.py bench-data --llama-bench llama-bench --types BF16 Q8_0 Q4_0
    ... --kernels native rounded
    ... --peer ik_llama.cpp=/path/to/its/llama-bench

A type's file is DIR/MODEL-TYPE.gguf, what llama.cpp's llama-quantize makes of DIR/MODEL.gguf
(checkpoints.py --gguf), which is BF16. Greenroom serves the same file in place. Tables of tokens/s:
decode and prompts with everything resident, and decode with --share of the file's size in memory (a
cgroup each, page cache counted; llama.cpp then without its repacking, which needs all of the file
in memory). --peer adds the llama-bench of another engine. Runs are processes of their own, cold,
interleaved, and ratios are over pairs of the same repetition; see decode.py and resident.py for
what a run does.

Floor, everything resident: the stored bytes of a token's experts and of the dense parts over the
RAM's bandwidth. With less memory there is none here: what is read depends on the policy.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from common import (
    Result,
    commit,
    decode_rate,
    machine,
    median_of,
    note,
    run_llama_bench,
    run_worker,
    show_ratio,
    table,
)
from floor import ram_bandwidth
from resident import decode_rate as resident_rate
from resident import prefill_rate

Runs = dict[str, list[Result]]  # by engine, one a repetition


def columns(args: argparse.Namespace) -> tuple[str, ...]:
    """Names of a table's columns after the first: of each peer its rate, and ours over it."""
    of_peers = (name for peer in args.peers for name in (peer, f"x {peer}"))
    return "GB", "kernels", "Greenroom", *of_peers


def file_of(root: Path, model: str, kind: str) -> Path:
    return root / f"{model}{'' if kind == 'BF16' else f'-{kind}'}.gguf"


def token_bytes(path: Path) -> int:
    """Stored bytes of one token: its experts, and the dense parts without the embedding."""
    import gguf

    reader = gguf.GGUFReader(path)
    field = {name.rsplit(".", 1)[-1]: part for name, part in reader.fields.items()}
    share = field["expert_used_count"].contents() / field["expert_count"].contents()
    total = 0.0
    for tensor in reader.tensors:
        if "_exps" in tensor.name:
            total += int(tensor.n_bytes) * share
        elif tensor.name != "token_embd.weight":
            total += int(tensor.n_bytes)
    return int(total)


def turns(args: argparse.Namespace, limit: int, path: Path) -> dict[str, Callable[[], Result]]:
    """Commands that run each engine once, by name; a `limit` of 0 is no limit.

    Runs of Greenroom have the name of their kernels.
    """
    inner = 1 if limit else 3
    ours = {"memory": limit} if limit else {"cache": "100%"}

    def greenroom(kernels: str) -> Result:
        return run_worker(
            "greenroom", path, limit, threads=args.threads, prompt=args.prompt,
            tokens=args.tokens, repeats=inner, options=json.dumps({"kernels": kernels}), **ours,
        )  # fmt: skip

    turns_by_name: dict[str, Callable[[], Result]] = {
        kernels: partial(greenroom, kernels) for kernels in args.kernels
    }
    for name, program in args.peers.items():
        turns_by_name[name] = partial(
            run_llama_bench, program, path, limit, threads=args.threads, prompt=args.prompt,
            tokens=args.peer_tokens if limit else args.tokens, repeats=inner, repack=not limit,
            engine=name,
        )  # fmt: skip
    return turns_by_name


def measure(args: argparse.Namespace, limited: bool) -> Iterator[tuple[str, Path, Runs]]:
    for kind in args.types:
        path, runs = file_of(args.root, args.model, kind), defaultdict(list)
        limit = int(path.stat().st_size * args.share) if limited else 0
        for repeat in range(args.repeats):
            engines = list(turns(args, limit, path).items())
            turn = repeat % len(engines)
            for engine, run in engines[turn:] + engines[:turn]:
                result = run()
                runs[engine].append(result)
                sections = result.get("error") or f"{decode_rate(result):.2f} tokens/s"
                note(f"{kind} {'limited' if limited else 'resident'} {engine}: {sections}")
        yield kind, path, runs


def row(
    kind: str, path: Path, runs: Runs, kernels: str, rate: Callable[[Result], float],
    peers: Iterable[str],
) -> list[str]:  # fmt: skip
    """The cells of a row: Greenroom's rate with these kernels, then each peer's and the ratio."""

    def show(engine: str) -> str:
        each = median_of(runs[engine], rate)
        return f"{each:.3g}" if each else str(runs[engine][0]["error"])

    cells = [kind, f"{path.stat().st_size / 1e9:.2f}", kernels, show(kernels)]
    for peer in peers:
        pairs = [
            (rate(a), rate(b))
            for a, b in zip(runs[kernels], runs[peer], strict=True)
            if "error" not in a | b
        ]
        cells += [show(peer), show_ratio(pairs)]
    return cells


def resident(args: argparse.Namespace, ram: float) -> str:
    def rate(result: Result) -> float:
        return resident_rate(result, args.tokens)

    def prompt_rate(result: Result) -> float:
        return prefill_rate(result, args.prompt)

    rows, prompts = [], []
    for kind, path, runs in measure(args, limited=False):
        floor = ram / token_bytes(path)
        for kernels in args.kernels:
            prompts.append(row(kind, path, runs, kernels, prompt_rate, args.peers))
            ours = median_of(runs[kernels], rate)
            share = f"{ours / floor:.0%}" if ours else "-"
            line = row(kind, path, runs, kernels, rate, args.peers)
            rows.append([*line, f"{floor:.1f}", share])
    decode = table(("everything resident", *columns(args), "floor", "% of floor"), rows)
    return f"{decode}\n\n{table((f'prompt of {args.prompt} tokens', *columns(args)), prompts)}"


def limited(args: argparse.Namespace) -> str:
    rows = []
    for kind, path, runs in measure(args, limited=True):
        for kernels in args.kernels:
            peak = median_of(runs[kernels], lambda r: (r["peak_bytes"] or 0) / 1e9)
            line = row(kind, path, runs, kernels, decode_rate, args.peers)
            rows.append([*line, f"{peak:.2f}" if peak is not None else "-"])
    return table((f"{args.share:.0%} of the file", *columns(args), "peak GB"), rows)


def named_program(text: str) -> tuple[str, Path]:
    """Parse NAME=PATH."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="decode from stored formats beside llama.cpp")
    parser.add_argument("root", type=Path, help="where the GGUF files are")
    parser.add_argument("--model", default="moe1.7b-zipf1.5", help="default: %(default)s")
    parser.add_argument("--types", nargs="+", default=["BF16", "Q8_0", "Q4_0"])
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument(
        "--peer", type=named_program, action="append", default=[], metavar="NAME=PATH",
        help="another llama-bench, such as ik_llama.cpp's; repeatable",
    )  # fmt: skip
    parser.add_argument("--share", type=float, default=0.5, help="limit / size of the file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--peer-tokens", type=int, default=8, help="of peers, limited")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--kernels", nargs="+", default=["native"], help="of Greenroom")
    parser.add_argument("--only", choices=("resident", "limited"))
    args = parser.parse_args()
    args.peers = {"llama.cpp": args.llama_bench, **dict(args.peer)}
    ram = ram_bandwidth(args.threads)
    print(f"commit {commit()}; {machine()}; {args.threads} threads, RAM {ram / 1e9:.1f} GB/s\n")
    if args.only != "limited":
        print(resident(args, ram), flush=True)
    if args.only != "resident":
        print("\n" + limited(args))


if __name__ == "__main__":
    main()
