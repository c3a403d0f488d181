"""Convert strided blocks of elements to byte ranges of files and copies to memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from greenroom.core.layout import ITEMSIZE, Copy, Extent, TensorSpec
from greenroom.errors import UnsupportedModel
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.checkpoint.pack.copies import contiguous_copy
from greenroom.hf.index.blocks import Block

GAP = 4096  # bytes; tensors at most this far apart are read together


def copy_of(block: Block, tensor: StoredTensor, spec: TensorSpec) -> Copy:
    """Convert a strided block of elements to a copy of bytes to memory.

    `tensor` describes the elements in the file, `spec` the tensor in the expert's memory slot.
    """
    dtype = tensor.dtype
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


def arranged_copy(block: Block, tensor: StoredTensor, spec: TensorSpec) -> Copy:
    """Make the copy of a tensor whose bytes `arrange` moves (runtime/slots/forms.py).

    Raises UnsupportedModel if the block is not all of the tensor, row by row.
    """
    if block.shape != tensor.shape or block.source_strides != (tensor.shape[1], 1):
        raise UnsupportedModel(
            "this architecture is not supported with experts of AWQ or GPTQ: transformers' weight"
            " conversion separates the outputs of a matrix: use an unquantised checkpoint"
        )
    return replace(
        copy_of(block, tensor, spec), source_strides=(tensor.nbytes, 0), form=tensor.form
    )


def elements_of(block: Block, unit: int, width: int) -> Block:
    """Convert a block of a quantised matrix's outputs to a block of stored elements.

    The stored tensor (codes or scales) has one row of `width` elements for every `unit` outputs.
    Raises UnsupportedModel if the block divides outputs that share a row.
    """
    outputs, (step, target_step) = (
        block.shape[1],
        (block.source_strides[1], block.target_strides[1]),
    )
    counts = outputs, block.source_start, block.target_start
    if unit > 1 and (step != 1 or target_step != 1 or any(n % unit for n in counts)):
        raise UnsupportedModel(
            "this architecture is not supported with quantised experts: transformers' weight"
            " conversion separates outputs that share a scale: use an unquantised checkpoint"
        )
    return replace(
        block,
        source_start=block.source_start // unit * width,
        target_start=block.target_start // unit * width,
        shape=(outputs // unit, width),
        source_strides=(step * width, 1),
        target_strides=(target_step * width, 1),
    )


def extents_of(
    tensors: Sequence[StoredTensor], plans: list[list[Copy]], shared: dict[Any, tuple[Copy, ...]]
) -> tuple[Extent, ...]:
    """Group one expert's tensors into extents: byte ranges that are read together.

    tensors: the expert's stored tensors
    plans:   the byte copies from each of these tensors to the expert's slot
    shared:  a dict in which the copies of experts with the same arrangement are stored once

    Tensors at most 4096 bytes apart in a file are grouped, unless one needs a transposition or cast
    and the other does not: an extent can be read in chunks only if all its copies are contiguous.
    """
    order = sorted(range(len(tensors)), key=lambda i: (tensors[i].file, tensors[i].offset))
    contiguous = [all(copy.contiguous for copy in plan) for plan in plans]
    groups: list[list[int]] = []
    end = (-1, 0, True)
    for i in order:
        part = tensors[i]
        if (part.file, contiguous[i]) == end[::2] and part.offset - end[1] <= GAP:
            groups[-1].append(i)
        else:
            groups.append([i])
        end = (part.file, part.offset + part.nbytes, contiguous[i])
    extents = []
    for group in groups:
        first, last = tensors[group[0]], tensors[group[-1]]
        inside = tuple((i, tensors[i].offset - first.offset) for i in group)
        if inside not in shared:
            shared[inside] = _place(inside, plans)
        length = last.offset + last.nbytes - first.offset
        extents.append(Extent(first.file, first.offset, length, shared[inside]))
    return tuple(extents)


def between(
    first: tuple[Extent, ...], last: tuple[Extent, ...], experts: int
) -> list[tuple[Extent, ...]] | None:
    """Return the extents of all experts whose tensors are slices of fused tensors.

    `first` and `last` are the extents of the first and the last expert. A slice's offset is a
    linear function of the expert's number, and so is the distance of two slices. So if the first
    and the last expert have the same arrangement, all have it. None if they have not.
    """
    if [(e.file, e.length, e.copies) for e in first] != [
        (e.file, e.length, e.copies) for e in last
    ]:
        return None
    steps = [(b.offset - a.offset) // max(1, experts - 1) for a, b in zip(first, last, strict=True)]
    return [
        tuple(
            Extent(a.file, a.offset + e * step, a.length, a.copies)
            for a, step in zip(first, steps, strict=True)
        )
        for e in range(experts)
    ]


def _place(inside: Iterable[tuple[int, int]], plans: list[list[Copy]]) -> tuple[Copy, ...]:
    """Return the byte copies from an extent to a slot, with adjacent copies merged.

    `inside` lists the extent's tensors: (index of the tensor's plan, first byte in the extent).
    """
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
