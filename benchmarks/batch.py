"""Throughput of `greenroom batch`: by the number of answers at a time, and by their order.

    python benchmarks/batch.py bench-data/moe1.7b-zipf0.7 [--cache 50%] [--at-once 8 64]
    python benchmarks/batch.py demo --kinds 32 --prompt 256 --tokens 16 --orders turns sorted
    python benchmarks/batch.py bench-data/moe1.7b-zipf0.7 --memory 2GB --streams

A batch has --requests prompts of random tokens, of --kinds kinds, which come in turns or sorted:
prompts of a kind have their first half in common. The first number of --at-once with the first
order is the row that others are compared with: 8 are the streams of a server. With --streams a
`greenroom serve` answers that row's requests over HTTP, to as many clients that read streams; else
it is an engine, as in the other rows. Rows come in turns, each with an engine of its own, whose
slots are filled by the first answers; times are without loading.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

# isort: off
import greenroom  # before torch: it sets how OpenMP's threads wait

import httpx2
import numpy as np

# isort: on
from common import commit, greenroom_program, machine, note, show_ratio, table

from greenroom.cli.batch import CHUNK, FOREVER_S
from greenroom.config import LoadConfig, ServeConfig
from greenroom.server.batch.requests import read_requests
from greenroom.server.batch.results import Results
from greenroom.server.batch.run import WAITING, BatchRun, LocalAnswerer, Tally
from greenroom.server.chat.local import wait_until_loaded
from greenroom.server.engine.start import start
from greenroom.server.http.service import Service

NAME = "bench"
COLUMNS = (
    "answers at a time", "order", "tokens/s", "beside the first", "MB read a token",
    "experts a pass", "reused tokens of prompts",
)  # fmt: skip


def write_batch(path: Path, order: str, args: argparse.Namespace) -> None:
    """Write a batch file of completions, whose kinds come in turns or sorted."""
    random = Random(0)

    def ids(count: int) -> list[int]:
        return [random.randrange(args.least_id, args.vocabulary) for _ in range(count)]

    common = [ids(args.prompt // 2) for _ in range(args.kinds)]
    lines = []
    for number in range(args.requests):
        first = common[number % args.kinds]
        body = {"model": NAME, "prompt": first + ids(args.prompt - len(first)),
                "max_tokens": args.tokens, "temperature": 0}  # fmt: skip
        lines.append({
            "custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body
        })  # fmt: skip
    if order == "sorted":
        lines.sort(key=lambda line: int(line["custom_id"]) % args.kinds)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))


def run(source: Path, width: int, args: argparse.Namespace) -> dict[str, float]:
    """Answer the batch; return tokens/s and what the expert cache did."""
    config = ServeConfig(
        max_batch=width, max_queue=width, timeout=FOREVER_S, no_page=True, prefill_chunk=CHUNK,
        no_prefix_reuse=args.no_prefix_reuse,
    )  # fmt: skip
    context = 2 * (args.prompt + args.tokens)
    size = {"memory": args.memory} if args.memory else {"cache": args.cache}
    load = LoadConfig(context=context, **size)
    engine, tally = start(args.model, load, config), Tally()
    service = Service(engine, config, NAME, log=tally)
    requests = read_requests(source, NAME)
    try:
        wait_until_loaded(engine, lambda share: None)
        with (
            tempfile.TemporaryDirectory() as folder,
            Results(Path(folder) / "out.jsonl", requests) as results,
        ):
            batch = BatchRun(LocalAnswerer(service), width + WAITING, results, lambda: None)
            begin = time.perf_counter()
            asyncio.run(batch.run(source, requests))
            seconds = time.perf_counter() - begin
        if batch.refused or batch.failed:
            raise SystemExit(f"{batch.refused} refused, {batch.failed[:1]}")
        stats: Any = engine.stats()
    finally:
        engine.stop(0.0)
        service.close()
    return {
        "tokens_per_s": tally.new_tokens / seconds,
        "read": stats["experts"]["bytes_read"] / tally.new_tokens,
        "requests": stats["experts"]["requests"] / max(1, stats["passes"]["count"]),
        "reused": tally.reused_tokens / max(1, tally.prompt_tokens),
    }


@contextmanager
def server(width: int, args: argparse.Namespace) -> Iterator[str]:
    """Start `greenroom serve` for `width` answers at a time; return its address when ready."""
    size = ["--memory", args.memory] if args.memory else ["--cache", args.cache]
    options = [*size, "--context", str(2 * (args.prompt + args.tokens)), "--no-page",
               "--max-batch", str(width), "--model-name", NAME, "--port", "0"]  # fmt: skip
    options += ["--no-prefix-reuse"] * args.no_prefix_reuse
    command = [*greenroom_program(), "serve", args.model, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said, url = [], ""
            for line in process.stderr:
                said.append(line)
                url = next((word for word in line.split() if word.startswith("http://")), url)
                if url:
                    break
            else:
                raise SystemExit("".join(said))
            threading.Thread(target=lambda: [*process.stderr], daemon=True).start()
            url = url.rstrip(".,")
            while httpx2.get(f"{url}/health").status_code != 200:
                time.sleep(0.05)
            yield url
        finally:
            process.terminate()


def stream(source: Path, width: int, args: argparse.Namespace) -> dict[str, float]:
    """Let a server answer the requests of a batch, each as a stream; return tokens/s."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for line in source.read_text().splitlines():
        options = {"stream": True, "stream_options": {"include_usage": True}}
        waiting.put(json.loads(line)["body"] | options)
    usages: list[dict[str, Any]] = []

    def client(url: str) -> None:
        with httpx2.Client(base_url=url, timeout=None) as http:
            while not waiting.empty():
                try:
                    body = waiting.get_nowait()
                except queue.Empty:
                    return
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    lines = [each for each in answer.iter_lines() if each.startswith("data: {")]
                usages.append(json.loads(lines[-1].removeprefix("data: "))["usage"])

    with server(width, args) as url:
        clients = [threading.Thread(target=client, args=(url,)) for _ in range(width)]
        begin = time.perf_counter()
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        seconds = time.perf_counter() - begin
        stats = httpx2.get(f"{url}/v1/stats").json()
    if len(usages) < args.requests:
        raise SystemExit(f"{len(usages)} of {args.requests} requests have an answer")
    tokens = sum(each["completion_tokens"] for each in usages)
    reused = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages)
    return {
        "tokens_per_s": tokens / seconds,
        "read": stats["experts"]["bytes_read"] / tokens,
        "requests": stats["experts"]["requests"] / max(1, stats["passes"]["count"]),
        "reused": reused / max(1, sum(each["prompt_tokens"] for each in usages)),
    }


