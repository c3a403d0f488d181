"""Reader and writer of safetensors files of NumPy arrays; the reader maps them into memory.

Format: 8 bytes with the header's length N (little endian), N bytes of JSON, then the data. The JSON
maps a tensor's name to `{"dtype", "shape", "data_offsets": [begin, end]}`, counted from the data's
first byte; `__metadata__` maps text to text. Widest types come first, so all are aligned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import GreenroomError, OutputError, TraceError
from greenroom.interrupts import undo_on_interrupt
from greenroom.json_file import INT64, JsonObject, Malformed, integer, parse

METADATA = "__metadata__"
MOST_AXES = 16
LONGEST = 100_000_000  # bytes of JSON; the format's own limit
DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "F16": np.float16, "F32": np.float32, "F64": np.float64,
}  # fmt: skip
_NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
_ALIGNMENT = 64  # bytes, of the first tensor's offset


@dataclass(frozen=True, slots=True)
class Tensor:
    """Array to be written to a safetensors file, given as consecutive parts.

    `parts` are arrays that are concatenated along the first axis to `shape`, cast to `dtype`.
    """

    dtype: Any
    shape: tuple[int, ...]
    parts: Iterable[NDArray[Any]]

    @classmethod
    def of(cls, array: NDArray[Any]) -> Tensor:
        """Wrap a NumPy array as a tensor to be written to a safetensors file."""
        return cls(array.dtype, array.shape, [array])

    @property
    def array(self) -> NDArray[Any]:
        """Return the concatenated parts of a tensor as one array."""
        return np.concatenate([np.asarray(part, self.dtype) for part in self.parts])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * int(np.dtype(self.dtype).itemsize)


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Context manager that writes a file atomically.

    It yields an open draft file in the same folder. At the end the draft is synced to disk and
    renamed to `path`; on an exception it is deleted. The file gets the permissions `mode`, less
    those of the umask. Raises OutputError if the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with (
                undo_on_interrupt(partial(os.unlink, draft)),
                # In a shared folder another user may have put a link in the draft's place.
                open(draft, "wb", opener=lambda p, f: os.open(p, f | os.O_NOFOLLOW, mode)) as file,
            ):
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            os.unlink(draft)


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file of named tensors and text metadata, atomically.

    Raises OutputError if the file cannot be written.
    """
    width = {name: np.dtype(tensor.dtype).itemsize for name, tensor in tensors.items()}
    ordered = sorted(tensors.items(), key=lambda item: (-width[item[0]], item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": _NAMES[np.dtype(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in ordered:
            written = 0
            for part in tensor.parts:
                data = np.ascontiguousarray(part, tensor.dtype)
                file.write(data.reshape(-1).view(np.uint8).data)
                written += data.nbytes
            if written != tensor.nbytes:
                raise ValueError(
                    f"the parts of the tensor {name} have {written} bytes, but its shape needs"
                    f" {tensor.nbytes}"
                )


def read(
    path: Path, what: str = "trace", damaged: type[GreenroomError] = TraceError
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Map a safetensors file into memory; return (read-only arrays by name, metadata).

    what:    what the file should be, for messages
    damaged: the error that is raised if the file is no valid safetensors file

    Raises OSError if the file cannot be opened.
    """
    with open(path, "rb") as file:  # opened once: another process may replace the file meanwhile
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > LONGEST or 8 + length > size:
            raise damaged(f"{path}: this file is not a {what}, or ends inside its header")
        written = file.read(length)
        mapped = np.memmap(file, np.uint8, "r").view(np.ndarray)
    try:
        header = JsonObject(parse(written, LONGEST))
        meta = header.object(METADATA, {})
        metadata = {name: meta.text(name) for name in meta}
        table = {name: _entry(header.object(name)) for name in header if name != METADATA}
    except Malformed as error:
        raise damaged(
            f"{path}: this file is not a {what}, or its header is damaged: {error}"
        ) from error
    data = 8 + length
    if (end := data + max((entry[3] for entry in table.values()), default=0)) > size:
        raise damaged(
            f"{path}: truncated: by its header the file must have {end} bytes, but it has {size}"
        )
    arrays = {}
    for name, (dtype, shape, begin, stop) in table.items():
        raw = mapped[data + begin : data + stop]
        if dtype == np.bool_ and raw.size and raw.max() > 1:
            raise damaged(
                f"{path}: damaged: the array {name} has values that are neither true nor false"
            )
        arrays[name] = np.require(raw.view(dtype).reshape(shape), requirements="A")
    return arrays, metadata


def _entry(entry: JsonObject) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    if (kind := entry.text("dtype")) not in DTYPES:
        raise Malformed(f"a tensor has the unknown type {kind[:40]!r}")
    dtype, shape = np.dtype(DTYPES[kind]), entry.list_of("shape", integer)
    offsets = entry.list_of("data_offsets", integer)
    if len(shape) > MOST_AXES or prod(max(n, 1) for n in shape) > INT64 // dtype.itemsize:
        raise Malformed(
            f"a tensor has more than {MOST_AXES} axes, or more elements than 64 bits can count"
        )
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * dtype.itemsize:
        raise Malformed(
            f"a tensor of type {kind} and shape {list(shape)} has the data_offsets"
            f" {list(offsets[:3])}, which do not fit"
        )
    return dtype, shape, *offsets
