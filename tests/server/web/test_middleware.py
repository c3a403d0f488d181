"""Keys, names, origins and limits: what keeps a server safe, over raw sockets where clients are
too polite."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from greenroom.errors import UsageError
from greenroom.server.http.keys import VARIABLE, check_address, is_loopback, read_api_key
from greenroom.server.web.listen import open_socket
from tests.server.conftest import NAME, Running, Serve, fake_engine, wait_for

CHAT: Any = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
MESSAGE = {**CHAT, "max_tokens": 5}
KEY = "sk-greenroom-test"
POST = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def dial(running: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), timeout=10)


def answer(sock: socket.socket) -> bytes:
    """Return all bytes that come until the server closes the connection."""
    data = b""
    while True:
        try:
            part = sock.recv(65536)
        except ConnectionResetError:
            return data
        if not part:
            return data
        data += part


def raw(running: Running, data: bytes) -> bytes:
    with dial(running) as sock:
        sock.sendall(data)
        return answer(sock)


def body_of(response: bytes) -> Any:
    return json.loads(response.partition(b"\r\n\r\n")[2])


class TestKeys:
    def test_every_path_needs_the_key(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), key=KEY)
        for path in ("/v1/models", "/v1/stats", "/metrics", "/openapi.json", "/nothing"):
            assert running.get(path).status_code == 401
            assert running.get(path, headers={"x-api-key": KEY}).status_code != 401
        assert running.get("/health").status_code == 200
        response = running.post("/v1/chat/completions", CHAT)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert not running.engine.tickets

    @pytest.mark.parametrize(
        "headers",
        [
            {"Authorization": "Bearer wrong"},
            {"Authorization": KEY},
            {"Authorization": f"Basic {KEY}"},
            {"Authorization": "Bearer"},
            {"x-api-key": KEY[:-1]},
            {"x-api-key": ""},
            {"x-api-key": "wrong", "Authorization": f"Bearer {KEY}"},
        ],
    )
    def test_wrong_keys_are_refused(self, serve: Serve, headers: dict[str, str]) -> None:
        running = serve(fake_engine("Hi"), key=KEY)
        assert running.post("/v1/chat/completions", CHAT, headers=headers).status_code == 401

    def test_clients_of_both_apis_send_the_key_in_their_header(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), key=KEY)
        by_openai = openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEY)
        assert by_openai.chat.completions.create(**CHAT).choices[0].message.content == "Hi"
        by_anthropic = anthropic.Anthropic(base_url=running.url, api_key=KEY)
        assert by_anthropic.messages.create(**MESSAGE).stop_reason == "end_turn"
        with pytest.raises(openai.AuthenticationError):
            by_openai.with_options(api_key="wrong").models.list()
        with pytest.raises(anthropic.AuthenticationError, match="wrong API key"):
            by_anthropic.with_options(api_key="wrong").messages.create(**MESSAGE)

    def test_the_body_of_a_client_without_a_key_is_not_read(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), key=KEY)
        head = f"{POST}Content-Length: 4000000\r\n\r\n"
        assert b" 401 " in raw(running, head.encode()).splitlines()[0]

    def test_a_client_with_the_key_resizes_the_cache(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), key=KEY)
        headers = {"x-api-key": KEY}
        response = running.post("/v1/admin/cache", {"cache": "20%"}, headers=headers)
        assert response.json() == {"slots": 7}
        assert running.engine.resized == ["20%"]
        assert running.post("/v1/admin/cache", {"cache": "20%"}).status_code == 401
        for wrong in ({"cache": 20}, {"size": "20%"}, {"cache": ""}):
            assert running.post("/v1/admin/cache", wrong, headers=headers).status_code == 400

    def test_a_client_with_the_key_changes_the_devices(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), key=KEY)
        headers, path = {"x-api-key": KEY}, "/v1/admin/devices"
        response = running.post(path, {"devices": "fake,fake"}, headers=headers)
        assert response.json() == {"slots": 14, "devices": ["fake:0", "fake:1"]}
        assert running.post(path, {"devices": "fake,fake"}).status_code == 401
        for wrong in ({"devices": "cuda:7"}, {"devices": 1}, {"cache": "20%"}):
            response = running.post(path, wrong, headers=headers)
            assert response.status_code == 400, response.text

    def test_a_server_without_a_key_refuses_resizes(self, running: Running) -> None:
        response = running.post("/v1/admin/cache", {"cache": "20%"})
        assert response.status_code == 403
        assert "--api-key-file" in response.text
        assert not running.engine.resized

    def test_a_client_with_the_key_cancels_a_request(self, serve: Serve) -> None:
        running = serve(fake_engine("word " * 50, delay_s=0.05), key=KEY)
        headers = {"x-api-key": KEY}
        by_openai = openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEY)
        chunks = by_openai.chat.completions.with_raw_response.create(**CHAT, n=2, stream=True)
        wait_for(lambda: len(running.engine.tickets) == 2)
        path, body = "/v1/admin/cancel", {"request": chunks.headers["x-request-id"]}
        assert running.post(path, body).status_code == 401
        assert running.post(path, {"request": "req_0"}, headers=headers).status_code == 404
        assert running.post(path, body, headers=headers).json() == {"cancelled": 2}
        for ticket in running.engine.tickets:
            wait_for(ticket.done.is_set)
        assert running.post(path, body, headers=headers).status_code == 404

    def test_a_server_without_a_key_cancels_nothing(self, serve: Serve) -> None:
        running = serve(fake_engine("word " * 5))
        assert running.post("/v1/admin/cancel", {"request": "req_1"}).status_code == 403

    def test_a_key_comes_from_a_file_or_the_environment(self, tmp_path: Path) -> None:
        file = tmp_path / "key"
        file.write_text(f"{KEY}\nsecond line\n")
        assert read_api_key(str(file), {}) == KEY
        assert read_api_key(str(file), {VARIABLE: "other"}) == KEY
        assert read_api_key(None, {VARIABLE: KEY}) == KEY
        assert read_api_key(None, {}) is None

    @pytest.mark.parametrize("text", ["", "\n", "  \n", "two words\n", "schlüssel\n"])
    def test_an_invalid_key_is_refused(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "key"
        file.write_text(text)
        with pytest.raises(UsageError, match=r"is empty|is not a valid API key"):
            read_api_key(str(file), {})
        with pytest.raises(UsageError, match=VARIABLE):
            read_api_key(None, {VARIABLE: text})

    def test_an_unreadable_key_file_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="No such file"):
            read_api_key(str(tmp_path / "none"), {})
        with pytest.raises(UsageError, match="Is a directory"):
            read_api_key(str(tmp_path), {})
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        with pytest.raises(UsageError, match="is not UTF-8 text"):
            read_api_key(str(tmp_path / "binary"), {})


class TestNames:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
    def test_loopback_needs_no_key(self, host: str) -> None:
        assert is_loopback(host)
        check_address(host, None)

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org", ""])
    def test_other_addresses_need_a_key(self, host: str) -> None:
        with pytest.raises(UsageError, match="--api-key-file"):
            check_address(host, None)
        check_address(host, KEY)

    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"]
    )
    def test_a_foreign_host_name_is_refused(self, running: Running, host: str) -> None:
        """DNS rebinding: a web page's own name, which leads to loopback."""
        assert running.get("/v1/models", headers={"host": host}).status_code == 403

    @pytest.mark.parametrize(
        "host", ["localhost@evil.example", "localhost:80:80", "localhost:٣", "", "localhost.evil"]
    )
    def test_a_similar_host_name_is_refused(self, running: Running, host: str) -> None:
        headers = {"host": host.encode()}
        assert running.get("/v1/models", headers=headers).status_code == 403

    @pytest.mark.parametrize(
        "host",
        [
            "localhost",
            "localhost:8000",
            "127.0.0.1:1",
            "[::1]:8000",
            "LOCALHOST",
            "LocalHost.:80",
            "127.0.0.1.",
            "[0:0:0:0:0:0:0:1]",
        ],
    )
    def test_names_of_this_machine_are_accepted(self, running: Running, host: str) -> None:
        assert running.get("/v1/models", headers={"host": host}).status_code == 200

    def test_web_pages_of_allowed_origins_may_call(self, serve: Serve) -> None:
        running = serve(
            fake_engine("Hi"), key=KEY, allowed_origins="https://a.example, https://b.example"
        )
        preflight = {"access-control-request-method": "POST", "origin": "https://a.example"}
        preflight["access-control-request-headers"] = "authorization,content-type"
        import httpx2

        url = f"{running.url}/v1/chat/completions"
        allowed = httpx2.options(url, headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        refused = httpx2.options(url, headers={**preflight, "origin": "https://evil.example"})
        assert refused.status_code == 400
        response = running.post(
            "/v1/chat/completions", CHAT, headers={"x-api-key": KEY, "origin": "https://b.example"}
        )
        assert response.headers["access-control-allow-origin"] == "https://b.example"

    def test_no_web_page_may_call_by_default(self, running: Running) -> None:
        response = running.post(
            "/v1/chat/completions", CHAT, headers={"origin": "https://a.example"}
        )
        assert "access-control-allow-origin" not in response.headers

    @pytest.mark.parametrize(
        "headers",
        [
            {"content-type": "text/plain"},
            {"content-type": "application/x-www-form-urlencoded"},
            {"content-type": ""},
            {"origin": "https://a.example"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site"},
        ],
    )
    def test_content_types_without_preflight_are_refused(
        self, running: Running, headers: dict[str, str]
    ) -> None:
        import httpx2

        data = json.dumps(CHAT).encode()
        response = httpx2.post(f"{running.url}/v1/chat/completions", content=data, headers=headers)
        assert response.status_code == 415
        assert "application/json" in response.json()["error"]["message"]

    def test_a_program_may_leave_out_the_content_type(self, running: Running) -> None:
        import httpx2

        data = json.dumps(CHAT).encode()
        response = httpx2.post(f"{running.url}/v1/chat/completions", content=data)
        assert "content-type" not in response.request.headers
        assert response.status_code == 200


class TestBodies:
    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (b"", "not valid JSON"),
            (b"{", "not valid JSON"),
            (b"nonsense", "not valid JSON"),
            (b"\xff\xfe{}", "not valid JSON"),
            (b'{"model": "\xff"}', "not valid JSON"),
            (b'{"model": "\\ud800"}', "not valid JSON"),
            (b"[" * 10_000, "not valid JSON"),
            (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "not valid JSON"),
            (b'{"model": ' + b"1" * 100_000 + b"}", "not valid JSON"),
            (b"[]", "the body: input should be"),
            (b"null", "the body: input should be"),
            (b'"text"', "the body: input should be"),
            (b"{" + b",".join(b'"k%d":1' % i for i in range(500)) + b"}", "502 invalid"),
        ],
        ids=range(13),
    )
    def test_invalid_bodies_are_refused(self, running: Running, data: bytes, expected: str) -> None:
        import httpx2

        for path in ("/v1/chat/completions", "/v1/messages"):
            response = httpx2.post(
                running.url + path, content=data, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400
            message = response.json()["error"]["message"]
            assert expected in message or (expected == "502 invalid" and "503 invalid" in message)
        assert running.post("/v1/chat/completions", CHAT).status_code == 200

    def test_a_body_that_is_too_large_is_not_read(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), max_body="1KiB")
        large = {**CHAT, "messages": [{"role": "user", "content": "x" * 2000}]}
        response = running.post("/v1/chat/completions", large)
        assert response.status_code == 413
        assert "1 KiB" in response.json()["error"]["message"]
        assert running.post("/v1/messages", large).json()["error"]["type"] == "request_too_large"
        head = f"{POST}Content-Length: 99999999999\r\n\r\n"
        assert b" 413 " in raw(running, head.encode()).splitlines()[0]

    def test_a_chunked_body_that_is_too_large_is_not_read(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), max_body="1KiB")
        with dial(running) as sock:
            sock.sendall(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode())
            for _ in range(4):
                sock.sendall(b"190\r\n" + b" " * 400 + b"\r\n")
            assert b" 413 " in answer(sock).splitlines()[0]

    def test_an_incomplete_body_times_out(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("greenroom.server.http.bodies.BODY_S", 0.3)
        running = serve(fake_engine("Hi"))
        began = time.monotonic()
        with dial(running) as sock:
            sock.sendall(f'{POST}Content-Length: 500\r\n\r\n{{"model": '.encode())
            response = answer(sock)
        assert b" 408 " in response.splitlines()[0]
        assert "0.3 seconds" in body_of(response)["error"]["message"]
        assert time.monotonic() - began < 5

    def test_a_client_may_disconnect_within_its_body(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"))
        with dial(running) as sock:
            sock.sendall(f'{POST}Content-Length: 500\r\n\r\n{{"model": '.encode())
        assert " 499 " in running.line()
        assert running.post("/v1/chat/completions", CHAT).status_code == 200


class TestPatience:
    @pytest.mark.parametrize(
        "data", [b"", b"POST /v1/chat", POST.encode(), b"GET /health HTTP/1.1\r\nHost: "]
    )
    def test_an_incomplete_head_times_out(self, serve: Serve, data: bytes) -> None:
        running = serve(fake_engine("Hi"), head_s=0.3)
        began = time.monotonic()
        assert raw(running, data) == b""
        assert 0.2 < time.monotonic() - began < 5

    def test_an_incomplete_second_head_times_out(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), head_s=0.3)
        with dial(running) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /heal")
            assert answer(sock).count(b"HTTP/1.1") == 1

    def test_a_head_without_end_is_refused(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"))
        with dial(running) as sock, pytest.raises(OSError):  # noqa: PT011, PT012
            sock.sendall(POST.encode())
            for _ in range(10_000):
                sock.sendall(b"X-Filler: " + b"x" * 10_000 + b"\r\n")

    @pytest.mark.parametrize("data", [b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00", b"\x00" * 100])
    def test_other_protocols_are_refused(self, serve: Serve, data: bytes) -> None:
        assert b" 400 " in raw(serve(fake_engine("Hi")), data).splitlines()[0]

    def test_a_client_that_does_not_read_is_disconnected(self, serve: Serve) -> None:
        running = serve(fake_engine("x" * 100, context=1 << 20), slow_s=0.5)
        running.engine.script = lambda request: (60 for _ in range(6_000))
        body = json.dumps({**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20})
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", running.port))
            sock.sendall(f"{POST}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_for(lambda: running.engine.tickets)
            wait_for(running.engine.tickets[0].done.is_set, 20)
            assert " 499 " in running.line()
        assert running.post("/v1/chat/completions", {**CHAT, "max_tokens": 2}).status_code == 200


class TestPorts:
    def test_a_used_port_is_an_error(self) -> None:
        with open_socket("127.0.0.1", 0) as sock:
            port = sock.getsockname()[1]
            with pytest.raises(UsageError, match=f"port {port} is in use"):
                open_socket("127.0.0.1", port)
        open_socket("127.0.0.1", port).close()

    @pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
    def test_an_address_of_another_machine_is_an_error(self, host: str) -> None:
        with pytest.raises(UsageError, match=f"cannot listen on {host}"):
            open_socket(host, 0)
