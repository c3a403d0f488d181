"""Memory filled with NaN that ends at a page without access.

A kernel that reads beyond a row's last element crashes, or takes a NaN.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGE = mmap.PAGESIZE
NAN = 0xFF  # this byte again and again is NaN in every float type, and in e8m0
NO_ACCESS, READ_ONLY = 0, mmap.PROT_READ
_libc: Any = ctypes.CDLL(None, use_errno=True)


def walled(nbytes: int, at_end: bool = True) -> NDArray[np.uint8]:
    """Memory of NaN between two forbidden pages.

    The memory ends at the second page (`at_end`) or begins after the first one.
    """
    return _part(_pages(nbytes), nbytes, at_end)


def moved(tensor: Tensor, at_end: bool = True) -> Tensor:
    """A copy of a contiguous tensor between walls."""
    memory = torch.from_numpy(walled(tensor.nbytes, at_end))
    out = memory.view(tensor.dtype).view(tensor.shape)
    return out.copy_(tensor)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes, in the order of its elements."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def _pages(nbytes: int) -> NDArray[np.uint8]:
    """Whole pages of NaN between two forbidden ones."""
    size = -(-nbytes // PAGE) * PAGE
    memory = np.frombuffer(mmap.mmap(-1, size + 2 * PAGE), np.uint8)
    pages = memory[PAGE:-PAGE]
    pages[:] = NAN
    for wall in (0, size + PAGE):
        _protect(memory[wall : wall + PAGE], NO_ACCESS)
    return pages


def _part(pages: NDArray[np.uint8], nbytes: int, at_end: bool) -> NDArray[np.uint8]:
    return pages[len(pages) - nbytes :] if at_end else pages[:nbytes]


def _protect(pages: NDArray[np.uint8], access: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(len(pages)), access):
        raise OSError(ctypes.get_errno(), "mprotect")


class WalledMemory:
    """The arrays of a kernel's calls, each between walls.

    Inputs are read-only. The bytes between an output and its pages' other end must stay NaN.
    """

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self._inputs: list[NDArray[np.uint8]] = []
        self._margins: list[NDArray[np.uint8]] = []

    def place(self, data: Tensor | ctypes.Array[Any] | None) -> int:
        """Copy an input, and return the address of the copy; 0 for None."""
        if data is None:
            return 0
        source = bytes_of(data) if isinstance(data, Tensor) else np.frombuffer(data, np.uint8)
        pages = _pages(len(source))
        out = _part(pages, len(source), self.at_end)
        out[:] = source
        _protect(pages, READ_ONLY)
        self._inputs.append(pages)
        return int(out.ctypes.data)

    def place_in_slots(self, parts: Sequence[Tensor], slots: Sequence[int], stride: int) -> int:
        """Copy an equal part of each expert into the expert's slot, with walls around each slot.

        Return the address that the part has, or would have, in slot 0.
        """
        pages = _pages((max(slots) + 1) * stride)
        nbytes = parts[0].nbytes
        for part, slot in zip(parts, slots, strict=True):
            place = _part(pages[slot * stride : (slot + 1) * stride - PAGE], nbytes, self.at_end)
            place[:] = bytes_of(part)
        _protect(pages, READ_ONLY)
        for end in range(stride, len(pages) + 1, stride):
            _protect(pages[end - PAGE : end], NO_ACCESS)
        self._inputs.append(pages)
        return int(_part(pages[: stride - PAGE], nbytes, self.at_end).ctypes.data)

    def allocate(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory of NaN for a kernel to write."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        pages = _pages(nbytes)
        rest = len(pages) - nbytes
        self._margins.append(pages[:rest] if self.at_end else pages[nbytes:])
        return torch.from_numpy(_part(pages, nbytes, self.at_end)).view(dtype).view(shape)

    def has_clean_margins(self) -> bool:
        """Check that nothing was written beside the outputs."""
        return all((margin == NAN).all() for margin in self._margins)
