"""Transcripts of real clients: their requests again, and the page that quotes them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.clients.record import serving
from tests.clients.transcripts import FOLDER, Exchange, Transcript, difference, parts_of
from tests.server.conftest import Running

PATHS = sorted(FOLDER.glob("*.jsonl"))
DRIVERS = FOLDER.with_name("drivers")
URL = "http://127.0.0.1:8000"
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BLOCK = r"<!-- {}: ([\w.-]+) -->\n```\w*\n(.*?)^```$"
QUOTED = re.compile(BLOCK.format("transcript"), re.DOTALL | re.MULTILINE)
CODE = re.compile(BLOCK.format("driver"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def demo() -> Iterator[Running]:
    """A server with the demo model."""
    with serving([]) as running:
        yield running


def send(running: Running, exchange: Exchange) -> Exchange:
    """Send a recorded request; return it with the present response."""
    body = None if exchange.body is None else json.dumps(exchange.body).encode()
    response = httpx2.request(
        exchange.method, running.url + exchange.path, headers=exchange.headers, content=body,
        timeout=100,
    )  # fmt: skip
    media_type = response.headers.get("content-type", "")
    parts = parts_of(media_type, response.content)
    return replace(exchange, status=response.status_code, media_type=media_type, parts=parts)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_server_answers_as_it_was_recorded(path: Path, demo: Running) -> None:
    transcript = Transcript.read(path)
    if transcript.answers:
        with serving(transcript.answers) as running:
            check(transcript, running)
    else:
        check(transcript, demo)


def check(transcript: Transcript, running: Running) -> None:
    assert transcript.exchanges
    for number, exchange in enumerate(transcript.exchanges):
        wrong = difference(exchange, send(running, exchange))
        assert wrong is None, f"exchange {number}, {exchange.method} {exchange.path}: {wrong}"


STREAM = [
    {"id": "chatcmpl-0123456789abcdef", "created": 1, "choices": [{"delta": {"content": "a"}}]},
    {"id": "chatcmpl-0123456789abcdef", "created": 1, "choices": [{"delta": {"content": "b"}}]},
    "[DONE]",
]
RECORDED = Exchange("POST", "/v1/x", {}, {}, 200, "text/event-stream", STREAM)


def with_parts(change: Callable[[Any], Any]) -> Exchange:
    parts: Any = copy.deepcopy(STREAM)
    change(parts)
    return replace(RECORDED, parts=parts)


def test_other_ids_and_times_make_no_difference() -> None:
    def change(parts: Any) -> None:
        for part in parts[:2]:
            part |= {"id": "chatcmpl-fedcba9876543210", "created": 2}

    assert difference(RECORDED, with_parts(change)) is None


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda parts: parts.pop(), "parts"),
        (lambda parts: parts.insert(1, parts[0]), "parts"),
        (lambda parts: parts[0].pop("created"), "parts.0"),
        (lambda parts: parts[0].update(extra=1), "parts.0"),
        (lambda parts: parts[1].update(created="1"), "parts.1.created"),
        (lambda parts: parts[1].update(id="chatcmpl-ffffffffffffffff"), "parts.1.id"),
        (lambda parts: parts[1].update(id="msg_0123456789abcdef"), "parts.1.id"),
        (lambda parts: parts[1]["choices"][0]["delta"].update(content="c"), "delta.content"),
        (lambda parts: parts[1]["choices"][0]["delta"].update(content=None), "delta.content"),
        (lambda parts: parts.__setitem__(2, {"error": {}}), "parts.2"),
    ],
)
def test_a_changed_answer_is_a_difference(change: Callable[[Any], Any], where: str) -> None:
    wrong = difference(RECORDED, with_parts(change))
    assert wrong is not None
    assert where in wrong.partition(": ")[0]


def test_another_status_or_type_of_media_is_a_difference() -> None:
    assert "status: 200" in str(difference(RECORDED, replace(RECORDED, status=400)))
    media = difference(RECORDED, replace(RECORDED, media_type="text/plain"))
    assert str(media).startswith("media_type")


def test_a_request_that_is_refused_fails_its_replay(demo: Running) -> None:
    exchange = Transcript.read(FOLDER / "llm.jsonl").exchanges[0]
    refused = send(demo, replace(exchange, body={**exchange.body, "unknown": 1}))
    assert "status: 200 was recorded, now 400" in str(difference(exchange, refused))


def test_transcripts_name_no_machine() -> None:
    private = re.compile(r"/tmp/|/root|/home/(?!user)|/work/|sk-|Bearer|localhost|127\.0\.0\.1")
    found = {path.name: private.search(path.read_text()) for path in PATHS}
    assert not {name: match[0] for name, match in found.items() if match}


def test_every_driver_has_a_transcript_and_a_place_in_the_page() -> None:
    drivers = {path.stem for path in DRIVERS.iterdir() if path.suffix != ".json"}
    quoted = {name for name, _ in QUOTED.findall(PAGE.read_text())}
    assert drivers == {path.stem for path in PATHS} == quoted


def test_the_page_quotes_transcripts() -> None:
    """The lines of a block are summaries of exchanges, in order; `...` stands for others."""
    for name, block in QUOTED.findall(PAGE.read_text()):
        transcript = Transcript.read(FOLDER / f"{name}.jsonl")
        summaries = iter([transcript.client, *(each.summary for each in transcript.exchanges)])
        for line in block.splitlines():
            assert line == "..." or line in summaries, f"{name}: {line}"


def test_the_page_has_the_settings_of_drivers() -> None:
    for name, block in CODE.findall(PAGE.read_text()):
        settings = settings_of((DRIVERS / name).read_text())
        missing = [line for line in block.splitlines() if line.strip() not in settings]
        assert not missing, f"{name}: {missing}"


def settings_of(driver: str) -> set[str]:
    """The lines of a driver with the address that the page has, also as exported variables."""
    for written, shown in (
        (r'f"\{URL\}', f'"{URL}'),
        (r"\{URL\}", URL),
        (r"\bURL\b", f'"{URL}"'),
        (r"`\$\{url\}/v1`", f"'{URL}/v1'"),
    ):
        driver = re.sub(written, shown, driver)
    exports = re.findall(r'"([A-Z_]+)": "([^"]*)"', driver)
    lines = {line.strip() for line in driver.splitlines()}
    return lines | {f"export {name}={value}" for name, value in exports}


def test_versions_of_the_table_are_those_of_transcripts() -> None:
    page = PAGE.read_text()
    clients = {Transcript.read(path).client.split(",")[0].split()[-1] for path in PATHS}
    assert set(re.findall(r"^\| \[.*?\| ([\d.]+) \|", page, re.MULTILINE)) == clients
