"""One HTTP client's connection: HTTP/1.1 with bounds on bytes and time.

uvicorn's protocol bounds neither heads nor trailers of requests, parses every pipelined request at
once, and resets the connection of a client that still writes when its response is complete. Here
bytes go to the parser in parts that end where a head or a body ends. So heads are counted to the
byte, and one request is parsed at a time. llhttp, the parser, refuses the forms that request
smuggling uses: Content-Length with Transfer-Encoding, two Content-Lengths, folded lines, bare line
feeds, spaces before colons.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from greenroom.config import show_bytes
from greenroom.server.http.errors import ApiError

HEAD_S = 15.0  # in which the request line and headers must come, from the first connection on
HEAD_BYTES = 64 << 10  # of a head; and of a chunked body's extensions and trailers together
CHUNK_BYTES = 12  # around the data of each chunk: its size and line ends
SLOW_S = 60.0  # in which a client must read the waiting output
LINGER_S, LINGER_BYTES = 10.0, 64 << 20  # bounds of discarded input
END = b"\r\n\r\n"  # of heads and of trailers


class LingeringTransport:
    """A socket transport that reads on after `close`, so that clients get the response.

    A socket that is closed with unread bytes is reset, and the client loses the response. So the
    response is followed by the end of the stream, and further input is discarded, within
    `LINGER_BYTES` and `seconds` (nginx calls this lingering_close). A second `close` closes the
    socket at once.
    """

    def __init__(
        self, transport: asyncio.Transport, unread: Callable[[], bool], seconds: float
    ) -> None:
        self._transport, self._unread, self._seconds = transport, unread, seconds
        self._due: asyncio.TimerHandle | None = None
        self._discarded = 0
        self.lingers = False

    def close(self) -> None:
        if self.lingers or self._transport.is_closing() or not self._unread():
            self._transport.close()
            return
        self.lingers = True
        self._transport.write_eof()
        self.discard_rest()

    def discard_rest(self) -> None:
        """Read and discard a connection's further input, within bounds of bytes and time."""
        self._transport.resume_reading()
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._seconds, self.abort)

    def stop_discarding(self) -> None:
        """Stop discarding input: the request has ended, or the connection is lost."""
        self._discarded = 0
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def discard(self, nbytes: int) -> None:
        """Count received bytes while a connection's input is discarded; abort above the bound."""
        self._discarded += nbytes if self._due is not None else 0
        if self._discarded > LINGER_BYTES:
            self.abort()

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """One client's HTTP/1.1 connection, with limits on the bytes and time of requests."""

    head_s, slow_s, linger_s = HEAD_S, SLOW_S, LINGER_S
    transport: LingeringTransport  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        lingering: Any = LingeringTransport(transport, self._is_unread, self.linger_s)
        super().connection_made(lingering)
        transport.set_write_buffer_limits(high=0)  # waiting begins when the kernel's is full
        self._head_due: asyncio.TimerHandle | None = None
        self._write_due: asyncio.TimerHandle | None = None
        self._pipelined = b""  # bytes after the request that is being answered
        self._refusal: ApiError | None = None
        self._in_app = False  # the app has the request that was parsed last
        self._framing = 0  # bytes of a chunked body other than data and chunk headers
        self._begin_head()
        self._wait_for_head()

    def _begin_head(self) -> None:
        self._in_head, self._chunked = True, False
        self._head_bytes = self._body_left = 0
        self._last = b""  # the last bytes that the parser was given of this message

    def _wait_for_head(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(self.head_s, self._give_up)

    def _is_unread(self) -> bool:
        """Is the HTTP client likely to be writing still?"""
        return self._refusal is not None or not self._in_head or bool(self._pipelined)

    # ---- from the client

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self.transport.discard(len(data))
        if not self.transport.is_closing():
            self._read(self._pipelined + data)

    def _read(self, data: bytes) -> None:
        """Parse received bytes up to the end of the request that must be answered first."""
        self._pipelined, at = b"", 0
        while at < len(data) and not self.transport.is_closing():
            if self._in_head and self.cycle is not None and not self.cycle.response_complete:
                self._pipelined = data[at:]
                self.flow.pause_reading()
                return
            end = self._end_of_part(data, at)
            too_large = False
            if self._in_head:
                self._in_app = False
                self._wait_for_head()
                too_large = end - at > HEAD_BYTES - self._head_bytes
                end = min(end, at + HEAD_BYTES - self._head_bytes)
                self._head_bytes += end - at
            self._parse(data[at:end])
            at = end
            if too_large and self._refusal is None:
                most = show_bytes(HEAD_BYTES)
                self._refuse(ApiError(431, f"the head of the request is larger than {most}"))

    def _end_of_part(self, data: bytes, at: int) -> int:
        """Return where the part of the input that the parser gets next ends.

        It ends with the head, the body of a given length, or the trailers, at the latest.
        """
        if not self._in_head and not self._chunked:
            return min(len(data), at + self._body_left)
        across = (self._last + data[at : at + len(END) - 1]).find(END)
        if across >= 0:
            return at + across + len(END) - len(self._last)
        end = data.find(END, at)
        return len(data) if end < 0 else end + len(END)

    def _parse(self, part: bytes) -> None:
        if self._chunked:
            self._framing += len(part)
        self._body_left -= len(part) if not self._in_head else 0
        self._last = (self._last + part[1 - len(END) :])[1 - len(END) :]
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            return  # the upgrade is ignored: the next request follows
        except httptools.HttpParserError:
            self._refuse(self._refusal or ApiError(400, "the request is not valid HTTP"))
            return
        if self._framing > HEAD_BYTES:
            most = show_bytes(HEAD_BYTES)
            self._refuse(ApiError(431, f"chunk extensions and trailers are larger than {most}"))

    def _refuse(self, error: ApiError) -> None:
        """Answer a request with an error in place of the app, and close the connection."""
        self._refusal = error
        self._stop_waiting_for_head()
        if self._in_app:  # its body is not valid
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        path = bytes(getattr(self, "url", b"")).decode("latin-1")
        body = json.dumps(error.body(path, "")).encode()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    # ---- from the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are not headers: one could pass for a key, or a content type
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_waiting_for_head()
        self._in_head, self._last, self._framing = False, b"", 0
        lengths = [int(value) for name, value in self.headers if name == b"content-length"]
        self._chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        self._body_left = lengths[0] if lengths else 0
        if self.parser.should_upgrade() and (self._chunked or self._body_left):
            # The parser does not take the bytes after an upgrade for a body.
            self._refusal = ApiError(400, "a request with a body cannot ask for an upgrade")
            raise self._refusal
        self._take_host()
        super().on_headers_complete()
        self._in_app = True

    def _take_host(self) -> None:
        """Take the host of an absolute request target in place of the Host header.

        Source: RFC 9112, 3.2.
        """
        url = httptools.parse_url(self.url)
        if url.host is None:
            return
        if url.schema.lower() not in (b"http", b"https") or url.userinfo is not None:
            self._refusal = ApiError(400, "the request's target must be a path or an http URL")
            raise self._refusal
        host = b"[%b]" % url.host if b":" in url.host else url.host
        host += b":%d" % url.port if url.port is not None else b""
        self.headers[:] = [(k, host if k == b"host" else v) for k, v in self.headers]

    def on_chunk_header(self) -> None:
        self._framing -= CHUNK_BYTES

    def on_body(self, body: bytes) -> None:
        self._framing -= len(body) if self._chunked else 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.transport.stop_discarding()
        self._begin_head()

    # ---- to the client

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if not self._in_head:
            self.transport.discard_rest()
        elif self._pipelined:
            self._unset_keepalive_if_required()
            self._read(self._pipelined)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_due = self.loop.call_later(self.slow_s, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_due is not None:
            self._write_due.cancel()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.lingers:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting_for_head()
        self.transport.stop_discarding()
        if self._write_due is not None:
            self._write_due.cancel()

    def _stop_waiting_for_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _give_up(self) -> None:
        if not self.transport.is_closing() or self._write_due is not None:
            self.transport.abort()
