"""Format of a journal, the file to which a recording of expert routing is appended.

The file begins with `GRTJ`. Records follow: the length of the JSON, the length of the arrays, the
JSON, the arrays, and the CRC-32 of both; the three numbers have 4 bytes each, little endian. The
first record is the header. Each further record is a segment: some forward passes of one request.
Bytes after the last record with a valid checksum were being written when the recording ended, and
are ignored.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import TraceError
from greenroom.json_file import (
    INT64,
    JsonObject,
    Malformed,
    flag,
    integer,
    list_of,
    parse,
    printable,
    show_value,
)
from greenroom.trace.tensors import PREDICTED, checked_meta
from greenroom.trace.trace import MOST_EXPERTS, OPTIONAL

MAGIC = b"GRTJ"
VERSIONS = (1, 2)  # 2: with output norms; other journals are of version 1
_TYPES: dict[str, Any] = {**OPTIONAL, "sampled": np.int64, "inputs": np.float32}


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a recording of expert routing: the layers, and what is recorded.

    weights, token_ids: whether gate weights and token ids are recorded
    gate_inputs: the share of tokens whose hidden states at the gates are recorded
    predictions: for each predictor of experts, how many layers ahead it predicts
    meta:        information about the model and the run
    output_norms: whether norms of experts' outputs, and changes of tokens, are recorded
    """

    experts_per_layer: tuple[int, ...]
    weights: bool = False
    token_ids: bool = False
    gate_inputs: float = 0.0
    meta: dict[str, Any] = field(default_factory=dict)
    predictions: dict[str, int] = field(default_factory=dict)
    output_norms: bool = False

    @property
    def version(self) -> int:
        """Version of the format of a journal with this header."""
        return VERSIONS[self.output_norms]

    def fields(self) -> list[str]:
        """List the names of the arrays that each recorded segment has, in stored order."""
        optional = {"weights": self.weights, "token_ids": self.token_ids}
        optional |= dict.fromkeys(("output_norms", "token_changes"), self.output_norms)
        optional |= dict.fromkeys(("sampled", "inputs"), self.gate_inputs > 0)
        chosen = [name for name, recorded in optional.items() if recorded]
        return ["experts", *chosen, *(PREDICTED + name for name in self.predictions)]

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the stored data type of one of a recorded segment's arrays, by its name.

        In an array of predictions, the largest value of the type means that nothing was predicted;
        -1 becomes this value when a segment is written.
        """
        if name in _TYPES:
            dtype: np.dtype[Any] = np.dtype(_TYPES[name])
            return dtype
        most = max(self.experts_per_layer) + name.startswith(PREDICTED)
        return np.dtype(np.uint8 if most <= 1 << 8 else np.uint16)


@dataclass(frozen=True, slots=True)
class Segment:
    """Segment of a recording of expert routing: some forward passes of one request.

    request: the request's number
    label:   the request's label
    passes:  for each pass, its number of tokens and whether it is a prefill
    last:    True if the request ends with this segment
    arrays:  the recorded arrays by name; `sampled` has the tokens whose hidden states are in
             `inputs`, counted from the segment's first token
    """

    request: int
    label: str
    passes: list[tuple[int, bool]]
    last: bool
    arrays: dict[str, NDArray[Any]]

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.passes)


class NoHeader(TraceError):
    """A journal ended before its header was written."""


def pack_record(info: dict[str, Any], data: bytes) -> bytes:
    """Encode a record of a recording's journal: lengths, JSON, arrays, checksum.

    `info` becomes the JSON, `data` are the bytes of the arrays.
    """
    text = json.dumps(info, separators=(",", ":")).encode()
    check = zlib.crc32(data, zlib.crc32(text))
    sizes = len(text).to_bytes(4, "little") + len(data).to_bytes(4, "little")
    return sizes + text + data + check.to_bytes(4, "little")


def read_header(path: Path) -> tuple[Header, int]:
    """Read the header of a recording's journal.

    Returns (header, the byte of the file at which the first segment begins). Raises TraceError if
    the header is missing, damaged, or of another version.
    """
    try:
        with open(path, "rb") as file:
            record = _next(file) if file.read(4) == MAGIC else None
            if record is None:
                raise NoHeader(
                    f"{path}: this recording ended before its header was written, so there is no"
                    " trace: delete the file"
                )
            return _header(path, record.info), file.tell()
    except Malformed as error:
        raise TraceError(
            f"{path}: the header of this recording is damaged: {error}: delete the file and record"
            " again"
        ) from error


def _header(path: Path, info: JsonObject) -> Header:
    if (version := info.value("version")) not in VERSIONS:
        raise TraceError(
            f"{path}: this unfinished recording has format version {printable(version)}, but this"
            f" Greenroom reads only versions {VERSIONS[0]} and {VERSIONS[1]}: delete the file and"
            " record again"
        )
    distances = info.object("predictions", {})
    header = Header(
        info.list_of("experts_per_layer", _experts),
        **info.fields_of(Header),
        meta=checked_meta(info.object("meta")),
        predictions={name: distances.integer(name) for name in distances},
    )
    if not header.experts_per_layer:
        raise Malformed("experts_per_layer is empty")
    return header


def _experts(value: Any, where: str) -> int:
    return integer(value, where, 1, MOST_EXPERTS)


def read_segments(path: Path, header: Header, begin: int) -> Iterator[tuple[Segment, int]]:
    """Yield the complete segments of a recording's journal.

    Yields (segment, the byte of the file at which the segment ends), from byte `begin` on. Raises
    TraceError if a segment has impossible contents.
    """
    due, last = 0, True  # requests ascend, and the segments of one lie together
    with open(path, "rb") as file:
        file.seek(begin)
        try:
            while (record := _next(file)) is not None:
                segment = _segment(header, record, due, INT64 if last else due)
                due, last = segment.request + segment.last, segment.last
                yield segment, file.tell()
        except Malformed as error:
            raise TraceError(
                f"{path}: damaged: the segment that ends at byte {file.tell()} is invalid: {error}"
            ) from error


def _segment(header: Header, record: _Record, least: int, most: int) -> Segment:
    """Decode a segment of a journal; its request's number must be from `least` to `most`."""
    info = record.info
    passes = list(info.list_of("passes", _pass))
    segment = Segment(
        info.integer("request", least=least, most=most),
        info.text("label"),
        passes,
        info.flag("last"),
        _arrays(header, info.list_of("shapes", list_of(integer)), record.data),
    )
    _check_shapes(segment, len(header.experts_per_layer))
    return segment


