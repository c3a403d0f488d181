"""Answer the requests of a batch, many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from starlette.types import ASGIApp

from greenroom.errors import GreenroomError
from greenroom.server.batch.requests import BatchRequest
from greenroom.server.batch.results import Results
from greenroom.server.http.request_log import RequestLog, RequestRecord
from greenroom.server.http.service import Service
from greenroom.server.web.app import create_app
from greenroom.server.web.calls import Response, post

BUSY, FAILED = 429, 500  # HTTP: too many requests; from here on the server's own failures
WAITING = 4  # requests that are prepared beside those that are answered
AGAIN_S = 0.1  # after which a request without a place is sent again


class Tally(RequestLog):
    """The request log of a batch: it counts, and writes unexpected errors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt_tokens = self.reused_tokens = self.new_tokens = 0

    def log_request(self, record: RequestRecord) -> None:
        self.prompt_tokens += record.prompt_tokens
        self.new_tokens += record.new_tokens
        self.reused_tokens += max((each.reused_tokens for each in record.finished), default=0)


class Answerer(Protocol):
    """Interface of what answers a batch: an engine of this process, or a running server."""

    def post(self, path: str, body: bytes) -> Awaitable[Response]:
        """Answer a request; the response comes when the request has had its place."""

    def check(self) -> None:
        """Raise GreenroomError if no further request can be answered."""


class LocalAnswerer:
    """Answers by the serving engine of this process."""

    def __init__(self, service: Service) -> None:
        self._engine = service.engine
        self._app: ASGIApp = create_app(service)
        self._calls = 0

    async def post(self, path: str, body: bytes) -> Response:
        """Return the response to a request, which waits while others have all places."""
        self._calls += 1
        try:
            while True:
                response = await post(self._app, path, body)
                if response.status != BUSY or self._calls == 1:
                    return response
                await asyncio.sleep(AGAIN_S)
        finally:
            self._calls -= 1

    def check(self) -> None:
        state, _, why = self._engine.state()
        if state != "ready":
            raise GreenroomError(why or f"the model is {state}")


class BatchRun:
    """Answers the requests of one batch file that have no result yet.

    at_once:   requests that are sent at the same time
    on_answer: called after each answer

    refused: answers with an error of the request (HTTP 4xx), which are results too
    failed:  custom_id and message of requests without a result, because the server failed
    """

    def __init__(
        self, answerer: Answerer, at_once: int, results: Results, on_answer: Callable[[], object]
    ) -> None:
        self._answerer, self._at_once = answerer, at_once
        self._results, self._on_answer = results, on_answer
        self.refused = 0
        self.failed: list[tuple[str, str]] = []

    async def run(self, source: Path, requests: Sequence[BatchRequest]) -> None:
        """Answer requests of the file `source`, in their order.

        GreenroomError if the model fails, or if a result cannot be written.
        """
        missing = iter([each for each in requests if each.custom_id not in self._results.done])
        with source.open("rb") as file:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._at_once):
                        group.create_task(self._answer_all(missing, file))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _answer_all(self, missing: Iterator[BatchRequest], file: BinaryIO) -> None:
        for request in missing:
            response = await self._answerer.post(request.path, request.read(file))
            if response.status < FAILED:
                self.refused += response.status >= 400
                self._results.add(request, response.status, response.body, response.request_id)
            else:
                self._answerer.check()
                self.failed.append((request.custom_id, _message(response)))
            self._on_answer()


def _message(response: Response) -> str:
    error = response.body.get("error") if isinstance(response.body, dict) else None
    text = str(error.get("message", error) if isinstance(error, dict) else response.body)[:500]
    return " ".join(text.split()) or f"HTTP {response.status}"
