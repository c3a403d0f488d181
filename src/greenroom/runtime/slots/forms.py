"""Forms in which files store the parts of affine matrices, and their arrangement for kernels.

A kernel reads codes, scales and zeros row by row, a row for each output. AWQ and GPTQ store
matrices [inputs, outputs], and all three tools pack zeros into int32. `arrange` moves the bytes of
one stored tensor to their places in one pass, between the buffer of a read and a slot. The target
is [rows, width]:

transposed      elements of two or four bytes: the transpose [width, rows]
awq             int32 [inputs, rows / 8], each with the codes of eight outputs, in the order ORDER
zerosB          int32 [width, rows B / 32]: zeros of B bits, from the lowest bits up
zerosB-minus-1  the same; the int32 are stored minus one in each of their numbers, with borrows
zeros4-awq      the same of four bits, in the order ORDER
rowsB           int32 [rows B / 32, width]: each has the zeros of several rows
index-N         int32 [width]: the group of each input, below N
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenroom.core.compiling.compile_cache import jit
from greenroom.errors import StoreError

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's output in each four bits of an int32, from the lowest
Ints = NDArray[np.signedinteger]


def arrange(form: str, source: NDArray[np.uint8], target: Ints) -> None:
    """Arrange a stored tensor's bytes as rows of a matrix.

    source: all bytes of the tensor, of which `form` says how they lie
    target: [rows, width], integers as wide as the elements; any strides

    Raises StoreError for a group of inputs that does not exist.
    """
    if form.startswith("index-"):
        _check_index(source.view(np.int32), int(form.removeprefix("index-")))
        target[...] = source.view(np.int32)
        return
    FORMS[form](source, target)


def as_integers(tensor: Tensor) -> Ints:
    """View a tensor in host memory as integers as wide as its elements."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(width).numpy()


def _check_index(index: Ints, groups: int) -> None:
    odd = index[(index < 0) | (index >= groups)]
    if odd.size:
        raise StoreError(
            f"the index of an expert's or a matrix's groups (g_idx) has the group {odd[0]}, but"
            f" there are {groups} groups: download the model again"
        )


def _transpose(source: NDArray[np.uint8], target: Ints) -> None:
    rows, width = target.shape
    _transpose_elements(source.view(target.dtype).reshape(width, rows), target)


@jit
def _transpose_elements(source: Ints, target: Ints) -> None:
    """Transpose a matrix, in strips whose cache lines stay in the processor's cache."""
    for first in range(0, target.shape[0], 32):
        last = min(first + 32, target.shape[0])
        for column in range(target.shape[1]):
            for row in range(first, last):
                target[row, column] = source[column, row]


def _arrange_awq(source: NDArray[np.uint8], target: Ints) -> None:
    rows, width = target.shape
    _transpose_codes(source.view(np.uint32).reshape(8 * width, rows // 8), target.view(np.uint32))


@jit
def _transpose_codes(source: NDArray[np.uint32], target: NDArray[np.uint32]) -> None:
    """Transpose blocks of 8 x 8 codes of four bits, in strips as `_transpose_elements`.

    The halves of a block's words are exchanged, then their quarters, then their eighths.
    """
    for first in range(0, source.shape[1], 8):
        last = min(first + 8, source.shape[1])
        for column in range(target.shape[1]):
            for word in range(first, last):
                a, b, c, d, e, f, g, h = (
                    source[8 * column, word],
                    source[8 * column + 1, word],
                    source[8 * column + 2, word],
                    source[8 * column + 3, word],
                    source[8 * column + 4, word],
                    source[8 * column + 5, word],
                    source[8 * column + 6, word],
                    source[8 * column + 7, word],
                )
                a, e = _swap_fields(a, e, 16, 0x0000FFFF)
                b, f = _swap_fields(b, f, 16, 0x0000FFFF)
                c, g = _swap_fields(c, g, 16, 0x0000FFFF)
                d, h = _swap_fields(d, h, 16, 0x0000FFFF)
                a, c = _swap_fields(a, c, 8, 0x00FF00FF)
                b, d = _swap_fields(b, d, 8, 0x00FF00FF)
                e, g = _swap_fields(e, g, 8, 0x00FF00FF)
                f, h = _swap_fields(f, h, 8, 0x00FF00FF)
                a, b = _swap_fields(a, b, 4, 0x0F0F0F0F)
                c, d = _swap_fields(c, d, 4, 0x0F0F0F0F)
                e, f = _swap_fields(e, f, 4, 0x0F0F0F0F)
                g, h = _swap_fields(g, h, 4, 0x0F0F0F0F)
                row = 8 * word  # four bits k of the words hold the output ORDER[k]
                target[row, column] = a
                target[row + 2, column] = b
                target[row + 4, column] = c
                target[row + 6, column] = d
                target[row + 1, column] = e
                target[row + 3, column] = f
                target[row + 5, column] = g
                target[row + 7, column] = h


@jit(inline="always")
def _swap_fields(one: Any, two: Any, bits: int, low: int) -> tuple[Any, Any]:
    """Exchange the high fields of one word and the low fields of another; `low` masks these."""
    return (
        np.uint32((one & low) | ((two & low) << bits)),
        np.uint32(((one >> bits) & low) | (two & ~np.uint32(low))),
    )


def _unpack_zeros(
    bits: int, plus: int, ordered: bool, by_row: bool, source: NDArray[np.uint8], target: Ints
) -> None:
    """Unpack zeros of `bits` bits to bytes; `plus` is added to each, carried within an int32.

    GPTQModel subtracts from int32 when it stores zeros, so a zero of 0 borrows from the next.
    """
    packed, (rows, width) = source.view(np.int32), target.shape
    packed = packed + np.int32(sum(plus << shift for shift in range(0, 32, bits)))
    packed = packed.reshape(-1, width).T if by_row else packed.reshape(width, -1)
    fields = packed[..., None] >> np.arange(0, 32, bits, dtype=np.int32)
    if ordered:
        fields = fields[..., np.argsort(ORDER)]
    zeros = fields & ((1 << bits) - 1)
    target[...] = zeros.reshape(width, -1)[:, :rows].T


FORMS: dict[str, Callable[[NDArray[np.uint8], Ints], None]] = {
    "transposed": _transpose,
    "awq": _arrange_awq,
    "zeros4-awq": partial(_unpack_zeros, 4, 0, True, False),
    **{f"zeros{bits}": partial(_unpack_zeros, bits, 0, False, False) for bits in (4, 8)},
    **{f"zeros{bits}-minus-1": partial(_unpack_zeros, bits, 1, False, False) for bits in (4, 8)},
    **{f"rows{bits}": partial(_unpack_zeros, bits, 0, False, True) for bits in (4, 8)},
}
