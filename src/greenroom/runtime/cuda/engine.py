"""What the tier asks of a GPU: memory, copies that do not disturb what is computed, and marks.

An `Engine` is the only place where streams and events are made. `Cuda` is a GPU; an `Engine` itself
does the same on a CPU, for the fake device and for tests.

Whatever the driver of a GPU refuses or loses comes out of here as one DeviceError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from greenroom.config import show_bytes
from greenroom.errors import DeviceError
from greenroom.runtime.memory.numa import node_of
from greenroom.runtime.memory.system import available_bytes, trim_heap

Mark = Any  # a point in what is computed; None is one that has passed
_FOR_ALL = 1  # cudaHostRegisterPortable: registered for every device


class Engine:
    """Copies and marks on one device: here on the CPU, where everything is done when it is ordered
    and every mark has passed."""

    device = torch.device("cpu")
    name = "the host"  # for people
    node: int | None = None  # of NUMA, where it is known

    def empty(self, nbytes: int) -> Tensor:
        """Memory of the device, [nbytes] uint8; DeviceError where there is not so much."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device now, of all processes."""
        return available_bytes(), available_bytes()

    def release(self) -> None:
        """Give memory back to the device that is unused and kept for later."""
        trim_heap()

    def mark(self) -> Mark:
        """A mark behind everything that this thread has ordered to be computed so far."""
        return None

    @contextlib.contextmanager
    def copying(self, after: Mark) -> Iterator[None]:
        """What is ordered within is done beside what is computed, once `after` has passed, and
        before the block is left."""
        yield

    def wait(self, mark: Mark) -> None:
        """Return when a mark has passed."""

    def copy_to_host(self, tensor: Tensor) -> tuple[Tensor, Mark]:
        """A tensor of the device in host memory, there once the mark has passed."""
        return tensor, None

    def copy_to_device(self, tensor: Tensor) -> Tensor:
        """A tensor of host memory on the device, for what is computed from here on."""
        return tensor

    def register(self, address: int, nbytes: int) -> str | None:
        """Have host memory read by the device itself; None, or why it cannot be."""
        return None

    def unregister(self, address: int) -> None:
        """Undo `register`."""


class Cuda(Engine):
    """A GPU. Copies run on a stream of their own; whoever orders one sleeps until it is done."""

    def __init__(self, index: int = 0) -> None:
        with device_errors():
            self.device = torch.device("cuda", index)
            torch.cuda.init()
            with torch.cuda.device(self.device):
                self._stream = torch.cuda.Stream()
            self.name = torch.cuda.get_device_name(self.device)
        self.node = node_of(pci_address(self.device))

    def empty(self, nbytes: int) -> Tensor:
        with torch.cuda.device(self.device), device_errors(f"{show_bytes(nbytes)} for slots"):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def memory(self) -> tuple[int, int]:
        with device_errors():
            free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def release(self) -> None:
        with device_errors():
            torch.cuda.empty_cache()

    def mark(self) -> Mark:
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    @contextlib.contextmanager
    def copying(self, after: Mark) -> Iterator[None]:
        with device_errors(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield
            done = torch.cuda.Event(blocking=True)  # its waiter sleeps, and lets go of Python
            done.record(self._stream)
            done.synchronize()

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            with device_errors():
                mark.synchronize()

    def copy_to_host(self, tensor: Tensor) -> tuple[Tensor, Mark]:
        with device_errors():
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            return host, self.mark()

    def copy_to_device(self, tensor: Tensor) -> Tensor:
        with device_errors():
            return tensor.pin_memory().to(self.device, non_blocking=True)

    def register(self, address: int, nbytes: int) -> str | None:
        try:
            with torch.cuda.device(self.device):
                error = torch.cuda.cudart().cudaHostRegister(address, nbytes, _FOR_ALL)
        except RuntimeError as refused:
            return first_line(refused)
        if int(error) == 0:
            return None
        # CUDA keeps the refusal as its last error, and the next launch would raise it: let it be
        # this one.
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):
            torch.ones(1, device=self.device)  # zeros may be a memset, and no launch
        return f"cudaHostRegister: error {int(error)}"

    def unregister(self, address: int) -> None:
        with contextlib.suppress(RuntimeError):  # of a device that is lost
            torch.cuda.cudart().cudaHostUnregister(address)


def pci_address(device: torch.device) -> str:
    """A GPU's address on its bus, as Linux writes it."""
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def first_line(error: BaseException) -> str:
    """What an error of torch says first; pages of advice follow."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def device_errors(what: str = "") -> Iterator[None]:
    """A CUDA error becomes a DeviceError of one line; `what` was wanted where memory is refused."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(out_of_memory(what, error)) from error
    except RuntimeError as error:
        if not is_cuda_error(error):
            raise
        if "busy or unavailable" in str(error):
            raise DeviceError(
                f"the GPU is busy, another process has it for itself ({first_line(error)}): end"
                " that one, or take another with --device"
            ) from error
        raise DeviceError(f"the GPU failed: {first_line(error)}; restart the process") from error


def out_of_memory(what: str, error: BaseException) -> str:
    """Who has the memory that was refused, as far as can be seen."""
    wanted = f"has no room for {what}" if what else "is out of memory"
    try:
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()
    except (RuntimeError, AssertionError):  # no answer is left
        return f"the GPU {wanted}: {first_line(error)}"
    others = max(0, total - free - own)
    return (
        f"the GPU {wanted}: {show_bytes(free)} of {show_bytes(total)} are free,"
        f" {show_bytes(own)} are this process's, {show_bytes(others)} others' (and what CUDA itself"
        " takes): give a smaller --memory, or --cache"
    )


def is_cuda_error(error: BaseException) -> bool:
    """Whether a RuntimeError of torch is the device's: `torch.AcceleratorError`, or one that only
    its words tell."""
    words = ("CUDA error", "CUDA driver error", "cuBLAS", "CUBLAS_STATUS")
    return isinstance(error, torch.AcceleratorError) or any(word in str(error) for word in words)
