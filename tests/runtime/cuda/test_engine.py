"""Errors of a GPU's driver become one line each; runs without a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from greenroom.errors import DeviceError
from greenroom.runtime.cuda import engine as module
from greenroom.runtime.cuda.engine import Cuda, device_errors, pci_address
from tests.runtime.cuda.torch_cuda import SELECTED, PoolStream


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
