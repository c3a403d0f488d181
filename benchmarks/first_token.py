"""Time to the first token of later prompts, beside the time of their reads and their computation.

    python benchmarks/first_token.py bench-data/qwen3-30b.gguf --memory 8GiB --prompts 19 128 512
    python benchmarks/first_token.py FOLDER --cache 25% --prompts 2048 2048 --blocks 512 2048

A first prompt fills the slots. On a virtual machine it waits for the host, which hands out memory
page by page when it is first written to (real_sizes.py prints that rate). Then each row is a new
prompt of random tokens: most of what it needs is not in memory, and takes the slots of others.

    block       tokens of a prompt that one forward pass computes
    read GB     bytes of experts read for the prompt
    disk GB/s   direct reads of 4 MiB by two threads, measured just before the prompt
    reads s     read / disk
    compute s   TTFT less the time that waited for experts
    TTFT s      of the forward pass of the prompt
    ratio       TTFT over the larger of reads and compute
    busy        share of TTFT in which the link from the disk carried something
    waiting     GB/s that arrived while the computation waited for experts
    computing   GB/s that arrived in the rest of the time
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# isort: off
import greenroom  # before torch, for the threads of OpenMP
import torch

# isort: on
from common import commit, machine, table
from real_sizes import weights_of
from transformers import DynamicCache

from greenroom.runtime.measure.bandwidth import disk_bandwidth, reads_directly

COLUMNS = (
    "tokens", "block", "read GB", "disk GB/s", "reads s", "compute s", "TTFT s", "ratio", "busy",
    "waiting", "computing",
)  # fmt: skip
Span = tuple[float, float]  # begin and end, in seconds


def first_token(
    model: Any, tokens: int, block: int, disk: float, draw: torch.Generator
) -> list[str]:
    """Measure one prompt of random tokens, computed in blocks; return its row."""
    room, vocabulary = model.greenroom, model.config.vocab_size
    ids = torch.randint(0, vocabulary, (1, tokens), generator=draw)
    read, waited = room.stats().bytes_read, room.driver.meter.stall_s
    room.timeline(True)
    start = time.perf_counter()
    cache = DynamicCache(config=model.config)
    for part in ids.split(block, 1):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    seconds = time.perf_counter() - start
    busy, share = link_use(room.timeline(False))
    read, waited = room.stats().bytes_read - read, room.driver.meter.stall_s - waited
    reads, compute = read / disk, seconds - waited
    return [
        f"{tokens}", f"{block}", f"{read / 1e9:.2f}", f"{disk / 1e9:.2f}", f"{reads:.2f}",
        f"{compute:.2f}", f"{seconds:.2f}", f"{seconds / max(reads, compute):.2f}",
        f"{busy / seconds:.0%}",
        f"{share * read / waited / 1e9:.1f}", f"{(1 - share) * read / compute / 1e9:.1f}",
    ]  # fmt: skip


def link_use(timeline: Any) -> tuple[float, float]:
    """Return the seconds in which a timeline's chunks moved, and how many arrived in stalls.

    The latter is a share of all chunks.
    """
    with tempfile.TemporaryDirectory() as folder:
        timeline.save(Path(folder) / "timeline.json")
        events = json.loads((Path(folder) / "timeline.json").read_text())["traceEvents"]
    chunks = sorted(_spans(events, ("demand", "prefetch")))
    busy = at = 0.0
    for begin, end in chunks:
        busy += max(0.0, end - max(begin, at))
        at = max(at, end)
    stalls, arrivals = sorted(_spans(events, ("stall:",))), sorted(end for _, end in chunks)
    within = sum(
        bisect_right(arrivals, end) - bisect_left(arrivals, begin) for begin, end in stalls
    )
    return busy, within / len(chunks)


def _spans(events: list[dict[str, Any]], categories: tuple[str, ...]) -> Iterator[Span]:
    for event in events:
        if event.get("cat") in categories:
            yield event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file, or a folder of safetensors")
    parser.add_argument("--memory", help="of the process, such as 8GiB")
    parser.add_argument("--cache", help="slots in place of --memory, such as 25%%")
    parser.add_argument("--prompts", type=int, nargs="+", default=[19, 19, 128, 512], metavar="N")
    parser.add_argument("--blocks", type=int, nargs="+", default=[512], metavar="N")
    parser.add_argument("--read-limit", metavar="SIZE", help="of the disk, a second, as 500MB")
    parser.add_argument(
        "--disk-bytes", type=int, default=1_200_000_000, metavar="N",
        help="read for a measurement of the disk (default: %(default)s)",
    )  # fmt: skip
    args = parser.parse_args()
    amount = {"memory": args.memory} if args.memory else {"cache": args.cache or "25%"}
    context, block = max(1024, *args.prompts), max(64, *args.blocks)
    model: Any = greenroom.load(
        str(args.model), context=context, prompt_block=block, read_limit=args.read_limit, **amount
    )[0]
    print(f"commit {commit()}; {machine()}\n\n{args.model}\n")
    draw, files = torch.Generator().manual_seed(3), weights_of(args.model).files
    model(torch.randint(0, model.config.vocab_size, (1, 64), generator=draw), use_cache=True)
    rows = []
    limit = model.greenroom.setup.read_limit
    for tokens in args.prompts:
        disk = disk_bandwidth(files, 4 << 20, 2, reads_directly(files[0]), args.disk_bytes)
        disk = min(disk, limit or disk)
        rows += [first_token(model, tokens, block, disk, draw) for block in args.blocks]
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
