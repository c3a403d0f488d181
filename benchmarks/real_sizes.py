"""Start-up and decoding of a large model in set amounts of memory, compared with llama.cpp.

    python benchmarks/real_sizes.py bench-data/qwen3-30b.gguf --memory 4GB 8GB 12GB
    python benchmarks/real_sizes.py FILE --memory 8GB --peer /path/to/llama-completion
    python benchmarks/real_sizes.py FILE --memory 8GB --floor --prompt 512

Each row is one cold run in a memory cgroup of --memory, page cache counted: `greenroom run` with
this --memory answers a short prompt with --tokens tokens. shapes.py writes models for it.

    start s      from the command to the line that describes the loaded model; the prompt is next
    dense GB     everything in the file but routed experts
    disk GB/s    direct reads of 4 MiB by two threads, measured just before the run
    write GB/s   each page of --memory written to once, just before the run: a virtual machine may
                 get memory from its host page by page, which would count as time of a first token
    over s       start less dense / disk
    TTFT s       from then to the first token
    TPOT ms      mean time of the tokens after the first
    hits         of requested experts: in memory (an engine that maps its file has no count)
    process %    peak of the process and of the files that it maps, of --memory
    cgroup %     peak of the cgroup with all its page cache, of --memory

--floor prints another table of Greenroom's runs. Each has a second cold run of one token, whose
reads are those of the prompt.

    missing MB   read for a token after the first, without prefetched experts that no token used
    compute ms   TPOT less what tokens waited for reads
    floor ms     compute + missing / disk: a token whose reads and computation do not overlap
    % of floor   floor / TPOT
    prompt GB    read for the prompt
    TTFT, reads  TTFT as a multiple of prompt / disk

--peer is llama.cpp's llama-completion, which generates the same tokens, or its llama-bench, which
generates from random tokens: routing is then not that of the recording. The peer runs with its
file mapped, and without (--load-mode none), for which it needs a version of autumn 2026 or later;
--peer-tokens are fewer for a slow one. Its exact command is printed.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import commit, greenroom_program, machine, note, table
from memlimit import (
    CgroupError,
    Measured,
    drop_page_cache,
    memory_cgroup,
    parse_bytes,
    run_in,
)
from memory import Peak, watched

from greenroom.errors import GreenroomError
from greenroom.hf.checkpoint.gguf_file import read_gguf
from greenroom.hf.checkpoint.header import read_header
from greenroom.runtime.measure.bandwidth import disk_bandwidth, reads_directly

PROMPT = "once upon a time a ship came to the harbour"
READY = " in slots"  # of the line that describes a loaded model
PEER_READY = "generate: n_ctx"
COLUMNS = ("engine", "memory", "start s", "dense GB", "disk GB/s", "write GB/s", "over s", "TTFT s",
           "TPOT ms", "hits", "process %", "cgroup %")  # fmt: skip
DOWN = r"down(_proj|_exps)\.weight$|down_proj$|w2"  # down projections of experts
WRITE = """
import mmap, sys, time
import numpy as np
memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE)
memory.madvise(mmap.MADV_HUGEPAGE)
start = time.perf_counter()
np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
print(len(memory) / (time.perf_counter() - start))
"""


@dataclass(frozen=True)
class Times:
    """What an engine reports of its run; None where it does not."""

    ttft_s: float
    tpot_s: float
    hits: float | None = None
    read: int = 0  # bytes of experts
    wasted: int = 0  # experts that were prefetched, and not used
    stall_s: float = 0.0  # of tokens after the first


@dataclass(frozen=True)
class Weights:
    """The files of a model.

    dense: bytes of all tensors but routed experts
    expert: bytes of a routed expert, on average
    """

    files: list[Path]
    dense: int
    expert: float


def weights_of(model: Path) -> Weights:
    """Read the headers of a model's files."""
    if model.is_dir():
        files = sorted(model.glob("*.safetensors"))
        headers = [read_header(path, number) for number, path in enumerate(files)]
        tensors = {name: t for header in headers for name, t in header.items()}
    else:
        paths, _, tensors = read_gguf(model.absolute())
        files = list(paths)
    if not tensors:
        sys.exit(f"{model}: has no weights: give a GGUF file, or a folder of safetensors")
    routed = {name: t for name, t in tensors.items() if re.search(r"\.experts\.|_exps\.", name)}
    dense = sum(t.nbytes for name, t in tensors.items() if name not in routed)
    down = {name: t for name, t in routed.items() if re.search(DOWN, name)}
    counts = (1 if re.search(r"\.experts\.\d", name) else t.shape[0] for name, t in down.items())
    return Weights(files, dense, sum(t.nbytes for t in routed.values()) / max(1, sum(counts)))


