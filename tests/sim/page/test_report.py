from __future__ import annotations

import json
import re
from html.parser import HTMLParser

from greenroom.server.page.assets import FOLDER, assets
from greenroom.sim.page.figures import PlottedCurve, miss_ratio_chart
from greenroom.sim.page.report import highlighted
from greenroom.sim.page.report import report as page_of

ROW = {"order": "natural", "scope": "shared", "pin": "step", "requests": 1000}
ROWS = [
    {**ROW, "policy": "lru", "capacity": 4, "misses": 400, "miss_ratio": 0.4},
    {**ROW, "policy": "lru", "capacity": 8, "misses": 100, "miss_ratio": 0.1},
    {**ROW, "policy": "<b>own</b>", "capacity": 4, "misses": 300, "miss_ratio": 0.3},
]
RECORDING = {"greeting": {"kind": "trace", "layers": [4, 3]}, "frames": [{"t": 12}]}
TIMES = {
    "ttft_s": 1.5, "tpot_s": 0.02, "tpot_p95_s": 0.05, "tokens_per_s": 40.0,
    "stall_s": 3.0, "seconds": 12.0,
}  # fmt: skip


def report(rows=ROWS, title="A </script><script>alert(1)</script> model") -> str:
    return page_of(
        title=title,
        facts=[("trace", "a<b.npz"), ("tokens", "12")],
        settings={"order": "natural"},
        command="greenroom simulate 'a<b.npz' --policy lru",
        experts=16,
        tokens=12,
        curves={"lru": [(4, 0.4), (8, 0.1)], "<b>own</b>": [(4, 0.3), (8, 0.1)]},
        floor=[(4, 0.2), (8, 0.1)],
        recording=RECORDING,
        rows=rows,
    )


class Page(HTMLParser):
    """Elements must close in order; what would load something is noted."""

    VOID = ("meta", "br", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.loads += [name for name, _ in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)


def test_the_page_is_complete_and_loads_nothing():
    text = report()
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert not re.search(r"https?://|@import|url\(|fetch\(", text)
    assert "prefers-color-scheme: dark" in text


def test_names_are_escaped_in_the_page():
    page = Page(report())
    assert page.text["h1"] == ["A </script><script>alert(1)</script> model"]
    assert not [tag for tag, _ in page.tags if tag == "b" and _ == {"own": None}]
    assert "<b>own</b>" in page.text["td"]
    assert page.text["pre"] == ["greenroom simulate 'a<b.npz' --policy lru"]
    assert len(page.text["script"]) == 2  # the data and the page's own


def test_the_table_has_the_distance_to_the_floor():
    table = re.findall(r"<tbody>(.*?)</tbody>", report())[0]
    cells = [re.findall(r"<td>([^<]*)</td>", row) for row in table.split("</tr>")[:-1]]
    assert [(row[0], row[1], row[4], row[5]) for row in cells] == [
        ("lru", "4 (25%)", "40.00%", "+100.0%"),
        ("&lt;b&gt;own&lt;/b&gt;", "4 (25%)", "30.00%", "+50.0%"),
        ("lru", "8 (50%)", "10.00%", "+0.0%"),
    ]


def test_times_are_shown_where_there_are_any():
    assert "TPOT" not in report()
    text = report([{**row, **TIMES} for row in ROWS])
    for shown in ("TTFT", "1.50 s", "20 ms", "50 ms", "25%"):
        assert shown in text


def test_the_data_are_those_of_the_curves():
    text = report()
    embedded = json.loads(re.findall(r'id="data">(.*?)</script>', text)[0])
    assert [curve["name"] for curve in embedded["curves"]][:2] == ["lru", "<b>own</b>"]
    assert embedded["curves"][0]["points"] == [[4, 0.4], [8, 0.1]]
    assert embedded["recording"] == RECORDING


def test_the_map_is_that_of_the_live_page():
    """Its scripts and its colours are the live page's, in one script without imports."""
    text, files = report(), assets()
    (script,) = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    assert "import " not in script
    assert not re.search("^export ", script, re.MULTILINE)
    for name in ("format.js", "map.js", "playback.js"):
        lines = files[FOLDER + name].content.decode().splitlines()
        own = [line.removeprefix("export ") for line in lines if not line.startswith("import ")]
        assert "\n".join(own) in script
    assert files[FOLDER + "drawing.css"].content.decode() in text


def test_top_level_names_of_scripts_differ():
    """They are one script in a report."""
    (script,) = re.findall(r'<script type="module">(.*?)</script>', report(), re.DOTALL)
    names = re.findall(r"^(?:const|let|class|function) (\w+)", script, re.MULTILINE)
    assert len(names) > 10
    assert len(set(names)) == len(names)


def test_the_highlighted_result_knows_no_future():
    """The middle capacity counts; the least time, where there is prefetching."""
    rows = [*ROWS, {**ROW, "policy": "opt", "capacity": 4, "misses": 1, "miss_ratio": 0.001}]
    assert highlighted(rows) == 2
    assert highlighted(rows[-1:]) == 0
    ahead = [{**row, **TIMES, "seconds": n, "prefetches": 1} for n, row in enumerate(ROWS[::2])]
    assert highlighted(ahead[::-1]) == 1


def test_points_are_where_the_axes_say():
    """Half of the experts is half of the width; the top is 40 %, so 10 % is a quarter up."""
    drawn = miss_ratio_chart(
        [PlottedCurve("lru", [(4, 0.4), (8, 0.1)], 0)],
        PlottedCurve("opt", [(4, 0.2), (8, 0.1)], -1),
        16,
    )
    assert 'd="M250.0 0.0L500.0 375.0"' in drawn
    assert "40 %</span>" in drawn
    assert "60 %</span>" not in drawn.split('class="x"')[0]
