"""The gate of several servers: it checks and reads each request, and passes it on.

gate = RequestGate(config, key, 3, ask, broadcast, lost=ConnectionError, leaves=is_removed)
response = await gate.respond(request)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from greenroom.config import Amount, ServeConfig
from greenroom.errors import GreenroomError
from greenroom.server.engine.start import BODIES
from greenroom.server.http.bodies import BodyBudget, receive
from greenroom.server.http.errors import ApiError, as_api_error
from greenroom.server.http.request_log import RequestRecord
from greenroom.server.replicas.relay import refused, relay
from greenroom.server.replicas.responses import EVERYWHERE, Answer, joined
from greenroom.server.web.app import key_check
from greenroom.server.web.calls import Call, Headers

PROBE_S, SPARE_S = 5.0, 30.0  # that /health waits for a replica; others, beyond --timeout
# Sends a call to a replica, as `relay` needs it; the list has replicas that have failed.
AskReplica = Callable[[Call, list[str]], AbstractAsyncContextManager[AsyncIterator[Any]]]
# Sends a call to all replicas; the result has the error of each that was lost.
Broadcast = Callable[[Call], Awaitable[Sequence[Answer | BaseException]]]


class RequestGate:
    """Checks keys and reads bodies, within the limits of one server for each replica.

    `replicas` is how many there may be, `lost` the exception of `ask` for a lost one, and `leaves`
    tells by its name whether one gets no more requests, since it is to be removed.
    """

    def __init__(
        self, config: ServeConfig, key: str | None, replicas: int, ask: AskReplica,
        broadcast: Broadcast, lost: type[Exception], leaves: Callable[[str], bool],
    ) -> None:  # fmt: skip
        self._ask, self._broadcast, self._lost, self._leaves = ask, broadcast, lost, leaves
        self._check = key_check(config, key)
        self._max_body = Amount.parse(config.max_body, "--max-body").nbytes or 0
        self._bodies = BodyBudget(BODIES * self._max_body * replicas)
        self._timeout = config.timeout + SPARE_S

    async def respond(self, request: Request) -> Response:
        """Return the response of a replica, or of all; an error in the format of the API."""
        path = request.url.path
        record = request.state.record = RequestRecord("", request.method, path)
        try:
            # Browsers ask without a key whether they may send one: a replica answers by its CORS.
            if request.method != "OPTIONS" and (error := self._check(request.scope)) is not None:
                raise error
            body = await receive(request, self._max_body, self._bodies)
            headers = [(name.lower(), value) for name, value in request.headers.raw]
            call = Call(request.method, path, headers, body, request.url.query.encode())
            async with asyncio.timeout(PROBE_S if path == "/health" else self._timeout):
                if path in EVERYWHERE:
                    return await self._answer_everywhere(call, record)
                parts = self._relay(call, record)
                status, head = await anext(parts)
            return _response(StreamingResponse(parts, status), head)
        except BaseException as error:
            record.release()
            if isinstance(error, TimeoutError):
                error = ApiError(503, "no replica is ready", retry_after_s=5)
            if isinstance(error, GreenroomError):
                return refused(path, as_api_error(error))
            raise

    async def _answer_everywhere(self, call: Call, record: RequestRecord) -> Response:
        results = await self._broadcast(call)
        answers = [each for each in results if not isinstance(each, BaseException)]
        if not answers:
            raise TimeoutError
        status, headers, body = joined(call.path, answers, len(results) - len(answers))
        record.release()
        return _response(Response(body, status), headers)

    async def _relay(self, call: Call, record: RequestRecord) -> AsyncIterator[Any]:
        """Yield what `relay` does; the body counts until the end, since it may be sent again."""
        try:
            async for part in relay(call, partial(self._ask, call), self._lost, self._leaves):
                yield part
        finally:
            record.release()


def _response(response: Response, headers: Headers) -> Response:
    response.raw_headers = [each for each in headers if each[0] != b"x-request-id"]  # Serve has one
    return response
