"""Codebooks of ggml's IQ1, IQ2 and IQ3 types: runs of weights that an index stands for."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import UnsupportedModel


@cache
def codebook(name: str) -> NDArray[np.float32]:
    """Return a ggml type's codebook, [entries, 8 or 4], from the package gguf.

    Raises UnsupportedModel if gguf is not installed.
    """
    if find_spec("gguf") is None:
        raise UnsupportedModel(
            f"weights in {name.upper()} need the package gguf, which has their codebook: pip"
            " install 'greenroom[gguf]'"
        )
    from gguf import quants

    kind = getattr(quants, name.upper())
    kind.init_grid()
    grid: NDArray[np.float32] = kind.grid.reshape(kind.grid_shape)
    return grid