def rows_of(results: dict[tuple[int, str], list[dict[str, float]]]) -> list[Sequence[Any]]:
    first = next(iter(results.values()))
    rows = []
    for (width, order), runs in results.items():
        pairs = [
            (a["tokens_per_s"], b["tokens_per_s"]) for a, b in zip(runs, first, strict=True)
        ]  # fmt: skip

        def median(name: str, runs: list[dict[str, float]] = runs) -> float:
            return float(np.median([each[name] for each in runs]))

        rows.append((
            width, order, f"{median('tokens_per_s'):.1f}",
            "" if runs is first else show_ratio(pairs), f"{median('read') / 1e6:.1f}",
            f"{median('requests'):.0f}", f"{median('reused'):.0%}",
        ))  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model, as for greenroom batch")
    parser.add_argument("--cache", default="50%", help="size of the expert cache")
    parser.add_argument("--memory", metavar="SIZE", help="of the process, in place of --cache")
    parser.add_argument("--streams", action="store_true", help="of a server, as the first row")
    parser.add_argument("--at-once", type=int, nargs="+", default=[8, 64], metavar="N")
    parser.add_argument("--orders", nargs="+", default=["turns"], choices=("turns", "sorted"))
    parser.add_argument("--requests", type=int, default=128, metavar="N")
    parser.add_argument("--kinds", type=int, default=8, metavar="N", help="of prompts")
    parser.add_argument("--prompt", type=int, default=32, metavar="N", help="tokens")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of an answer")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--no-prefix-reuse", action="store_true")
    parser.add_argument("--least-id", type=int, default=5, metavar="N", help="of a token")
    parser.add_argument("--vocabulary", type=int, default=390, metavar="N", help="ids are below")
    args = parser.parse_args()
    rows = [(width, order) for width in args.at_once for order in args.orders]
    results: dict[tuple[int, str], list[dict[str, float]]] = {row: [] for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        sources = {order: Path(folder) / f"{order}.jsonl" for order in args.orders}
        for order, path in sources.items():
            write_batch(path, order, args)
        for number in range(args.rounds):
            for row in rows if number % 2 == 0 else rows[::-1]:
                measure = stream if args.streams and row == rows[0] else run
                results[row].append(measure(sources[row[1]], row[0], args))
            note(f"round {number + 1} of {args.rounds}")
    print(f"commit {commit()}; {machine()}; greenroom {greenroom.__version__}\n")
    size = f"{args.memory} of memory" if args.memory else f"slots for {args.cache} of the experts"
    print(f"{args.model}, {args.requests} requests, {size}\n")
    print(table(COLUMNS, rows_of(results)))


if __name__ == "__main__":
    main()
