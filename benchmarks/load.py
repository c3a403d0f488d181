"""A load test of replicas: many clients, mixed requests, hang-ups, and replicas that are killed.

    python benchmarks/load.py [--minutes 30] [--clients 64] [--replicas 3] [--kill-every 300]

Starts `deploy/ray.py` on a Ray cluster whose nodes are processes (`--alone`: one `greenroom serve`,
and no Ray), asks every question alone, before and after clients ask them at random: short
and long prompts, chats, required tools, all four APIs, streamed or not. Some clients hang up. Every
complete answer must be the first one (temperature 0, `--batch-invariant`); every other must end
with an error that says why. Shown are times by kind of request, for those that were streamed; a
slowdown is the time of an answer over that of the question asked alone. The oldest replica is
killed every --kill-every seconds. Memory is that of each process that lived long enough: its last
quarter over its second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
from common import commit, machine, note, table

RAY = Path(__file__).parents[1] / "deploy" / "ray.py"
SERVER = ("--batch-invariant", "--threads", "1", "--max-batch", "8", "--memory")
FLAT, JUDGED_S, SAMPLE_S = 1.02, 240.0, 2.0
WORDS = ("king", "ship", "garden", "river", "miller", "goose", "and", "had", "the", "near")
CLEAR = (429, 502, 503)  # HTTP: no place, the replica was lost, no replica
LOST = "the replica that computed this answer was lost"
TOOL = {"name": "look_up", "parameters": {"type": "object", "required": ["word"],
        "properties": {"word": {"enum": ["ship", "goose", "river"]}}}}  # fmt: skip
OURS = ("ray::ServeReplica:greenroom:", "ray::ProxyActor", "ray::ServeController")


@dataclass(frozen=True)
class Question:
    """A request whose answer is always the same."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass
class Reply:
    """What a client got: the text, the error, and when its parts came, in seconds."""

    status: int = 0
    text: str = ""
    error: str | None = None
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0


def questions(seed: int) -> list[Question]:
    """Short and long prompts for all APIs, and required tools."""
    rng, found = random.Random(seed), []
    for number in range(3):
        for kind, words in (("short", 12), ("long", 300)):
            text = f"{number}. " + " ".join(rng.choices(WORDS, k=words))
            user, tokens = [{"role": "user", "content": text}], 16 if kind == "short" else 48
            common = {"model": "demo", "temperature": 0}
            for path, body in (
                ("/v1/completions", {"prompt": text, "max_tokens": tokens}),
                ("/v1/chat/completions", {"messages": user, "max_tokens": tokens}),
                ("/v1/responses", {"input": text, "max_output_tokens": tokens}),
                ("/v1/messages", {"messages": user, "max_tokens": tokens}),
            ):
                found.append(Question(kind, path, {**common, **body}))
            options = {"temperature": 0, "num_predict": tokens}
            ollama = {"model": "demo", "messages": user, "options": options}
            found.append(Question(kind, "/api/chat", ollama))
            if kind == "short":
                tools = {"tools": [{"type": "function", "function": TOOL}], "max_tokens": 64,
                         "tool_choice": "required", "messages": user}  # fmt: skip
                found.append(Question("tools", "/v1/chat/completions", {**common, **tools}))
    return found


def content(data: dict[str, Any]) -> str:
    """The text or the tool's arguments in a response, or in an event of a stream."""
    if data.get("object") == "text_completion":
        return "".join(each["text"] for each in data["choices"])
    if "choices" in data:
        found = [each.get("message") or each.get("delta") or {} for each in data["choices"]]
        calls = [call for each in found for call in each.get("tool_calls") or ()]
        called = "".join(each["function"].get("arguments") or "" for each in calls)
        return "".join(each.get("content") or "" for each in found) + called
    if data.get("type") == "message":
        return "".join(each["text"] for each in data["content"])
    if data.get("object") == "response":
        return "".join(part["text"] for each in data["output"] for part in each["content"])
    if data.get("type") == "response.output_text.delta":
        return str(data["delta"])
    if data.get("type") == "content_block_delta":
        return str(data["delta"].get("text", ""))
    if "done" in data:
        return str(data["message"].get("content") or "")
    return ""


def error_of(data: dict[str, Any]) -> str | None:
    """The message of an error, in the format of any of the APIs."""
    error = data.get("error") or (data.get("response") or {}).get("error")
    if isinstance(error, dict):
        return str(error["message"])
    if data.get("type") == "error":
        return str(data["message"])
    return str(error) if error else None


def is_clear(reply: Reply) -> bool:
    """Check that an error is one that clients get when a replica is lost, or has no place."""
    return reply.status in CLEAR or (reply.error or "").startswith(LOST)


