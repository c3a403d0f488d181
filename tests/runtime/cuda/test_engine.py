"""Errors of a GPU's driver become one line each; runs without a GPU."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from greenroom.errors import DeviceError
from greenroom.runtime.cuda import captures
from greenroom.runtime.cuda import engine as module
from greenroom.runtime.cuda.engine import Cuda, device_errors, pci_address

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


class Graph:
    """A graph that notes the stream on which it is captured, and the graph whose memory it has."""

    captured: ClassVar[list[Any]] = []
    pools: ClassVar[list[Any]] = []

    def pool(self) -> Any:
        return self

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.captured.append(CURRENT[-1])
        self.pools.append(pool)

    def capture_end(self) -> None:
        pass

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
    monkeypatch.setattr(torch.cuda, "Stream", PoolStream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: CURRENT[-1])


@pytest.mark.parametrize("priority", [0, -1])
def test_a_graph_is_captured_where_no_other_thread_launches_work(gpu, streams, priority):
    copies = [PoolStream() for _ in range(32)]  # of any engine in the process
    CURRENT[:] = [PoolStream(priority=priority)]
    for _ in range(100):
        gpu.capture(lambda: None)
    assert len(Graph.captured) == 100
    assert not any(each in copies or each == CURRENT[0] for each in Graph.captured)


def test_all_graphs_share_the_memory_of_the_first_which_is_kept(gpu, streams):
    """A pool for each takes 2 MiB; torch refuses the pool of graphs that are gone."""
    for _ in range(3):
        gpu.capture(lambda: None)
    first = Graph.pools[1]
    assert Graph.pools == [None, first, first]
    assert gpu._first_graph is first
    assert all(each == Graph.captured[0] for each in Graph.captured)  # as sharing needs


def test_graphs_that_fail_spoil_no_later_ones_until_there_are_several(gpu, streams, caplog):
    def refuse() -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    with caplog.at_level(logging.WARNING):
        works = [gpu.capture(each) for each in (print, refuse, print, print)]
    assert works[1] == refuse
    assert print not in works
    (record,) = caplog.records
    assert "kernel by kernel: CUDA error: operation not permitted" in record.message
    first, failed_with, new, shared = Graph.pools
    assert (first, new) == (None, None)  # torch takes the pool of a failed graph for one in use
    assert shared is not failed_with
    works = [gpu.capture(refuse) for _ in range(2 * captures.MOST_FAILURES)]
    assert len(caplog.records) == captures.MOST_FAILURES
    assert gpu.capture(print) == print


def test_pieces_are_graphs_with_memory_of_their_own(gpu, streams, monkeypatch):
    """What one piece leaves for the next outlives other graphs that run between them."""
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    gpu.capture(lambda: None)
    ran: list[int] = []

    def work(cut: Any) -> None:
        for n in range(3):
            ran.append(n)
            cut()

    pieces = gpu.capture_in_pieces(work)
    assert len(pieces) == 4
    assert ran == [0, 1, 2]
    gpu.capture(lambda: None)
    shared = gpu._first_graph
    assert Graph.pools == [None, 0, 0, 0, 0, shared]
    assert all(each == Graph.captured[0] for each in Graph.captured)
    assert len({id(piece.__self__) for piece in pieces}) == 4
    assert len(gpu.capture_in_pieces(lambda cut: None)) == 1
    assert Graph.pools[-1] == 1


def test_pieces_that_fail_are_none(gpu, streams, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    ended = []
    monkeypatch.setattr(Graph, "capture_end", lambda graph: ended.append(graph))

    def work(cut: Any) -> None:
        cut()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with caplog.at_level(logging.WARNING):
        assert gpu.capture_in_pieces(work) is None
    assert len({*map(id, ended)}) == len(ended) == 2
    assert "kernel by kernel: CUDA error: operation not permitted" in caplog.text
    with pytest.raises(KeyboardInterrupt):
        gpu.capture_in_pieces(lambda cut: (_ for _ in ()).throw(KeyboardInterrupt))
    for _ in range(2 * captures.MOST_FAILURES):
        gpu.capture_in_pieces(work)
    assert len(caplog.records) == captures.MOST_FAILURES


@pytest.mark.parametrize("error", [DeviceError, torch.OutOfMemoryError])
def test_a_graph_that_has_no_memory_is_no_error_and_keeps_none(gpu, streams, monkeypatch, error):
    """Errors of experts' kernels are DeviceErrors within a pass, also where memory is short."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    failed = len(captures._failed_graphs)

    def work(cut: Any = lambda: None) -> None:
        cut()
        raise error("the GPU is out of memory")

    assert gpu.capture(work) == work
    assert gpu.capture_in_pieces(work) is None
    assert len(captures._failed_graphs) == failed  # their captures have ended


