"""Cost and gain of serving: one user and eight, a second turn, HTTP, and the options.

    python benchmarks/serve.py bench-data [--variant zipf1.5] [--cache 50%] [--parts users turn ...]

One engine with the cache half the size of the experts, over a checkpoint of checkpoints.py, with
random tokens (the checkpoint's router is skewed by design). Speeds are ratios of interleaved pairs.

  run     one user of the engine against `generate`, tokens a second (what `greenroom run` does)
  users   eight users against one, tokens a second; TTFT p95 of the eight
  turn    the first token of a second turn of a 500-token conversation, against the same sent cold
  http    CPU seconds a token of one user: through HTTP against the engine alone
  delay   --batch-delay: eight prompts that arrive within 100 ms, off against on
  exact   --batch-invariant: eight users, off against on
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from checkpoints import VARIANTS, folder_of
from common import commit, machine, note, show_ratio, table

from greenroom.config import LoadConfig, ServeConfig
from greenroom.server.engine.loop import ContinuousEngine
from greenroom.server.engine.requests import Finished, Request, Sampling, Token
from greenroom.server.engine.start import start

PARTS = ("run", "users", "turn", "http", "delay", "exact")
GREEDY = Sampling(temperature=0.0)
Pairs = list[tuple[float, float]]


class Answer:
    """The tokens of one request and their times."""

    def __init__(self, engine: ContinuousEngine, ids: list[int], new: int) -> None:
        self.times: list[float] = []
        self.ids: list[int] = []
        self._over = threading.Event()
        self.begin = time.perf_counter()
        engine.submit(Request(tuple(ids), new, GREEDY, end_ids=()), self._receive)

    def _receive(self, event: Token | Finished) -> None:
        if isinstance(event, Finished):
            self.finished = event
            self._over.set()
        else:
            self.times.append(time.perf_counter())
            self.ids.append(event.id)

    def end(self) -> Answer:
        self._over.wait()
        if self.finished.error is not None:
            raise self.finished.error
        return self

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.begin


class Bench:
    """Starts engines of the checkpoint one after another, and sends requests to them.

    `start(**options)` starts an engine, which later requests are sent to; `stop` ends all engines.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self._seed = args, 0
        self.folder = folder_of(args.root, args.variant)
        self.engine: ContinuousEngine | None = None
        self._engines: list[ContinuousEngine] = []

    def start(self, **serve: Any) -> ContinuousEngine:
        load = LoadConfig(cache=self.args.cache, context=2048)
        self.engine = start(str(self.folder), load, ServeConfig(**{"max_batch": 8, **serve}))
        self._engines.append(self.engine)
        while self.engine.state()[0] == "loading":
            time.sleep(0.05)
        assert self.engine.state()[0] == "ready", self.engine.state()
        self.engine.end_ids = ()  # answers have the requested length
        for _ in range(2):  # kernels, and what is resident
            self.ask(8, 64, 8)
        return self.engine

    def stop(self) -> None:
        for each in self._engines:
            each.stop(0)
        self._engines.clear()

    def prompt(self, tokens: int) -> list[int]:
        assert self.engine is not None
        self._seed += 1
        random = torch.Generator().manual_seed(self._seed)
        most = self.engine.model.config.vocab_size - 1
        return torch.randint(5, most, (tokens,), generator=random).tolist()

    def ask(self, users: int, prompt: int, new: int, apart_s: float = 0.0) -> list[Answer]:
        """Send new prompts of `users` users, and return their answers.

        The prompts are sent at once, or `apart_s` seconds after one another.
        """
        assert self.engine is not None
        answers_begun = []
        for _ in range(users):
            answers_begun.append(Answer(self.engine, self.prompt(prompt), new))
            if apart_s:
                time.sleep(apart_s)
        return [each.end() for each in answers_begun]

    def rate(self, users: int) -> float:
        """Tokens a second of all users together, while all of them answer."""
        answers = self.ask(users, self.args.prompt, self.args.tokens)
        begin = max(each.times[0] for each in answers)
        end = min(each.times[-1] for each in answers)
        counted = sum(sum(begin < t <= end for t in each.times) for each in answers)
        if not counted:
            sys.exit(f"no time in which all {users} answer: more --tokens than {self.args.tokens}")
        return counted / (end - begin)


