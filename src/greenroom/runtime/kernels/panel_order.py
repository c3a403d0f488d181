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

from greenroom.core.layout import PLAIN, Catalog, Copy, SlotLayout
from greenroom.runtime.kernels.matrix import PANEL, Format, format_symbol
from greenroom.runtime.kernels.native.library import Library, library
from greenroom.runtime.slots.matrix_copies import divided, in_rows, part_of, rearranged

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
    return rearranged(catalog, layout_in_panels, _split)


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
        ranges = [(0, codes.nbytes), *filter(None, (part_of(copy, codes) for copy in contiguous))]
        cuts = [end for part in ranges for end in part if end % panel_bytes]
        moved = [
            c for c in copies if not c.contiguous and 0 <= c.target - codes.offset < codes.nbytes
        ]
        if not cuts and not moved and has_panels(half.encoding):
            names[codes.name] = half.encoding
    tensors = [replace(spec, panels=names.get(spec.name, "")) for spec in layout.tensors]
    return replace(layout, tensors=tuple(tensors))


def _split(copy: Copy, layout: SlotLayout) -> list[Copy]:
    """Divide a copy into copies of matrices in panels, and of what lies between."""
    if not copy.contiguous:
        return [copy]
    return [
        part if spec is None else replace(in_rows(part, spec), panels=spec.panels)
        for part, spec in divided(copy, [spec for spec in layout.tensors if spec.panels])
    ]
