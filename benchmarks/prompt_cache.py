"""First token of a prompt after a restart of the server, with and without --prompt-cache.

    python benchmarks/prompt_cache.py demo --cache 25%
    python benchmarks/prompt_cache.py bench-data/moe1.7b-zipf1.5 --memory 2300MB --repeats 3

Each measurement is the first request of a server that was just started, in a process of its own:
a prompt of random tokens, sent as token ids. In every repetition a new prompt is first answered by
a server with an empty folder, which is then killed; so its files are there, and nothing else is.

    without s   first token after a start without --prompt-cache
    with s      first token after a start with it
    sooner      without over with, as the geometric mean over the repetitions, with its interval
    files MB    of one prompt
    as cached   answers that equal those with the prefix cache in memory, before the restart
    as computed answers that equal those without any cache (all of them with --batch-invariant)

The part `writing` compares the seconds in which three users get two answers each, to new prompts of
an eighth of the tokens, with and without --prompt-cache: each prompt is written after its answer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from common import commit, greenroom_program, machine, note, show_ratio, table

COLUMNS = (
    "model",
    "tokens",
    "files MB",
    "without s",
    "with s",
    "sooner",
    "as cached",
    "as computed",
)
Table = tuple[Sequence[str], list[Sequence[Any]]]
LEAST_ID = 5  # smaller ids are special tokens


class Answer:
    """The text of one answer."""

    def __init__(self, port: int, ids: list[int], new: int) -> None:
        self.text = ""
        body = {"model": "bench", "prompt": ids, "max_tokens": new, "temperature": 0,
                "stream": True}  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while line := response.readline():
            if line.startswith(b"data: {"):
                self.text += json.loads(line[6:])["choices"][0]["text"]
        connection.close()


@contextmanager
def server(args: argparse.Namespace, folder: Path | None) -> Iterator[int]:
    """Start a server; yield its port once the model is loaded, and kill it in the end."""
    size = ["--memory", args.memory] if args.memory else ["--cache", args.cache]
    command = [
        *greenroom_program(), "serve", str(args.model), "--port", "0", "--model-name", "bench",
        "--context", str(args.tokens + 2 * args.new), "--kv-memory", args.kv_memory, *size,
    ]  # fmt: skip
    if folder is not None:
        command += ["--prompt-cache", str(folder)]
    if args.batch_invariant:
        command.append("--batch-invariant")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines: list[str] = []
        try:
            while not (lines and lines[-1].startswith("try: ")):
                lines.append(process.stderr.readline())
                assert lines[-1], "".join(lines)
            reader = threading.Thread(target=process.stderr.read)
            reader.start()
            yield int(next(x for x in lines if "http://" in x).split("http://")[1].split()[0]
                      .rpartition(":")[2])  # fmt: skip
        finally:
            process.kill()
            process.wait()
            reader.join()


def fetch(port: int, path: str) -> str:
    """Return the body of a GET request."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path)
    body = connection.getresponse().read().decode()
    connection.close()
    return body


def ttft(port: int) -> float:
    """Return the server's time to the first token of its first request, in seconds.

    A client sees the first text, which may begin only with a later token.
    """
    (total,) = re.findall(r"^greenroom_ttft_seconds_sum\S* (\S+)", fetch(port, "/metrics"), re.M)
    return float(total)


def wait_for_files(port: int) -> int:
    """Wait until everything is written; return the bytes of all files."""
    while True:
        stats = json.loads(fetch(port, "/v1/stats"))["prompt_cache"]
        if stats["bytes_written"] and not stats["pending"]:
            return int(stats["bytes"])
        time.sleep(0.05)


def restart(args: argparse.Namespace, seed: int) -> tuple[float, float, int, bool, bool]:
    """Measure one prompt: (TTFT without, TTFT with, bytes of files, as cached, as computed)."""
    random = Random(seed)
    ids = [random.randrange(LEAST_ID, args.vocabulary) for _ in range(args.tokens)]
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        with server(args, folder) as port:
            Answer(port, ids, args.new)
            nbytes = wait_for_files(port)
            cached = Answer(port, ids, args.new)
        with server(args, None) as port:
            without, without_s = Answer(port, ids, args.new), ttft(port)
        with server(args, folder) as port:
            again, again_s = Answer(port, ids, args.new), ttft(port)
    note(f"without {without_s:.3f} s, with {again_s:.3f} s")
    return without_s, again_s, nbytes, again.text == cached.text, again.text == without.text


def workload_s(args: argparse.Namespace, folder: Path | None) -> float:
    """Measure the seconds in which a server answers three users, two prompts each."""
    random, prompts = Random(0), list[list[int]]()
    for _ in range(7):
        ids = [random.randrange(LEAST_ID, args.vocabulary) for _ in range(args.tokens // 8)]
        prompts.append(ids)
    with server(args, folder) as port:
        Answer(port, prompts[0], 8)  # kernels, and what is resident

        def send(user: int) -> None:
            for each in prompts[1 + 2 * user : 3 + 2 * user]:
                Answer(port, each, args.new)

        threads = [threading.Thread(target=send, args=(user,)) for user in range(3)]
        begin = time.perf_counter()
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return time.perf_counter() - begin


def restarts(args: argparse.Namespace) -> Table:
    """Measure the first token after a restart, with several prompts."""
    rows = [restart(args, seed) for seed in range(args.repeats)]
    without, again, nbytes, cached, computed = map(sorted, zip(*rows, strict=True))
    middle = len(rows) // 2
    line = (
        Path(args.model).name, args.tokens, f"{nbytes[middle] / 1e6:.1f}",
        f"{without[middle]:.2f}", f"{again[middle]:.3f}",
        show_ratio([row[:2] for row in rows]),
        *(f"{sum(each)} of {len(rows)}" for each in (cached, computed)),
    )  # fmt: skip
    return COLUMNS, [line]


def writing(args: argparse.Namespace) -> Table:
    """Compare a workload whose prompts are written with one whose prompts are not."""
    pairs = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            pairs.append((workload_s(args, Path(name)), workload_s(args, None)))
        note(f"writing {pairs[-1][0]:.2f} s, not writing {pairs[-1][1]:.2f} s")
    return ("model", "seconds, writing over not writing"), [
        (Path(args.model).name, show_ratio(pairs))
    ]


PARTS: dict[str, Callable[[argparse.Namespace], Table]] = {"restart": restarts, "writing": writing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="demo, a folder, or a GGUF file")
    parser.add_argument("--memory", help="of the process, such as 2300MB")
    parser.add_argument("--cache", default="50%", help="slots in place of --memory")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt")
    parser.add_argument("--new", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--vocabulary", type=int, default=250, help="ids are below this number")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files are written (default: /tmp)")
    args = parser.parse_args()
    print(f"commit {commit()}; {machine()}\n", flush=True)
    for part in args.parts:
        print(table(*PARTS[part](args)) + "\n", flush=True)


if __name__ == "__main__":
    main()
