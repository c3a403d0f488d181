"""Copy of an MoE layer's chosen experts and gate weights from GPU to host."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_local = threading.local()


def to_host(index: Tensor, weights: Tensor | None) -> tuple[NDArray[np.int64], Any]:
    """Copy an MoE layer's chosen experts and gate weights to the host, as NumPy arrays.

    index [tokens, top_k] becomes int64; weights [tokens, top_k] become float32, None stays None.
    On a GPU the copy waits for all work launched before: the only synchronisation of a layer.
    """
    if index.dtype is not torch.int64:
        index = index.to(torch.int64)
    weights = None if weights is None else weights.float()
    if not index.is_cuda:
        return index.numpy(), None if weights is None else weights.numpy()
    sources = [index] if weights is None else [index, weights]
    # None are left by an interrupt here, since a copy may still write to them.
    buffers: dict[int, Tensor] = _local.__dict__.pop("buffers", {})
    pinned = [_pinned(buffers, i, each) for i, each in enumerate(sources)]
    for target, each in zip(pinned, sources, strict=True):
        target.copy_(each, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(index.device))
    done.synchronize()
    arrays = [each.numpy().copy() for each in pinned]  # the next layer reuses the buffer
    _local.buffers = buffers
    return arrays[0], arrays[1] if weights is not None else None


def _pinned(buffers: dict[int, Tensor], number: int, like: Tensor) -> Tensor:
    """Return a view of the pinned buffer `number`, shaped like a tensor.

    The buffer grows to its largest request.
    """
    buffer = buffers.get(number)
    if buffer is None or buffer.numel() < like.numel():
        size = max(1024, like.numel())
        with torch.inference_mode(False):  # a later pass may be outside of inference mode
            buffer = buffers[number] = torch.empty(size, dtype=like.dtype, pin_memory=True)
    return buffer[: like.numel()].view(like.shape)
