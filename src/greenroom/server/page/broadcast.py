"""Frames for all pages that watch: one maker, and a place for one frame a page."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from greenroom.server.http.errors import ApiError
from greenroom.server.http.streams import event
from greenroom.server.page.live import EngineFrames

FRAME_S = 0.5  # between two frames
BYTES_PER_S = 18_000  # of a page's frames; larger frames come less often
PAGES = 8  # that watch at a time

log = logging.getLogger(__name__)


class Broadcast:
    """Sends frames of an engine to pages; while no page watches, nothing is computed.

    A page that reads slowly gets the latest frame when it is ready, and misses those between.
    """

    def __init__(self, source: EngineFrames) -> None:
        self._source = source
        self._places: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def pages(self) -> int:
        return len(self._places)

    def join(self) -> asyncio.Queue[bytes | None]:
        """Begin to watch; return the place of the latest frame, where None is the end.

        ApiError 429 if too many pages watch.
        """
        if len(self._places) >= PAGES:
            raise ApiError(429, f"{PAGES} pages watch already: close one", retry_after_s=5)
        place: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._places.add(place)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._send())
        return place

    def leave(self, place: asyncio.Queue[bytes | None]) -> None:
        """Stop to watch; the last page that leaves ends the computation of frames."""
        self._places.discard(place)
        if not self._places and self._task is not None:
            self._task.cancel()
            self._task = None

    async def events(self, place: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
        """Yield server-sent events: the greeting once the model is loaded, then frames."""
        greeted = False
        while (frame := await place.get()) is not None:
            if not greeted and (greeting := self._source.greeting()) is not None:
                greeted = True
                yield event(greeting, "greeting")
            yield frame

    async def _send(self) -> None:
        """Send frames until the engine stops: an open stream would hold up the server's end."""
        try:
            stops = False
            while not stops:
                frame = self._source.frame()
                stops = frame["state"][0] == "stopping"
                encoded = event(frame)
                for place in self._places:
                    _put(place, encoded)
                await asyncio.sleep(max(FRAME_S, len(encoded) / BYTES_PER_S))
        except Exception:
            log.exception("no frame of the live page can be made")
        for place in self._places:
            _put(place, None)


def _put(place: asyncio.Queue[Any], item: bytes | None) -> None:
    """Put an item into its place, instead of the one that was not taken."""
    with contextlib.suppress(asyncio.QueueEmpty):
        place.get_nowait()
    place.put_nowait(item)
