"""What torch gives an engine of a GPU, where there is none: devices, streams, graphs."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from greenroom.runtime.cuda import captures
from greenroom.runtime.cuda.engine import Cuda

SELECTED: list[Any] = []  # devices that are selected now, the innermost last


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """An engine that was made before its device could fail."""

    @contextlib.contextmanager
    def selected(device: Any) -> Iterator[None]:
        SELECTED.append(device)
        yield
        SELECTED.pop()

    monkeypatch.setattr(torch.cuda, "device", selected)
    return new_engine()


def new_engine() -> Cuda:
    cuda = object.__new__(Cuda)
    cuda.device, cuda._streams = torch.device("cuda", 1), threading.local()
    return cuda


class PoolStream:
    """A stream of the pool, from which torch takes 32 of a priority in turn."""

    given: ClassVar[Counter[int]] = Counter()

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.of = priority, self.given[priority] % 32
        self.given[priority] += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolStream) and self.of == other.of

    __hash__ = None  # type: ignore[assignment]

    def wait_stream(self, other: Any) -> None:
        pass


class Generator:
    """Torch's generator of a GPU, whose state a capture marks (torch before 2.13)."""

    def __init__(self, state: dict[str, bool] | None = None) -> None:
        self.state = state or {"captured": False}

    def clone_state(self) -> Generator:
        return Generator()

    def graphsafe_get_state(self) -> Generator:
        return Generator(self.state)

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state

    def draw(self) -> None:
        """Draw a random number, on a stream that no capture has."""
        if self.state["captured"]:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


class Graph:
    """A graph that notes the stream on which it is captured, and the graph whose memory it has."""

    captured: ClassVar[list[Any]] = []
    pools: ClassVar[list[Any]] = []

    def pool(self) -> Any:
        return self

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert not torch.is_inference_mode_enabled()
        self.captured.append(CURRENT[-1])
        self.pools.append(pool)
        self.state = torch.cuda.default_generators[1].state
        self.state["captured"] = True

    def capture_end(self) -> None:
        self.state["captured"] = False

    def replay(self) -> None:
        pass


CURRENT: list[Any] = []


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        CURRENT.append(stream)
        yield
        CURRENT.pop()

    CURRENT[:], Graph.captured, Graph.pools = [PoolStream()], [], []
    monkeypatch.setattr(captures, "_unused_streams", defaultdict(list))
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(), Generator()))
    monkeypatch.setattr(torch.cuda, "Stream", PoolStream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: CURRENT[-1])
