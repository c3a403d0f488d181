"""An engine whose graphs are what a GPU's are: operations on the same memory, without Python.

    engine = RecordedGraphs(monkeypatch)        # for one test; Triton's interpreter runs kernels

A capture records torch's operations and Triton's launches, and changes no memory that was there
before. A replay runs them again with the same tensors: a length, an address or a choice that
Python had at the capture is stale. Memory that an operation leaves uninitialised becomes NaN at
each replay. An operation that waits for a value fails in a capture, as with CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.kernels.triton.kernel import Launch

# On a GPU these operations wait for the values of a tensor, or for a copy of Python's values.
WAITING_OPERATIONS = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique_dim",
    "_unique2", "unique_consecutive", "repeat_interleave", "lift_fresh",
}  # fmt: skip
NOT_WAITING = {torch.ops.aten.repeat_interleave.self_int}
UNINITIALISED = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}

Operation = Callable[[], object]
_capture = threading.local()


def name_of(function: Any) -> str:
    """Return the name of one of torch's operations, without its overload."""
    name: str = function._schema.name.removeprefix("aten::")
    return name


def waits(function: Any) -> bool:
    """Tell whether the host waits for one of torch's operations on a GPU."""
    return name_of(function) in WAITING_OPERATIONS and function not in NOT_WAITING


class Recording(TorchDispatchMode):
    """Records operations; those that write to memory from before do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = list[Operation]()
        self.made = dict[int, Tensor]()  # tensors of the capture, by the address of their storage

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = name_of(function), kwargs or {}
        if waits(function):
            raise RuntimeError(f"CUDA error: {name} is not permitted when stream is capturing")
        call = partial(function, *args, **kwargs)
        if function._schema.is_mutable:
            written = [
                value
                for value, argument in zip(args, function._schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            self.operations.append(call)
            return call() if all(map(self._is_made_here, written)) else written[0]
        out = call()
        given = {_address(each) for each in _tensors((args, kwargs))}
        new = [each for each in _tensors(out) if _address(each) not in given]
        for each in new:
            self.made[_address(each)] = each
        if not new:  # a view
            return out
        if name in UNINITIALISED:
            self.operations += [partial(_poison, each) for each in new]
        else:
            self.operations.append(partial(_run_again, call, out))
        return out

    def _is_made_here(self, tensor: Tensor) -> bool:
        return _address(tensor) in self.made

    def replay(self) -> None:
        with torch.inference_mode():
            for operation in self.operations:
                operation()


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _poison(tensor: Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def _run_again(call: Operation, out: Any) -> None:
    for old, new in zip(_tensors(out), _tensors(call()), strict=True):
        old.copy_(new)


class RecordedGraphs(Engine):
    """An engine of a CPU that captures and replays graphs."""

    makes_graphs = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replays = 0  # of all graphs
        start = Launch.start

        def record(launch: Launch, *first: Any) -> None:
            if (recording := getattr(_capture, "recording", None)) is not None:
                recording.operations.append(partial(start, launch, *first))
                return
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                start(launch, *first)

        monkeypatch.setattr(Launch, "start", record)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        (replay,) = self.capture_in_pieces(lambda cut: work())
        return replay

    def capture_in_pieces(
        self, work: Callable[[Callable[[], None]], None]
    ) -> list[Callable[[], None]]:
        recordings = [Recording()]
        made = recordings[0].made

        def cut() -> None:
            _capture.recording.__exit__(None, None, None)
            recordings.append(Recording())
            recordings[-1].made = made
            _capture.recording = recordings[-1].__enter__()

        _capture.recording = recordings[0].__enter__()
        try:
            work(cut)
        finally:
            _capture.recording.__exit__(None, None, None)
            _capture.recording = None
        return [partial(self._replay, each) for each in recordings]

    def _replay(self, recording: Recording) -> None:
        assert getattr(_capture, "recording", None) is None
        self.replays += 1
        recording.replay()
