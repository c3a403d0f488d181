"""Compare Greenroom's counts of memory with those of a memory cgroup.

    python benchmarks/memory.py demo bench-data/moe1.7b-zipf1.0 bench-data/moe1.7b-zipf1.0-Q8_0.gguf

Each model is run in a cgroup of its own and then served there. One line a model, in MiB:

    start     what the start-up line says that the process will take once all slots are filled
    close     the peak in the closing line of `run`
    cgroup    the peak of the cgroup: pages of the process, and those of files that it maps
    stats     the peak in `/v1/stats`, after a request of the same size
    cgroup    the same peak while it was served
    apart     the largest difference from the cgroup's figure of the same process, in percent

The `max_usage` of a cgroup also counts the page cache of files that nobody maps (`cache`): Python's
modules and libraries as they are read at the start. The kernel takes it back where memory is short.
Where libraries were in memory before, the kernel charges them to another cgroup: mapped files are
then counted by the process's own map.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memlimit import Cgroup, CgroupError, memory_cgroup

NO_LIMIT = 1 << 50
EVERY_S = 0.02
MIB = 1 << 20
READY_S = 600


@dataclass
class Peak:
    """The peak of a cgroup while it is watched, in bytes; `cache` is its page cache's peak."""

    used: int = 0
    cache: int = 0


@contextlib.contextmanager
def watched(group: Cgroup) -> Iterator[Peak]:
    """Sample a cgroup until the context ends."""
    peak, done = Peak(), threading.Event()

    def sample() -> None:
        while not done.wait(EVERY_S):
            with contextlib.suppress(OSError, ValueError, KeyError):
                stat = dict(line.split() for line in _read(group, "memory.stat"))
                process_bytes = int(stat.get("rss", stat.get("anon", 0)))
                peak.used = max(peak.used, process_bytes + _mapped(group))
                peak.cache = max(peak.cache, int(stat.get("cache", stat.get("file", 0))))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _read(group: Cgroup, name: str) -> list[str]:
    return (group.folder / name).read_text().splitlines()


def _mapped(group: Cgroup) -> int:
    """Bytes of files that the largest process of the cgroup has mapped."""
    sizes = [0]
    for pid in group.procs.read_text().split():
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            fields = dict(line.split(":", 1) for line in status)
            sizes.append(int(fields["RssFile"].split()[0]) * 1024)
    return max(sizes)


def inside(group: Cgroup, *arguments: str) -> subprocess.Popen[str]:
    """Start `greenroom ARGUMENTS` in a cgroup."""
    enter = 'echo 0 > "$0" && exec "$@"'
    command = ["sh", "-c", enter, str(group.procs), sys.executable, "-m", "greenroom", *arguments]
    environment = {**os.environ, "GREENROOM_LEARNED": "off"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )


def run(model: str, options: list[str], tokens: int) -> tuple[int, int, Peak]:
    """Run `greenroom run` once in a memory cgroup.

    Return (bytes in the start-up line, peak in the closing line, peak of the cgroup).
    """
    with memory_cgroup(NO_LIMIT) as group, watched(group) as peak:
        command_line = ["run", model, "Once upon a time", "--raw", "--json", *options]
        process = inside(group, *command_line, "--max-new-tokens", str(tokens))
        out, _ = process.communicate()
        if process.returncode:
            raise SystemExit(
                f"greenroom {' '.join(command_line)}: ended with exit code {process.returncode}"
            )
        result = json.loads(out)
    return result["memory_bytes"], result["peak_rss_bytes"], peak


def serve(model: str, options: list[str], tokens: int, port: int) -> tuple[int, Peak]:
    """Send one request to `greenroom serve` in a memory cgroup.

    Return (the peak in `/v1/stats`, the peak of the cgroup).
    """
    with memory_cgroup(NO_LIMIT) as group, watched(group) as peak:
        process = inside(group, "serve", model, "--port", str(port), *options)
        try:
            base, until = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
            while _get(f"{base}/health") is None:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(
                        f"greenroom serve {model}: no answer on port {port} within {READY_S} s"
                    )
                time.sleep(0.2)
            name = json.loads(_get(f"{base}/v1/models") or "")["data"][0]["id"]
            body = {"model": name, "prompt": "Once upon a time", "max_tokens": tokens}
            request = urllib.request.Request(
                f"{base}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            urllib.request.urlopen(request, timeout=READY_S).read()
            stats = json.loads(_get(f"{base}/v1/stats") or "")
        finally:
            process.terminate()
            process.wait()
    return stats["memory"]["peak_bytes"], peak


def _get(url: str) -> str | None:
    """The answer, or None where there is none yet."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", help="folders, GGUF files, or demo")
    parser.add_argument("--cache", default="25%", help="size of the expert cache (default: 25%%)")
    parser.add_argument("--memory", help="budget of the process, in place of --cache")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (default: 64)")
    parser.add_argument("--port", type=int, default=8397)
    args = parser.parse_args(argv)
    options = ["--memory", args.memory] if args.memory else ["--cache", args.cache]
    print("| model | start | close | cgroup | cache | stats | cgroup | apart |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    try:
        for model in args.models:
            start, close, ran = run(model, options, args.tokens)
            stats, served = serve(model, options, args.tokens, args.port)
            pairs = ((start, ran.used), (close, ran.used), (stats, served.used))
            deviation = max(abs(process_bytes / group - 1) for process_bytes, group in pairs)
            sizes = (start, close, ran.used, ran.cache, stats, served.used)
            cells = " | ".join(f"{size / MIB:,.0f}" for size in sizes)
            print(f"| {Path(model).name} | {cells} | {deviation:.1%} |", flush=True)
    except CgroupError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
