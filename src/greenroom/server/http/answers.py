"""Streams the answers of one HTTP request from the engine's thread to the event loop.

answers = await start_answers(service, record, lambda dialogue: Job(...))
async for index, part in answers:    # AnswerDelta, AnswerDelta, ... AnswerEnd of each answer
answers.cancel()                     # the client has disconnected: nothing more is computed
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from greenroom.errors import GreenroomError
from greenroom.hf.pictures.prompt import PromptPictures
from greenroom.hf.text.dialogue import Dialogue, ReplyParser
from greenroom.server.engine.requests import (
    Event,
    Finished,
    PromptTokens,
    Request,
    Sampling,
    Token,
)
from greenroom.server.engine.sequence import Sequence
from greenroom.server.engine.tokens.reader import AnswerDelta, AnswerEnd, AnswerReader
from greenroom.server.http.errors import ApiError, as_api_error
from greenroom.server.http.request_log import RequestRecord
from greenroom.server.http.service import Service

TURN = 16  # events until other requests get a turn
LEAVE_S = 5.0  # longest wait for cancelled answers to end


@dataclass(frozen=True, slots=True)
class Job:
    """A client's request as input of the engine: prompts, settings, `n` answers to each prompt.

    Prompts are token ids; `pictures` are those of the only prompt. Answers to a `plain` job are
    text, without reasoning and tool calls. With `one_call`, an answer ends after its first tool
    call.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    tools: list[dict[str, Any]] | None = None
    pictures: PromptPictures | None = None
    plain: bool = False
    one_call: bool = False

    def reader(self, dialogue: Dialogue, index: int, end_ids: tuple[int, ...]) -> AnswerReader:
        """Make the AnswerReader that converts the tokens of answer number `index` to text.

        Answers 0 to n - 1 are those to the first prompt. Tokens in `end_ids` have no text.
        """
        if self.plain or (self.grammar is not None and self.tools is None):
            speaker = ReplyParser(dialogue)
        else:
            speaker = dialogue.reply_parser(self.prompts[index // self.n], self.tools)
        # With log-probabilities a completion shows every token that was chosen, also the last.
        ends = () if self.plain and self.top_logprobs is not None else end_ids
        return AnswerReader(speaker, self.stops, ends, self.one_call)


async def start_answers(
    service: Service, record: RequestRecord, make: Callable[[Dialogue], Job], variant: int = 0
) -> AnswerStream:
    """Make an HTTP request's Job (prompts and settings) on a worker thread, and submit it.

    `make` takes the Dialogue and returns the Job; `variant` of the model answers. Raises
    Busy, TooLong, UsageError or ApiError.
    """
    loop = asyncio.get_running_loop()

    def prepare(dialogue: Dialogue) -> AnswerStream:
        answers = AnswerStream(service, record, dialogue, make(dialogue), loop, variant)
        answers.submit()  # which may compile a grammar
        return answers

    return await service.prepare(prepare, record, AnswerStream.cancel)


class AnswerStream:
    """Streams the answers to one HTTP request as they are computed."""

    def __init__(
        self,
        service: Service,
        record: RequestRecord,
        dialogue: Dialogue,
        job: Job,
        loop: asyncio.AbstractEventLoop,
        variant: int = 0,
    ) -> None:
        self.job, self.dialogue, self.variant = job, dialogue, variant
        self.request_id = record.id
        self.prompt_tokens = record.prompt_tokens = sum(map(len, job.prompts))
        self._service, self._record, self._loop = service, record, loop
        if len(service.models) > 1:
            record.model = service.models[variant]
        if (pictures := job.pictures) is not None and dialogue.pictures is not None:
            service.pixels.take(record, pictures.nbytes, dialogue.pictures.waiting_bytes)
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._begun = asyncio.Event()
        self._early: list[tuple[int, Event]] = []  # of choices whose prompt has no scores yet
        self._scored = [job.prompt_logprobs is None] * len(job.prompts)
        self._tickets: list[Sequence] = []
        self.count = len(job.prompts) * job.n
        if self.count > service.most_answers:
            most = service.most_answers
            message = f"the request has {self.count} answers: at most {most} are allowed at a time"
            raise ApiError(400, message, param="n")
        ends = tuple(service.engine.end_ids)
        self._readers = [job.reader(dialogue, index, ends) for index in range(self.count)]
        self._unfinished = self._delivered = self._tokens = 0

    def submit(self) -> None:
        """Submit all of an HTTP request's answers to the engine; if one is refused, cancel all."""
        try:
            for index in range(self.count):
                self._tickets.append(
                    self._service.engine.submit(
                        self._request(index), partial(self._post_event, index)
                    )
                )
                self._unfinished += 1
        except BaseException:
            self.cancel()
            raise

    def _request(self, index: int) -> Request:
        job, config, engine = self.job, self._service.config, self._service.engine
        ids, sampling = job.prompts[index // job.n], job.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + index % job.n) % (1 << 63))
        limits = (job.max_tokens, config.max_tokens, max(1, engine.context - len(ids)))
        return Request(
            ids,
            max_new_tokens=min(limit for limit in limits if limit is not None),
            sampling=sampling,
            top_logprobs=job.top_logprobs,
            prompt_logprobs=job.prompt_logprobs if index % job.n == 0 else None,
            grammar=job.grammar,
            pictures=job.pictures,
            timeout_s=self._service.left_s(self._record),
            name=self._record.id,
            variant=self.variant,
        )

    def _post_event(self, index: int, event: Event) -> None:
        """Queue an event of an answer. Called in the engine's thread."""
        if isinstance(event, Finished):
            model = self._service.models[self.variant]
            self._service.metrics.observe_answer(event, model)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._queue_event, index, event)

    def _queue_event(self, index: int, event: Event) -> None:
        self._events.put_nowait((index, event))
        self._begun.set()

    async def wait_for_event(self) -> None:
        """Wait until the engine has sent the first event of any answer."""
        await self._begun.wait()

    async def __aiter__(self) -> AsyncIterator[tuple[int, AnswerDelta | AnswerEnd]]:
        """Yield (index of an answer, the answer's next part). ApiError if an answer fails."""
        while self._unfinished:
            index, event = await self._next()
            if isinstance(event, PromptTokens):
                for choice in range(index, index + self.job.n):
                    yield choice, AnswerDelta(prompt=event.tokens)
                continue
            reader = self._readers[index]
            if isinstance(event, Token):
                self._tokens += 1
                for delta in reader.feed(event):
                    yield index, delta
                if reader.stopped:
                    self._tickets[index].cancel()
                continue
            self._note(event)
            if not reader.stopped:
                self._check(event)
            deltas, end = reader.end(event)
            for delta in deltas:
                yield index, delta
            self._record.reason = end.reason
            yield index, end

    async def _next(self) -> tuple[int, Event]:
        """Return the next event of the answers; let other tasks run after every `TURN` events.

        The first choice of a prompt computes the log-probabilities of the prompt. The events of the
        other choices wait for them.
        """
        self._delivered += 1
        if self._delivered % TURN == 0:
            await asyncio.sleep(0)
        for place, (index, _) in enumerate(self._early):
            if self._scored[index // self.job.n]:
                return self._early.pop(place)
        while True:
            index, event = await self._events.get()
            prompt, choice = divmod(index, self.job.n)
            self._scored[prompt] |= isinstance(event, PromptTokens)
            if self._scored[prompt] or choice == 0:
                return index, event
            self._early.append((index, event))

    def _note(self, finished: Finished) -> None:
        self._unfinished -= 1
        self._record.add_answer(finished)

    def _check(self, finished: Finished) -> None:
        """Raise ApiError if an answer failed, timed out, or was stopped before its first token."""
        if finished.reason == "error":
            error = finished.error or GreenroomError("the engine failed")
            self._service.log.log_failure(self._record.id, error)
            raise as_api_error(error)
        if finished.reason == "timeout":
            raise self._service.too_slow()
        lost = finished.reason == "stopping" and not self._tokens
        if lost or finished.reason == "cancelled":
            raise ApiError(503, "the server is stopping", retry_after_s=30)

    def cancel(self) -> None:
        """Cancel all of an HTTP request's answers that have not ended."""
        for ticket in self._tickets:
            ticket.cancel()

    async def cancel_and_wait(self) -> None:
        """Cancel an HTTP request's answers, and wait up to 5 seconds until they have ended.

        The request log needs their token counts.
        """
        self.cancel()

        async def drain() -> None:
            while self._unfinished:
                _, event = self._early.pop() if self._early else await self._events.get()
                if isinstance(event, Finished):
                    self._note(event)

        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(drain(), LEAVE_S)
