"""A decoded token waits for misses alone: for no value, event or copy of the device.

The CPU stands in the GPU's place, and Triton's interpreter runs the kernels. An engine knows which
memory is the host's there, since a copy between it and a device waits, unless it is told not to.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("triton")

from greenroom.runtime.cuda.engine import Mark
from greenroom.runtime.cuda.piece_graph import PieceGraph
from greenroom.runtime.cuda.token_graph import TokenGraph
from greenroom.runtime.kernels.triton.kernel import Launch
from greenroom.runtime.kernels.triton.token_launches import TokenLaunches
from tests.hf.memory.test_device import ids, placed
from tests.recorded_graphs import RecordedGraphs, Recording, name_of, waits

pytestmark = pytest.mark.interpreted
WAITING_METHODS = (
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__",
)  # fmt: skip
# How tokens are computed, and whether the engine makes graphs: kernel by kernel, in pieces that are
# no graphs, by graphs.
KERNELS, NO_GRAPHS, GRAPHS = (False, True), (True, False), (True, True)


class WatchedEngine(RecordedGraphs):
    """An engine that forbids waits to one thread at a time, and knows the host's memory.

    watched: the thread that may not wait now; 0: none
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, makes_graphs: bool) -> None:
        super().__init__(monkeypatch)
        self.makes_graphs, self.watched = makes_graphs, 0
        self._host = list[Tensor]()  # kept, so that no address is another tensor's later

    def mark(self) -> Mark:
        return object()

    def wait(self, mark: Mark) -> None:
        assert mark is None or threading.get_ident() != self.watched, "waits for an event"

    @contextlib.contextmanager
    def copying(self, after: Mark) -> Iterator[None]:
        assert threading.get_ident() != self.watched, "waits for copies"
        yield

    def host_numbers(self, count: int) -> Tensor:
        return self.note(super().host_numbers(count))

    def copy_to_host(self, tensor: Tensor) -> tuple[Tensor, Mark]:
        return self.note(tensor.clone()), self.mark()

    def is_host_memory(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(each.untyped_storage().data_ptr() == address for each in self._host)

    def note(self, tensor: Tensor) -> Tensor:
        """Note memory of the host, and return it."""
        self._host.append(tensor)
        return tensor

    def capture(self, work: Any) -> Any:
        return super().capture(work) if self.makes_graphs else work

    def capture_in_pieces(self, work: Any) -> Any:
        return super().capture_in_pieces(work) if self.makes_graphs else None

    def _replay(self, recording: Recording) -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            super()._replay(recording)


class NoWaitingOperations(TorchDispatchMode):
    """Forbid operations that wait for values, and copies of which the host waits for the end."""

    def __init__(self, engine: WatchedEngine) -> None:
        super().__init__()
        self._engine = engine

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = name_of(function)
        if name == "lift_fresh":  # of memory that is the host's; `NoWaitingMethods` has the others
            self._engine.note(args[0])
        else:
            assert not waits(function), f"{name} waits for the device"
        if name == "copy_" and not (args[2:] or [False])[0]:
            ours, theirs = map(self._engine.is_host_memory, args[:2])
            assert ours == theirs, "a copy between host and device that is waited for"
        return function(*args, **(kwargs or {}))


class NoWaitingMethods(TorchFunctionMode):
    """Forbid methods that bring values to the host."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        target = [*args[1:], *(kwargs or {}).values()]
        assert name not in WAITING_METHODS, f"{name} waits for the device"
        copies = name in ("tensor", "as_tensor") and (kwargs or {}).get("device") is not None
        assert not copies, f"{name} waits for a copy to the device"
        # A device given as an object is the model's own.
        assert name != "to" or "cpu" not in target, "to('cpu') waits for the device"
        return function(*args, **(kwargs or {}))


@contextmanager
def no_waiting(engine: WatchedEngine) -> Iterator[None]:
    engine.watched = threading.get_ident()
    try:
        with NoWaitingOperations(engine), NoWaitingMethods():
            yield
    finally:
        engine.watched = 0


@pytest.fixture
def launches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter, which is no part of a decode pass, read tensors."""
    start = Launch.start

    def unwatched(self: Launch, *first: Any) -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            start(self, *first)

    monkeypatch.setattr(Launch, "start", unwatched)


def watch_tokens(
    name: str, monkeypatch: Any, engine: WatchedEngine, by_graph: bool = True, **parts: Any
) -> int:
    """Decode tokens without a wait; return how many experts missed."""
    with (
        placed(name, monkeypatch, engine, kernels="triton", **parts) as model,
        torch.inference_mode(),
    ):
        model.greenroom.bindings._graph._refused = not by_graph
        tokens = 60 if parts["capacity"] == 1000 else 5  # of all experts
        cache = model(ids(1, tokens), use_cache=True).past_key_values
        for token in ids(4, 1):  # launches are built, and each shared expert's input compared once
            model(token[None], past_key_values=cache, use_cache=True)
        view, replays = model.greenroom.driver.scheduler.view, engine.replays
        misses = view.misses
        for token in ids(3, 1):
            with no_waiting(engine):
                model(token[None], past_key_values=cache, use_cache=True)
        assert (engine.replays > replays) == engine.makes_graphs
        return view.misses - misses


@pytest.mark.parametrize(
    ("name", "capacity", "host_capacity", "by_graph", "makes_graphs"),
    [
        *(("qwen3_moe", *n, *way) for n in ((3, 0), (3, 1000), (1000, 0))
          for way in (KERNELS, NO_GRAPHS, GRAPHS)),
        ("gpt_oss", 12, 0, *GRAPHS),
        ("deepseek_v3", 3, 0, *KERNELS),
        ("deepseek_v3", 3, 1000, *GRAPHS),
    ],
)  # fmt: skip
def test_a_decode_pass_waits_for_no_value(
    name, capacity, host_capacity, by_graph, makes_graphs, launches_alone, monkeypatch
):
    engine = WatchedEngine(monkeypatch, makes_graphs)
    parts = {"capacity": capacity, "host_capacity": host_capacity}
    misses = watch_tokens(name, monkeypatch, engine, by_graph, **parts)
    assert misses or capacity > 3


@pytest.mark.parametrize(
    ("owner", "function", "by_graph", "capacity"),
    [
        (TokenLaunches, "start", False, 3),
        (PieceGraph, "replay", True, 3),
        (TokenGraph, "replay", True, 1000),
    ],
)
@pytest.mark.parametrize("what", ["event", "copies", "copy", "value"])
def test_a_wait_is_noticed(owner, function, by_graph, capacity, what, launches_alone, monkeypatch):
    """Whatever the kind, and wherever the token's launches are made."""
    engine, own = WatchedEngine(monkeypatch, makes_graphs=True), getattr(owner, function)

    def wait(self: Any, *given: Any) -> Any:
        if what == "event":
            engine.wait(engine.mark())
        elif what == "copies":
            with engine.copying(None):
                pass
        elif what == "copy":
            engine.host_numbers(1).copy_(torch.zeros(1, dtype=torch.int64))
        else:
            torch.zeros(1).item()
        return own(self, *given)

    def watch() -> None:
        parts = {"capacity": capacity, "policy": "lru"}
        watch_tokens("qwen3_moe", monkeypatch, engine, by_graph, **parts)

    monkeypatch.setattr(owner, function, wait)
    with pytest.raises(AssertionError, match="wait"):
        watch()
