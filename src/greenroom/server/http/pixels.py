"""Limit on the pixels of all requests together, from their arrival to their end."""

from __future__ import annotations

import threading
from functools import partial

from greenroom.server.engine.requests import Busy
from greenroom.server.http.request_log import RequestRecord


class PixelBudget:
    """Counts the bytes of decoded pictures of all HTTP requests; thread-safe."""

    def __init__(self) -> None:
        self._used = 0
        self._lock = threading.Lock()

    def take(self, record: RequestRecord, nbytes: int, limit: int) -> None:
        """Count `nbytes` of a request's pixels until it ends; Busy beyond `limit` in total."""
        with self._lock:
            if self._used + nbytes > limit:
                raise Busy(
                    "the pictures of other requests leave no room for these: try again later",
                    retry_after_s=1.0,
                )
            self._used += nbytes
        record.at_end.append(partial(self._give_back, nbytes))

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._used -= nbytes
