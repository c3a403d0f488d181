"""Resizes of the expert cache by clients, rate-limited.

A resize holds up running answers and evicts experts that they need again. So at most one resize
runs at a time, with a pause of `REST_S` seconds after each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

REST_S = 1.0  # from the end of a resize to the beginning of the next


class CacheResizer:
    """Resizes the expert cache for all clients, one resize at a time; the latest size wins.

    Sizes that arrive during a resize wait for its end. Then only the latest of them is applied, and
    all waiting callers get its number of slots. An invalid size raises an error in its own caller
    only. All callers must be in one event loop.
    """

    def __init__(self, resize: Callable[[str], int]) -> None:
        self._resize = resize  # blocks, and returns the number of slots
        self._waiting: list[tuple[str, asyncio.Future[int]]] = []  # the latest last
        self._working: asyncio.Task[None] | None = None
        self._next_at = 0.0

    async def __call__(self, size: str) -> int:
        loop = asyncio.get_running_loop()
        slots: asyncio.Future[int] = loop.create_future()
        self._waiting.append((size, slots))
        if self._working is None:
            self._working = loop.create_task(self._work())
        return await slots

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
        """Resize the expert cache once, to the latest valid size."""
        while waiting:
            size, future = waiting.pop()
            try:
                slots = await asyncio.to_thread(self._resize, size)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
                continue
            for each in (future, *(older for _, older in waiting)):
                if not each.done():
                    each.set_result(slots)
            return
