"""One client's connection: bytes and time are bounded whatever way they arrive, and nothing that
one request carries is taken for another."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from greenroom.server.web.connection import HEAD_BYTES
from tests.server.conftest import Running, Serve, fake_engine, wait_for
from tests.server.web.test_middleware import CHAT, POST, answer, body_of, dial, raw

BODY = json.dumps(CHAT).encode()
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
CHUNKED = f"{POST}Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)


def statuses(response: bytes) -> list[int]:
    return [int(part[:3]) for part in response.split(b"HTTP/1.1 ")[1:]]


def head_of(nbytes: int, first: bytes = GET) -> bytes:
    """A head of so many bytes."""
    filler = nbytes - len(first) - len(b"X-Filler: \r\n\r\n")
    return first + b"X-Filler: " + b"x" * filler + b"\r\n\r\n"


def send_in_parts(running: Running, data: bytes, size: int) -> bytes:
    with dial(running) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(data), size):
            sock.sendall(data[at : at + size])
            time.sleep(0.0005)
        return answer(sock)


def response_of(sock: socket.socket) -> bytes:
    """One response whose body is JSON, from a connection that stays open."""
    data = b""
    while not data.endswith(b"}"):
        data += sock.recv(65536)
    return data


class TestHeads:
    @pytest.mark.parametrize("size", [1 << 20, 40_000, 999])
    def test_bytes_of_a_head_are_counted_in_any_packets(self, running: Running, size: int) -> None:
        assert statuses(send_in_parts(running, head_of(HEAD_BYTES), size)) == [200]
        response = send_in_parts(running, head_of(HEAD_BYTES + 1), size)
        assert statuses(response) == [431]
        assert body_of(response)["error"]["message"] == (
            "the head of the request is larger than 64 KiB"
        )

    @pytest.mark.parametrize("chunked", [False, True])
    @pytest.mark.parametrize("more", [0, 1])
    def test_a_pipelined_head_is_counted_from_its_first_byte(
        self, running: Running, chunked: bool, more: int
    ) -> None:
        first = CHUNKED.replace(b"Connection: close\r\n", b"") + CHUNK + b"0\r\nX: y\r\n\r\n"
        if not chunked:
            first = f"{POST}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
        response = raw(running, first + head_of(HEAD_BYTES + more))
        assert statuses(response) == [200, 431 if more else 200]

    def test_a_request_line_without_end_is_refused(self, running: Running) -> None:
        assert statuses(raw(running, b"GET /" + b"x" * HEAD_BYTES)) == [431]

    def test_the_error_has_the_format_of_the_api(self, running: Running) -> None:
        head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"
        for ending in (b"X: " + b"x" * HEAD_BYTES, b"X: a\r\n b\r\n\r\n"):
            error = body_of(raw(running, head + ending))
            assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
            error = body_of(raw(running, head.replace(b"messages", b"completions") + ending))
            assert error["error"]["type"] == "invalid_request_error"

    def test_too_many_headers_are_refused(self, running: Running) -> None:
        for count, status in ((90, 200), (200, 431)):
            head = GET + b"".join(b"X-%d: y\r\n" % i for i in range(count)) + b"\r\n"
            assert statuses(raw(running, head)) == [status]

    @pytest.mark.parametrize(
        ("head", "status"),
        [
            (b"GET /health HTTP/1.1\r\n\r\n", 400),
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
            (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nhost: evil.example\r\n\r\n", 400),
            (b"GET /v1/models HTTP/1.0\r\n\r\n", 200),
            (b"GET /v1/models HTTP/1.1\r\nConnection: close\r\nHost:\r\n\r\n", 403),
            (b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 403),
            (b"GET http://evil.example:80/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 403),
            (b"GET http://a@localhost/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
            (b"GET ftp://localhost/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
            (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
            (b"GET /v1/models\r\n\r\n", 505),
            (b"GET /v1/models HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
            (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
        ],
        ids=range(13),
    )
    def test_hosts_and_http_versions_are_checked(
        self, running: Running, head: bytes, status: int
    ) -> None:
        response = raw(running, head)
        assert statuses(response) == [status]
        assert status == 200 or body_of(response)["error"]["message"]

    def test_an_absolute_target_with_the_servers_name_is_served(self, running: Running) -> None:
        for target in (b"http://LOCALHOST:80/v1/models", b"http://[::1]:8000/v1/models"):
            head = GET.replace(b"/v1/models", target).replace(b"Host: localhost", b"Host: other")
            assert statuses(raw(running, head + b"\r\n")) == [200]


class TestSmuggling:
    SECOND = b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
            (b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", 400),
            (b"Content-Length: 5\r\nContent-Length: 5\r\n", 400),
            (b"Content-Length: 5\r\nContent-Length: 50\r\n", 400),
            (b"Content-Length: 5, 5\r\n", 400),
            (b"Content-Length: -5\r\n", 400),
            (b"Content-Length: +5\r\n", 400),
            (b"Content-Length: 5_0\r\n", 400),
            (b"Content-Length: 99999999999999999999999\r\n", 400),
            (b"Content-Length : 5\r\n", 400),
            (b"X: a\r\n Content-Length: 5\r\n", 400),
            (b"X: a\nContent-Length: 5\r\n", 400),
            (b"X: a\rContent-Length: 5\r\n", 400),
            (b"X: a\0b\r\n", 400),
            (b"Transfer-Encoding: xchunked\r\n", 400),
            (b"Transfer-Encoding: chunked, identity\r\n", 400),
            (b"Transfer-Encoding: gzip, chunked\r\n", 501),
            (b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n", 400),
            (b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n", 400),
        ],
        ids=range(19),
    )
    def test_a_body_without_a_clear_end_is_refused(
        self, running: Running, headers: bytes, status: int
    ) -> None:
        """The bytes of such a body could pass for a second request."""
        response = raw(running, POST.encode() + headers + b"\r\n0\r\n\r\n" + self.SECOND)
        assert statuses(response) == [status]
        assert b"connection: close" in response

    def test_chunks_in_http_1_0_are_refused(self, running: Running) -> None:
        head = POST.replace("HTTP/1.1", "HTTP/1.0") + "Transfer-Encoding: chunked\r\n\r\n"
        assert statuses(raw(running, head.encode() + CHUNK + b"0\r\n\r\n")) == [400]

    @pytest.mark.parametrize(
        "chunks",
        [b"5\nhello\n0\n\n", b"5\r\nhello0\r\n\r\n", b"-5\r\nhello\r\n", b"f" * 17 + b"\r\nhello"],
    )
    def test_malformed_chunks_are_refused(self, running: Running, chunks: bytes) -> None:
        response = raw(running, CHUNKED + chunks + self.SECOND)
        assert statuses(response) == [400]
        assert body_of(response)["error"]["message"] == "the request is not valid HTTP"

    @pytest.mark.parametrize("one_packet", [True, False])
    def test_trailers_are_not_headers(self, serve: Serve, one_packet: bool) -> None:
        running = serve(fake_engine("Hi"), key="secret")
        head = f"{POST}Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        ending = CHUNK + b"0\r\nx-api-key: secret\r\n\r\n"
        assert statuses(send_in_parts(running, head + ending, 1 << 20 if one_packet else 200)) == [
            401
        ]

    def test_an_upgrade_is_ignored(self, running: Running) -> None:
        """The request is answered in HTTP/1.1, and so is the one after it."""
        head = GET.replace(b"Connection: close", b"Connection: Upgrade\r\nUpgrade: h2c")
        assert statuses(raw(running, head + b"\r\n" + GET + b"\r\n")) == [200, 200]

    def test_pipelined_requests_are_answered_one_by_one(self, serve: Serve) -> None:
        running = serve(fake_engine("one two three", delay_s=0.002))
        post = f"{POST}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
        wrong = b"nonsense\r\n\r\n"
        response = raw(running, post * 20 + wrong)
        assert statuses(response) == [200] * 20 + [400]
        tickets = running.engine.tickets
        assert len(tickets) == 20

    def test_a_pipelined_request_waits_for_the_answer_before_it(self, serve: Serve) -> None:
        running = serve(fake_engine("word " * 40, delay_s=0.02))
        post = f"{POST}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
        with dial(running) as sock:
            sock.sendall(post * 50)
            wait_for(lambda: running.engine.tickets and running.engine.tickets[0].sent_tokens > 3)
            assert len(running.engine.tickets) == 1
            (connection,) = running.server.server_state.connections
            assert not connection.pipeline  # type: ignore[union-attr]


class TestBodies:
    def test_trailers_are_bounded(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"))
        few, many = (b"".join(b"X: %04d\r\n" % i for i in range(n)) for n in (50, 10_000))
        assert statuses(raw(running, CHUNKED + CHUNK + b"0\r\n" + few + b"\r\n")) == [200]
        for size in (1 << 20, 30_000):
            for ending in (many + b"\r\n", many, b"X: " + b"x" * 70_000):
                response = send_in_parts(running, CHUNKED + CHUNK + b"0\r\n" + ending, size)
                assert statuses(response) == [431]
                assert "trailers are larger than 64 KiB" in body_of(response)["error"]["message"]
        assert len(running.engine.tickets) == 1

    def test_chunk_extensions_are_bounded(self, running: Running) -> None:
        small = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * 30_000)
        assert statuses(raw(running, CHUNKED + small + b"0\r\n\r\n")) == [200]
        large = b"".join(b"1;%b\r\n%c\r\n" % (b"x" * 2000, byte) for byte in BODY)
        assert statuses(raw(running, CHUNKED + large + b"0\r\n\r\n")) == [431]

    @pytest.mark.parametrize("encoding", ["gzip", "br", "gzip, identity", "x" * 500])
    def test_an_encoded_body_is_refused(self, running: Running, encoding: str) -> None:
        response = running.post(
            "/v1/chat/completions", CHAT, headers={"content-encoding": encoding}
        )
        assert response.status_code == 415
        message = response.json()["error"]["message"]
        assert "a body encoded as" in message
        assert len(message) < 120

    def test_the_identity_encoding_is_accepted(self, running: Running) -> None:
        headers = {"content-encoding": "Identity"}
        assert running.post("/v1/chat/completions", CHAT, headers=headers).status_code == 200


class TestLingering:
    """A response that comes before the whole request must reach a client that still writes."""

    @pytest.mark.parametrize("chunked", [False, True])
    def test_a_client_that_sends_a_large_body_gets_413(self, serve: Serve, chunked: bool) -> None:
        running = serve(fake_engine("Hi"), max_body="1KiB")
        data = b"x" * (20 << 20)
        framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(data)}"
        with dial(running) as sock:
            sock.sendall(f"{POST}{framing}\r\n\r\n".encode())
            if chunked:
                sock.sendall(b"%x\r\n" % len(data))
            sock.sendall(data)
            response = answer(sock)
        assert statuses(response) == [413]
        assert "1 KiB" in body_of(response)["error"]["message"]

    def test_a_client_that_sends_a_large_head_gets_431(self, running: Running) -> None:
        assert statuses(raw(running, head_of(8 << 20))) == [431]

    def test_a_body_without_end_is_cut_off(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), max_body="1KiB", linger_s=0.3)
        response: list[bytes] = []
        with dial(running) as sock:
            sock.sendall(f"{POST}Content-Length: 9999999\r\n\r\n".encode())
            reader = threading.Thread(target=lambda: response.append(answer(sock)))
            reader.start()
            with pytest.raises(OSError):  # noqa: PT011, PT012
                for _ in range(1000):
                    sock.sendall(b"x")
                    time.sleep(0.01)
            reader.join()
        assert statuses(response[0]) == [413]
        wait_for(lambda: not running.server.server_state.connections)

    def test_discarded_bytes_are_bounded(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("greenroom.server.web.connection.LINGER_BYTES", 1 << 20)
        running = serve(fake_engine("Hi"))
        for path, head in (("/v1/chat/completions", ""), ("/nothing", "")):
            first = POST.replace("/v1/chat/completions", path) + head
            with dial(running) as sock, pytest.raises(OSError):  # noqa: PT011, PT012
                sock.sendall(f"{first}Content-Length: 99999999\r\n\r\n".encode())
                for _ in range(90):
                    sock.sendall(b"x" * (1 << 20))

    def test_discarding_of_a_body_has_a_time_limit(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), linger_s=0.3)
        began = time.monotonic()
        head = POST.replace("/v1/chat/completions", "/nothing") + "Content-Length: 50\r\n\r\n"
        assert statuses(raw(running, head.encode())) == [404]
        assert 0.2 < time.monotonic() - began < 5

    def test_the_connection_is_reused_after_a_discarded_body(self, running: Running) -> None:
        head = POST.replace("/v1/chat/completions", "/nothing") + "Content-Length: 50\r\n\r\n"
        with dial(running) as sock:
            sock.sendall(head.encode())
            assert statuses(response_of(sock)) == [404]
            sock.sendall(b"x" * 50 + GET + b"\r\n")
            assert statuses(answer(sock)) == [200]

    def test_a_stopping_server_does_not_wait_for_discarded_input(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), max_body="1KiB")
        with dial(running) as sock:
            sock.sendall(f"{POST}Content-Length: 9999999\r\n\r\n".encode())
            wait_for(lambda: running.lines)
            began = time.monotonic()
            running.stop()
            assert time.monotonic() - began < 5


def test_line_ends_do_not_keep_a_connection_open(serve: Serve) -> None:
    running = serve(fake_engine("Hi"), head_s=0.3)
    with dial(running) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert statuses(response_of(sock)) == [200]
        began = time.monotonic()
        sock.sendall(b"\r\n")
        assert answer(sock) == b""
        assert time.monotonic() - began < 5
