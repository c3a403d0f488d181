"""The live page in Chromium: a real engine behind it, a user in front of it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli import main
from greenroom.config import LoadConfig, ServeConfig, ZipfConfig
from greenroom.server.engine.start import start
from greenroom.server.page.timeline_frames import timeline_frames
from greenroom.server.page.viewer import Viewer
from greenroom.sim.page.recording import recording
from greenroom.sim.study import Cell, Study
from greenroom.trace.synth import zipf
from tests.browser import CONTRAST, Visit, save, text, until
from tests.server.conftest import DEMO, NAME, Running, launch

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
KEY = "sk-greenroom-test"
NARROW = {"width": 360, "height": 740}
HITS = "/Layer: [\\d,]+ hits, [\\d,]+ misses \\([\\d.]+ %\\)/"
PROMPT: Any = {"model": NAME, "prompt": "Once upon a time", "temperature": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """The demo model with a quarter of its experts in memory, and a budget."""
    instance = start(str(DEMO), LoadConfig(memory="2GiB", context=1024), ServeConfig(max_batch=2))
    while instance.state()[0] == "loading":
        time.sleep(0.05)
    assert instance.state()[0] == "ready", instance.state()
    instance.resize("25%")
    instance.end_ids = ()  # answers have the requested length
    yield instance
    instance.stop(0.0)


@contextmanager
def served(engine: Any, **options: Any) -> Iterator[Running]:
    """A server of the engine, which outlives the server."""
    stop, state = engine.stop, engine.state
    engine.stop = lambda grace_s: setattr(engine, "state", lambda: ("stopping", 1.0, ""))
    running = launch(engine, **options)
    try:
        yield running
    finally:
        if running.thread.is_alive():
            running.stop()
        engine.stop, engine.state = stop, state


@pytest.fixture(scope="module")
def server(engine: Any) -> Iterator[Running]:
    with served(engine) as running:
        yield running


def ready(page: Any) -> None:
    page.wait_for_selector("#state[data-state=ready]")
    page.wait_for_selector("#map")


@contextmanager
def generating(running: Running, tokens: int = 900, **headers: str) -> Iterator[None]:
    """An answer is computed meanwhile."""
    body = {**PROMPT, "max_tokens": tokens}
    thread = threading.Thread(target=lambda: running.post("/v1/completions", body, headers=headers))
    thread.start()
    try:
        yield
    finally:
        for sequence in running.service.engine.sequences()[0]:
            sequence.cancel()
        thread.join()


def test_the_page_loads(server: Running, visit: Visit) -> None:
    page = visit(server.url)
    ready(page)
    assert text(page, "#model") == NAME
    assert "8 layers × 32 experts" in text(page, "#facts")
    assert "64 of 256 in memory" in text(page, "#experts-note")
    assert re.fullmatch(r"[\d.]+ [KMG]iB of 2.00 GiB in use", text(page, "#memory-note"))
    assert "expert slots" in text(page, "#memory-parts").lower()
    assert page.title() == f"{NAME} · Greenroom"
    for card in ("speed", "ttft", "ratio", "waits", "experts", "requests", "chat", "memory",
                 "links", "prefetch"):  # fmt: skip
        assert page.is_visible(f"#{card}"), card
    assert not page.is_visible("#gate")
    assert not page.is_visible("#resize")  # the server has no key
    assert page.evaluate("localStorage.length + sessionStorage.length") == 0
    assert page.evaluate("document.cookie") == ""


def test_numbers_move_during_a_generation(server: Running, visit: Visit) -> None:
    page = visit(server.url)
    ready(page)
    until(page, "document.querySelector('#speed .value').textContent.startsWith('0.0')")
    before = page.evaluate("document.querySelector('#map').toDataURL()")
    with generating(server):
        speed = "parseFloat(document.querySelector('#speed .value').textContent)"
        until(page, f"{speed} > 0.5")
        page.wait_for_selector("#request-table tbody tr")
        assert "answer" in text(page, "#request-table tbody")
        assert not page.is_visible("#request-table tbody button")  # the server has no key
        until(page, "document.querySelector('#ratio .value').textContent.includes('%')")
        until(page, "document.querySelector('#speed path.line').getAttribute('d')")
        assert page.evaluate("document.querySelector('#map').toDataURL()") != before
        assert "1 of at most 2 running" in text(page, "#queue")
        page.hover("#map", position={"x": 34, "y": 5})
        until(page, f"{HITS}.test(document.querySelector('#pointed').textContent)")
    until(page, "document.querySelectorAll('#request-table tbody tr').length === 0")
    assert re.search(r"\d+ m?s", text(page, "#ttft .value"))


def test_the_chat_streams_and_stops(server: Running, visit: Visit) -> None:
    page = visit(server.url)
    ready(page)
    page.fill("#chat-most", "12")
    page.fill("#chat-text", "Hello")
    page.press("#chat-text", "Shift+Enter")
    page.keyboard.type("world")
    assert page.input_value("#chat-text") == "Hello\nworld"
    page.evaluate(
        """() => {
          window.sizes = new Set();
          const all = {childList: true, subtree: true, characterData: true};
          new MutationObserver(() => window.sizes.add(
            document.querySelector('.said.assistant')?.textContent.length ?? 0
          )).observe(document.querySelector('#chat-log'), all);
        }"""
    )
    page.press("#chat-text", "Enter")
    until(page, "document.querySelector('#chat-send').textContent === 'Stop'")
    until(page, "document.querySelector('#chat-send').textContent === 'Send'")
    assert text(page, ".said.user") == "Hello\nworld"
    assert len(text(page, ".said.assistant")) > 3
    assert page.evaluate("window.sizes.size") > 4  # it came in parts
    page.fill("#chat-most", "900")
    page.fill("#chat-text", "Tell me more")
    page.click("#chat-send")
    until(page, "document.querySelectorAll('.said.assistant')[1]?.textContent.length > 3")
    page.click("#chat-send")
    until(page, "document.querySelector('#chat-send').textContent === 'Send'")
    until(page, "document.querySelector('#queue').textContent.startsWith('0 of')")
    page.click("#chat-reset")
    assert text(page, "#chat-log") == ""


def test_an_error_of_the_chat_is_shown(server: Running, visit: Visit) -> None:
    page = visit(server.url, expected="status of 400")
    ready(page)
    page.fill("#chat-text", "many words " * 1000)
    page.press("#chat-text", "Enter")
    page.wait_for_selector(".said.error")
    assert "tokens" in text(page, ".said.error")
    assert page.get_attribute(".said.error", "role") == "alert"
    assert text(page, "#chat-send") == "Send"


def test_the_page_works_by_keyboard(server: Running, visit: Visit) -> None:
    page = visit(server.url)
    ready(page)
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or reached[-1] == ""
    assert [each for each in reached if each][:5] == [
        "map", "chat-reset", "chat-log", "chat-text", "chat-most",
    ]  # fmt: skip
    assert "chat-send" in reached
    page.focus("#map")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    until(page, "document.querySelector('#pointed').textContent.startsWith('Layer 1, expert 2: ')")
    assert text(page, "#spoken").startswith("Layer 1, expert 2: ")
    page.keyboard.press("End")
    page.keyboard.press("PageDown")
    until(page, "document.querySelector('#pointed').textContent.startsWith('Layer 7, expert 31: ')")
    page.keyboard.press("Escape")
    until(page, "document.querySelector('#pointed').textContent.startsWith('Point at')")


def test_pointing_at_an_expert_describes_it(server: Running, visit: Visit) -> None:
    page = visit(server.url)
    ready(page)
    page.hover("#map", position={"x": 34, "y": 5})
    until(page, "document.querySelector('#pointed').textContent.startsWith('Layer 0, expert 0: ')")
    assert re.search("in memory|on disk|being read|read ahead", text(page, "#pointed"))
    page.hover("#model")
    until(page, "document.querySelector('#pointed').textContent.startsWith('Point at')")


def test_a_narrow_screen_needs_no_scrolling_sideways(server: Running, visit: Visit) -> None:
    page = visit(server.url, viewport=NARROW, has_touch=True)
    ready(page)
    with generating(server):
        page.wait_for_selector("#request-table tbody tr")
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        for card in ("speed", "experts", "requests", "chat", "memory", "links", "prefetch"):
            box = page.locator(f"#{card}").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= NARROW["width"]
        assert page.locator("#map").bounding_box()["width"] > 200
        save(page, "narrow")


TEXTS = (
    "h1", "#facts", "#state", ".note", ".value", ".value small", ".tile h2", "#chat-send",
    "#chat-reset", "#pointed", "#memory-parts dt", ".keys li",
)  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(server: Running, visit: Visit, scheme: str) -> None:
    page = visit(server.url, color_scheme=scheme)
    ready(page)
    for selector in TEXTS:
        contrast, behind = page.evaluate(CONTRAST, selector)
        assert contrast >= 4.5, selector
        if selector != "#chat-send":  # white on green, or black on green
            assert (behind > 0.5) == (scheme == "light"), selector
    with generating(server):
        page.wait_for_selector("#request-table tbody tr")
        page.wait_for_timeout(3000)  # for the charts
        save(page, scheme)


def test_the_page_reconnects_after_a_restart(engine: Any, visit: Visit) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(served(engine))
        page = visit(first.url, expected="Failed to load resource")
        ready(page)
        first.stop()
        del engine.state  # it has stopped for this server alone
        page.wait_for_selector("#state[data-state=away]")
        assert "cannot be reached" in text(page, "#state")
        second = stack.enter_context(served(engine, port=first.port))
        ready(page)
        with generating(second):
            page.wait_for_selector("#request-table tbody tr")


def test_a_key_opens_the_page_and_its_buttons(engine: Any, visit: Visit) -> None:
    headers = {"x-api-key": KEY}
    with served(engine, key=KEY) as running:
        page = visit(running.url, expected="status of 40[01]")
        page.wait_for_selector("#gate")
        assert not page.is_visible("#page")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('#gate-error').textContent === 'wrong API key'")
        page.fill("#key", KEY)
        page.click("#gate button")
        ready(page)
        assert not page.is_visible("#gate")
        assert KEY not in page.url
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
        with generating(running, **headers):
            page.click("#request-table tbody button")
            until(page, "document.querySelector('#queue').textContent.startsWith('0 of')")
        page.fill("#cache", "30%")
        page.press("#cache", "Enter")
        until(page, "document.querySelector('#resize-error').textContent === '76 slots'")
        until(page, "document.querySelector('#experts-note').textContent.includes('in 76 slots')")
        page.fill("#cache", "0%")
        page.click("#resize button")
        until(page, "document.querySelector('#resize-error').className === 'error'")
        assert "0%" in text(page, "#resize-error")
        assert not any(KEY in line for line in running.lines)
    engine.resize("25%")  # as the other tests expect


def test_devices_are_added_and_removed(visit: Visit) -> None:
    """A model on two fake devices, of which the second is spare at first."""
    lost = "Failed to load resource"  # the key is missing at first; servers end before their pages
    load = LoadConfig(device="fake,fake", spare_devices=1, cache="25%")
    instance: Any = start(str(DEMO), load, ServeConfig())
    try:
        while instance.state()[0] == "loading":
            time.sleep(0.05)
        assert instance.state()[0] == "ready", instance.state()
        with served(instance) as running:  # without a key nothing can be changed
            page = visit(running.url, expected=lost)
            ready(page)
            assert not page.is_visible("#devices")
        with served(instance, key=KEY) as running:
            page = visit(running.url, expected=lost)
            page.fill("#key", KEY)
            page.press("#key", "Enter")
            ready(page)
            page.wait_for_selector("#devices label")
            assert not page.is_enabled("#devices input[value='fake:0']")
            second = "#devices input[value='fake:1']"
            assert not page.is_checked(second)
            for names in (["fake:0", "fake:1"], ["fake:0"]):
                page.click(second)
                until(page, "document.querySelector('#devices-error').textContent"
                            f".endsWith('slots on {', '.join(names)}')")  # fmt: skip
                assert instance.greenroom.devices == names
                page.wait_for_timeout(1200)  # the next frame has the same
                assert page.is_checked(second) == (len(names) == 2)
            save(page, "devices")
    finally:
        instance.stop(0.0)


def test_a_recording_plays(visit: Visit) -> None:
    trace = zipf(ZipfConfig(layers=48, experts=128, top_k=8, requests=2, tokens=60))
    played = recording(Study.of(trace, "runtime"), Cell("lru", 1536), "synthetic")
    with Viewer(played, 0) as viewer:
        threading.Thread(target=viewer.serve_forever, daemon=True).start()
        try:
            page = visit(viewer.url)
            page.wait_for_selector("#state[data-state=recording]")
            at = "Number(document.querySelector('#position').value)"
            until(page, f"{at} > 3")
            assert text(page, "#model") == "synthetic"
            assert not page.is_visible("#chat")
            assert "1,536 slots" in text(page, "#experts-note")
            page.click("#play")
            here = page.evaluate(at)
            page.wait_for_timeout(300)
            assert page.evaluate(at) == here
            page.focus("#position")
            page.keyboard.press("End")
            assert "60 of 60" in text(page, "#at")
            page.keyboard.press("Home")
            page.keyboard.press("ArrowRight")
            assert page.evaluate(at) == 1
            page.focus("#play")
            page.keyboard.press("Enter")
            until(page, f"{at} > 3")
        finally:
            viewer.shutdown()


def test_the_timeline_of_a_run_plays(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    limits = ("--cache", "25%", "--max-new-tokens", "20", "--timeline", str(path))
    assert main(["run", "demo", "Once upon a time", *limits]) == 0
    with Viewer(timeline_frames(path, "a run"), 0) as viewer:
        threading.Thread(target=viewer.serve_forever, daemon=True).start()
        try:
            page = visit(viewer.url)
            page.wait_for_selector("#state[data-state=recording]")
            assert text(page, "#model") == "a run"
            before = page.evaluate("document.querySelector('#map').toDataURL()")
            page.focus("#position")
            page.keyboard.press("End")
            until(page, f"document.querySelector('#map').toDataURL() !== {json.dumps(before)}")
            assert "8 layers × 32 experts" in text(page, "#facts")
        finally:
            viewer.shutdown()
