"""nginx with `deploy/nginx/greenroom.conf` before a server: TLS, keys, limits, streams."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.server.conftest import NAME, Running, answer_ids, fake_engine, launch, wait_for

CONFIG = Path(__file__).parents[2] / "deploy" / "nginx" / "greenroom.conf"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
ALICE, BOB, CAROL, OPERATOR, SERVER = (letter * 64 for letter in "abcde")
CLIENTS = f"{ALICE} alice;\n{BOB} bob;\n{CAROL} carol;\n{OPERATOR} operator;\n"
ASKED = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        NGINX is None or shutil.which("openssl") is None, reason="needs nginx and openssl"
    ),
]


@dataclass
class Proxy:
    """A server behind nginx; its answers wait for `go` after their first token."""

    server: Running
    client: httpx2.Client
    go: threading.Event

    def ask(self, key: str, path: str = "/v1/chat/completions") -> httpx2.Response:
        return self.client.post(path, json=ASKED, headers={"Authorization": f"Bearer {key}"})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def configure(folder: Path, port: int, upstream: str) -> Path:
    """Write the files of nginx: the shipped one with other addresses and folders, and a key."""
    text = CONFIG.read_text()
    for old, new in (
        ("listen 443", f"listen 127.0.0.1:{port}"), ("http://127.0.0.1:8000", upstream),
        ("/etc/nginx/greenroom", str(folder)), ("/var/log/nginx", str(folder)),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    (folder / "greenroom.conf").write_text(text)
    (folder / "clients").write_text(CLIENTS)
    (folder / "server-key").write_text(f'proxy_set_header Authorization "Bearer {SERVER}";\n')
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
               "-addext", "subjectAltName=DNS:localhost", "-keyout", folder / "certificate.key",
               "-out", folder / "certificate.pem"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    main = folder / "nginx.conf"
    user = "user root;\n" if os.geteuid() == 0 else ""
    places = "".join(f"{name}_temp_path {folder}/{name};\n" for name in TEMPORARY)
    main.write_text(
        f"daemon off;\n{user}worker_processes 1;\npid {folder}/pid;\nevents {{}}\n"
        f"http {{\n{places}include {folder}/greenroom.conf;\n}}\n"
    )
    return main


def answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder, port, go = tmp_path_factory.mktemp("nginx"), free_port(), threading.Event()
    go.set()
    engine = fake_engine("")
    ids = answer_ids("Hello there")

    def script(request: object) -> Iterator[int]:
        yield ids[0]
        go.wait(30)
        yield from ids[1:]

    engine.script = script
    server = launch(engine, SERVER)
    assert NGINX is not None
    main = configure(folder, port, server.url)
    command = [NGINX, "-e", "stderr", "-p", str(folder), "-c", str(main)]
    with (
        (folder / "errors").open("wb") as errors,
        subprocess.Popen(command, stderr=errors) as nginx,
    ):
        try:
            wait_for(lambda: answers(port) or nginx.poll() is not None)
            assert nginx.poll() is None, (folder / "errors").read_text()
            context = ssl.create_default_context(cafile=str(folder / "certificate.pem"))
            with httpx2.Client(base_url=f"https://localhost:{port}", verify=context) as client:
                yield Proxy(server, client, go)
        finally:
            nginx.terminate()
            server.stop()


def test_a_client_needs_a_key_of_its_own(proxy: Proxy) -> None:
    for key in ("wrong", SERVER):
        refused = proxy.ask(key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert proxy.client.post("/v1/chat/completions", json=ASKED).status_code == 401
    assert proxy.ask(ALICE).json()["choices"][0]["message"]["content"] == "Hello there"
    listed = proxy.client.get("/v1/models", headers={"x-api-key": BOB})
    assert listed.json()["data"][0]["id"] == NAME


def test_the_page_and_health_need_no_key_but_data_do(proxy: Proxy) -> None:
    for path, status in (("/", 200), ("/page/main.js", 200), ("/health", 200), ("/metrics", 401),
                         ("/v1/live", 401), ("/page/../metrics", 401),
                         ("/page/%2e%2e/metrics", 401)):  # fmt: skip
        assert proxy.client.get(path).status_code == status, path


def test_only_the_operator_changes_the_server(proxy: Proxy) -> None:
    body = {"cache": "50%"}
    for path in ("/v1/admin/cache", "/v1/%61dmin/cache", "/v1/x/../admin/cache"):
        refused = proxy.client.post(path, json=body, headers={"x-api-key": ALICE})
        assert refused.status_code == 403
    assert proxy.server.engine.resized == []
    changed = proxy.client.post("/v1/admin/cache", json=body, headers={"x-api-key": OPERATOR})
    assert changed.json() == {"slots": 7}


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", "text/event-stream"), ("/api/chat", "application/x-ndjson")],
)
def test_parts_of_a_stream_pass_at_once(proxy: Proxy, path: str, kind: str) -> None:
    proxy.go.clear()
    try:
        body, headers = {**ASKED, "stream": True}, {"x-api-key": BOB}
        with proxy.client.stream("POST", path, json=body, headers=headers) as response:
            assert response.headers["content-type"].startswith(kind)
            lines = response.iter_lines()
            first = next(line for line in lines if '"content":"H' in line)  # before the others
            assert "there" not in first
            proxy.go.set()
            assert "there" in "".join(lines)
    finally:
        proxy.go.set()


def test_requests_of_one_client_are_limited_and_not_those_of_others(proxy: Proxy) -> None:
    paths = ["/v1/models"] * 30
    found = [proxy.client.get(path, headers={"x-api-key": CAROL}).status_code for path in paths]
    assert set(found) == {200, 429}
    assert found.count(200) >= 15
    assert proxy.client.get("/v1/models", headers={"x-api-key": OPERATOR}).status_code == 200


def test_a_body_above_the_limit_is_refused(proxy: Proxy) -> None:
    headers = {"x-api-key": OPERATOR}
    large = proxy.client.post("/v1/completions", content=b"x" * (5 << 20), headers=headers)
    assert large.status_code == 413
