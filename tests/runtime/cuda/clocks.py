"""An engine that keeps clocks of streams: an order that a GPU would not keep is seen on a CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from greenroom.runtime.cuda.engine import Engine

COMPUTES, HOST = "computes", "host"
Clock = dict[str, int]


class Clocks(Engine):
    """An engine that knows which operations of its streams have ended before which others begin.

    An operation is its stream and number. A stream's clock has, for each stream, the last operation
    that it is behind; what the host has waited for, all later operations are behind.
    """

    def __init__(self) -> None:
        self.lock, self._local = threading.RLock(), threading.local()
        self.clocks: dict[str, Clock] = {HOST: {}}
        self.count: Clock = {}
        self.streams = 0

    def current_stream(self) -> str:
        return getattr(self._local, "stream", COMPUTES)

    @contextlib.contextmanager
    def on_stream(self, stream: str) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def new_stream(self) -> str:
        self.streams += 1
        return f"copies {self.streams}"

    def _clock(self, stream: str) -> Clock:
        return self.clocks.setdefault(stream, {})

    def _follow(self, stream: str, clock: Clock) -> None:
        own = self._clock(stream)
        for name, number in clock.items():
            own[name] = max(own.get(name, 0), number)

    def operate(self) -> tuple[str, int]:
        """Launch an operation on the current stream."""
        with self.lock:
            stream = self.current_stream()
            self._follow(stream, self.clocks[HOST])
            self.count[stream] = self._clock(stream)[stream] = self.count.get(stream, 0) + 1
            return stream, self.count[stream]

    def is_behind(self, operation: tuple[str, int] | None) -> bool:
        """Tell whether what the current stream does next is behind an operation."""
        if operation is None:
            return True
        with self.lock:
            stream, number = operation
            known = [self._clock(self.current_stream()), self.clocks[HOST]]
            return stream == self.current_stream() or any(
                clock.get(stream, 0) >= number for clock in known
            )

    def mark(self) -> Clock:
        with self.lock:
            stream = self.current_stream()
            return {**self._clock(stream), stream: self.count.get(stream, 0)}

    def wait(self, mark: Clock | None) -> None:
        with self.lock:
            self._follow(HOST, mark or {})

    def wait_on(self, stream: str, mark: Clock | None) -> None:
        with self.lock:
            self._follow(stream, mark or {})

    def order(self, before: str, after: str) -> None:
        with self.lock:
            self._follow(after, {**self._clock(before), before: self.count.get(before, 0)})

    @contextlib.contextmanager
    def copying(self, after: Clock | None) -> Iterator[None]:
        with self.on_stream(f"lane {threading.get_ident()}"):
            self.wait_on(self.current_stream(), after)
            yield
            self.wait(self.mark())
