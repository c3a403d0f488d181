"""A file of experts, each filled with its own id."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from greenroom.core.layout import Catalog, Copy, Extent, SlotLayout


def plain(offset: int, target: int, nbytes: int) -> Copy:
    """A run of float32 bytes."""
    n = nbytes // 4
    return Copy(offset, target, (1, n), (nbytes, 4), (nbytes, 4), "float32", "float32")


def write_experts(folder: Path, layers: int, experts: int, size: int) -> Catalog:
    """Write a file of experts of two tensors of `size` floats each, as a catalog.

    Expert e of layer l has the id l * experts + e; its first tensor holds id, its second id + 0.5.
    They begin at an odd multiple of 8 bytes, as data in safetensors files does.
    """
    total, nbytes = layers * experts, size * 4
    values = np.repeat(np.arange(2 * total, dtype=np.float32) / 2, size)
    path = folder / f"{layers}-{experts}-{size}.bin"
    path.write_bytes(b"\0" * 8 + values.tobytes())
    layout = SlotLayout.pack([("up", (size,), "float32"), ("down", (size,), "float32")])
    down = layout["down"].offset

    def locate(layer: int, expert: int) -> tuple[Extent, ...]:
        start = 8 + (layer * experts + expert) * 2 * nbytes
        copies = (plain(0, 0, nbytes), plain(nbytes, down, nbytes))
        return (Extent(0, start, 2 * nbytes, copies),)

    return Catalog(
        files=(str(path),),
        layers=tuple(f"layers.{i}" for i in range(layers)),
        offsets=tuple(experts * i for i in range(layers + 1)),
        layouts=(layout,) * layers,
        locate=locate,
    )
