"""Division of copies at the matrices that slots have in another order than files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain

from greenroom.core.layout import Catalog, Copy, SlotLayout, TensorSpec


def rearranged(
    catalog: Catalog,
    mark: Callable[[SlotLayout, Sequence[Copy]], SlotLayout],
    divide: Callable[[Copy, SlotLayout], list[Copy]],
) -> Catalog:
    """Return a catalog whose experts lie in slots in another order than in files.

    mark: marks the matrices of a layout; it gets the copies that write an expert
    divide: divides a copy at the matrices that are marked in a layout
    """
    layouts = []
    for layer, (first, layout) in enumerate(zip(catalog.offsets, catalog.layouts, strict=False)):
        experts = catalog.experts_per_layer[layer]
        copies = [c for e in catalog.extents(first) for c in e.copies] if experts else []
        layouts.append(mark(layout, copies))

    @cache
    def convert(layer: int, copies: tuple[Copy, ...]) -> tuple[Copy, ...]:
        return tuple(chain.from_iterable(divide(copy, layouts[layer]) for copy in copies))

    return catalog.converted(layouts, convert)


def part_of(copy: Copy, spec: TensorSpec) -> tuple[int, int] | None:
    """Return the range of a tensor's bytes that a copy writes; None: no bytes."""
    start = max(copy.target - spec.offset, 0)
    stop = min(copy.target + copy.nbytes - spec.offset, spec.nbytes)
    return (start, stop) if start < stop else None


def divided(copy: Copy, matrices: Sequence[TensorSpec]) -> list[tuple[Copy, TensorSpec | None]]:
    """Divide a contiguous copy into those of matrices, and those of what lies between."""
    parts: list[tuple[Copy, TensorSpec | None]] = []
    at, end = copy.target, copy.target + copy.nbytes
    for spec in sorted(matrices, key=lambda spec: spec.offset):
        if part := part_of(copy, spec):
            start, stop = part[0] + spec.offset, part[1] + spec.offset
            if at < start:
                parts.append((_bytes(copy, at, start), None))
            parts.append((_bytes(copy, start, stop), spec))
            at = stop
    if not parts:
        return [(copy, None)]
    return [*parts, (_bytes(copy, at, end), None)] if at < end else parts


def in_rows(copy: Copy, spec: TensorSpec) -> Copy:
    """Return a copy of bytes of a matrix as one of the matrix's rows."""
    return _bytes(copy, copy.target, copy.target + copy.nbytes, spec.nbytes // spec.shape[0])


def _bytes(copy: Copy, start: int, stop: int, width: int = 0) -> Copy:
    """Return the part of a contiguous copy that writes some bytes of the slot, as bytes."""
    n = width or stop - start
    source = copy.source + start - copy.target
    return Copy(source, start, ((stop - start) // n, n), (n, 1), (n, 1), "uint8", "uint8")