class Load:
    """Clients that ask a server at random until the time is over.

    An error that is not `is_clear` is wrong, and so is every answer that is not the first one.
    """

    def __init__(
        self, url: str, asked: list[Question], seed: int, is_clear: Callable[[Reply], bool]
    ) -> None:
        self.url, self.asked, self.seed, self._is_clear = url, asked, seed, is_clear
        self.first: dict[int, Reply] = {}
        self.outcomes, self.wrong = Counter[str](), list[str]()
        self.replies = defaultdict[str, list[Reply]](list)
        self.slowdowns = defaultdict[str, list[float]](list)

    async def run(self, clients: int, seconds: float, watch: Any) -> None:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=self.url, timeout=600, limits=limits) as client:
            self._client = client
            for number, each in enumerate(self.asked):
                await self.ask(each, True)  # the second time its prefix is in memory, as later
                self.first[number] = await self._ask_alone(each)
            watching = asyncio.ensure_future(asyncio.to_thread(watch, seconds))
            self._end = time.monotonic() + seconds
            await asyncio.gather(*(self._client_loop(number) for number in range(clients)))
            await watching
            for number, each in enumerate(self.asked):
                self._judge(number, await self._ask_alone(each), True, None)

    async def _ask_alone(self, asked: Question) -> Reply:
        reply = await self.ask(asked, True)
        if reply.error or not reply.text:
            self.wrong.append(f"{asked.path} alone: {reply.error or 'no text'}")
        return reply

    async def ask(self, asked: Question, stream: bool, parts: int | None = None) -> Reply:
        """Ask a question; hang up after so many parts, if given."""
        reply, begin = Reply(), time.monotonic()
        body = {**asked.body, "stream": stream}
        async with self._client.stream("POST", asked.path, json=body) as response:
            reply.status = response.status_code
            if not stream or reply.status >= 400:
                data = json.loads(await response.aread())
                reply.text, reply.error = content(data), error_of(data)
            else:
                async for line in response.aiter_lines():
                    if not (line := line.removeprefix("data: ")).startswith("{"):
                        continue
                    data = json.loads(line)
                    reply.error = error_of(data) or reply.error
                    if text := content(data):
                        reply.text += text
                        reply.times.append(time.monotonic() - begin)
                        if len(reply.times) == parts:
                            break
        reply.seconds = time.monotonic() - begin
        return reply

    async def _client_loop(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        while time.monotonic() < self._end:
            which = rng.randrange(len(self.asked))
            stream = rng.random() < 0.7
            parts = rng.randrange(1, 6) if stream and rng.random() < 0.1 else None
            try:
                reply = await self.ask(self.asked[which], stream, parts)
                self._judge(which, reply, stream, parts)
            except (httpx2.HTTPError, ValueError, KeyError) as error:
                self.wrong.append(f"{self.asked[which].path}: {type(error).__name__}: {error}")

    def _judge(self, which: int, reply: Reply, stream: bool, parts: int | None) -> None:
        asked, first = self.asked[which], self.first[which]
        if reply.error is not None:
            self.outcomes[f"{reply.status}: {reply.error}"] += 1
            if not self._is_clear(reply):
                self.wrong.append(f"{asked.path}: {reply.status}: {reply.error}")
            if not first.text.startswith(reply.text):
                self.wrong.append(
                    f"{asked.path}: {reply.text!r} before an error, not {first.text!r}"
                )
        elif parts is not None and len(reply.times) == parts:
            self.outcomes["hung up"] += 1
            if not first.text.startswith(reply.text):
                self.wrong.append(f"{asked.path}: {reply.text!r} begins not as {first.text!r}")
        elif reply.text != first.text:
            self.wrong.append(f"{asked.path}: {reply.text!r}, not {first.text!r}")
        else:
            self.outcomes["complete"] += 1
            self.slowdowns[asked.kind].append(reply.seconds / first.seconds)
            if stream:
                self.replies[asked.kind].append(reply)


class Watch:
    """Samples the memory of the server's processes, and kills the oldest replica now and then."""

    def __init__(self, server: psutil.Process | None, kill_every: float) -> None:
        self._server, self._kill_every = server, kill_every
        self.memory = defaultdict[tuple[str, int], list[tuple[float, int]]](list)
        self.killed = 0

    def __call__(self, seconds: float) -> None:
        begin = time.monotonic()
        next_kill = begin + self._kill_every
        while (now := time.monotonic()) < begin + seconds:
            alive = [self._server] if self._server else ray_processes()
            for each in alive:
                with suppress(psutil.Error):
                    self.memory[name_of(each), each.pid].append((now, each.memory_info().rss))
            replicas = [each for each in alive if name_of(each).endswith(":Replica")]
            if now >= next_kill and replicas:
                os.kill(min(replicas, key=psutil.Process.create_time).pid, signal.SIGKILL)
                self.killed, next_kill = self.killed + 1, now + self._kill_every
            time.sleep(SAMPLE_S)

    def growth(self) -> dict[str, float]:
        """Memory of the last quarter of each process's time over that of the second quarter."""
        found: dict[str, float] = {}
        for (name, pid), samples in self.memory.items():
            if samples[-1][0] - samples[0][0] >= JUDGED_S and len(samples) >= 8:
                sizes = [size for _, size in samples]
                quarter = len(sizes) // 4
                second = statistics.median(sizes[quarter : 2 * quarter])
                found[f"{name} {pid}"] = statistics.median(sizes[-quarter:]) / second
        return found


def name_of(process: psutil.Process) -> str:
    """The name of a process, without the method that it runs now."""
    with suppress(psutil.Error, IndexError):
        return process.cmdline()[0].split()[0].partition(".")[0]
    return ""


def ray_processes() -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if name_of(each).startswith(OURS)]


