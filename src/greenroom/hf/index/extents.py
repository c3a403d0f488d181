"""From blocks to byte ranges: what is copied where, and which tensors are read together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from greenroom.core.layout import ITEMSIZE, Copy, Extent, TensorSpec
from greenroom.errors import UnsupportedModel
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.checkpoint.pack.copies import contiguous_copy
from greenroom.hf.index.blocks import Block

GAP = 4096  # bytes; tensors at most this far apart are read in one go


def copy_of(block: Block, dtype: str, spec: TensorSpec) -> Copy:
    """A block of elements of a stored tensor, as bytes."""
    a, b = ITEMSIZE[dtype], ITEMSIZE[spec.dtype]
    return Copy(
        source=block.source_start * a,
        target=spec.offset + block.target_start * b,
        shape=block.shape,
        source_strides=(block.source_strides[0] * a, block.source_strides[1] * a),
        target_strides=(block.target_strides[0] * b, block.target_strides[1] * b),
        source_dtype=dtype,
        target_dtype=spec.dtype,
    )


def elements_of(block: Block, unit: int, width: int) -> Block:
    """A block of outputs (one row) as elements of a tensor whose rows, of `width` elements, stand
    for `unit` outputs each."""
    outputs, (step, target_step) = (
        block.shape[1],
        (block.source_strides[1], block.target_strides[1]),
    )
    counts = outputs, block.source_start, block.target_start
    if unit > 1 and (step != 1 or target_step != 1 or any(n % unit for n in counts)):
        raise UnsupportedModel("experts whose scales stand for outputs that are moved apart")
    return replace(
        block,
        source_start=block.source_start // unit * width,
        target_start=block.target_start // unit * width,
        shape=(outputs // unit, width),
        source_strides=(step * width, 1),
        target_strides=(target_step * width, 1),
    )


def extents_of(
    own: Sequence[StoredTensor], plans: list[list[Copy]], shared: dict[Any, tuple[Copy, ...]]
) -> tuple[Extent, ...]:
    """Group one expert's tensors into extents; experts arranged alike share their copies.

    What must be transformed on its way is not read together with what need not: it would make the
    rest indivisible.
    """
    order = sorted(range(len(own)), key=lambda i: (own[i].file, own[i].offset))
    straight = [all(copy.contiguous for copy in plan) for plan in plans]
    groups: list[list[int]] = []
    end = (-1, 0, True)
    for i in order:
        part = own[i]
        if (part.file, straight[i]) == end[::2] and part.offset - end[1] <= GAP:
            groups[-1].append(i)
        else:
            groups.append([i])
        end = (part.file, part.offset + part.nbytes, straight[i])
    extents = []
    for group in groups:
        first, last = own[group[0]], own[group[-1]]
        inside = tuple((i, own[i].offset - first.offset) for i in group)
        if inside not in shared:
            shared[inside] = _place(inside, plans)
        length = last.offset + last.nbytes - first.offset
        extents.append(Extent(first.file, first.offset, length, shared[inside]))
    return tuple(extents)


def _place(inside: Iterable[tuple[int, int]], plans: list[list[Copy]]) -> tuple[Copy, ...]:
    """The copies of an extent: each tensor's at its place, joined where they are one run."""
    placed: list[Copy] = []
    for i, at in inside:
        for copy in plans[i]:
            moved = replace(copy, source=copy.source + at)
            if placed and _adjacent(placed[-1], moved):
                before = placed.pop()
                moved = contiguous_copy(before.source, before.target, before.nbytes + moved.nbytes)
            placed.append(moved)
    return tuple(placed)


def _adjacent(a: Copy, b: Copy) -> bool:
    return (
        a.contiguous
        and b.contiguous
        and a.source + a.nbytes == b.source
        and a.target + a.nbytes == b.target
    )
