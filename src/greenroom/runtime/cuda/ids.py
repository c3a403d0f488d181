"""What the host must know of a step: the experts that were chosen, by one small copy a layer."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_local = threading.local()


def to_host(index: Tensor, weights: Tensor | None) -> tuple[NDArray[np.int64], Any]:
    """(index [T, K] int64, weights [T, K] float32 or None) in NumPy.

    From a GPU they come by pinned memory, and only what was ordered before them is waited for. It
    is the one synchronisation of a layer.
    """
    index = index.to(torch.int64)
    weights = None if weights is None else weights.float()
    if not index.is_cuda:
        return index.numpy(), None if weights is None else weights.numpy()
    wanted = [index] if weights is None else [index, weights]
    pinned = [_pinned(i, each) for i, each in enumerate(wanted)]
    for target, each in zip(pinned, wanted, strict=True):
        target.copy_(each, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(index.device))
    done.synchronize()
    found = [each.numpy().copy() for each in pinned]  # the buffer is the next layer's
    return found[0], found[1] if weights is not None else None


def _pinned(number: int, like: Tensor) -> Tensor:
    """This thread's buffer, as large as what it was ever asked for."""
    buffers: dict[int, Tensor] = _local.__dict__.setdefault("buffers", {})
    found = buffers.get(number)
    if found is None or found.numel() < like.numel():
        size = max(1024, like.numel())
        found = buffers[number] = torch.empty(size, dtype=like.dtype, pin_memory=True)
    return found[: like.numel()].view(like.shape)
