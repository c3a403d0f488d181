"""Sizes of the expert cache that clients ask for, however many at once.

A resize waits for a step to end and throws experts out that answers need again. So at most one is
under way and one waits, and between two of them answers get `REST_S` for themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

REST_S = 1.0  # from the end of a resize to the beginning of the next


class CacheResizer:
    """Resizes for all callers; the latest size wins. Used from one event loop.

    A caller whose size was superseded while it waited gets the slots that the later one has made.
    A size that is refused is refused for its own caller alone.
    """

    def __init__(self, resize: Callable[[str], int]) -> None:
        self._resize = resize  # blocks, and returns the number of slots
        self._waiting: list[tuple[str, asyncio.Future[int]]] = []  # the latest last
        self._working: asyncio.Task[None] | None = None
        self._next_at = 0.0

    async def __call__(self, size: str) -> int:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[int] = loop.create_future()
        self._waiting.append((size, found))
        if self._working is None:
            self._working = loop.create_task(self._work())
        return await found

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                await asyncio.sleep(max(0.0, self._next_at - loop.time()))
                waiting, self._waiting = self._waiting, []
                await self._serve(waiting)
                self._next_at = loop.time() + REST_S
        finally:
            self._working = None

    async def _serve(self, waiting: list[tuple[str, asyncio.Future[int]]]) -> None:
        """One resize to the latest size that is not refused."""
        while waiting:
            size, found = waiting.pop()
            try:
                slots = await asyncio.to_thread(self._resize, size)
            except Exception as error:
                if not found.done():
                    found.set_exception(error)
                continue
            for each in (found, *(older for _, older in waiting)):
                if not each.done():
                    each.set_result(slots)
            return
