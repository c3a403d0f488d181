"""Tensors in large memory pages, for weights that are read again and again.

A core that reads weights from pages of 4 KiB also waits for address translation: from pages of 2
MiB the same matrix is read a tenth to a quarter faster (docs/log/).
"""

from __future__ import annotations

import threading
from math import prod

import torch
from torch import Tensor

from greenroom.runtime.memory.system import reserve_memory

ALIGNMENT = 64  # bytes, as of torch's own memory
SPAN = 256 << 20  # bytes of address space that are reserved at a time


class TensorArena:
    """Allocator that places tensors one after another in large memory pages.

    Address space is reserved in spans of 256 MiB. Memory is taken when tensors are written, and
    freed with the last tensor of a span, so tensors should have equal lifetimes. Threads may
    allocate at the same time: transformers' loader reads weights in several.
    """

    def __init__(self) -> None:
        self._span: Tensor | None = None  # bytes
        self._used = 0
        self._lock = threading.Lock()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised tensor in large pages, as torch.empty does in small ones.

        Raises DeviceError if there is not enough address space.
        """
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(*shape, dtype=dtype)
        with self._lock:
            if self._span is None or self._used + nbytes > len(self._span):
                space = reserve_memory(max(nbytes, SPAN), large_pages=True)
                self._span, self._used = torch.frombuffer(space, dtype=torch.uint8), 0
            span, start = self._span, self._used
            self._used = -(-(start + nbytes) // ALIGNMENT) * ALIGNMENT
        return span[start : start + nbytes].view(dtype).view(shape)
