"""Pages in Chromium, driven by Playwright, for the tests marked `browser`."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
SCREENSHOTS = Path(__file__).parents[1] / "build" / "screenshots"
PATIENCE_MS = 30_000
Visit = Callable[..., Any]
# The contrast of an element's text to what is behind it, and the light of that.
CONTRAST = """(selector) => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[0-9.]+/g).map((x) => x / 255)
      .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const element = document.querySelector(selector);
  const ground = (at) => getComputedStyle(at).backgroundColor;
  let behind = element;
  while (ground(behind) === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
  const [a, b] = [getComputedStyle(element).color, ground(behind)].map(light);
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), b];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as driver:
        instance = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield instance
        instance.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Visit]:
    """`visit(url)` opens a page of a server, or a file.

    It must ask no other server and have no error but `expected`.
    """
    problems: list[str] = []
    with ExitStack() as stack:

        def open_page(url: str, expected: str = "^$", **context: Any) -> Any:
            whole = url if url.startswith("file:") else f"{url}/"
            tab = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
            stack.callback(tab.close)
            page = tab.new_page()
            page.set_default_timeout(PATIENCE_MS)

            def note(kind: str, text: str) -> None:
                if not re.search(expected, text):
                    problems.append(f"{kind}: {text}")

            page.on("console", lambda message: (
                note(message.type, message.text) if message.type in ("error", "warning") else None
            ))  # fmt: skip
            page.on("pageerror", lambda error: note("exception", str(error)))
            page.on("request", lambda request: (
                None if request.url.startswith(whole) else note("request", request.url)
            ))  # fmt: skip
            page.goto(whole)
            return page

        yield open_page
        assert not problems, problems


def until(page: Any, expression: str) -> None:
    """Wait until an expression of JavaScript is true.

    Playwright's own `wait_for_function` is stopped by the page's policy, which forbids `eval`.
    """
    end = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(30)


def save(page: Any, name: str) -> None:
    """Save a picture of the page, for people to look at."""
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def text(page: Any, selector: str) -> str:
    return str(page.inner_text(selector))
