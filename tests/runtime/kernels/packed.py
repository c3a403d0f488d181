"""Input rows as integers, packed and unpacked by numpy (native/formats/inputs.hpp)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GROUP = 32
SMALLEST = 2.0**-87  # largest number of a group for which the scale is not that of this number
LARGEST = {1: 127, 2: 16383}


def group_type(planes: int) -> np.dtype[np.void]:
    """A group of inputs, as `PackedGroup`."""
    rest = 4 * GROUP - planes * GROUP - 12
    return np.dtype(
        [
            ("bytes", "i1", (planes, GROUP)),
            ("scale", "f4"),
            ("sums", "f4", 2),
            ("unused", "u1", rest),
        ]
    )


def pack(x: Tensor, planes: int) -> Tensor:
    """Pack rows of float32 numbers [..., columns], none of them NaN or infinite."""
    rows = x.float().numpy().reshape(-1, GROUP)
    largest = np.abs(rows).max(1)
    if planes == 1:
        zero = largest < SMALLEST
        scale = np.where(zero, 0, largest / np.float32(127))
        factor = np.where(zero, 0, np.float32(127) / np.where(zero, 1, largest))
    else:
        exponent = np.where(largest > 0, np.maximum(np.frexp(largest)[1] - 1, -87), -87)
        scale = np.exp2(exponent - 13.0)
        factor = 1 / scale
    integers = np.rint(rows.astype(np.float64) * factor.astype(np.float64)[:, None])
    integers = np.minimum(integers, LARGEST[planes]).astype(np.int32)
    groups = np.zeros(len(rows), group_type(planes))
    groups["scale"] = scale
    with np.errstate(over="ignore"):
        groups["sums"] = integers.reshape(-1, 2, GROUP // 2).sum(2) * groups["scale"][:, None]
    groups["bytes"][:, 0] = integers if planes == 1 else integers >> 7
    if planes == 2:
        groups["bytes"][:, 1] = integers & 127
    return torch.from_numpy(groups.view(np.float32).copy()).view(x.shape)


def groups_of(packed: Tensor, planes: int) -> NDArray[np.void]:
    """The groups of packed rows, one after another."""
    return packed.contiguous().numpy().reshape(-1).view(group_type(planes))


def unpack(packed: Tensor, planes: int) -> Tensor:
    """The numbers of packed rows [..., columns] in float64; float32 rows are not packed."""
    if planes == 0:
        return packed.double()
    groups = groups_of(packed, planes)
    integers = groups["bytes"].astype(np.float64)
    numbers = integers[:, 0] if planes == 1 else 128 * integers[:, 0] + integers[:, 1]
    return torch.from_numpy(numbers * groups["scale"].astype(np.float64)[:, None]).view(
        packed.shape
    )


def rounded(x: Tensor, planes: int) -> Tensor:
    """The numbers that a product takes in place of x."""
    return unpack(pack(x, planes) if planes else x, planes)


def equal(got: Tensor, want: Tensor, planes: int) -> bool:
    """Have all groups the same bytes, scales and sums?"""
    pair = groups_of(got, planes), groups_of(want, planes)
    return all(
        np.array_equal(*(each[name] for each in pair)) for name in ("bytes", "scale", "sums")
    )
