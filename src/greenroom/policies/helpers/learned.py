"""Checks of the arrays that an eviction policy has learned in an earlier run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.policy import Arrays


def array_of(
    arrays: Arrays,
    name: str,
    shape: tuple[int | None, ...],
    dtype: Any,
    least: float = -np.inf,
    most: float = np.inf,
) -> NDArray[Any]:
    """Return one of the arrays that a policy has learned, with values checked.

    `shape` has None where any size is accepted. ValueError if the array is missing, has another
    shape or type, or a value that is not finite, below `least` or above `most`.
    """
    array = arrays.get(name)
    if array is None:
        raise ValueError(f"the array {name} is missing")
    fits = array.ndim == len(shape) and all(
        expected in (None, size) for size, expected in zip(array.shape, shape, strict=True)
    )
    if not fits or array.dtype != dtype:
        sizes = ["any" if size is None else size for size in shape]
        raise ValueError(
            f"the array {name} is {array.dtype}{list(array.shape)}, not {np.dtype(dtype)}{sizes}"
        )
    if not np.isfinite(array).all() or (array < least).any() or (array > most).any():
        raise ValueError(f"the array {name} has a value that is not from {least:g} to {most:g}")
    return array
