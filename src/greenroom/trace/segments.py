"""Records of a journal file of routing: the header and the segments.

Format: `GRTJ`, then records of [bytes of JSON, bytes of arrays, JSON, arrays, CRC-32 of both], the
three numbers in 4 bytes each, little endian. The first record is the header, which all segments
share. Each further record is a segment: some passes of one request. Bytes after the last record
with a valid checksum were being written when the recording ended, and are ignored.
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
from greenroom.trace.trace import MOST_EXPERTS

MAGIC = b"GRTJ"
VERSION = 1
_TYPES = {
    "weights": np.float16,
    "token_ids": np.int32,
    "sampled": np.int64,
    "inputs": np.float32,
}


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a routing recording: its layers, and the optional fields it has."""

    experts_per_layer: tuple[int, ...]
    weights: bool = False
    token_ids: bool = False
    gate_inputs: float = 0.0  # the share of tokens whose gate inputs are recorded
    meta: dict[str, Any] = field(default_factory=dict)
    predictions: dict[str, int] = field(default_factory=dict)  # predictor -> distance

    def fields(self) -> list[str]:
        """List the names of a recorded segment's arrays, in stored order."""
        optional = {"weights": self.weights, "token_ids": self.token_ids}
        optional |= {"sampled": self.gate_inputs > 0, "inputs": self.gate_inputs > 0}
        chosen = [name for name, recorded in optional.items() if recorded]
        return ["experts", *chosen, *(PREDICTED + name for name in self.predictions)]

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the data type of one of a recorded segment's arrays.

        A prediction's largest value means that nothing was predicted; a segment in memory may have
        -1 there.
        """
        if name in _TYPES:
            return np.dtype(_TYPES[name])
        most = max(self.experts_per_layer) + name.startswith(PREDICTED)
        return np.dtype(np.uint8 if most <= 1 << 8 else np.uint16)


@dataclass(frozen=True, slots=True)
class Segment:
    """Segment of a routing recording: some passes of one request.

    The array `sampled` counts tokens from the segment's first.
    """

    request: int
    label: str
    passes: list[tuple[int, bool]]  # (tokens, prefill)
    last: bool  # whether the request ends here
    arrays: dict[str, NDArray[Any]]

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.passes)


def pack_record(info: dict[str, Any], data: bytes) -> bytes:
    """Encode a record of a journal file: sizes, JSON, arrays, checksum."""
    text = json.dumps(info, separators=(",", ":")).encode()
    check = zlib.crc32(data, zlib.crc32(text))
    sizes = len(text).to_bytes(4, "little") + len(data).to_bytes(4, "little")
    return sizes + text + data + check.to_bytes(4, "little")


def read_header(path: Path) -> tuple[Header, int]:
    """Read the header of a journal: (header, offset of the first segment)."""
    try:
        with open(path, "rb") as file:
            record = _next(file) if file.read(4) == MAGIC else None
            if record is None:
                raise TraceError(
                    f"{path}: the recording ended before its header was written: delete the file"
                )
            return _header(path, record.info), file.tell()
    except Malformed as error:
        raise TraceError(f"{path}: the journal's header is damaged: {error}") from error


def _header(path: Path, info: JsonObject) -> Header:
    if (version := info.value("version")) != VERSION:
        raise TraceError(
            f"{path}: a journal of version {printable(version)}; this Greenroom reads {VERSION}:"
            " record it again"
        )
    distances = info.object("predictions", {})
    header = Header(
        info.list_of("experts_per_layer", _experts),
        **info.fields_of(Header),
        meta=checked_meta(info.object("meta")),
        predictions={name: distances.integer(name) for name in distances},
    )
    if not header.experts_per_layer:
        raise Malformed("it has no layers")
    return header


def _experts(value: Any, where: str) -> int:
    return integer(value, where, 1, MOST_EXPERTS)


def read_segments(path: Path, header: Header, begin: int) -> Iterator[tuple[Segment, int]]:
    """Yield a journal's complete segments and the offset of each segment's end.

    TraceError for impossible contents.
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
                f"{path}: damaged: the segment before byte {file.tell()}: {error}"
            ) from error


def _segment(header: Header, record: _Record, least: int, most: int) -> Segment:
    """Decode a journal's segment, whose request must lie between `least` and `most`."""
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
    """Decode a recorded pass of a journal: (tokens, prefill)."""
    if not isinstance(value, list) or len(value) != 2:
        raise Malformed(f"{where} must be [tokens, prefill], got {show_value(value)}")
    return integer(value[0], where, least=1), flag(value[1], where)


def _arrays(
    header: Header, shapes: tuple[tuple[int, ...], ...], data: bytes
) -> dict[str, NDArray[Any]]:
    names, arrays = header.fields(), dict[str, NDArray[Any]]()
    if len(shapes) != len(names):
        raise Malformed(f"it has {len(shapes)} arrays, not {', '.join(names)}")
    at = 0
    for name, shape in zip(names, shapes, strict=True):
        dtype, count = header.dtype(name), prod(shape)
        if len(shape) > 3 or at + count * dtype.itemsize > len(data):
            raise Malformed(f"{name} is larger than the segment")
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    return arrays


def _check_shapes(segment: Segment, layers: int) -> None:
    """Check the shapes of a segment's arrays against its tokens and layers. Malformed."""
    sampled = segment.arrays.get("sampled", np.empty(0, np.int64))
    for name, array in segment.arrays.items():
        of_sample = name in ("sampled", "inputs")
        rows = sampled.size if of_sample else segment.tokens
        expected = (
            (rows,) if name in ("sampled", "token_ids") else (rows, layers, *array.shape[2:3])
        )
        if array.shape != expected or not (of_sample or array.size):
            raise Malformed(f"{name} is {list(array.shape)}, but must be {list(expected)}")


class _Record(NamedTuple):
    info: JsonObject
    data: bytes


def _next(file: BinaryIO) -> _Record | None:
    """Read a journal's next record; None where no complete record follows.

    Malformed for other JSON.
    """
    sizes = file.read(8)
    text_size, data_size = int.from_bytes(sizes[:4], "little"), int.from_bytes(sizes[4:], "little")
    if text_size + data_size + 4 > os.fstat(file.fileno()).st_size - file.tell():
        return None
    text, data, check = file.read(text_size), file.read(data_size), file.read(4)
    if len(check) < 4 or zlib.crc32(data, zlib.crc32(text)) != int.from_bytes(check, "little"):
        return None
    return _Record(JsonObject(parse(text)), data)