def test_a_capture_that_does_not_end_is_kept(gpu, streams, monkeypatch):
    """Torch may take its memory for memory in use."""

    def refuse(graph: Graph, *_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    for name in ("capture_end", "capture_begin"):
        with monkeypatch.context() as patch:
            patch.setattr(Graph, name, refuse)
            failed = len(captures._failed_graphs)
            assert gpu.capture(print) == print
            assert len(captures._failed_graphs) == failed + 1


def test_an_interrupt_between_two_pieces_is_not_taken_for_a_failure(gpu, streams, monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    underway, begin, end = set[int](), Graph.capture_begin, Graph.capture_end

    def begun(graph: Graph, **options: Any) -> None:
        if underway_once:
            raise KeyboardInterrupt
        underway_once.append(1)
        underway.add(id(graph))
        begin(graph, **options)

    def ended(graph: Graph) -> None:
        if id(graph) not in underway:
            raise RuntimeError("Invalid capture.")
        underway.remove(id(graph))
        end(graph)

    underway_once = list[int]()
    monkeypatch.setattr(Graph, "capture_begin", begun)
    monkeypatch.setattr(Graph, "capture_end", ended)
    with pytest.raises(KeyboardInterrupt):
        gpu.capture_in_pieces(lambda cut: cut())
    assert not underway
    assert gpu._failures == 0


@pytest.mark.parametrize("at", ["capture_begin", "capture_end", "end"])
def test_a_capture_that_an_interrupt_meets_is_ended(at, gpu, streams, monkeypatch):
    """Else its thread would capture for good. Python raises behind the call that is under way."""
    underway, begin, end = set[int](), Graph.capture_begin, Graph.capture_end

    def begun(graph: Graph, **options: Any) -> None:
        begin(graph, **options)
        underway.add(id(graph))
        if at == "capture_begin":
            signal.raise_signal(signal.SIGINT)

    def ended(graph: Graph) -> None:
        if at == "capture_end":
            signal.raise_signal(signal.SIGINT)
        underway.remove(id(graph))
        end(graph)

    monkeypatch.setattr(Graph, "capture_begin", begun)
    monkeypatch.setattr(Graph, "capture_end", ended)

    def behind_the_work(frame: Any, event: str, argument: Any) -> None:
        if at == frame.f_code.co_name == "end" and event == "call":
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(behind_the_work)
    try:
        with pytest.raises(KeyboardInterrupt):
            gpu.capture(lambda: None)
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGINT, before)
    assert not underway
    assert gpu._failures == 0


def test_python_collects_no_garbage_within_a_capture(gpu, streams):
    """What it finalises may free memory or wait for the device, which CUDA refuses then."""
    collects, gone = list[bool](), list[int]()

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            gone.append(1)

    def work() -> None:
        collects.append(gc.isenabled())
        gone.clear()  # cycles of earlier captures, which may end between two captures
        Cycle()
        assert len([[] for _ in range(100_000)]) > sum(gc.get_threshold())
        assert not gone

    gpu.capture(work)
    assert collects == [False]
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        gpu.capture(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert gc.isenabled()
    gc.disable()
    try:
        gpu.capture(work)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_memory_is_released_when_no_graph_is_captured(gpu, streams, monkeypatch):
    """Torch refuses during a capture, also one of another thread."""
    done, threads = list[str](), list[threading.Thread]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("release"))

    def work() -> None:
        threads.append(threading.Thread(target=gpu.release))
        threads[0].start()
        threads[0].join(0.05)
        done.append("captured")

    gpu.capture(work)
    threads[0].join(30)
    assert done == ["captured", "release"]


def test_memory_that_torch_does_not_release_after_a_failed_capture_is_no_error(gpu, monkeypatch):
    def refuse() -> None:
        raise RuntimeError(f"{reason} INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    reason = "captures_underway.empty()"
    gpu.release()
    reason = "block"
    with pytest.raises(RuntimeError, match="block"):
        gpu.release()


def test_an_engine_opens_no_device_but_its_own(gpu, streams, monkeypatch):
    """A CUDA context on another GPU takes hundreds of MB there."""
    on: list[Any] = []
    mark = SimpleNamespace(synchronize=lambda: on.append(SELECTED[-1:]))
    driver = SimpleNamespace(cudaHostUnregister=lambda _: on.append(SELECTED[-1:]))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    gpu.wait(mark)
    gpu.unregister(4096)
    with gpu.on_stream(PoolStream()):
        on.append(SELECTED[-1:])
    assert on == [[gpu.device]] * 3


def test_a_gpu_that_another_process_uses_exclusively_is_an_error(monkeypatch):
    def busy() -> None:
        raise RuntimeError(
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ..."
        )

    monkeypatch.setattr(torch.cuda, "init", busy)
    with pytest.raises(DeviceError, match="another process uses the GPU exclusively") as caught:
        Cuda()
    assert "\n" not in str(caught.value)


def test_a_gpu_that_does_not_start_is_an_error(monkeypatch):
    def broken() -> None:
        raise RuntimeError("CUDA driver error: unknown error")

    monkeypatch.setattr(torch.cuda, "init", broken)
    with pytest.raises(DeviceError, match="the GPU failed: CUDA driver error: unknown error"):
        Cuda()


class Streams:
    """What `Cuda.copying` asks of torch.cuda, without a GPU: streams, and events that note them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.current, self.log = 0, threading.local(), list[tuple[str, int]]()
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self))
        monkeypatch.setattr(torch.cuda, "stream", self.using)
        monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event(self))

    @contextlib.contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        self.current.number = stream.number
        yield
        self.current.number = -1


class Stream:
    def __init__(self, streams: Streams) -> None:
        self.number, self._log = streams.made, streams.log
        streams.made += 1

    def wait_event(self, event: str) -> None:
        self._log.append((f"wait for {event}", self.number))


class Event:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def record(self, stream: Stream) -> None:
        self._streams.log.append(("record", stream.number))

    def synchronize(self) -> None:
        self._streams.log.append(("synchronize", self._streams.current.number))


def test_each_thread_copies_on_a_stream_of_its_own(gpu, monkeypatch):
    streams = Streams(monkeypatch)

    def copy_twice() -> None:
        for mark in (None, "mark"):
            with gpu.copying(mark):
                streams.log.append(("copy", streams.current.number))

    for _ in range(2):
        thread = threading.Thread(target=copy_twice)
        thread.start()
        thread.join()
    once = ["copy", "record", "synchronize"]
    expected = [*once, "wait for mark", *once]
    assert streams.log == [(what, number) for number in (0, 1) for what in expected]


def test_copies_that_were_queued_before_an_error_are_complete_when_it_is_raised(gpu, monkeypatch):
    """The host memory that they read is used again, and another stream may write their slot."""
    streams = Streams(monkeypatch)

    def copy() -> None:
        with gpu.copying(None):
            streams.log.append(("copy", 0))
            raise DeviceError("the GPU has no room for a second copy")

    with pytest.raises(DeviceError, match="no room"):
        copy()
    assert streams.log[-1] == ("synchronize", 0)


class Refusing:
    """A driver that answers `register` with an error."""

    def __init__(self, code: int | str) -> None:
        self.code, self.flags, self.undone = code, -1, 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.flags = flags
        if isinstance(self.code, str):
            raise RuntimeError(self.code)
        return self.code

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.undone += 1
        raise RuntimeError("CUDA error: the device is lost")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (0, None),
        (2, "cudaHostRegister: error 2"),
        ("CUDA error: operation not permitted\nmore", "CUDA error: operation not permitted"),
    ],
)
def test_memory_is_registered_for_all_devices_or_the_reason_is_returned(
    gpu, code, why, monkeypatch
):
    driver = Refusing(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)  # takes the driver's last error
    assert gpu.register(4096, 8192) == why
    portable, mapped = 1, 2  # kernels read mapped memory
    assert driver.flags == portable | mapped
    gpu.unregister(4096)  # of a device that is lost: nothing is raised
    assert driver.undone == 1


def test_an_allocation_error_names_the_memory_of_other_processes(gpu, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 << 30)
    with pytest.raises(DeviceError, match="has no room for 2 GiB for slots: 1 GiB of 24") as caught:
        gpu.empty(2 << 30)
    assert "this process uses 2 GiB, CUDA and other processes use 21 GiB" in str(caught.value)
    assert "smaller --memory" in str(caught.value)


def test_a_driver_without_memory_is_no_failed_gpu(monkeypatch):
    """A graph's first launch needs memory too; the process need not be started again."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    with (
        pytest.raises(DeviceError, match="no room for the graph of a token: 1 MiB of 1 GiB"),
        device_errors("the graph of a token"),
    ):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")


@pytest.mark.parametrize(("named", "device"), [(" GPU 1 has a total capacity of 3", 1), ("", None)])
def test_a_memory_error_has_the_figures_of_its_gpu(named, device, monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: asked.append(gpu) or (1, 2))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: asked.append(gpu) or 1)
    module.out_of_memory("", torch.OutOfMemoryError(f"CUDA out of memory.{named}"))
    assert asked == [device, device]