def greenroom(args: argparse.Namespace, memory: str, tokens: int | None = None) -> list[str]:
    """The command of Greenroom's run."""
    prompt = " ".join((PROMPT.split() * args.prompt)[: args.prompt])
    return [*greenroom_program(), "run", str(args.model), prompt, "--raw", "--json",
            "--memory", str(parse_bytes(memory)), "--max-new-tokens", str(tokens or args.tokens),
            "--temperature", "0", "--threads", str(args.threads), *args.options]  # fmt: skip


def greenroom_times(out: str) -> Times:
    """Read the JSON of `greenroom run`."""
    result = json.loads(out)
    tpot = 1 / result["tokens_per_s"] if result["new_tokens"] > 1 else float("nan")
    wasted = (result["prefetch"] or {}).get("wasted", 0)
    stall_s = sum(result["stalls"].get(name, 0.0) for name in ("miss", "late"))
    return Times(result["ttft_s"], tpot, result["hit_ratio"], result["bytes_read"], wasted, stall_s)


def peer(args: argparse.Namespace, mapped: bool) -> list[str]:
    """The peer's command, with its file mapped or read."""
    common = [str(args.peer), "-m", str(args.model), "-t", str(args.threads), "--no-warmup",
              "--load-mode", "mmap" if mapped else "none",
              "-n", str(args.peer_tokens or args.tokens)]  # fmt: skip
    if args.peer.name == "llama-bench":
        return [*common, "-p", "16", "-r", "1", "--repack", "0", "-o", "json"]
    # --no-repack: weights laid out anew take memory of the process, which is short of it.
    plain = ["-p", PROMPT, "--temp", "0", "-no-cnv", "--ignore-eos", "-c", "4096", "--seed", "1",
             "--no-repack"]  # fmt: skip
    return [*common, *plain]


def peer_times(program: Path, out: str, err: str) -> Times:
    """Read the times that llama.cpp prints; llama-bench has no time of a first token."""
    if program.name == "llama-bench":
        rows = {bool(row["n_prompt"]): row for row in json.loads(out)}
        seconds = {prompt: row["samples_ns"][0] / 1e9 for prompt, row in rows.items()}
        return Times(seconds[True], seconds[False] / rows[False]["n_gen"])
    prompt = re.search(r"prompt eval time =\s*([\d.]+) ms", err)
    decode = re.search(r"\beval time =\s*([\d.]+) ms /\s*(\d+) runs", err)
    if prompt is None or decode is None:
        raise ValueError("the peer printed no times")
    return Times(float(prompt[1]) / 1e3, float(decode[1]) / 1e3 / int(decode[2]))


def version(program: Path) -> str:
    """The line in which llama.cpp says its version, or that it has none."""
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version: .*", done.stdout + done.stderr)
    return found[0] if found else "prints no version"


def first_write(nbytes: int) -> float:
    """Bytes per second at which a new process writes to each page of its memory once."""
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(nbytes)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def measure(
    command: Sequence[str], memory: str, files: list[Path], mark: str, timeout_s: float
) -> tuple[Measured, str, str, Peak]:
    """Run a command cold in a cgroup; also the peak of what its process used."""
    drop_page_cache(files)
    limit = parse_bytes(memory)
    with memory_cgroup(limit) as group, watched(group) as peak:
        measured, out, err = run_in(group, command, limit, timeout_s, mark=mark)
    return measured, out, err, peak


def rows(args: argparse.Namespace) -> Iterator[list[str]]:
    """One row a run."""
    weights = weights_of(args.model)
    files, dense = weights.files, weights.dense
    engines: list[tuple[str, bool]] = [("Greenroom", True)]
    if args.peer is not None:
        note(f"{args.peer}: {version(args.peer)}")
        engines += [("llama.cpp, mmap", True), ("llama.cpp, no mmap", False)]
    for memory in args.memory:
        for engine, mapped in engines:
            ours = engine == "Greenroom"
            command = greenroom(args, memory) if ours else peer(args, mapped)
            note(f"{memory}: {shlex.join(command)}")
            disk = disk_bandwidth(files, 4 << 20, 2, reads_directly(files[0]), args.disk_bytes)
            write = first_write(parse_bytes(memory))
            measured, out, err, peak = measure(
                command, memory, files, READY if ours else PEER_READY, args.timeout
            )
            yield [
                engine,
                memory,
                *cells(args, ours, measured, out, err, peak, (dense, disk, write)),
            ]


