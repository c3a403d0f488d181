"""Memory filled with NaN that ends at a page without access.

A kernel that reads beyond a row's last element crashes, or takes a NaN.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenroom.core.layout import SlotLayout, TensorSpec

PAGE = mmap.PAGESIZE
NAN = 0xFF  # this byte again and again is NaN in every float type, and in e8m0
_libc: Any = ctypes.CDLL(None, use_errno=True)
_empty = torch.empty


def walled(nbytes: int, at_end: bool = True) -> NDArray[np.uint8]:
    """Memory of NaN between two forbidden pages.

    The memory ends at the second page (`at_end`) or begins after the first one.
    """
    pages = -(-nbytes // PAGE)
    memory = np.frombuffer(mmap.mmap(-1, (pages + 2) * PAGE), np.uint8)
    memory[PAGE:-PAGE] = NAN
    for wall in (0, (pages + 1) * PAGE):
        _forbid(memory.ctypes.data + wall, PAGE)
    start = PAGE * (pages + 1) - nbytes if at_end else PAGE
    return memory[start : start + nbytes]


def _forbid(address: int, nbytes: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def moved(tensor: Tensor, at_end: bool = True) -> Tensor:
    """A copy of a contiguous tensor between walls."""
    memory = torch.from_numpy(walled(tensor.nbytes, at_end))
    out = memory.view(tensor.dtype).view(tensor.shape)
    return out.copy_(tensor)


def nan_memory(*shape: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """torch.empty, filled with NaN, so that reads of unwritten memory show."""
    out = _empty(*shape, dtype=dtype, **options)
    if not out.is_meta and out.is_contiguous():
        out.view(-1).view(torch.uint8).fill_(NAN)
    return out


class WalledSlots:
    """Slots with a forbidden page behind the last byte of each; see `Slots`."""

    def __init__(self, layout: SlotLayout, count: int) -> None:
        last = max(spec.offset + spec.nbytes for spec in layout.tensors)
        pages = -(-layout.nbytes // PAGE)
        self.stride = (pages + 1) * PAGE
        self._memory = walled(count * self.stride)
        self._shift = pages * PAGE - -(-last // 4) * 4  # torch wants words of 4 bytes aligned
        self.base = self._memory.ctypes.data + self._shift
        for slot in range(count):
            _forbid(self._memory.ctypes.data + slot * self.stride + pages * PAGE, PAGE)

    def address(self, slot: int) -> int:
        return self.base + slot * self.stride

    def tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        start = slot * self.stride + self._shift + spec.offset
        raw = torch.from_numpy(self._memory[start : start + spec.nbytes])
        return raw.view(getattr(torch, spec.dtype)).view(spec.shape)