@contextmanager
def running(args: argparse.Namespace, log: Path) -> Iterator[tuple[str, psutil.Process | None]]:
    """A server that answers: its address, and its process if it is one `greenroom serve`."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
    options = ["demo", "--port", port, *SERVER, args.memory]
    with ExitStack() as stack:
        if args.alone:
            command = [sys.executable, "-m", "greenroom", "serve", *options]
        else:
            address = stack.enter_context(cluster(args.replicas))
            command = [sys.executable, str(RAY), *options, "--address", address,
                       "--replicas", str(args.replicas)]  # fmt: skip
        output = stack.enter_context(log.open("wb"))
        server = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            wait(f"{url}/health", server, log)
            yield url, psutil.Process(server.pid) if args.alone else None
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(90)
            server.kill()


@contextmanager
def cluster(nodes: int) -> Iterator[str]:
    """The address of a Ray cluster of so many nodes, each a process."""
    try:
        from ray.cluster_utils import Cluster
    except ModuleNotFoundError:
        sys.exit("ray is missing: pip install 'greenroom[ray]'")
    head = {"num_cpus": 1, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes - 1):
            started.add_node(num_cpus=1)
        yield started.address
    finally:
        started.shutdown()


def wait(health: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 180
    while True:
        with suppress(httpx2.HTTPError):
            if httpx2.get(health, timeout=10).status_code == 200:
                return
        if server.poll() is not None or time.monotonic() > until:
            sys.exit(f"the server does not answer:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


def percentiles(values: list[float], unit: float = 1.0) -> list[str]:
    """The median and the 95th percentile."""
    if len(values) < 2:
        return ["-", "-"]
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return [f"{statistics.median(values) * unit:.1f}", f"{cuts[-1] * unit:.1f}"]


def show(load: Load) -> None:
    rows = []
    for kind in sorted(load.slowdowns):
        times = [each.times for each in load.replies[kind]]
        first = [each[0] for each in times if each]
        later = [(each[-1] - each[0]) / (len(each) - 1) for each in times if len(each) > 1]
        rows.append([kind, len(load.slowdowns[kind]), *percentiles(first, 1e3),
                     *percentiles(later, 1e3), *percentiles(load.slowdowns[kind])])  # fmt: skip
    header = ["requests", "complete", "TTFT p50 ms", "p95", "TPOT p50 ms", "p95", "slowdown p50",
              "p95"]  # fmt: skip
    print(table(header, rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=300.0, metavar="S")
    parser.add_argument("--memory", default="1GiB", help="of each replica (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="one `greenroom serve`, without Ray")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"commit {commit()}; {machine()}; {args.minutes} minutes, {args.clients} clients")
    with tempfile.TemporaryDirectory() as folder, running(args, Path(folder) / "log") as server:
        load, watch = (
            Load(server[0], questions(args.seed), args.seed, is_clear),
            Watch(server[1], args.kill_every),
        )
        note("every question alone, then all clients")
        asyncio.run(load.run(args.clients, args.minutes * 60, watch))
    show(load)
    print(f"\n{len(load.wrong)} wrong answers")
    for outcome, count in load.outcomes.most_common():
        print(f"{count} answers: {outcome}")
    print(f"{watch.killed} replicas killed")
    growth = watch.growth()
    for name, ratio in growth.items():
        print(f"memory of {name}: {ratio:.3f}")
    wrong = load.wrong[:3] + [f"memory grew: {each}" for each in growth if growth[each] > FLAT]
    if wrong:
        sys.exit(f"failed: {len(load.wrong)} wrong answers; {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
