"""Device engines: memory allocation, asynchronous copies, and events in CUDA streams.

Only an `Engine` makes streams and events. `Cuda` is the engine of a GPU; the base class does the
same on a CPU, for the fake device and for tests. Every failure of a GPU's driver becomes a
DeviceError.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from greenroom.config import show_bytes
from greenroom.errors import DeviceError
from greenroom.runtime.cuda.captures import GraphCaptures, capture_lock
from greenroom.runtime.memory.numa import node_of
from greenroom.runtime.memory.system import available_bytes, trim_heap

log = logging.getLogger(__name__)

Mark = Any  # an event in a stream; None is one that has passed
_FOR_ALL = 1 | 2  # cudaHostRegisterPortable, -Mapped: for every device, also for its kernels
_SAME_ADDRESS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


class Engine:
    """Interface to a device's memory, copies and events.

    This base class is for the CPU, on which all operations are synchronous.
    """

    device = torch.device("cpu")
    name = "the host"  # for people
    node: int | None = None  # NUMA node, if known
    makes_graphs = False  # `capture` makes one launch of several, unless it fails
    kernels_read_host = True  # at the host's addresses, if `register` was called for the memory

    def empty(self, nbytes: int) -> Tensor:
        """Allocate uninitialised device memory: [nbytes] uint8, for passes of any inference mode.

        Raises DeviceError if the device has not enough memory.
        """
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)

    def free(self, memory: Tensor) -> None:
        """Free what `empty` allocated, of which kernels' constant arguments may have views."""
        memory.untyped_storage().resize_(0)

    def memory(self) -> tuple[int, int]:
        """Return the device's (free, total) memory in bytes, which all processes share.

        For the CPU both numbers are the bytes available to this process.
        """
        return available_bytes(), available_bytes()

    def release(self) -> None:
        """Free unused memory that torch (on GPUs) or the C library has cached."""
        trim_heap()

    def mark(self) -> Mark:
        """Record and return an event after all work launched on the device's current stream."""
        return None

    def mark_time(self) -> Any:
        """Record and return an event like `mark`, whose time is known once it has passed."""
        return time.perf_counter()

    def seconds_between(self, begin: Any, end: Any) -> float | None:
        """Return the device's seconds between two events of `mark_time`; None before the second."""
        return float(end - begin)

    @contextlib.contextmanager
    def copying(self, after: Mark) -> Iterator[None]:
        """Run the copies of this context concurrently with computation, after the event `after`.

        The copies are complete when the context ends. If `after` is None, they wait for no event.
        """
        yield

    def wait(self, mark: Mark) -> None:
        """Wait until the device has reached a recorded event; return at once for None."""

    def current_stream(self) -> Any:
        """Return the stream on which the calling thread launches work."""
        return None

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the calling thread launches work on a stream."""
        return contextlib.nullcontext()

    def new_stream(self) -> Any:
        """Return a new stream, for work beside that of all others."""
        return None

    def order(self, before: Any, after: Any) -> None:
        """Have a stream wait for all work that was launched on another one."""

    def wait_on(self, stream: Any, mark: Mark) -> None:
        """Have a stream wait for a recorded event; the host does not wait."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that launches the same work again, on a GPU as one graph.

        The memory that the work reads and writes stays the same; all of its kernels are compiled.
        If a graph cannot be captured, the result is `work`.
        """
        return work

    def capture_in_pieces(
        self, work: Callable[[Callable[[], None]], None]
    ) -> list[Callable[[], None]] | None:
        """Return functions that launch the same work again, in pieces, each as one graph.

        `work` gets a function that it calls where a piece ends. Others may launch work between two
        pieces. None if the device has no graphs, or if they cannot be captured.
        """
        return None

    def drop_graphs(self) -> None:
        """Keep no memory for further graphs, since none of those that were captured runs again."""

    def is_idle(self, stream: Any) -> bool:
        """Check whether all work launched on a stream is complete; never waits for it."""
        return True

    def host_numbers(self, count: int) -> Tensor:
        """Allocate int64 numbers in host memory, 0, that kernels on the device can write."""
        return torch.zeros(count, dtype=torch.int64)

    def copy_to_host(self, tensor: Tensor) -> tuple[Tensor, Mark]:
        """Copy a device tensor to host memory asynchronously.

        Returns (copy, mark): the copy is complete after `wait(mark)`.
        """
        return tensor, None

    def copy_to_device(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device; work launched there afterwards can use the copy."""
        return tensor

    def register(self, address: int, nbytes: int) -> str | None:
        """Pin host memory, so that copies to the device run concurrently with computation.

        Returns None if the memory is pinned, else the reason why the device or the system refuses.
        """
        return None

    def unregister(self, address: int) -> None:
        """Unpin host memory that `register` pinned."""


