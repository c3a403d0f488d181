"""The report of a simulation in Chromium: the map of experts, its player, and the chart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli import main
from greenroom.config import ZipfConfig
from greenroom.trace.file import save as write_trace
from greenroom.trace.synth import zipf
from tests.browser import CONTRAST, Visit, save, text, until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
LAYERS, EXPERTS, TOKENS = 8, 32, 200
TEXTS = "h1", ".about", ".note", "#slots", ".keys li", "#pointed", "#play", "th", ".axis"
PICTURE = "document.querySelector('#map').toDataURL()"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report of three policies."""
    folder: Path = tmp_path_factory.mktemp("report")
    trace = zipf(ZipfConfig(layers=LAYERS, experts=EXPERTS, top_k=4, requests=4, tokens=TOKENS))
    write_trace(trace, folder / "a.trace")
    asked = ("--policy", "lru,next-use,opt", "--capacity", "10%,25%,50%", "--order", "runtime")
    page = folder / "report.html"
    assert main(["simulate", str(folder / "a.trace"), *asked, "--report", str(page)]) == 0
    return page.as_uri()


def ready(page: Any) -> None:
    until(page, "document.querySelector('#slots')?.textContent.startsWith('After')")


def test_the_map_shows_the_end_and_plays(report: str, visit: Visit) -> None:
    page = visit(report)
    ready(page)
    slots = f"{TOKENS} of {TOKENS} tokens: 64 of 256 experts in memory, in 64 slots."
    assert text(page, "#slots") == f"After {slots}"
    assert text(page, "#play") == "Play"
    assert page.is_visible("#key-resident")
    assert not page.is_visible("#key-flight")  # a replay without times has no transfers
    before = page.evaluate(PICTURE)
    page.click("#play")
    until(page, "Number(document.querySelector('#position').value) > 3")
    assert page.evaluate(PICTURE) != before
    page.click("#play")
    page.focus("#position")
    page.keyboard.press("End")
    assert text(page, "#slots") == f"After {slots}"


def test_an_expert_has_its_share_of_tokens(report: str, visit: Visit) -> None:
    page = visit(report)
    ready(page)
    page.focus("#map")
    page.keyboard.press("ArrowDown")
    until(page, "document.querySelector('#pointed').textContent.startsWith('Layer 1, expert 0: ')")
    found = re.search(
        r"(in memory|on disk)(, just used)?, chosen by ([\d.]+) % of tokens, ([\d.]+) times the"
        r" layer's mean\. Layer: [\d,]+ hits, [\d,]+ misses \([\d.]+ %\)",
        text(page, "#pointed"),
    )
    assert found is not None
    mean = 100 * 4 / EXPERTS  # percent of tokens
    assert float(found[3]) / mean == pytest.approx(float(found[4]), abs=0.02)


def test_the_chart_names_the_curves(report: str, visit: Visit) -> None:
    page = visit(report)
    ready(page)
    page.hover(".plot", position={"x": 300, "y": 100})
    assert re.search(r"experts \(.*%\).*lru", text(page, ".tip"), re.DOTALL)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(report: str, visit: Visit, scheme: str) -> None:
    page = visit(report, color_scheme=scheme)
    ready(page)
    for selector in TEXTS:
        contrast, behind = page.evaluate(CONTRAST, selector)
        assert contrast >= 4.5, selector
        if selector != "#play":
            assert (behind > 0.5) == (scheme == "light"), selector
    save(page, f"report-{scheme}")


def test_a_narrow_screen_needs_no_scrolling_sideways(report: str, visit: Visit) -> None:
    page = visit(report, viewport={"width": 360, "height": 740}, has_touch=True)
    ready(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    save(page, "report-narrow")
