"""What hostile clients send: requests of valid HTTP, and bytes that are none.

Each attack was once successful, here or against another server, or is its near relative.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

ASKED: Any = [{"role": "user", "content": "Hello"}]
LONG = "word " * 800_000  # about as much as a body may have
FUNCTION: Any = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(9)}}


def hostile_requests() -> list[tuple[str, Any]]:
    """(path, body) of many kinds. None asks for more answers or tokens than it may: who does so
    is a client like others, and waits with them."""
    chat, text, message = "chat/completions", "completions", "messages"
    asks: dict[str, Any] = {"model": "demo", "messages": ASKED}

    def schema(of: Any) -> tuple[str, Any]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": of}}
        return chat, {**asks, "response_format": form, "max_tokens": 20}

    tools = [{"type": "function", "function": {"name": f"t{i}", "parameters": FUNCTION}}
             for i in range(120)]  # fmt: skip
    return [
        (chat, {**asks, "messages": [{"role": "user", "content": LONG}]}),
        (chat, {**asks, "messages": [{"role": "user", "content": ""}] * 16_000}),
        (chat, {**asks, "messages": [{"role": "user", "content": ""}] * 100_000}),
        (text, {"model": "demo", "prompt": LONG}),
        (text, {"model": "demo", "prompt": ["a" * 30_000] * 128}),
        (text, {"model": "demo", "prompt": [3] * 200_000}),
        (text, {"model": "demo", "prompt": "\u00e4\U0001f331" * 500_000}),
        (text, {"model": "demo", "prompt": "x", "n": 128, "best_of": 128}),
        (text, {"model": "demo", "prompt": "x", "temperature": 3e-38, "max_tokens": 20}),
        (text, {"model": "demo", "prompt": "x", "repetition_penalty": 5e-324}),
        (text, {"model": "demo", "prompt": "x", "user": LONG}),
        (text, {"model": "demo", "prompt": "x", "logit_bias": {str(i): 100 for i in range(300)},
                "logprobs": 20, "max_tokens": 20}),
        (message, {**asks, "max_tokens": 5, "system": LONG}),
        ("messages/count_tokens",
         {"model": "demo", "messages": [{"role": "user", "content": LONG}]}),
        ("responses", {"model": "demo", "input": LONG}),
        schema({"type": "object", "properties": dict.fromkeys(map(str, range(15_000)), True)}),
        schema({"type": "object", "properties": dict.fromkeys(map(str, range(990)), True)}),
        schema({"$ref": "#"}),
        schema({"type": "string", "pattern": "(a|b)*a(a|b){400}"}),
        schema({"type": "string", "pattern": "a{1000000}"}),
        schema({"enum": ["x" * 16_000]}),
        schema({"enum": list(range(100_000))}),
        schema({"x": [[]] * 15_000}),
        (chat, {**asks, "tools": tools, "tool_choice": "required"}),
    ]  # fmt: skip


@dataclass(frozen=True)
class Raw:
    """Bytes for a connection, and the status of the answer."""

    data: bytes
    status: int


def head(*lines: str, method: str = "POST", path: str = "/v1/completions") -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", *lines, "", "")).encode()


def raw_attacks(port: int) -> dict[str, Raw]:
    """Attack by name."""
    host, form = f"Host: 127.0.0.1:{port}", "Content-Type: application/json"
    body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1}).encode()
    length = f"Content-Length: {len(body)}"
    chunked = "Transfer-Encoding: chunked"
    chunks = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    get = {"method": "GET", "path": "/health"}
    return {
        "no host": Raw(head(form, length) + body, 400),
        "two hosts": Raw(head(host, host, form, length) + body, 400),
        "a foreign host": Raw(head("Host: evil.example", form, length) + body, 403),
        "a foreign absolute target": Raw(
            head(host, method="GET", path="http://evil.example/"), 403
        ),
        "a compressed body": Raw(head(host, form, length, "Content-Encoding: gzip") + body, 415),
        "a form of a web page": Raw(head(host, "Content-Type: text/plain", length) + body, 415),
        "a page without a type": Raw(head(host, "Origin: http://evil.example", length) + body, 415),
        "a head without end": Raw(head(host, "X: " + "a" * (1 << 20)), 431),
        "a thousand headers": Raw(head(host, *(f"X{i}: 1" for i in range(1000)), **get), 431),
        "both lengths": Raw(head(host, form, length, chunked) + chunks, 400),
        "two lengths": Raw(head(host, form, length, "Content-Length: 5") + body, 400),
        "a negative length": Raw(head(host, form, "Content-Length: -5") + body, 400),
        "a length of digits of another script": Raw(
            head(host, form, "Content-Length: \u0663") + body, 400
        ),
        "a chunk of negative size": Raw(head(host, form, chunked) + b"-5\r\nhello\r\n", 400),
        "a chunk of 2**64 bytes": Raw(head(host, form, chunked) + b"1" + b"0" * 16 + b"\r\n", 400),
        "trailers without end": Raw(
            head(host, form, chunked) + chunks + b"X: " + b"a" * (1 << 20), 431
        ),
        "a body that is too large": Raw(head(host, form, "Content-Length: 99999999999"), 413),
        "another protocol": Raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9, 400),
        "line ends alone": Raw(b"\r\n" * (1 << 17), 431),
        "a null in the path": Raw(head(host, method="GET", path="/page/%00"), 404),
        "a path above the page": Raw(head(host, method="GET", path="/page/../../etc/passwd"), 404),
        "an encoded path above": Raw(
            head(host, method="GET", path="/page/%2e%2e/%2e%2e/etc/passwd"), 404
        ),
    }


def bodies() -> dict[str, tuple[bytes, int]]:
    """JSON that is none, or too much: (body, status) by name, for /v1/completions."""
    return {
        "brackets": (b"[" * 200_000, 400),
        "brackets in a field": (b'{"model":"demo","prompt":' + b"[" * 200_000, 400),
        "half a surrogate pair": (b'{"model":"demo","prompt":"\\ud800"}', 400),
        "invalid UTF-8": (b'{"model":"demo","prompt":"\xff\xfe"}', 400),
        "a number of 400 digits": (
            b'{"model":"demo","prompt":"x","seed":' + b"9" * 400 + b"}",
            400,
        ),
        "infinity": (b'{"model":"demo","prompt":"x","temperature":Infinity}', 400),
        "the same field twice": (b'{"model":"demo","model":"x","prompt":"x"}', 404),
        "a million fields": (b"{" + b",".join(b'"%d":0' % i for i in range(200_000)) + b"}", 400),
        "nothing": (b"", 400),
        "an unknown field": (b'{"model":"demo","prompt":"x","\\u0000":1}', 400),
    }
