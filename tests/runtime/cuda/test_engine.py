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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """An engine that was made before its device could fail."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    cuda = object.__new__(Cuda)
    cuda.device, cuda._streams = torch.device("cuda", 0), threading.local()
    return cuda


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
    assert driver.flags == module._FOR_ALL
    gpu.unregister(4096)  # of a device that is lost: nothing is raised
    assert driver.undone == 1


def test_an_allocation_error_names_the_memory_of_other_processes(gpu, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 << 30)
    with pytest.raises(DeviceError, match="has no room for 2 GiB for slots: 1 GiB of 24") as caught:
        gpu.empty(2 << 30)
    assert "this process uses 2 GiB, CUDA and other processes use 21 GiB" in str(caught.value)
    assert "smaller --memory" in str(caught.value)


def test_a_device_that_no_longer_answers_is_an_error(monkeypatch):
    def lost() -> None:
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