def _pass(value: Any, where: str) -> tuple[int, bool]:
    """Decode a forward pass of a journal's segment: (tokens, whether it is a prefill)."""
    if not isinstance(value, list) or len(value) != 2:
        raise Malformed(f"{where} must be [tokens, prefill], got {show_value(value)}")
    return integer(value[0], where, least=1), flag(value[1], where)


def _arrays(
    header: Header, shapes: tuple[tuple[int, ...], ...], data: bytes
) -> dict[str, NDArray[Any]]:
    names, arrays = header.fields(), dict[str, NDArray[Any]]()
    if len(shapes) != len(names):
        raise Malformed(
            f"shapes has {len(shapes)} entries, but must have {len(names)}, for"
            f" {printable(', '.join(names))}"
        )
    at = 0
    for name, shape in zip(names, shapes, strict=True):
        dtype, count = header.dtype(name), prod(shape)
        if len(shape) > 3 or at + count * dtype.itemsize > len(data):
            raise Malformed(f"the array {printable(name)} is larger than the segment")
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    return arrays


def _check_shapes(segment: Segment, layers: int) -> None:
    """Raise Malformed if an array's shape does not fit the segment's tokens and layers."""
    sampled = segment.arrays.get("sampled", np.empty(0, np.int64))
    for name, array in segment.arrays.items():
        of_sample = name in ("sampled", "inputs")
        rows = sampled.size if of_sample else segment.tokens
        expected = (
            (rows,) if name in ("sampled", "token_ids") else (rows, layers, *array.shape[2:3])
        )
        if array.shape != expected or not (of_sample or array.size):
            raise Malformed(
                f"the array {printable(name)} has shape {list(array.shape)}, but must have shape"
                f" {list(expected)} and not be empty"
            )


class _Record(NamedTuple):
    info: JsonObject
    data: bytes


def _next(file: BinaryIO) -> _Record | None:
    """Read the next record of a journal; None if no complete record follows.

    Raises Malformed if the record's JSON is not an object.
    """
    sizes = file.read(8)
    text_size, data_size = int.from_bytes(sizes[:4], "little"), int.from_bytes(sizes[4:], "little")
    left = os.fstat(file.fileno()).st_size - file.tell()
    if not text_size or text_size + data_size + 4 > left:  # zeros: a power cut took a write
        return None
    text, data, check = file.read(text_size), file.read(data_size), file.read(4)
    if len(check) < 4 or zlib.crc32(data, zlib.crc32(text)) != int.from_bytes(check, "little"):
        return None
    return _Record(JsonObject(parse(text)), data)