FLOOR_COLUMNS = ("memory", "write GB/s", "prompt GB", "disk GB/s", "TTFT s", "TTFT, reads",
                 "missing MB", "compute ms", "floor ms", "TPOT ms", "% of floor")  # fmt: skip


def floor_rows(args: argparse.Namespace) -> Iterator[list[str]]:
    """One row for each memory: times beside those of reads and computation that do not overlap."""
    weights = weights_of(args.model)
    files = weights.files

    def run(memory: str, tokens: int) -> Times:
        command = greenroom(args, memory, tokens)
        measured, out, err, _ = measure(command, memory, files, READY, args.timeout)
        if measured.returncode:
            sys.exit(f"{memory}: {err.strip().splitlines()[-1:]}")
        return greenroom_times(out)

    for memory in args.memory:
        disk = disk_bandwidth(files, 4 << 20, 2, reads_directly(files[0]), args.disk_bytes)
        write = first_write(parse_bytes(memory))
        first, whole = run(memory, 1), run(memory, args.tokens)
        after = args.tokens - 1
        read = whole.read - first.read - (whole.wasted - first.wasted) * weights.expert
        waited = (whole.stall_s - first.stall_s) / after
        compute = whole.tpot_s - waited
        floor = compute + read / after / disk
        yield [
            memory,
            f"{write / 1e9:.2f}",
            f"{first.read / 1e9:.2f}",
            f"{disk / 1e9:.2f}",
            f"{first.ttft_s:.2f}",
            f"{first.ttft_s * disk / first.read:.2f}",
            f"{read / after / 1e6:.0f}",
            f"{1e3 * compute:.1f}",
            f"{1e3 * floor:.1f}",
            f"{1e3 * whole.tpot_s:.1f}",
            f"{floor / whole.tpot_s:.0%}",
        ]


def cells(
    args: argparse.Namespace, ours: bool, measured: Measured, out: str, err: str, peak: Peak,
    around: tuple[int, float, float],
) -> list[str]:  # fmt: skip
    """The figures of one run, or why there are none; around it: dense bytes, disk and memory."""
    dense, disk, write = around
    if measured.returncode:
        last = err.strip().splitlines()[-1:] or ["no output"]
        note(last[0][:500])
        late = measured.wall_s >= args.timeout
        why = f"over {args.timeout:.0f} s" if late else "killed" if measured.killed else "failed"
        return [why, *["-"] * (len(COLUMNS) - 3)]
    times = greenroom_times(out) if ours else peer_times(args.peer, out, err)
    start = measured.marked_s
    return [
        f"{start:.1f}" if start is not None else "-",
        f"{dense / 1e9:.2f}",
        f"{disk / 1e9:.2f}",
        f"{write / 1e9:.2f}",
        f"{start - dense / disk:.1f}" if start is not None else "-",
        f"{times.ttft_s:.2f}",
        f"{1e3 * times.tpot_s:.1f}",
        f"{times.hits:.1%}" if times.hits is not None else "-",
        f"{peak.used / measured.limit_bytes:.1%}",
        f"{(measured.peak_bytes or 0) / measured.limit_bytes:.1%}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="start-up and decoding in set amounts of memory")
    parser.add_argument("model", type=Path, help="a GGUF file, or a folder of safetensors")
    parser.add_argument("--memory", nargs="+", required=True, metavar="SIZE", help="such as 8GB")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument(
        "--prompt", type=int, default=len(PROMPT.split()), metavar="N", help="words of the prompt"
    )
    parser.add_argument("--floor", action="store_true", help="print the table of floors")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", type=Path, metavar="PATH", help="a program of llama.cpp")
    parser.add_argument("--peer-tokens", type=int, metavar="N", help="(default: --tokens)")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="of a run")
    parser.add_argument(
        "--disk-bytes",
        type=int,
        default=1_200_000_000,
        metavar="N",
        help="read for a measurement of the disk (default: %(default)s)",
    )
    parser.add_argument("options", nargs="*", help="for greenroom run, after --")
    args = parser.parse_args()  # fmt: skip
    try:
        print(f"commit {commit()}; {machine()}\n\n{args.model}, {args.tokens} tokens\n", flush=True)
        print(
            table(FLOOR_COLUMNS, list(floor_rows(args)))
            if args.floor
            else table(COLUMNS, list(rows(args)))
        )
    except (CgroupError, GreenroomError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
