"""Emulated GPUs: torch devices of their own, whose memory and processor are the host's.

    emulated_gpus(monkeypatch)                         # for one test
    greenroom.load(folder, device="cuda:0,cuda:1", kernels="eager", ...)

An operation on tensors of two devices, or NumPy's view of a device's tensor, fails as with CUDA. So
a forgotten copy between host and device, or between devices, is an error here too. Copies are
synchronous; streams, events and pinned memory are not emulated.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from greenroom.hf.load import resolve
from greenroom.hf.memory import devices as places
from greenroom.runtime.cuda import ids
from greenroom.runtime.cuda.engine import Engine

NAME = "emulated"  # of the devices in torch
FREE, TOTAL = 2 << 30, 4 << 30  # bytes of memory of each
CONVERSIONS = "aten::to", "aten::_to_copy"
MIXED = "aten::copy_", *CONVERSIONS  # operations on tensors of two devices
INDEXED = "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"
_registered: list[torch.library.Library] = []


class DeviceTensor(torch.Tensor):
    """A tensor on an emulated device; `host` is the tensor with its values."""

    host: torch.Tensor
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: torch.Tensor, number: int) -> DeviceTensor:
        with torch.inference_mode(False):  # one that is made within could not change outside
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                host.size(),
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=torch.device(NAME, number),
            )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.host} on {self.device}"

    def tolist(self) -> Any:
        return self.host.tolist()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def __deepcopy__(self, memo: Any) -> DeviceTensor:
        return DeviceTensor(self.host.clone(), self.device.index)


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the host; its results are on the device of its arguments."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    name, given = func._schema.name, [each for each in leaves if isinstance(each, torch.Tensor)]
    target = next((each for each in leaves if isinstance(each, torch.device)), None)
    if name == "aten::to" and target is None and len(given) > 1:
        target = given[1].device
    devices = {each.device for each in given if each.dim() or each.device.type == NAME}
    if name in INDEXED:  # whose indices may be on the host
        devices = {given[0].device}
    if len(devices) > 1 and name not in MIXED:
        raise RuntimeError(f"{name}: expected all tensors on one device, got {devices}")
    host_args, host_kwargs = pytree.tree_unflatten([_on_host(each) for each in leaves], tree)
    host_kwargs.pop("pin_memory", None)
    with torch.inference_mode(False), torch.no_grad():
        out = func(*host_args, **host_kwargs)
    if any(each.shape != _on_host(each).shape for each in given):
        raise RuntimeError(f"{name}: a tensor of an emulated device cannot change its size")
    if name in CONVERSIONS:
        target = given[0].device if target is None else target
        if out is host_args[0] and target == given[0].device:
            return given[0]
        return _on_device(out.clone() if out is host_args[0] else out, target)
    target = target or (args[0].device if name == "aten::copy_" else next(iter(devices), None))
    known = {id(_on_host(each)): each for each in given}
    return pytree.tree_map(
        lambda each: known[id(each)] if id(each) in known else _on_device(each, target), out
    )


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == NAME else value
    return value.host if isinstance(value, DeviceTensor) else value


def _on_device(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, torch.Tensor) or device is None or device.type != NAME:
        return value
    return DeviceTensor(value, device.index or 0)


def _from_host(make: Any) -> Any:
    """A function that makes tensors; torch's own fails with an emulated device."""

    def function(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != NAME:
            made: torch.Tensor = make(*args, device=device, **kwargs)
            return made
        return make(*args, **kwargs).to(device)

    return function


class Unavailable:
    """What torch asks about the devices: none is an accelerator by default."""

    is_available = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 0)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    current_device = staticmethod(lambda: 0)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])


def register() -> None:
    """Register the devices with torch, once in a process."""
    if _registered:
        return
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        pytest.skip("this torch has no devices that are written in Python")
    setup(NAME, Unavailable())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")
    _registered.append(library)


class EmulatedGpu(Engine):
    """Engine of an emulated GPU."""

    name = "emulated GPU"

    def __init__(self, number: int = 0) -> None:
        self.device, self.used = torch.device(NAME, number), 0

    def empty(self, nbytes: int) -> torch.Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._use(nbytes)
        weakref.finalize(made, self._use, -nbytes)
        return made

    def free(self, memory: torch.Tensor) -> None:
        """Leave it to the collector: the memory is that of a tensor on the host."""

    def _use(self, nbytes: int) -> None:
        self.used += nbytes

    def memory(self) -> tuple[int, int]:
        """Free and total bytes; only slots take any."""
        return FREE - self.used, TOTAL

    def copy_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.cpu(), None

    def copy_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


class Event:
    """An event of a stream, which has passed."""

    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class Stream(contextlib.nullcontext[None]):
    """A stream whose work is complete when it is launched."""

    def wait_stream(self, other: Any) -> None: ...


def emulated_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `greenroom.load` emulated GPUs, with `--device cuda`."""
    register()
    torch.utils._device._device_constructors()  # before some of them are replaced
    for function in (torch.tensor, torch.arange):
        monkeypatch.setattr(torch, function.__name__, _from_host(function))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch, "Stream", Stream)  # of transformers' offloaded KV cache
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number=0: EmulatedGpu.name)
    monkeypatch.setattr(
        ids, "_pinned", lambda buffers, number, like: torch.empty(like.shape, dtype=like.dtype)
    )
    monkeypatch.setattr(resolve, "on_a_gpu", lambda config: config.device.startswith("cuda"))
    monkeypatch.setattr(places, "engine_for", lambda setup, number: EmulatedGpu(number))
