"""Chat backend over a model in this process, without HTTP.

backend = LocalBackend(engine, sampling)
reply = backend.answer(messages, on_delta)     # returns at the answer's end, or at Ctrl-C
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from greenroom.config import SamplingConfig
from greenroom.errors import GreenroomError
from greenroom.hf.text.dialogue import Dialogue
from greenroom.interrupts import mark_handled
from greenroom.server.chat.backend import Messages, OnDelta, Reply
from greenroom.server.engine.loop import ContinuousEngine
from greenroom.server.engine.requests import (
    Event,
    Finished,
    Request,
    Sampling,
    Token,
)
from greenroom.server.engine.tokens.reader import AnswerDelta, AnswerReader
from greenroom.server.http.request_log import tokens_per_s

GRACE_S = 5.0
FIELDS = ("reason", "prompt_tokens", "reused_tokens", "new_tokens", "ttft_s", "hit_ratio")
Events = queue.SimpleQueue[Event]


class LocalBackend:
    """Answers chat messages with the serving engine of this process, without HTTP."""

    def __init__(self, engine: ContinuousEngine, sampling: SamplingConfig) -> None:
        self._engine, self._sampling = engine, sampling
        self._dialogue = Dialogue(engine.tokenizer, engine.model_type, engine.context)

    def answer(self, messages: Messages, on_delta: OnDelta) -> Reply:
        ids = self._ids(messages)
        reader = AnswerReader(self._dialogue.reply_parser(ids), end_ids=self._engine.end_ids)
        events: Events = queue.SimpleQueue()
        ticket = self._engine.submit(self._request(ids), events.put)
        reply = Reply()
        try:
            finished = self._receive(events, reader, reply, on_delta)
        except KeyboardInterrupt as error:
            mark_handled(error)
            ticket.cancel()
            finished = _last(events)
        if finished.reason == "error":
            raise finished.error or GreenroomError("the engine failed")
        for name in FIELDS:
            setattr(reply, name, getattr(finished, name))
        reply.tokens_per_s = tokens_per_s(finished)
        return reply

    def _receive(
        self, events: Events, reader: AnswerReader, reply: Reply, on_delta: OnDelta
    ) -> Finished:
        while True:
            event, deltas = events.get(), list[AnswerDelta]()
            if isinstance(event, Token):
                deltas = reader.feed(event)
            elif isinstance(event, Finished):
                deltas, _ = reader.end(event)
            for delta in deltas:
                reply.add(delta)
                on_delta(delta)
            if isinstance(event, Finished):
                return event

    def _ids(self, messages: Messages) -> tuple[int, ...]:
        """Return the prompt's tokens; without a chat template, those of the last message."""
        if self._dialogue.has_template:
            return tuple(self._dialogue.chat(messages))
        return tuple(self._dialogue.encode(messages[-1]["content"]))

    def _request(self, ids: tuple[int, ...]) -> Request:
        config, room = self._sampling, max(1, self._engine.context - len(ids))
        return Request(
            ids,
            max_new_tokens=min(config.max_new_tokens, room),
            sampling=Sampling(config.temperature, config.top_p, config.top_k, seed=config.seed),
        )

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def resize(self, cache: str) -> int:
        return self._engine.resize(cache)

    def close(self) -> None:
        self._engine.stop(GRACE_S)
        self._dialogue.close()


def wait_until_loaded(engine: ContinuousEngine, show: Callable[[float], None]) -> None:
    """Wait until the serving engine has loaded its model; `show` gets the progress, 0 to 1.

    GreenroomError if loading fails.
    """
    while True:
        state, progress, why = engine.state()
        if state != "loading":
            break
        show(progress)
        time.sleep(0.05)
    if state != "ready":
        raise GreenroomError(why or f"the model was not loaded: the engine is {state}")


def _last(events: Events) -> Finished:
    while True:
        event = events.get()
        if isinstance(event, Finished):
            return event
