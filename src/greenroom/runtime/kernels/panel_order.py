"""The order of panels, in which compiled kernels read encoded matrices (native/formats/panel.hpp).

16 rows of a matrix are interleaved in their place, so that one load takes the same part of all 16,
and memory is read from its first byte to its last. Types of GGUF whose products are those of
integers have this order; the bytes of other encodings lie as they do in files.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain

import numpy as np

from greenroom.core.layout import PLAIN, Catalog, Copy, SlotLayout, TensorSpec
from greenroom.runtime.kernels.matrix import PANEL, Format, format_symbol
from greenroom.runtime.kernels.native.library import Library, library

MOVER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
KERNELS = ("native", "precise")  # the kernels that read the order of panels


class Panels:
    """Moves matrices between the order of rows and the order of panels (`PanelOrder`)."""

    def arrange(
        self, encoding: str, data: np.ndarray, first: int, panels: np.ndarray, row_bytes: int
    ) -> None:
        """Write some bytes of a matrix to their places in panels.

        data: the bytes from number `first` on, in the order of rows

        The call releases Python's lock.
        """
        _move(encoding, 0, data, first, panels, row_bytes)

    def restore(self, encoding: str, panels: np.ndarray, row_bytes: int) -> np.ndarray:
        """Return the bytes of a matrix in the order of rows."""
        rows = np.empty_like(panels)
        _move(encoding, 1, rows, 0, panels, row_bytes)
        return rows


def _move(
    encoding: str, which: int, rows: np.ndarray, first: int, panels: np.ndarray, row_bytes: int
) -> None:
    call = library().structure("OrderCall")(
        rows=rows.ctypes.data,
        panels=panels.ctypes.data,
        row_bytes=row_bytes,
        panel_rows=panels.size // row_bytes // PANEL * PANEL,
        start=first,
        stop=first + rows.size,
    )
    _mover(library(), encoding, which)(ctypes.addressof(call))


@cache
def _mover(of: Library, encoding: str, which: int) -> Callable[[int], None]:
    function: Callable[[int], None] = MOVER(_functions(encoding)[which])
    return function


def _functions(encoding: str) -> tuple[int, int]:
    """Return the addresses of the functions that arrange and restore; 0: there are none."""
    if not (address := library().address(format_symbol(encoding))):
        return 0, 0
    of = Format.from_address(address)
    return of.arrange or 0, of.restore or 0


def has_panels(encoding: str) -> bool:
    """Check that compiled kernels read an encoding in the order of panels."""
    return encoding != PLAIN and _functions(encoding)[0] > 0


def in_panels(catalog: Catalog) -> Catalog:
    """Return a catalog whose experts are arranged in panels on the way to their slots.

    Matrices whose copies do not have whole panels stay in rows.
    """
    layouts = []
    for layer, (first, layout) in enumerate(zip(catalog.offsets, catalog.layouts, strict=False)):
        experts = catalog.experts_per_layer[layer]
        copies = [c for e in catalog.extents(first) for c in e.copies] if experts else []
        layouts.append(layout_in_panels(layout, copies))
    parts = [_matrices(layout) for layout in layouts]

    @cache
    def convert(layer: int, copies: tuple[Copy, ...]) -> tuple[Copy, ...]:
        each = (_split(copy, parts[layer]) for copy in copies)
        return tuple(chain.from_iterable(each)) if parts[layer] else copies

    return catalog.converted(layouts, convert)


def layout_in_panels(layout: SlotLayout, copies: Sequence[Copy] = ()) -> SlotLayout:
    """Mark the matrices of a layout that can be in panels.

    copies: those that write an expert; each must have whole panels of a matrix
    """
    if layout.segments:
        return layout
    names = dict[str, str]()
    for half in chain.from_iterable(layout.weight(name).halves for name in layout.encodings):
        codes = half.parts[0]
        panel_bytes = PANEL * (codes.nbytes // half.shape[0])
        contiguous = [copy for copy in copies if copy.contiguous]
        ranges = [(0, codes.nbytes), *filter(None, (_part(copy, codes) for copy in contiguous))]
        cuts = [end for part in ranges for end in part if end % panel_bytes]
        moved = [
            c for c in copies if not c.contiguous and 0 <= c.target - codes.offset < codes.nbytes
        ]
        if not cuts and not moved and has_panels(half.encoding):
            names[codes.name] = half.encoding
    tensors = [replace(spec, panels=names.get(spec.name, "")) for spec in layout.tensors]
    return replace(layout, tensors=tuple(tensors))


def _matrices(layout: SlotLayout) -> list[TensorSpec]:
    return [spec for spec in layout.tensors if spec.panels]


def _part(copy: Copy, spec: TensorSpec) -> tuple[int, int] | None:
    """Return the range of a tensor's bytes that a copy writes, or None if it writes none."""
    start = max(copy.target - spec.offset, 0)
    stop = min(copy.target + copy.nbytes - spec.offset, spec.nbytes)
    return (start, stop) if start < stop else None


def _split(copy: Copy, matrices: Sequence[TensorSpec]) -> list[Copy]:
    """Divide a copy into copies of matrices in panels, and of what lies between."""
    if not copy.contiguous:
        return [copy]
    parts, at, end = [], copy.target, copy.target + copy.nbytes
    for spec in sorted(matrices, key=lambda spec: spec.offset):
        if part := _part(copy, spec):
            start, stop = part[0] + spec.offset, part[1] + spec.offset
            if at < start:
                parts.append(_bytes(copy, at, start))
            panels = _bytes(copy, start, stop, spec.nbytes // spec.shape[0])
            parts.append(replace(panels, panels=spec.panels))
            at = stop
    if not parts:
        return [copy]
    return [*parts, _bytes(copy, at, end)] if at < end else parts


def _bytes(copy: Copy, start: int, stop: int, width: int = 0) -> Copy:
    """Return the part of a contiguous copy that writes some bytes of the slot, as bytes."""
    n = width or stop - start
    source = copy.source + start - copy.target
    return Copy(source, start, ((stop - start) // n, n), (n, 1), (n, 1), "uint8", "uint8")
