"""The socket and the loop: uvicorn, with time-outs for clients that stall, ended by a signal.

What uvicorn does not have: a time in which the head of a request must be there, a bound on its
size, and a time in which a client must take what it is sent.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from greenroom.errors import UsageError
from greenroom.server.app import create_app
from greenroom.server.service import Service

HEAD_S = 15.0  # in which the request line and headers must come, from the first connection on
HEAD_BYTES = 64 << 10
IDLE_S = 75  # between the requests of one connection
SLOW_S = 60.0  # in which a client must take what waits for it
BEYOND_S = 5.0  # after the grace period, for answers to be told that they end


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. UsageError where that cannot be, in words."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise UsageError(_why(host, port, error)) from error


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use: choose another with --port, or stop what uses it"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than these: choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"


def address(sock: socket.socket) -> str:
    """The URL that a client on this machine can use."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Patient(HttpToolsProtocol):
    """HTTP/1.1 whose patience ends."""

    head_s, slow_s = HEAD_S, SLOW_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # waiting begins when the kernel's is full
        self._head_bytes, self._head_there = 0, False
        self._head_due = self.loop.call_later(self.head_s, self._give_up)
        self._write_due: asyncio.TimerHandle | None = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_there, self._head_bytes = False, 0
        self._head_due.cancel()
        self._head_due = self.loop.call_later(self.head_s, self._give_up)

    def on_headers_complete(self) -> None:
        self._head_there = True
        self._head_due.cancel()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_there:
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self._give_up()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_due = self.loop.call_later(self.slow_s, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_due is not None:
            self._write_due.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_due.cancel()
        if self._write_due is not None:
            self._write_due.cancel()

    def _give_up(self) -> None:
        if not self.transport.is_closing() or self._write_due is not None:
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn that lets the engine end the running answers, and does not die of its signal."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more; running answers get the grace period, then they are told that it ends."""
        engine, grace = self._service.engine, self._service.config.grace
        stopping = asyncio.ensure_future(asyncio.to_thread(engine.stop, grace))
        await super().shutdown(sockets)
        if self.force_exit:
            await asyncio.to_thread(engine.stop, 0.0)
        await stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the server; a second SIGINT ends it at once. While the model
        loads there is nothing to end in order: SIGINT is the process's own then."""
        before: dict[int, Any] = {}

        def handler(number: int, frame: FrameType | None) -> None:
            loading = self._service.engine.state()[0] == "loading"
            if loading and number == signal.SIGINT and callable(before[number]):
                before[number](number, frame)
            self.handle_exit(number, frame)

        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handler)
        try:
            yield
        finally:
            for ended, each in before.items():
                signal.signal(ended, each)


def server(service: Service, app: ASGIApp | None = None) -> Server:
    """A server that is not yet run."""
    config = uvicorn.Config(
        app or create_app(service),
        loop="asyncio",
        http=Patient,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=int(service.config.grace + BEYOND_S),
    )
    return Server(config, service)


def serve(service: Service, sock: socket.socket, each_tick: Callable[[], None]) -> None:
    """Serve until a signal comes. `each_tick` is called ten times a second; what it raises ends
    the server, and is raised from here."""
    running = server(service)
    raised: list[BaseException] = []

    async def tick(counter: int) -> bool:
        try:
            each_tick()
        except BaseException as error:
            raised.append(error)
            running.should_exit = True
        return await type(running).on_tick(running, counter)

    running.on_tick = tick  # type: ignore[method-assign]
    running.run([sock])
    if raised:
        raise raised[0]
