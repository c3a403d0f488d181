"""The order of fields, in which GPU kernels read the block formats of GGUF.

A block has codes and scales, and its size is seldom a multiple of 16 bytes, so that codes cannot be
loaded by 128 bits. In a device's slot, each field of all blocks of a matrix lies in an array of its
own, in the order of `FIELDS`: an array of structures becomes a structure of arrays. A matrix takes
the same bytes as before.

The device separates the fields when a chunk has arrived in its memory, on the stream of copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from greenroom.core.layout import BLOCKS, Catalog, Copy, SlotLayout, TensorSpec
from greenroom.runtime.slots.matrix_copies import divided, rearranged

# Fields of a block, as (first byte, bytes), in the order of their arrays: codes first, whose bytes
# are a multiple of 16, so that all arrays are aligned.
FIELDS: dict[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("q4_0", "iq4_nl"), ((2, 16), (0, 2))),
    "q4_1": ((4, 16), (0, 4)),
    "q5_0": ((6, 16), (2, 4), (0, 2)),
    "q5_1": ((8, 16), (4, 4), (0, 4)),
    "q8_0": ((2, 32), (0, 2)),
    "gguf_mxfp4": ((1, 16), (0, 1)),
    "iq4_xs": ((8, 128), (0, 8)),
    "q2_k": ((16, 64), (0, 16), (80, 4)),
    "q3_k": ((32, 64), (0, 32), (96, 12), (108, 2)),
    "q6_k": ((0, 128), (128, 64), (192, 16), (208, 2)),
}
# Inputs of a matrix are a multiple of these, where it is not a block's: kernels load two scales of
# one byte at a time.
MULTIPLES = {"gguf_mxfp4": 64}
_ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def field_arrays(encoding: str, matrix: Tensor) -> list[Tensor]:
    """View the arrays of a matrix's fields, each [blocks, bytes]; `matrix` has its bytes."""
    blocks = matrix.numel() // BLOCKS[encoding][1]
    sizes = [nbytes for _, nbytes in FIELDS[encoding]]
    arrays = matrix.split([blocks * nbytes for nbytes in sizes])
    return [array.view(blocks, n) for array, n in zip(arrays, sizes, strict=True)]


def separate(encoding: str, data: Tensor, first: int, matrix: Tensor) -> None:
    """Write some bytes of a matrix to the arrays of their fields.

    data: the bytes from number `first` on, in the order of files; blocks may be cut anywhere
    """
    nbytes, arrays = BLOCKS[encoding][1], field_arrays(encoding, matrix)
    before = min(-first % nbytes, data.numel())
    count = (data.numel() - before) // nbytes
    behind = before + count * nbytes
    for start, stop in ((0, before), (behind, data.numel())):
        if start < stop:
            _separate_part(encoding, data[start:stop], first + start, arrays)
    if count:
        block = (first + before) // nbytes
        blocks = data[before:behind].view(count, nbytes)
        _copy_fields(encoding, blocks, [array[block : block + count] for array in arrays])


def separate_rows(encoding: str, rows: Tensor, first: int, step: int, matrix: Tensor) -> None:
    """Write some rows of a matrix to the arrays of their fields.

    rows: [n, bytes of a row], the matrix's rows `first`, `first + step`, and so on
    """
    nbytes = BLOCKS[encoding][1]
    blocks = rows.unflatten(1, (rows.shape[1] // nbytes, nbytes))
    arrays = [
        array.view(-1, blocks.shape[1], array.shape[1])[first::step][: len(rows)]
        for array in field_arrays(encoding, matrix)
    ]
    _copy_fields(encoding, blocks, arrays)


def join(encoding: str, matrix: Tensor) -> Tensor:
    """Return the bytes of a matrix in the order of files, as one vector."""
    arrays = zip(FIELDS[encoding], field_arrays(encoding, matrix), strict=True)
    return torch.cat([array for _, array in sorted(arrays, key=lambda each: each[0])], 1).view(-1)


def _separate_part(encoding: str, data: Tensor, first: int, arrays: Sequence[Tensor]) -> None:
    """Write bytes of one block, from number `first` of a matrix on."""
    block, at = divmod(first, BLOCKS[encoding][1])
    for (begin, nbytes), array in zip(FIELDS[encoding], arrays, strict=True):
        start, stop = max(at, begin), min(at + data.numel(), begin + nbytes)
        if start < stop:
            array[block, start - begin : stop - begin].copy_(data[start - at : stop - at])


def _copy_fields(encoding: str, blocks: Tensor, arrays: Sequence[Tensor]) -> None:
    """Copy each field of blocks [..., bytes of a block] to its array, in wide items."""
    fields = FIELDS[encoding]
    numbers = (number for field in fields for number in field)
    offsets = (tensor.storage_offset() for tensor in (blocks, *arrays))
    item = gcd(8, *offsets, *blocks.stride()[:-1], *numbers)
    kind = _ITEMS[item]
    blocks = blocks.view(kind)
    for (begin, nbytes), array in zip(fields, arrays, strict=True):
        start, stop = begin // item, (begin + nbytes) // item
        array.view(kind).copy_(blocks[..., start:stop])


def in_fields(catalog: Catalog) -> Catalog:
    """Return a catalog whose experts lie in a device's slots in the order of fields.

    Matrices whose copies do not have whole rows stay in the order of files.
    """
    return rearranged(catalog, layout_in_fields, _divide)


def layout_in_fields(layout: SlotLayout, copies: Sequence[Copy] = ()) -> SlotLayout:
    """Mark the matrices of a layout, or of its segments, whose fields can be separated.

    copies: those that write an expert; experts in segments lie in slots as in files
    """
    if layout.segments:
        marked = (replace(s, layout=layout_in_fields(s.layout)) for s in layout.segments)
        return replace(layout, segments=tuple(marked))
    names = dict[str, str]()
    for name in layout.encodings:
        weight = layout.weight(name)
        codes, encoding = weight.parts[0], weight.encoding
        if encoding in FIELDS and weight.shape[1] % MULTIPLES.get(encoding, 1) == 0:
            moved = [c for c in copies if not c.contiguous and _within(c, codes)]
            if all(_has_rows(copy, codes) for copy in moved):
                names[name] = encoding
    tensors = [replace(spec, fields=names.get(spec.name, "")) for spec in layout.tensors]
    return replace(layout, tensors=tuple(tensors))


def _within(copy: Copy, spec: TensorSpec) -> bool:
    return 0 <= copy.target - spec.offset < spec.nbytes


def _has_rows(copy: Copy, spec: TensorSpec) -> bool:
    """Check that a copy has whole rows of a matrix, as bytes."""
    width = spec.nbytes // spec.shape[0]
    return (
        not copy.form
        and copy.source_dtype == copy.target_dtype == "uint8"
        and copy.shape[1] == width
        and copy.source_strides[1] == copy.target_strides[1] == 1
        and copy.target_strides[0] % width == (copy.target - spec.offset) % width == 0
    )


def _divide(copy: Copy, layout: SlotLayout) -> list[Copy]:
    """Divide a copy into copies of matrices in fields, and of what lies between."""
    matrices = [spec for spec in layout.stored_tensors if spec.fields]
    if not copy.contiguous:
        return [next((replace(copy, matrix=s) for s in matrices if _within(copy, s)), copy)]
    return [replace(part, matrix=spec) for part, spec in divided(copy, matrices)]
