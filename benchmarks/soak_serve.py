"""A long load test of the server's engine: no request may fail, memory stays flat.

    python benchmarks/soak_serve.py MODEL [--minutes 30] [--users 6] [--batch-invariant]

Users send the engine requests of mixed lengths: conversations with several turns, prompts with a
common prefix, greedy and sampled answers. Some clients disconnect early, some send invalid
requests, some have too little time; the expert cache is resized meanwhile. At the end:

  - every answer that was not given up by its client ended as it should,
  - the process holds no more than 2 % more memory at the end than after a quarter of the time
    (judged in runs of two minutes and more: a shorter one is still filling its caches),
  - every answer is computed again, in the same passes, over a cache of another size: the tokens
    must be the same (with --batch-invariant: one request at a time).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from common import commit, machine, note
from passes import replay

from greenroom.config import LoadConfig, ServeConfig
from greenroom.errors import GreenroomError
from greenroom.hf.kv.batch import Batch
from greenroom.runtime.memory.system import rss_bytes
from greenroom.server.engine.journal import Journal, Pass, PrefixReuse
from greenroom.server.engine.loop import ContinuousEngine
from greenroom.server.engine.requests import Busy, Finished, Request, Sampling, Token
from greenroom.server.engine.start import start
from greenroom.server.engine.tokens.sampling import Sampler

SIZES = ("25%", "50%", "75%")
PROMPTS = (1, 4, 20, 60, 150, 400)
FLAT, JUDGED_MINUTES = 1.02, 2.0
BAD = (
    {"ids": ()}, {"ids": (1 << 40,)}, {"ids": (5,), "max_new_tokens": -1},
    {"ids": (5,), "max_new_tokens": 1 << 50}, {"ids": (5,), "sampling": Sampling(top_p=7.0)},
    {"ids": (5,), "grammar": "no grammar at all ("},
)  # fmt: skip


@dataclass
class Reply:
    """The tokens and the end of one request, as its client received them."""

    hang_up_after: int | None = None
    ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    ticket: Any = None
    over: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Token | Finished) -> None:
        if isinstance(event, Finished):
            self.finished = event
            self.over.set()
            return
        self.ids.append(event.id)
        if self.hang_up_after is not None and len(self.ids) >= self.hang_up_after:
            self.ticket.cancel()


class Soak:
    def __init__(self, engine: ContinuousEngine, seconds: float) -> None:
        self.engine, self.until = engine, time.monotonic() + seconds
        self.begin, self.seconds = time.monotonic(), seconds
        self.answers: dict[int, Reply] = {}  # by sequence number
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[tuple[float, int]] = []
        self.systems = [self.draw(random.Random(n), 100) for n in range(3)]
        self._lock = threading.Lock()

    def draw(self, rng: random.Random, count: int) -> tuple[int, ...]:
        most = self.engine._vocabulary
        return tuple(rng.randrange(5, most) for _ in range(count))

    def going(self) -> bool:
        return time.monotonic() < self.until and self.engine.state()[0] == "ready"

    def user(self, seed: int) -> None:
        """A user that sends requests until the time is over."""
        rng = random.Random(seed)
        talk: tuple[int, ...] = ()
        while self.going():
            if rng.random() < 0.1:
                self._bad(rng)
                continue
            if not talk or rng.random() < 0.4 or len(talk) > 500:
                talk = rng.choice([(), *self.systems])
            talk = (*talk, *self.draw(rng, rng.choice(PROMPTS)))
            reply = self._ask(rng, talk)
            if reply is not None:
                talk = (*talk, *reply.ids)

    def _ask(self, rng: random.Random, ids: tuple[int, ...]) -> Reply | None:
        new = rng.choice((1, 5, 20, 60))
        sampling = Sampling(temperature=rng.choice((0.0, 0.8)), seed=rng.randrange(1 << 30))
        reply = Reply(rng.randrange(1, 20) if rng.random() < 0.15 else None)
        limit = 0.3 if rng.random() < 0.05 else None
        request = Request(ids, new, sampling, end_ids=(), timeout_s=limit)
        try:
            reply.ticket = ticket = self.engine.submit(request, when_ticketed(reply))
        except Busy as busy:
            self._count("busy")
            time.sleep(min(busy.retry_after_s, 2.0))
            return None
        if rng.random() < 0.05:
            ticket.cancel()
        if not reply.over.wait(600):
            self._fail("an answer hangs")
            return None
        assert reply.finished is not None
        self._count(reply.finished.reason)
        if reply.finished.error is not None:
            self._fail(f"an answer ended with {reply.finished.error!r}")
        with self._lock:
            self.answers[ticket.number] = reply
        return reply

    def _bad(self, rng: random.Random) -> None:
        fields: dict[str, Any] = {"max_new_tokens": 4, **rng.choice(BAD)}
        try:
            self.engine.submit(Request(**fields), lambda reply: None)
            self._fail(f"taken: {fields}")
        except GreenroomError:
            self._count("refused")

    def resizes(self) -> None:
        """Resize the cache in turns; sample memory whenever it has the first size again."""
        turn = 0
        while self.going():
            try:
                self.engine.resize(SIZES[turn % len(SIZES)])
            except GreenroomError as error:
                if self.engine.state()[0] == "ready":
                    self._fail(f"a resize failed: {error!r}")
            time.sleep(min(2.0, self.seconds / 60))
            if turn % len(SIZES) == 0:
                self.memory.append((time.monotonic() - self.begin, rss_bytes()))
            turn += 1

    def _count(self, what: str) -> None:
        with self._lock:
            self.reasons[what] += 1

    def _fail(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)
        note(what)

    def run(self, users: int) -> None:
        threads = [threading.Thread(target=self.user, args=(seed,)) for seed in range(users)]
        threads.append(threading.Thread(target=self.resizes))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def growth(self) -> float:
        """Median memory of the last quarter of the time over that of the second quarter."""
        quarter = self.seconds / 4
        second = [nbytes for at, nbytes in self.memory if quarter <= at < 2 * quarter]
        last = [nbytes for at, nbytes in self.memory if at >= 3 * quarter]
        return statistics.median(last) / statistics.median(second) if second and last else 1.0


def when_ticketed(reply: Reply) -> Any:
    """A callback that waits until its request has a ticket: an answer may begin before."""

    def listen(what: Token | Finished) -> None:
        while reply.ticket is None:
            time.sleep(1e-4)
        reply(what)

    return listen


def start_one(args: argparse.Namespace, cache: str, journal: Journal | None) -> ContinuousEngine:
    load = LoadConfig(cache=cache, context=1024)
    serve = ServeConfig(max_batch=4, max_queue=8, batch_invariant=args.batch_invariant)
    engine = start(args.model, load, serve, journal=journal)
    while engine.state()[0] == "loading":
        time.sleep(0.05)
    if engine.state()[0] != "ready":
        sys.exit(f"the model cannot be served: {engine.state()[2]}")
    return engine


def again(args: argparse.Namespace, journal: Journal, soak: Soak) -> int:
    """Number of answers whose tokens differ when they are computed again."""
    engine = start_one(args, "35%", None)
    try:
        batch = Batch(engine.model, exact=args.batch_invariant)
        generation_config, vocabulary = engine.model.generation_config, engine._vocabulary
        requests = {n: journal.requests[n] for n in soak.answers}
        samplers = {
            n: Sampler(r, generation_config, vocabulary) for n, r in journal.requests.items()
        }
        if args.batch_invariant:
            replayed = {}
            for number, request in requests.items():
                events = [Pass(((number, a, n),)) for a, n in sequential_passes(request, 128)]
                sequential = Journal(list[PrefixReuse | Pass](events), {number: request})
                replayed[number] = replay(batch, sequential, {number: samplers[number]})[number]
        else:
            replayed = replay(batch, journal, samplers)
        wrong = 0
        for number, reply in soak.answers.items():
            ids = [token.id for token in replayed[number]]
            wrong += reply.ids != ids[: len(reply.ids)]
        return wrong
    finally:
        engine.stop(0)


def sequential_passes(request: Request, chunk: int) -> list[tuple[int, int]]:
    """(begin, tokens) of the passes of a request that runs without others."""
    prompt = len(request.ids)
    reads = [(a, min(chunk, prompt - a)) for a in range(0, prompt, chunk)]
    return reads + [(prompt + n, 1) for n in range(request.max_new_tokens - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description="an engine under load for a long time")
    parser.add_argument("model", help="a folder, a hub id, or demo")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--cache", default="50%")
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--batch-invariant", action="store_true")
    args = parser.parse_args()
    print(f"commit {commit()}; {machine()}; {args.model}, {args.minutes} minutes", flush=True)
    journal = Journal()
    engine = start_one(args, args.cache, journal)
    soak = Soak(engine, args.minutes * 60)
    soak.run(args.users)
    passes, state = engine.stats()["passes"], engine.state()
    engine.stop(5)
    if state[0] != "ready":
        soak.wrong.append(f"the engine is {state}")
    growth = soak.growth()
    note("computing it all again")
    different = again(args, journal, soak)
    print(f"{sum(soak.reasons.values())} requests: {dict(soak.reasons)}; {passes['count']} passes")
    print(f"memory of the last quarter over that of the second: {growth:.3f}")
    print(f"{len(soak.answers)} answers computed again, {different} different")
    wrong = soak.wrong[:3] + [f"{different} answers are different"] * bool(different)
    if growth > FLAT and args.minutes >= JUDGED_MINUTES:
        wrong.append(f"memory has grown by {growth - 1:.1%}")
    if wrong:
        sys.exit(f"failed: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