class Cuda(GraphCaptures, Engine):
    """Engine of a CUDA GPU.

    Each thread that copies has a stream of its own, so that one copy is on its way while another
    thread prepares the next. A thread releases the GIL and sleeps until its copies are complete.
    """

    makes_graphs = True

    def __init__(self, index: int = 0) -> None:
        with device_errors():
            self.device = torch.device("cuda", index)
            torch.cuda.init()
            self.name = torch.cuda.get_device_name(self.device)
        self.node = node_of(pci_address(self.device))
        self.kernels_read_host = reads_at_host_addresses(index)
        self._streams = threading.local()

    def empty(self, nbytes: int) -> Tensor:
        errors = device_errors(f"{show_bytes(nbytes)} for slots")
        with torch.cuda.device(self.device), errors, torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def memory(self) -> tuple[int, int]:
        with device_errors():
            free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def release(self) -> None:
        # Torch refuses during a capture, and for good after one that has failed.
        with capture_lock, device_errors():
            try:
                torch.cuda.empty_cache()
            except RuntimeError as error:
                if "captures_underway" not in str(error):
                    raise
                log.debug("--device cuda: unused memory stays with torch: %s", first_line(error))

    def mark(self) -> Mark:
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def mark_time(self) -> Any:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def seconds_between(self, begin: Any, end: Any) -> float | None:
        with device_errors():
            return begin.elapsed_time(end) / 1000 if end.query() else None

    @contextlib.contextmanager
    def copying(self, after: Mark) -> Iterator[None]:
        with device_errors(), torch.cuda.device(self.device):
            stream = self._copy_stream
            with torch.cuda.stream(stream):
                if after is not None:
                    stream.wait_event(after)
                try:
                    yield
                finally:  # also behind an error: queued copies read host memory
                    done = torch.cuda.Event(blocking=True)  # the thread sleeps, without the GIL
                    done.record(stream)
                    done.synchronize()

    @property
    def _copy_stream(self) -> torch.cuda.Stream:
        """Return the calling thread's stream for copies."""
        stream: torch.cuda.Stream | None = getattr(self._streams, "copies", None)
        if stream is None:
            stream = self._streams.copies = torch.cuda.Stream(self.device)
        return stream

    def wait(self, mark: Mark) -> None:
        if mark is not None:  # a thread that waits gets no context on another device
            with device_errors(), torch.cuda.device(self.device):
                mark.synchronize()

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        # Outside of its device, torch would select the thread's device again, and so open it.
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def new_stream(self) -> Any:
        with device_errors():
            return torch.cuda.Stream(self.device)

    def order(self, before: Any, after: Any) -> None:
        with device_errors():
            after.wait_stream(before)

    def wait_on(self, stream: Any, mark: Mark) -> None:
        if mark is not None:
            with device_errors():
                stream.wait_event(mark)

    def is_idle(self, stream: Any) -> bool:
        with device_errors():
            return bool(stream.query())

    def host_numbers(self, count: int) -> Tensor:
        with device_errors():
            return torch.zeros(count, dtype=torch.int64, pin_memory=True)

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
        # CUDA keeps the refusal as its last error, and the next launch raises it: launch one here.
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):
            torch.ones(1, device=self.device)  # zeros may be a memset, and no launch
        return f"cudaHostRegister: error {int(error)}"

    def unregister(self, address: int) -> None:
        # Of a device that is lost, suppressed. A thread that closes gets no context on another one.
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(address)


def pci_address(device: torch.device) -> str:
    """Return a GPU's PCI address in Linux's form, as `0000:3b:00.0`."""
    gpu: Any = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def reads_at_host_addresses(index: int) -> bool:
    """Ask the driver whether a GPU's kernels find registered host memory at the host's addresses.

    If not, an access would end the process's use of the GPU, so a doubt is a no.
    """
    device, answer = ctypes.c_int(), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuDeviceGet(ctypes.byref(device), index)
        failed |= driver.cuDeviceGetAttribute(ctypes.byref(answer), _SAME_ADDRESS, device)
    except (OSError, AttributeError):
        return False
    return failed == 0 and answer.value == 1


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type's name without a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def device_errors(what: str = "") -> Iterator[None]:
    """Raise a DeviceError with a one-line message for a CUDA error in this context.

    `what` describes what the context allocates, for the message if the GPU's memory is full.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise DeviceError(out_of_memory(what, error)) from error
        if not is_cuda_error(error):
            raise
        if "busy or unavailable" in str(error):
            raise DeviceError(
                f"another process uses the GPU exclusively ({first_line(error)}): end that process,"
                " or choose another GPU with --device"
            ) from error
        raise DeviceError(f"the GPU failed: {first_line(error)}; restart the process") from error


def out_of_memory(what: str, error: BaseException) -> str:
    """Make the error message for a failed GPU allocation, with free and used bytes.

    `what` describes the allocation; "" if that is unknown.
    """
    problem = f"has no room for {what}" if what else "is out of memory"
    named = re.search(r"GPU (\d+) ", str(error))  # another one may be the thread's
    device = int(named[1]) if named else None
    try:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
    except (RuntimeError, AssertionError):  # the device no longer answers
        return f"the GPU {problem}: {first_line(error)}"
    others = max(0, total - free - reserved)
    return (
        f"the GPU {problem}: {show_bytes(free)} of {show_bytes(total)} are free, this process uses"
        f" {show_bytes(reserved)}, CUDA and other processes use {show_bytes(others)}: give a"
        " smaller --memory or --cache"
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Check whether an exception says that a GPU's memory is full.

    Torch's allocator raises a type of its own. The driver needs memory too, as for a graph.
    """
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)


def is_cuda_error(error: BaseException) -> bool:
    """Check by its type or message whether an exception comes from CUDA."""
    markers = ("CUDA error", "CUDA driver error", "cuBLAS", "CUBLAS_STATUS")
    return isinstance(error, torch.AcceleratorError) or any(each in str(error) for each in markers)
