"""Listening socket and HTTP server: uvicorn with `Connection`, ended by a signal."""

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

from greenroom.errors import UsageError
from greenroom.server.http.service import Service
from greenroom.server.web.app import create_app
from greenroom.server.web.connection import Connection

IDLE_S = 75  # between the requests of one connection
BEYOND_S = 5.0  # after the grace period, for answers to send their end


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket, or raise UsageError with the reason."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise UsageError(_why(host, port, error)) from error


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is in use: choose another with --port, or stop the program that uses it"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs root rights: choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"


def url_of(sock: socket.socket) -> str:
    """Return a listening socket's URL for clients on this machine."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, whose shutdown also stops the serving engine."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests; end running answers after the grace period (`--grace`)."""
        engine, grace = self._service.engine, self._service.config.grace
        stopping = asyncio.ensure_future(asyncio.to_thread(engine.stop, grace))
        await super().shutdown(sockets)
        if self.force_exit:
            await asyncio.to_thread(engine.stop, 0.0)
        await stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM: they end the server; a second SIGINT ends it at once.

        While the model loads, SIGINT also goes to the handler that was installed before.
        """
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


def make_server(service: Service) -> Server:
    """Make the HTTP server of a service, without starting the server."""
    config = uvicorn.Config(
        create_app(service),
        loop="asyncio",
        http=Connection,
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
    """Serve HTTP until a signal comes, calling `each_tick` ten times a second.

    An exception of `each_tick` ends the server and is raised again.
    """
    running = make_server(service)
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