def test_a_device_that_no_longer_answers_is_an_error(monkeypatch):
    def lost(device: Any) -> None:
        raise RuntimeError("CUDA error: the launch timed out and was terminated")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    with (
        pytest.raises(DeviceError, match="the GPU is out of memory: CUDA out of memory") as caught,
        device_errors(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.\nadvice")
    assert "\n" not in str(caught.value)


def test_a_gpu_s_address_is_as_linux_writes_it(monkeypatch):
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xA3, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert pci_address(torch.device("cuda", 1)) == "0000:a3:01.0"


class Driver:
    """CUDA's driver, as far as an attribute of a device is asked."""

    def __init__(self, value: int = 1, device_error: int = 0, attribute_error: int = 0) -> None:
        self._value, self._errors = value, (device_error, attribute_error)
        self.asked: list[tuple[int, int]] = []

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = 40 + index
        return self._errors[0]

    def cuDeviceGetAttribute(self, answer: Any, attribute: int, device: Any) -> int:  # noqa: N802
        self.asked.append((attribute, device.value))
        answer._obj.value = self._value
        return self._errors[1]


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (Driver(), True),
        (Driver(value=0), False),
        (Driver(device_error=101), False),
        (Driver(attribute_error=1), False),
        (SimpleNamespace(), False),
    ],
)
def test_kernels_read_host_memory_if_the_driver_says_so(monkeypatch, driver, expected):
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: driver)
    assert module.reads_at_host_addresses(1) == expected
    if expected:
        assert driver.asked == [(91, 41)]


def test_kernels_read_no_host_memory_without_a_driver(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    assert not module.reads_at_host_addresses(0)
