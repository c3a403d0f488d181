"""Reader of safetensors headers: the type, shape and byte range of each tensor.

Format: 8 bytes with the header's length N (little endian), N bytes of JSON, then the data. The JSON
maps a tensor's name to `{"dtype", "shape", "data_offsets": [begin, end]}`, counted from the data's
first byte. Only the header is read, so a file of any size costs two small reads and no mapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from greenroom.core.layout import PLAIN
from greenroom.errors import CheckpointError
from greenroom.json_file import INT64, Malformed, parse, show_value

MOST_AXES = 16
LONGEST_NAME = 500  # characters
LONGEST = 100_000_000  # bytes; the format's own limit for the JSON

# safetensors' name -> torch's
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn",
    "F6_E2M3": "float6_e2m3",
    "F6_E3M2": "float6_e3m2",
}
NAMES = {torch_name: name for name, torch_name in DTYPES.items()}
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # of an element; others are torch's types


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The file position, type and shape of one tensor on disk, plain or quantised.

    file, offset, nbytes: where the tensor's bytes or quantised codes lie: the file's index in a
                list of paths, the first byte in the file, and the number of bytes
    dtype:      torch's name of the stored type
    shape:      the shape of the decoded tensor: [..., outputs, inputs], or [..., inputs, outputs]
                if `transposed`
    encoding:   "plain" for numbers of `dtype`, otherwise the name of a quantisation format
    codes:      the shape of the quantised codes, [..., outputs, columns]; () if plain
    transposed: True if decoding transposes the stored matrix
    unit:       how many outputs share one row of scales; if it is 1, the numbers of rows of codes
                and scales say how many (a matrix scale has one row)
    companions: the tensors of scales, which lie elsewhere
    form:       how the file has the tensor, if not row by row (runtime/slots/forms.py); `shape`,
                `codes` and `dtype` are those of the tensor in memory
    """

    file: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    encoding: str = PLAIN
    codes: tuple[int, ...] = ()
    transposed: bool = False
    unit: int = 1
    companions: tuple[StoredTensor, ...] = ()
    form: str = ""

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The plain tensors that make up a stored tensor: itself, or codes and scales."""
        if self.encoding == PLAIN:
            return (self,)
        return replace(self, shape=self.codes, encoding=PLAIN), *self.companions

    def __getitem__(self, number: int) -> StoredTensor:
        """Return the matrix at an index of the first axis of a stored stack of matrices."""
        return replace(
            self.rows(number, 1),
            shape=self.shape[1:],
            codes=self.codes[1:],
            companions=tuple(companion[number] for companion in self.companions),
        )

    def rows(self, first: int, count: int) -> StoredTensor:
        """Return a range of a stored tensor's rows: `count` rows from row `first` on.

        The bytes at `offset` are divided evenly among the rows. The tensors of scales in
        `companions` are unchanged.
        """
        size = self.nbytes // self.shape[0]
        shape = (count, *self.shape[1:])
        return replace(self, shape=shape, offset=self.offset + first * size, nbytes=count * size)


@contextmanager
def read_errors(path: str | Path) -> Iterator[None]:
    """Context manager that turns an OSError into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def read_header(path: Path, file: int) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file: a StoredTensor by name, in the header's order.

    `file` is the index that the StoredTensors record for this file. Raises CheckpointError, with
    the file's path, if the header is damaged or the file is truncated.
    """
    with read_errors(path), open(path, "rb") as stream:
        size = path.stat().st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > LONGEST or 8 + length > size:
            raise CheckpointError(
                f"{path}: not a safetensors file, or the file ends inside its header: download the"
                " file again"
            )
        text = stream.read(length)
    try:
        entries = parse(text, LONGEST)
    except Malformed as error:
        raise CheckpointError(
            f"{path}: the safetensors header is {error}: download the file again"
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(
            f"{path}: the safetensors header must be a JSON object, but is {show_value(entries)}:"
            " download the file again"
        )
    entries.pop("__metadata__", None)
    data = 8 + length
    tensors = {name: tensor_of(path, file, name, entry, data) for name, entry in entries.items()}
    check_ranges(path, tensors, size)
    return tensors


def tensor_of(path: Path, file: int, name: str, entry: Any, data: int) -> StoredTensor:
    """Make the StoredTensor of one JSON entry of a safetensors header.

    `data` is the file offset of the tensor data, `file` the index of the file in a list. Raises
    CheckpointError if the entry's dtype, shape and byte range are invalid or do not agree.
    """
    check_name(path, name)
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise _bad_entry(path, name) from error
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise _bad_entry(path, name)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: the tensor {name} has the unknown dtype {show_value(dtype)}"
        )
    torch_name = DTYPES[dtype]
    shape, expected = _size(dtype, shape)
    if expected is None:
        raise CheckpointError(
            f"{path}: damaged: the tensor {name} has too many elements, or more than {MOST_AXES}"
            " axes: download the file again"
        )
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: the tensor {name} has {end - begin} bytes, but dtype {dtype} and shape"
            f" {list(shape)} need {expected}: download the file again"
        )
    return StoredTensor(file, torch_name, shape, data + begin, expected)


@lru_cache(1024)
def _size(dtype: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int | None]:
    """Return the shape and the bytes of a tensor; None if they are too many.

    Equal shapes are the same object, which saves memory: a model may have 100,000 tensors.
    """
    bits = BITS.get(dtype) or getattr(torch, DTYPES[dtype]).itemsize * 8
    if len(shape) > MOST_AXES or prod(max(n, 1) for n in shape) > INT64 // bits:
        return shape, None
    return shape, -(-prod(shape) * bits // 8)


def _bad_entry(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: the header's entry for the tensor {name} is damaged: an entry needs dtype, shape"
        " and data_offsets: download the file again"
    )


def check_name(path: Path, name: str) -> None:
    """Raise CheckpointError for a tensor name that is unprintable or over 500 characters."""
    if not name.isprintable() or len(name) > LONGEST_NAME:
        raise CheckpointError(
            f"{path}: {show_value(name)} is not a valid name of a tensor: a name has at most"
            f" {LONGEST_NAME} printable characters: download the file again"
        )


def check_ranges(path: Path, tensors: dict[str, StoredTensor], size: int) -> None:
    """Raise CheckpointError if a file's tensors overlap or end beyond the file.

    `size` is the file's length in bytes.
    """
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.nbytes == 0:
            continue
        if tensor.offset < end:
            raise CheckpointError(
                f"{path}: damaged: the bytes of the tensors {before} and {name} overlap: download"
                " the file again"
            )
        end, before = tensor.offset + tensor.nbytes, name
    if end > size:
        raise CheckpointError(
            f"{path}: truncated: the tensor {before} ends at byte {end}, but the file has {size}"
            " bytes: download the file again"
        )