class Clock:
    """A streamer for `generate` that records the time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())  # the prompt is the first

    def end(self) -> None:
        pass


def run(bench: Bench) -> str:
    """Compare `generate` and the engine on the same model, cache and prompts."""
    engine = bench.start(no_prefix_reuse=True)
    pairs: Pairs = []
    new = bench.args.tokens
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    for _ in range(bench.args.repeats):
        prompt = bench.prompt(bench.args.prompt)
        times = Answer(engine, prompt, new).end().times
        ours = (new - 1) / (times[-1] - times[0])
        ids, clock = torch.tensor([prompt]), Clock()
        with torch.inference_mode():
            engine.model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=clock, **options
            )
        theirs = (new - 1) / (clock.times[-1] - clock.times[1])
        pairs.append((ours, theirs))
        note(f"run: engine {ours:.1f}, generate {theirs:.1f} tokens/s")
    return f"One user of the engine, times `generate`: {show_ratio(pairs)}"


def users(bench: Bench) -> str:
    engine = bench.start(no_prefix_reuse=True)
    pairs: Pairs = []
    ttfts: list[float] = []
    for _ in range(bench.args.repeats):
        one = bench.rate(1)
        before = engine.stats()["experts"]
        eight = bench.rate(8)
        after = engine.stats()["experts"]
        ttfts += [each.ttft_s for each in bench.ask(8, bench.args.prompt, 1)]
        hits = (after["hits"] - before["hits"]) / (after["requests"] - before["requests"])
        pairs.append((eight, one))
        note(f"users: one {one:.1f}, eight {eight:.1f} tokens/s, hit ratio of eight {hits:.1%}")
    p95 = statistics.quantiles(ttfts, n=20)[-1]
    rates = [statistics.median(each) for each in zip(*pairs, strict=True)]
    return (
        f"Eight users {rates[0]:.1f} tokens/s, one {rates[1]:.1f}: {show_ratio(pairs)} times;"
        f" TTFT of eight prompts of {bench.args.prompt} tokens at once: p50"
        f" {statistics.median(ttfts):.2f} s, p95 {p95:.2f} s"
    )


def turn(bench: Bench) -> str:
    """Compare the second turn of a conversation with the same tokens sent cold.

    The conversation has a prompt of 470 tokens, an answer of 30, and 20 more tokens.
    """
    engine = bench.start()
    pairs: Pairs = []
    for _ in range(bench.args.repeats):
        prompt = bench.prompt(470)
        first = Answer(engine, prompt, 30).end()
        second = Answer(engine, [*prompt, *first.ids, *bench.prompt(20)], 1).end()
        cold = Answer(engine, bench.prompt(520), 1).end()
        assert second.finished.reused_tokens >= 499
        assert cold.finished.reused_tokens == 0
        pairs.append((cold.ttft_s, second.ttft_s))
        note(f"turn: cold {cold.ttft_s:.2f} s, second turn {second.ttft_s:.3f} s")
    return f"First token of the second turn sooner than cold: {show_ratio(pairs)} times"


def http_(bench: Bench) -> str:
    """Compare the CPU seconds of an answer through HTTP and by the engine alone."""
    engine = bench.start(no_prefix_reuse=True)
    pairs: Pairs = []
    new, vocabulary = bench.args.tokens, len(engine.tokenizer)
    with torch.no_grad():  # every token of an answer shall have a text
        engine.model.get_output_embeddings().weight[vocabulary:] = 0
    with served_by_http(engine) as client:
        client([1, 2, 3], 4)
        for repeat in range(2 * bench.args.repeats):
            ids = [token % vocabulary for token in bench.prompt(8)]
            spent = {}
            for way in ("http", "engine") if repeat % 2 else ("engine", "http"):
                begin = time.process_time()
                if way == "http":
                    client(ids, new)
                else:
                    Answer(engine, ids, new).end()
                spent[way] = time.process_time() - begin
            pairs.append((spent["http"], spent["engine"]))
            note(f"http: {spent['http'] / new * 1e3:.2f} against {spent['engine'] / new * 1e3:.2f}"
                 " ms of CPU a token")  # fmt: skip
    return f"CPU time a token through HTTP, times the engine alone: {show_ratio(pairs)}"


@contextmanager
def served_by_http(engine: ContinuousEngine) -> Iterator[Callable[[list[int], int], None]]:
    """An HTTP server for an engine; yields a function that sends one request from a process."""
    from greenroom.server.http.request_log import RequestLog
    from greenroom.server.http.service import Service
    from greenroom.server.web.listen import make_server, open_socket

    config = engine.config
    log = RequestLog(config.log_format, lambda line: None)
    sock = open_socket("127.0.0.1", 0)
    running = make_server(Service(engine, config, "bench", None, log))
    running.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    thread = threading.Thread(target=running.run, args=([sock],))
    thread.start()
    command = [sys.executable, __file__, "--client", str(sock.getsockname()[1])]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def send(ids: list[int], new: int) -> None:
            print(json.dumps([ids, new]), file=child.stdin, flush=True)  # type: ignore[arg-type]
            assert child.stdout.readline() == "done\n"  # type: ignore[union-attr]

        try:
            yield send
        finally:
            child.stdin.close()
            running.should_exit = True
            thread.join()


def client(port: int) -> None:
    """Send a request for each line [ids, new] of standard input; print `done` after each."""
    for line in sys.stdin:
        ids, new = json.loads(line)
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = {"model": "bench", "prompt": ids, "max_tokens": new, "temperature": 0,
                "stream": True}  # fmt: skip
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        while answer.readline():
            pass
        connection.close()
        print("done", flush=True)


def delay(bench: Bench) -> str:
    """A table of eight prompts, one every 12 ms: TTFT and bytes read, with and without delay."""
    engines = {ms: bench.start(no_prefix_reuse=True, batch_delay=ms) for ms in (0.0, 100.0)}
    pairs_by_delay: dict[float, list[tuple[float, float, float]]] = {ms: [] for ms in engines}
    for _ in range(bench.args.repeats):
        for ms, engine in engines.items():
            bench.engine = engine
            before = engine.stats()["experts"]["bytes_read"]
            ttfts = [each.ttft_s for each in bench.ask(8, bench.args.prompt, 4, apart_s=0.012)]
            nbytes = engine.stats()["experts"]["bytes_read"] - before
            pairs_by_delay[ms].append((max(ttfts), statistics.fmean(ttfts), nbytes / 1e6))
            note(f"delay {ms}: {pairs_by_delay[ms][-1]}")
    rows = [
        (f"{ms:.0f} ms", *(f"{statistics.median(each):.3g}" for each in zip(*all_, strict=True)))
        for ms, all_ in pairs_by_delay.items()
    ]
    head = ("--batch-delay", "last TTFT s", "mean TTFT s", "MB read for the eight")
    return table(head, rows)


def exact(bench: Bench) -> str:
    engines = [bench.start(no_prefix_reuse=True, batch_invariant=on) for on in (True, False)]
    pairs: Pairs = []
    for _ in range(bench.args.repeats):
        rates = []
        for bench.engine in engines:
            rates.append(bench.rate(8))
        pairs.append((rates[0], rates[1]))
        note(f"exact: {rates[0]:.1f}, without {rates[1]:.1f} tokens/s")
    return f"Eight users with --batch-invariant, times without: {show_ratio(pairs)}"


KINDS: dict[str, Callable[[Bench], str]] = {
    "run": run, "users": users, "turn": turn, "http": http_, "delay": delay, "exact": exact,
}  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        client(int(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description="what serving costs and gains")
    parser.add_argument("root", type=Path, help="where checkpoints.py made its folders")
    parser.add_argument("--variant", default="zipf1.5", choices=list(VARIANTS))
    parser.add_argument("--cache", default="50%")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer")
    args = parser.parse_args()
    print(f"commit {commit()}; {machine()}; {args.variant}, cache {args.cache}\n", flush=True)
    bench = Bench(args)
    try:
        for part in args.parts:
            print(KINDS[part](bench) + "\n", flush=True)
            bench.stop()
    finally:
        bench.stop()


if __name__ == "__main__":
    main()
