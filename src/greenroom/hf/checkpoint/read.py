"""Read complete tensors of a checkpoint into memory, decoded.

Files are read past the page cache (runtime/store/ranges.py): otherwise tensors would be in memory
twice. Casts and dequantisation work in small chunks for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from greenroom.core.layout import PLAIN
from greenroom.errors import CheckpointError, StoreError, UnsupportedModel
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.slots.forms import arrange, as_integers
from greenroom.runtime.store.ranges import RangeReader

CHUNK = 1 << 20  # bytes read at a time where a tensor is cast; more would fragment the heap


def read_tensor(
    files: Sequence[str],
    name: str,
    stored: StoredTensor,
    dtype: torch.dtype | None = None,
    empty: Callable[..., Tensor] = torch.empty,
) -> Tensor:
    """Read a tensor of a checkpoint into memory, dequantised and cast to a dtype.

    files:  the checkpoint's weight files; `stored.file` is an index into them
    name:   the tensor's name, for error messages
    dtype:  the dtype of the result; None keeps the stored dtype, if the tensor is not quantised
    empty:  `empty(*shape, dtype=...)` allocates the result, except for stacks of quantised matrices

    Raises CheckpointError if the file is truncated or cannot be read, UnsupportedModel if torch
    lacks the stored dtype or no decoder exists for the encoding.
    """
    if stored.encoding == PLAIN:
        kind = _dtype(files[stored.file], name, stored)
        tensor = empty(prod(stored.shape), dtype=dtype or kind)
        _read_plain(files, name, stored, tensor)
        return tensor.reshape(stored.shape)
    assert dtype is not None
    if len(stored.shape) > 2:
        matrices = (stored[i] for i in range(stored.shape[0]))
        return torch.stack([read_tensor(files, name, matrix, dtype) for matrix in matrices])
    return _read_matrix(files, name, stored, dtype, empty)


def read_parts(
    files: Sequence[str], name: str, stored: StoredTensor, parts: Sequence[Tensor]
) -> None:
    """Read a quantised matrix's codes and scales into existing tensors, without decoding.

    `parts` are these tensors: one for the codes, then one for each tensor of scales. `files` and
    `name` are those of `read_tensor`.
    """
    for tensor, part in zip(stored.parts, parts, strict=True):
        if not tensor.form:
            _read_plain(files, name, tensor, part.view(-1))
            continue
        raw = torch.empty(tensor.nbytes, dtype=torch.uint8)
        _read_plain(files, name, replace(tensor, dtype="uint8"), raw)
        try:
            arrange(tensor.form, raw.numpy(), as_integers(part))
        except StoreError as error:
            raise CheckpointError(f"{files[tensor.file]}: the matrix {name}: {error}") from error


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The order of a stored matrix's rows and blocks in a matrix in memory.

    places: the row in memory of each stored row
    blocks: the stored block of each block of a row; None if the blocks of a row are in order
    """

    places: Tensor
    blocks: Tensor | None = None


def read_moved(
    files: Sequence[str], name: str, stored: StoredTensor, order: BlockOrder, codes: Tensor
) -> None:
    """Read a quantised matrix into rows of an existing tensor, in another order.

    The matrix has no scales in other tensors. `files` and `name` are those of `read_tensor`.
    """
    (part,), rows = stored.parts, stored.shape[0]
    step = max(1, CHUNK // (part.nbytes // rows))
    for first in range(0, rows, step):
        chunk = read_tensor(files, name, part.rows(first, min(step, rows - first)))
        if order.blocks is not None:
            blocks = chunk.view(len(chunk), len(order.blocks), -1)
            chunk = blocks[:, order.blocks].view(chunk.shape)
        codes[order.places[first : first + len(chunk)]] = chunk


def _read_matrix(
    files: Sequence[str],
    name: str,
    stored: StoredTensor,
    dtype: torch.dtype,
    empty: Callable[..., Tensor],
) -> Tensor:
    """Read and decode a quantised matrix in chunks of rows."""
    rows, columns = stored.shape[:: -1 if stored.transposed else 1]
    matrix = (torch.empty if stored.transposed else empty)(rows, columns, dtype=dtype)
    step = unit = stored.unit
    if rows % unit == 0:  # otherwise each row of scales is decoded separately
        step *= max(1, CHUNK // (4 * columns * unit))
    if stored.encoding not in ENCODINGS:
        raise UnsupportedModel(
            f"{files[stored.file]}: the tensor {name} is stored as {stored.encoding}, which is not"
            f" supported; supported are {', '.join(ENCODINGS)}"
        )
    decode = ENCODINGS[stored.encoding].decode
    codes, *companions = stored.parts
    # Rows of codes for one of scales. A last row of scales may cover fewer.
    units = [unit if unit > 1 else rows // companion.shape[0] for companion in companions]
    arranged_parts = _read_arranged(files, name, stored)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        ranges = [(row, count), *((row // each, -(-count // each)) for each in units)]
        if arranged_parts:
            tensors = [
                part[start : start + n]
                for part, (start, n) in zip(arranged_parts, ranges, strict=True)
            ]
        else:
            parts = (codes, *companions)
            tensors = [
                read_tensor(files, name, part.rows(*each))
                for part, each in zip(parts, ranges, strict=True)
            ]
        matrix[row : row + count] = decode(tensors, (count, columns), dtype)
    return empty(columns, rows, dtype=dtype).copy_(matrix.T) if stored.transposed else matrix


def _read_arranged(files: Sequence[str], name: str, stored: StoredTensor) -> list[Tensor]:
    """Read all parts of a matrix if some need `arrange`; otherwise return an empty list."""
    if not any(part.form for part in stored.parts):
        return []
    tensors = [torch.empty(p.shape, dtype=getattr(torch, p.dtype)) for p in stored.parts]
    read_parts(files, name, stored, tensors)
    return tensors


def _dtype(path: str, name: str, stored: StoredTensor) -> torch.dtype:
    kind: torch.dtype | None = getattr(torch, stored.dtype, None)
    if kind is None:
        raise UnsupportedModel(
            f"{path}: the tensor {name} is stored as {stored.dtype}, a type that this torch does"
            " not have"
        )
    return kind


def _read_plain(files: Sequence[str], name: str, stored: StoredTensor, into: Tensor) -> None:
    """Read a plain tensor's elements into `into` [n], cast to its dtype."""
    path = files[stored.file]
    kind = _dtype(path, name, stored)
    cast = into.dtype != kind
    try:
        with RangeReader(path, stored.offset, stored.nbytes) as reader:
            for part in into.split(CHUNK // kind.itemsize) if cast else (into,):
                chunk = torch.empty(len(part), dtype=kind) if cast else part
                if not reader.fill(chunk.view(torch.uint8).numpy()):
                    raise CheckpointError(
                        f"{path}: truncated: the file ends inside the tensor {name}: download the"
                        " file again"
                    )
                if cast:
                    part.copy_(chunk)
    except OSError as error:
        raise CheckpointError(
            f"{path}: reading the tensor {name} failed: {error.strerror}"
        ) from error
