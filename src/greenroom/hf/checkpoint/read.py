"""Read whole tensors into ordinary memory: the dense parts of a model, and references.

Files are read, not mapped, and what was read is dropped from the page cache: the dense parts are in
memory once, not twice. What is cast or expanded is so piece by piece, for the same reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from greenroom.core.layout import PLAIN
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.runtime.encodings import ENCODINGS, Encoding

PIECE = 1 << 20  # bytes read at a time where a tensor is cast; more would fragment the heap


def read_tensor(
    files: Sequence[str],
    name: str,
    stored: StoredTensor,
    dtype: torch.dtype | None = None,
    empty: Callable[..., Tensor] = torch.empty,
) -> Tensor:
    """A tensor of `stored.shape`; CheckpointError where the file ends too early or fails.

    `dtype` casts a plain tensor, and is needed for an encoded one. `empty(*shape, dtype=...)` makes
    what is returned, but for stacks of encoded matrices.
    """
    if stored.encoding == PLAIN:
        kind = _dtype(files[stored.file], name, stored)
        tensor = empty(prod(stored.shape), dtype=dtype or kind)
        _read(files, name, stored, tensor)
        return tensor.reshape(stored.shape)
    assert dtype is not None
    if len(stored.shape) > 2:
        each = range(stored.shape[0])
        return torch.stack([read_tensor(files, name, stored[i], dtype) for i in each])
    return _matrix(files, name, stored, dtype, empty)


def read_parts(
    files: Sequence[str], name: str, stored: StoredTensor, parts: Sequence[Tensor]
) -> None:
    """An encoded matrix as it is stored, into its parts: the codes, then the companions."""
    for tensor, part in zip(stored.parts, parts, strict=True):
        _read(files, name, tensor, part.view(-1))


def _matrix(
    files: Sequence[str],
    name: str,
    stored: StoredTensor,
    dtype: torch.dtype,
    empty: Callable[..., Tensor],
) -> Tensor:
    """An encoded matrix, expanded some rows at a time."""
    rows, columns = stored.shape[:: -1 if stored.transposed else 1]
    matrix = (torch.empty if stored.transposed else empty)(rows, columns, dtype=dtype)
    step = unit = stored.unit
    if rows % unit == 0:  # otherwise each row of scales is expanded by itself
        step *= max(1, PIECE // (4 * columns * unit))
    decode = decoder(stored.encoding)
    codes, *companions = stored.parts
    for row in range(0, rows, step):
        count = min(step, rows - row)
        parts = [codes.rows(row, count)]
        parts += [c.rows(row // unit, -(-count // unit)) for c in companions]
        own = [read_tensor(files, name, part) for part in parts]
        matrix[row : row + count] = decode(own, (count, columns), dtype)
    return empty(columns, rows, dtype=dtype).copy_(matrix.T) if stored.transposed else matrix


def decoder(encoding: str) -> Callable[..., Tensor]:
    """What expands an encoding: ours, or gguf's own for ggml types that no kernel reads."""
    if encoding in ENCODINGS:
        return ENCODINGS[encoding].decode
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType[encoding]
    return Encoding(
        encoding, lambda codes: torch.from_numpy(dequantize(codes.numpy(), kind))
    ).decode


def _dtype(path: str, name: str, stored: StoredTensor) -> torch.dtype:
    kind: torch.dtype | None = getattr(torch, stored.dtype, None)
    if kind is None:
        raise UnsupportedModel(f"{path}: {name} is stored as {stored.dtype}")
    return kind


def _read(files: Sequence[str], name: str, stored: StoredTensor, into: Tensor) -> None:
    """A plain tensor's elements, into a tensor [n]; cast where it has another type."""
    path = files[stored.file]
    kind = _dtype(path, name, stored)
    cast = into.dtype != kind
    try:
        with open(path, "rb", buffering=0) as stream:
            stream.seek(stored.offset)
            for part in into.split(PIECE // kind.itemsize) if cast else (into,):
                piece = torch.empty(len(part), dtype=kind) if cast else part
                view = piece.view(torch.uint8).numpy().data
                while view:
                    if not (n := stream.readinto(view)):
                        raise CheckpointError(f"{path}: truncated: it ends inside of {name}")
                    view = view[n:]
                if cast:
                    part.copy_(piece)
            os.posix_fadvise(stream.fileno(), stored.offset, stored.nbytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise CheckpointError(f"{path}: reading {name} failed: {error.strerror}") from error
