"""A server in a memory cgroup: what the kernel says of it, and its answers."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    from memlimit import Cgroup, CgroupError, memory_cgroup
finally:
    sys.path.remove(str(BENCHMARKS))
    sys.modules.pop("memlimit", None)  # the tests of benchmarks/ import their own

__all__ = ["CgroupError", "Memory", "Server", "least_memory", "memory_cgroup", "serving"]
NO_LIMIT = 1 << 50
START_S, ANSWER_S = 600.0, 300.0
PORT = re.compile(r"http://127\.0\.0\.1:(\d+) answers once")
LEAST = re.compile(r"give --memory (\d+)MiB")


@dataclass(frozen=True)
class Memory:
    """Memory of a server, in bytes, at one moment.

    rss:   resident pages of the process, and those of its children that are not of files
    peak:  the most resident pages of the process so far
    usage: of the cgroup, page cache and the kernel's own memory included
    """

    rss: int
    peak: int
    usage: int


class Server:
    """A server that answers, in its cgroup."""

    def __init__(self, process: subprocess.Popen[str], group: Cgroup, port: int) -> None:
        self._process, self._group, self._port = process, group, port
        self._connections = threading.local()

    def ask(self, body: dict[str, Any]) -> Any:
        """The choices of an answer of `/v1/completions`; AssertionError if there is none."""
        if not hasattr(self._connections, "mine"):
            self._connections.mine = http.client.HTTPConnection(
                "127.0.0.1", self._port, timeout=ANSWER_S
            )
        connection: http.client.HTTPConnection = self._connections.mine
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, f"{response.status}: {text}"
        return json.loads(text)["choices"]

    def memory(self) -> Memory:
        """Read the memory of the server now."""
        own = _status(self._process.pid)
        children = [int(pid) for pid in self._group.procs.read_text().split()]
        others = [_status(pid) for pid in children if pid != self._process.pid]
        rss = own["VmRSS"] + sum(each["RssAnon"] + each["RssShmem"] for each in others)
        return Memory(rss, own["VmHWM"], self._group.usage_bytes())

    def kills(self) -> int:
        """How many processes the kernel has ended in the cgroup for want of memory."""
        return self._group.kills()


def _status(pid: int) -> dict[str, int]:
    """Sizes of a process in bytes; 0 where it has ended."""
    sizes = dict.fromkeys(("VmRSS", "VmHWM", "RssAnon", "RssShmem"), 0)
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in sizes:
                sizes[name] = int(value.split()[0]) * 1024
    return sizes


def _start(model: Path, options: Sequence[str], group: Cgroup) -> subprocess.Popen[str]:
    enter = 'echo 0 > "$0" && exec "$@"'
    command = [sys.executable, "-m", "greenroom", "serve", str(model), "--port", "0", *options]
    return subprocess.Popen(
        ["sh", "-c", enter, str(group.procs), *command], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "GREENROOM_LEARNED": "off"},
    )  # fmt: skip


@contextmanager
def serving(model: Path, *options: str, limit: int = NO_LIMIT) -> Iterator[Server]:
    """Context with a server in a cgroup of `limit` bytes, which answers already.

    RuntimeError with what it printed if it ends before it answers.
    """
    lines: list[str] = []
    with memory_cgroup(limit) as group, _start(model, options, group) as process:
        assert process.stderr is not None
        errors = process.stderr
        reader = threading.Thread(target=lambda: lines.extend(errors), daemon=True)
        reader.start()
        try:
            yield Server(process, group, _wait_until_ready(process, lines))
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            reader.join(60)


def _wait_until_ready(process: subprocess.Popen[str], lines: list[str]) -> int:
    """The port of a server, once it answers."""
    until, port = time.monotonic() + START_S, 0
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
        if not port:
            port = next((int(found[1]) for line in [*lines] if (found := PORT.search(line))), 0)
            continue
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with suppress(OSError):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return port
        connection.close()
    time.sleep(0.1)  # for its last line
    raise RuntimeError(f"exit code {process.poll()}: {''.join(lines)[-2000:]}")


def least_memory(model: Path, *options: str) -> int:
    """The least `--memory` in bytes that a server accepts, by its refusal of less."""
    try:
        with serving(model, "--memory", "1MiB", *options):
            raise AssertionError("a server accepts --memory 1MiB")
    except RuntimeError as error:
        found = LEAST.search(str(error))
        if found is None:
            raise
        return int(found[1]) << 20
