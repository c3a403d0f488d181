"""Values over time of the live screen: rates and shares over the last seconds of frames."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from greenroom.cli.screen.frame import Frame

GAP_S = 3.0  # between two frames, after which rates begin anew: the screen was away
LAYERS_S = 60.0  # over which misses and stalls of layers are counted
SPEED_S, RATIO_S, WAIT_S, LINK_S = 2.0, 5.0, 3.0, 3.0  # over which values are averaged
FRAMES = 600  # in which values of the last frames are stored
SPANS = 15.0, 30.0, 60.0, 120.0  # seconds that a chart may show


@dataclass(frozen=True, slots=True)
class LayerTotals:
    """Hits, misses and stalls in seconds, by layer, over the last minute."""

    hits: list[int]
    misses: list[int]
    stalls: list[float]


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Bytes a second of a link, and its busy share of the time."""

    nbytes: float
    busy: float


class History:
    """The last frames, and the values of the charts at their times.

    Each series has pairs of a time and a value, which is None where nothing is known. Its times
    leave out the seconds in which there was no screen.
    """

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque(maxlen=FRAMES)
        self.now = 0.0
        names = ("speed", "ratio", "waits")
        self.series: dict[str, deque[tuple[float, float | None]]] = {
            name: deque(maxlen=FRAMES) for name in names
        }

    def add(self, frame: Frame) -> None:
        """Add a frame, and the values of the charts at its time."""
        passed = frame.at - self.frames[-1].at if self.frames else 0.0
        if passed > GAP_S:
            self.frames.clear()
            passed = 0.0
        self.now += passed
        self.frames.append(frame)
        for name, value in (
            ("speed", self.speed()), ("ratio", self.ratio()), ("waits", self.waits()),
        ):  # fmt: skip
            self.series[name].append((self.now, value))

    @property
    def last(self) -> Frame:
        return self.frames[-1]

    @property
    def span(self) -> float:
        """The seconds that charts show: more after a while."""
        return next((span for span in SPANS if self.now <= span), SPANS[-1])

    def speed(self) -> float | None:
        """Return the new tokens a second; None before there are two frames."""
        before, seconds = self._before(SPEED_S)
        return (self.last.tokens - before.tokens) / seconds if seconds else None

    def ratio(self) -> float | None:
        """Return the share of expert requests that were hits; None without requests."""
        before, now = self._before(RATIO_S)[0].cache, self.last.cache
        hits = sum(now.hits) - sum(before.hits)
        requests = hits + sum(now.misses) - sum(before.misses)
        return hits / requests if requests else None

    def waits(self) -> float | None:
        """Return the share of the time in which layers only waited; None before two frames."""
        before, seconds = self._before(WAIT_S)
        if not seconds:
            return None
        waited = sum(self.last.cache.stalls) - sum(before.cache.stalls)
        return _share(waited / seconds)

    def layers(self) -> LayerTotals:
        """Return hits, misses and stalls of each layer over the last minute."""
        before, now = self._before(LAYERS_S)[0].cache, self.last.cache
        return LayerTotals(
            [a - b for a, b in zip(now.hits, before.hits, strict=True)],
            [a - b for a, b in zip(now.misses, before.misses, strict=True)],
            [a - b for a, b in zip(now.stalls, before.stalls, strict=True)],
        )

    def links(self) -> list[LinkRate]:
        """Return each link's rate over the last seconds."""
        before, seconds = self._before(LINK_S)
        if not seconds:
            return [LinkRate(0.0, 0.0) for _ in self.last.cache.links]
        return [
            LinkRate((a.nbytes - b.nbytes) / seconds, _share((a.busy_s - b.busy_s) / seconds))
            for a, b in zip(self.last.cache.links, before.cache.links, strict=True)
        ]

    def _before(self, span: float) -> tuple[Frame, float]:
        """Return the frame `span` seconds ago, or the first, and the seconds since then."""
        until = self.last.at - span
        frame = next((each for each in reversed(self.frames) if each.at <= until), self.frames[0])
        return frame, self.last.at - frame.at


def _share(value: float) -> float:
    """Limit a share to 0 to 1: counters of one frame may be a moment apart."""
    return min(1.0, max(0.0, value))
