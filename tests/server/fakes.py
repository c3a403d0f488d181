"""A fake engine without a model: its script decides the tokens of each answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from greenroom.config import ServeConfig
from greenroom.errors import GreenroomError, TooLong, UsageError
from greenroom.server.engine.requests import Busy, Finished, Listener, PromptTokens, Request, Token
from greenroom.server.engine.snapshot import Totals

Script = Callable[[Request], Iterable[int]]


@dataclass
class FakeTicket:
    """One request, which its own thread answers."""

    request: Request
    listener: Listener
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    sent_tokens: int = 0
    stopping: bool = False

    admitted = answered = 0.0  # times, as of a Sequence
    arrived: float = field(default_factory=time.monotonic)

    def cancel(self) -> None:
        self.cancelled.set()

    @property
    def prompt(self) -> int:
        return len(self.request.ids)

    computed = prompt

    @property
    def new(self) -> int:
        return self.sent_tokens


class FakeDevices:
    """The part of a model that changes its devices: it was loaded on two."""

    devices = ("fake:0", "fake:1")

    def use_devices(self, device: str) -> int:
        if device != "fake,fake":
            raise UsageError(f"devices {device[:64]}: this model was loaded on fake:0, fake:1")
        return 14


class FakeEngine:
    """Answers every request with the tokens of `script`, one every `delay_s`.

    `failing` is raised after `fail_after` tokens; `places` bounds the requests at a time.
    """

    was_ready = False  # it has no model, whose statistics could be read
    config = ServeConfig()
    pictures = None  # it takes text only

    def __init__(
        self,
        tokenizer: Any,
        script: Script | Sequence[int] = (),
        *,
        end_ids: tuple[int, ...] = (),
        model_type: str | None = None,
        context: int = 512,
        delay_s: float = 0.0,
        first_s: float = 0.0,
        places: int = 1000,
        reused: int = 0,
    ) -> None:
        self.tokenizer, self.end_ids, self.model_type = tokenizer, end_ids, model_type
        self.context, self.summary = context, "fake: nothing is placed anywhere"
        self.script = script if callable(script) else (lambda request: script)
        self.delay_s, self.first_s, self.places, self.reused = delay_s, first_s, places, reused
        self.failure: BaseException | None = None
        self.failing: GreenroomError | None = None
        self.fail_after = 0
        self.now: tuple[str, float, str] = ("ready", 1.0, "")
        self.tickets: list[FakeTicket] = []
        self.resized: list[str | int] = []
        self.greenroom = FakeDevices()
        self.stopped_after: float | None = None
        self.totals = Totals()
        self._lock = threading.Lock()

    def submit(self, request: Request, listener: Listener) -> FakeTicket:
        if len(request.ids) >= self.context:
            raise TooLong(f"the prompt has {len(request.ids)} tokens, there is room for"
                          f" {self.context}")  # fmt: skip
        with self._lock:
            if sum(not ticket.done.is_set() for ticket in self.tickets) >= self.places:
                raise Busy("the queue is full", retry_after_s=3.0)
            ticket = FakeTicket(request, listener)
            self.tickets.append(ticket)
        threading.Thread(target=self._answer, args=(ticket,), daemon=True).start()
        return ticket

    def _answer(self, ticket: FakeTicket) -> None:
        request, began, first = ticket.request, time.monotonic(), None
        reason = "stop"
        ticket.cancelled.wait(self.first_s)
        if request.prompt_logprobs is not None:
            scored = [self._scored(request, token) for token in request.ids[1:]]
            ticket.listener(PromptTokens((Token(request.ids[0]), *scored)))
        for token in self.script(request):
            if ticket.cancelled.is_set():
                break
            if self.failing is not None and ticket.sent_tokens >= self.fail_after:
                reason = "error"
                break
            if ticket.sent_tokens >= request.max_new_tokens:
                reason = "length"
                break
            first = first or time.monotonic() - began
            ticket.sent_tokens += 1
            ticket.listener(self._token(request, token))
            ticket.cancelled.wait(self.delay_s)
            if request.timeout_s and time.monotonic() - began > request.timeout_s:
                reason = "timeout"
                break
        if ticket.cancelled.is_set():
            reason = "stopping" if ticket.stopping else "cancelled"
        error = self.failing if reason == "error" else None
        ticket.done.set()
        took = time.monotonic() - began
        prompt = len(request.ids)
        finished = Finished(
            reason, prompt, self.reused, ticket.sent_tokens, 0.0, first, took, 0.75, error
        )
        with self._lock:
            self.totals.add(finished)
        ticket.listener(finished)

    def _scored(self, request: Request, token: int) -> Token:
        """Return a prompt token whose log-probability is minus its id."""
        top = tuple((token + i, -1.0 - i) for i in range(1, (request.prompt_logprobs or 0) + 1))
        return Token(token, -float(token), top)

    def _token(self, request: Request, token: int) -> Token:
        if request.top_logprobs is None:
            return Token(token)
        top = tuple((token + i, -0.5 - i) for i in range(request.top_logprobs))
        return Token(token, -0.5, top)

    def sequences(self) -> tuple[list[FakeTicket], list[FakeTicket]]:
        with self._lock:
            return [ticket for ticket in self.tickets if not ticket.done.is_set()], []

    def state(self) -> tuple[str, float, str]:
        return self.now

    def stats(self) -> dict[str, Any]:
        counted = self.totals.as_json()
        return {"running": 0, "layers": {"hits": [3, 4], "misses": [1, 0]}, **counted}

    def resize(self, cache: str | int) -> int:
        self.resized.append(cache)
        return 7

    def stop(self, grace_s: float) -> None:
        self.stopped_after = grace_s
        self.now = ("stopping", 1.0, "")
        until = time.monotonic() + grace_s
        for ticket in self.tickets:
            ticket.done.wait(max(0.0, until - time.monotonic()))
            ticket.stopping = True
            ticket.cancel()
