"""The live page over HTTP: its files and headers, who sees data, and pages that come and go."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import pytest

from greenroom.server.http.errors import ApiError
from greenroom.server.page import broadcast
from greenroom.server.page.assets import DATA, FOLDER, assets
from greenroom.server.page.broadcast import PAGES, Broadcast
from greenroom.server.page.live import EngineFrames
from tests.server.conftest import Running, Serve, fake_engine, wait_for

KEY = "sk-greenroom-test"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames come a hundred times a second."""
    monkeypatch.setattr(broadcast, "FRAME_S", 0.01)


@contextmanager
def watching(running: Running, **headers: str) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The response of the stream, and the frames in it."""
    with httpx2.stream("GET", running.url + DATA, headers=headers, timeout=20) as response:

        def frames() -> Iterator[Any]:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])

        yield response, frames()


class TestFiles:
    def test_the_page_and_all_that_it_names_are_served(self, running: Running) -> None:
        page = running.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        named = {*re.findall(r'(?:src|href)="([^"#]+)"', page.text)}
        assert "page/main.js" in named
        seen: set[str] = set()
        while left := named - seen:
            name = left.pop()
            seen.add(name)
            response = running.get("/" + name)
            assert response.status_code == 200, name
            assert response.headers["x-content-type-options"] == "nosniff"
            named |= {FOLDER[1:] + other for other in re.findall(r'from "\./(.+)"', response.text)}
        assert {"/" + name for name in seen} | {"/"} == {*assets()}

    def test_no_file_names_another_server(self) -> None:
        """Nor does any script turn text into HTML or code."""
        for path, asset in assets().items():
            text = asset.content.decode().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|//[a-z0-9.-]+\.[a-z]{2,}|innerHTML|eval\(", text), path

    def test_the_content_security_policy_is_strict(self, running: Running) -> None:
        for path in assets():
            headers = running.get(path).headers
            policy = dict(
                part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
            )
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["referrer-policy"] == "no-referrer"

    def test_the_page_can_be_switched_off(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), no_page=True)
        for path in ("/", FOLDER + "main.js", DATA):
            assert running.get(path).status_code == 404

    def test_other_paths_are_not_files(self, running: Running) -> None:
        for path in ("/page", "/page/", "/page/none.js", "/page/..%2findex.html", "/index.html"):
            assert running.get(path).status_code == 404


class TestAccess:
    def test_only_the_files_need_no_key(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), key=KEY)
        assert running.get("/").status_code == 200
        assert KEY not in running.get("/").text
        for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": KEY}):
            assert running.get(DATA, headers=headers).status_code == 401
        for query in (f"?key={KEY}", f"?api_key={KEY}"):  # keys in URLs would be in logs
            assert running.get(DATA + query).status_code == 401
        with watching(running, Authorization=f"Bearer {KEY}") as (response, frames):
            assert response.status_code == 200
            assert next(frames)["state"] == ["ready", 1.0]

    def test_without_the_page_no_path_is_open(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"), key=KEY, no_page=True)
        assert running.get("/").status_code == 401

    def test_other_names_of_the_host_are_refused(self, running: Running) -> None:
        for path in ("/", FOLDER + "main.js", DATA):
            assert running.get(path, headers={"host": "evil.example"}).status_code == 403

    def test_pages_are_not_logged(self, serve: Serve, quick: None) -> None:
        running = serve(fake_engine("Hi"))
        with watching(running) as (_, frames):
            next(frames)
        for path in assets():
            running.get(path)
        running.get("/v1/nothing")
        assert "/v1/nothing" in running.line(2)
        assert "GET / 200" in running.lines[0]
        assert len(running.lines) == 2


class TestStreams:
    def test_frames_follow_until_a_client_hangs_up(
        self, serve: Serve, quick: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is computed before the first page comes, and after the last one has gone."""
        made, frame = [], EngineFrames.frame
        monkeypatch.setattr(EngineFrames, "frame", lambda self: made.append(1) or frame(self))
        running = serve(fake_engine("Hi"))
        running.get("/health")
        assert not made
        with watching(running) as (response, frames):
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-store"
            times = [next(frames)["t"] for _ in range(5)]
        assert times == sorted(times)
        count = -1
        while count != len(made):  # two looks without a frame between
            count = len(made)
            asyncio.run(asyncio.sleep(0.2))
        assert len(made) >= 5

    def test_a_page_sees_the_model_load(self, serve: Serve, quick: None) -> None:
        running = serve(fake_engine("Hi"))
        running.engine.now = ("loading", 0.25, "reading /secret/path")
        with watching(running) as (_, frames):
            frame = next(frames)
            assert frame["state"] == ["loading", 0.25]
            assert "secret" not in json.dumps(frame)
            running.engine.now = ("ready", 1.0, "")
            wait_for(lambda: next(frames)["state"] == ["ready", 1.0])

    def test_there_is_a_limit_of_pages(self, serve: Serve, quick: None) -> None:
        running = serve(fake_engine("Hi"))
        with ExitStack() as stack:
            pages = [stack.enter_context(watching(running)) for _ in range(PAGES)]
            for _, frames in pages:
                next(frames)
            response = running.get(DATA)
            assert response.status_code == 429
            assert f"{PAGES} pages" in response.json()["error"]["message"]
        wait_for(lambda: _status(running) == 200)

    def test_an_open_page_does_not_hold_up_the_end(self, serve: Serve, quick: None) -> None:
        running = serve(fake_engine("Hi"), grace=60.0)
        with watching(running) as (_, frames):
            next(frames)
            running.server.should_exit = True
            assert [frame["state"][0] for frame in frames][-1] == "stopping"
        running.thread.join(20)
        assert not running.thread.is_alive()

    def test_a_frame_that_fails_ends_the_streams(
        self, serve: Serve, quick: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running = serve(fake_engine("Hi"))
        with watching(running) as (_, frames):
            next(frames)
            monkeypatch.setattr(EngineFrames, "frame", lambda self: 1 / 0)
            assert len([*frames]) < 100  # it ends


def _status(running: Running) -> int:
    with watching(running) as (response, _):
        return response.status_code


class Source:
    """Frames with a number, and no engine."""

    def __init__(self) -> None:
        self.number = 0

    def frame(self) -> dict[str, Any]:
        self.number += 1
        return {"number": self.number, "state": ["ready", 1.0]}

    def greeting(self) -> dict[str, Any]:
        return {"greeting": True}


class TestBroadcast:
    def test_a_slow_page_gets_the_latest_frame(self, quick: None) -> None:
        async def watch() -> None:
            source: Any = Source()
            sender = Broadcast(source)
            slow, fast = sender.join(), sender.join()
            events = sender.events(fast)
            assert b"greeting" in await anext(events)
            while source.number < 20:
                await anext(events)
            assert slow.qsize() == 1
            frame = json.loads((slow.get_nowait() or b"")[6:])
            assert frame["number"] == source.number
            sender.leave(slow)
            sender.leave(fast)
            assert sender.pages == 0

        asyncio.run(watch())

    def test_frames_end_with_the_last_page_and_begin_again(self, quick: None) -> None:
        async def come_and_go() -> None:
            source: Any = Source()
            sender = Broadcast(source)
            for _ in range(3):
                place = sender.join()
                assert await place.get()
                sender.leave(place)
                sender.leave(place)  # a second time changes nothing
                before = source.number
                await asyncio.sleep(0.05)
                assert source.number == before

        asyncio.run(come_and_go())

    def test_large_frames_come_less_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        delays: list[float] = []

        async def sleep(seconds: float) -> None:
            delays.append(seconds)
            if len(delays) == 2:
                raise asyncio.CancelledError

        async def watch() -> None:
            source: Any = Source()
            source.frame = lambda: {"state": ["ready", 1.0], "map": "x" * size}
            sender = Broadcast(source)
            sender.join()
            monkeypatch.setattr(broadcast.asyncio, "sleep", sleep)
            assert sender._task is not None
            with pytest.raises(asyncio.CancelledError):
                await sender._task
            monkeypatch.undo()

        for size in (10, 100_000):
            delays.clear()
            asyncio.run(watch())
            assert delays[0] >= size / 20_000
            assert (delays[0] == broadcast.FRAME_S) == (size == 10)

    def test_too_many_pages_are_refused(self, quick: None) -> None:
        async def join() -> None:
            source: Any = Source()
            sender = Broadcast(source)
            places = [sender.join() for _ in range(PAGES)]
            with pytest.raises(ApiError, match="pages watch already"):
                sender.join()
            sender.leave(places[0])
            sender.join()

        asyncio.run(join())
