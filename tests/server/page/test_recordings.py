"""Recordings on the live page: timelines, and the server of recordings."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.config import ZipfConfig
from greenroom.errors import TraceError, UsageError
from greenroom.server.page.assets import DATA, assets
from greenroom.server.page.timeline_frames import timeline_frames
from greenroom.server.page.viewer import Viewer
from greenroom.sim.page.recording import recording
from greenroom.sim.study import Cell, Study
from greenroom.trace.synth import zipf
from tests.drawing.decode import unpack


def states(frame: dict[str, Any], experts: int) -> list[int]:
    return unpack(frame["states"], 2, experts)


def event(row: int, name: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
    micros = {"ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
    return {"ph": "X", "name": name, "cat": "", "pid": 1, "tid": row, "args": args, **micros}


def timeline(*events: Any, **other: Any) -> dict[str, Any]:
    rows = ("compute", "disk -> host, lane 0", "passes")
    named = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": row}}
        for tid, row in enumerate(rows)
    ]
    return {
        "traceEvents": [*named, *events],
        "displayTimeUnit": "ms",
        "otherData": {"experts_per_layer": [2, 2], **other},
    }


PASS = (
    event(1, "demand", 0.0, 0.1, expert=1, chunk=0, slot=0),
    event(0, "stall: miss", 0.02, 0.1, layer=0),
    event(0, "layer 0: 1 experts", 0.1, 0.15, layer=0, experts=[1]),
    event(1, "prefetch", 0.12, 0.2, expert=3, chunk=0, slot=1),
    event(1, "demand", 0.2, 0.3, expert=2, chunk=0, slot=0),
    event(0, "layer 1: 2 experts", 0.3, 0.35, layer=1, experts=[2, 3]),
    event(2, "prompt", 0.0, 0.15),
    event(2, "token", 0.15, 0.4),
)


class TestTimelines:
    def play(self, tmp_path: Path, content: Any) -> dict[str, Any]:
        path = tmp_path / "timeline.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return timeline_frames(path, "run")

    def test_experts_arrive_and_give_up_their_slots(self, tmp_path: Path) -> None:
        recording = self.play(tmp_path, timeline(*PASS))
        frames = recording["frames"]
        at = {round(frame["t"], 2): frame for frame in frames}
        assert recording["greeting"]["layers"] == [2, 2]
        assert recording["greeting"]["links"] == ["disk -> host"]
        assert states(at[0.06], 4) == [0, 1, 0, 0]  # being read
        assert states(at[0.14], 4) == [0, 3, 0, 1]
        assert states(at[0.22], 4) == [0, 0, 1, 2]  # slot 0 has another expert, 3 was read ahead
        assert states(frames[-1], 4) == [0, 0, 3, 3]
        assert unpack(at[0.16]["used"], 1, 4) == [0, 1, 0, 0]
        assert frames[-1]["tokens"] == [0, 1]
        assert [f["answered"] for f in frames if f["answered"]] == [[[0, 0.15]]]
        assert frames[-1]["stalls"] == [80, 0]
        assert frames[-1]["links"][0][1] == pytest.approx(0.28, abs=1e-3)
        assert at[0.06]["links"][0][4] == 1

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ("", "not JSON"),
            ("{}", "otherData|traceEvents"),
            ("[1, 2]", "not an object"),
            (json.dumps(timeline(*PASS))[:-9], "not JSON"),
            (timeline(), "it has no events"),
            (timeline(*PASS, experts_per_layer=[]), "1 to 1024 layers"),
            (timeline(*PASS, experts_per_layer=[0]), "experts_per_layer"),
            (timeline(*PASS, experts_per_layer="many"), "must be a list"),
            (timeline(*PASS, experts_per_layer=[1] * 1025), "1 to 1024 layers"),
            (timeline(*PASS, experts_per_layer=[1 << 16] * 5), "327680 experts"),
            (timeline(event(0, "layer 0: 1 experts", 0, 1, layer=0, experts=[4])), "expert 4 of 4"),
            (timeline(event(0, "layer 0: 1 experts", 0, 1, experts=[-1])), "experts"),
            (timeline(event(0, "stall: miss", 0, 1, layer=2)), "layer"),
            (timeline(event(1, "demand", 0, 1, slot=0)), "expert is missing"),
            (timeline({**PASS[0], "ts": "soon"}), "microseconds"),
            (timeline({**PASS[0], "dur": 1e300}), "microseconds"),
            (timeline({**PASS[0], "args": []}), "must be an object"),
        ],
    )
    def test_damaged_files_are_one_clear_line(self, tmp_path: Path, content: Any, why: str) -> None:
        with pytest.raises(TraceError, match=why) as caught:
            self.play(tmp_path, content)
        assert "\n" not in str(caught.value)
        assert "timeline.json" in str(caught.value)

    def test_a_long_timeline_has_a_bounded_number_of_frames(self, tmp_path: Path) -> None:
        recording = self.play(tmp_path, timeline(*PASS, event(2, "token", 9000.0, 9001.0)))
        assert 1000 < len(recording["frames"]) <= 1502
        assert recording["greeting"]["span"] == 9001.0


@pytest.fixture
def viewer() -> Iterator[Viewer]:
    trace = zipf(ZipfConfig(layers=3, experts=10, top_k=2, requests=4, tokens=15))
    played = recording(Study.of(trace, "runtime"), Cell("lru", 9), "synthetic")
    with Viewer(played, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class TestViewer:
    def get(self, url: str, **headers: str) -> Any:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20)

    def test_the_page_and_the_recording_are_served(self, viewer: Viewer) -> None:
        for path, asset in assets().items():
            with self.get(viewer.url + path) as response:
                assert response.read() == asset.content
                assert "default-src 'none'" in response.headers["content-security-policy"]
        with self.get(viewer.url + DATA) as response:
            assert response.headers["content-type"] == "application/json"
            assert json.load(response)["greeting"]["kind"] == "trace"

    @pytest.mark.parametrize(
        ("path", "host", "status"),
        [("/none", "localhost", 404), ("/page/../x", "localhost", 404), ("/", "evil.example", 403),
         ("/", "evil.example:80", 403), (DATA, "127.0.0.1.evil.example", 403)],
    )  # fmt: skip
    def test_other_paths_and_hosts_are_refused(
        self, viewer: Viewer, path: str, host: str, status: int
    ) -> None:
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.get(viewer.url + path, host=host)
        assert caught.value.code == status
        caught.value.close()

    def test_a_port_in_use_is_an_error(self, viewer: Viewer) -> None:
        with pytest.raises(UsageError, match="--port"):
            Viewer({}, viewer.server_address[1])
