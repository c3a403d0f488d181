"""Reader of routing recordings in NumPy's npz format, for untrusted files.

NumPy's own reader allocates the array size that a header claims. This reader reads an array's bytes
first, within a limit, and compares their number with the header.
"""

from __future__ import annotations

import os
import sys
import warnings
import zipfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format
from numpy.typing import NDArray

from greenroom.errors import TraceError
from greenroom.json_file import JsonObject, Malformed, integer, parse
from greenroom.trace.tensors import checked_meta
from greenroom.trace.trace import MOST_EXPERTS, Trace, smallest_ids

NEEDED, OPTIONAL = ("experts", "offsets", "phase", "meta"), ("labels", "weights", "token_ids")
ENCRYPTED = 1  # bit of a zip entry's flags
DENSEST = 100  # bytes of arrays that a byte of the file may expand to, beyond the first FREE
FREE = 64 << 20  # bytes
KINDS = "biufU"  # kinds of dtype that arrays may have
_HEADERS = {(1, 0): format.read_array_header_1_0, (2, 0): format.read_array_header_2_0}


def read(path: Path) -> Trace:
    """Read a trace of expert routing from a NumPy npz file.

    The file must have the arrays `experts` [tokens, layers, top_k], `offsets` (the first token of
    each request, then the number of tokens), `phase` (decode or prefill) and `meta` (JSON with
    `experts_per_layer`); it may have `labels`, `weights` and `token_ids`. Raises TraceError if the
    file is no such recording.
    """
    arrays = read_arrays(path, (*NEEDED, *OPTIONAL))
    if missing := [name for name in NEEDED if name not in arrays]:
        raise TraceError(
            f"{path}: this npz file is not a trace: the arrays {', '.join(missing)} are missing"
        )
    experts, starts = smallest_ids(arrays["experts"]), _cast(arrays, "offsets", "iu", np.int64)
    try:
        meta = JsonObject(parse(_text(arrays, "meta")))
        most = np.array(_sizes(meta.value("experts_per_layer")), np.int64)
    except Malformed as error:
        raise TraceError(
            f"{path}: the array meta must be JSON text with experts_per_layer: {error}"
        ) from error
    if experts.ndim != 3 or (most.ndim and most.shape != experts.shape[1:2]):
        raise TraceError(
            f"{path}: the array experts has shape {list(experts.shape)}, but must have [tokens,"
            " layers, top_k], with as many layers as experts_per_layer"
        )
    phase = _text(arrays, "phase")
    if phase not in ("decode", "prefill"):
        raise TraceError(f"{path}: the array phase is {phase[:40]!r}, not decode or prefill")
    passes = starts if phase == "prefill" else np.arange(len(experts) + 1, dtype=np.int64)
    labels = _strings(arrays, "labels") if "labels" in arrays else [""] * max(starts.size - 1, 0)
    return Trace(
        experts=experts,
        experts_per_layer=np.broadcast_to(most, experts.shape[1:2]).copy(),
        request_starts=starts,
        pass_starts=passes,
        pass_prefill=np.full(max(passes.size - 1, 0), phase == "prefill"),
        labels=tuple(labels),
        weights=_cast(arrays, "weights", "f", np.float16),
        token_ids=_cast(arrays, "token_ids", "iu", np.int32),
        meta=checked_meta(meta),
    )


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read arrays of an untrusted npz file by their names, those that it has.

    Raises TraceError if an array cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            room = FREE + DENSEST * os.path.getsize(path)
            entries = {entry.filename: entry for entry in archive.infolist()}
            arrays = {}
            for name in names:
                if (entry := entries.get(f"{name}.npy")) is not None:
                    room -= entry.file_size
                    arrays[name] = _array(archive, entry, room)
            return arrays
    except Malformed as error:
        raise TraceError(f"{path}: this npz file is damaged or truncated: {error}") from error
    except Exception as error:  # a damaged zip file fails in a dozen ways
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TraceError(f"{path}: this npz file is damaged or truncated: {reason}") from error


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, room: int) -> NDArray[Any]:
    """Read one array of an npz recording.

    `room` is how many bytes the file's arrays may still take after this array; if it is negative,
    the array is too large. Raises Malformed.
    """
    name = entry.filename
    if entry.flag_bits & ENCRYPTED or entry.compress_type not in (0, zipfile.ZIP_DEFLATED):
        raise Malformed(f"{name} is encrypted, or compressed by a method that NumPy does not use")
    if room < 0:
        raise Malformed(
            f"{name} expands to {entry.file_size} bytes, too many for a file of this size"
        )
    with archive.open(entry) as stream:
        if (version := format.read_magic(stream)) not in _HEADERS:
            raise Malformed(
                f"{name} has version {version[0]}.{version[1]} of NumPy's format, but only 1.0 and"
                " 2.0 are supported"
            )
        with warnings.catch_warnings():  # NumPy warns of headers that Python 2 has written
            warnings.simplefilter("ignore", UserWarning)
            shape, by_columns, dtype = _HEADERS[version](stream)
        data = stream.read(entry.file_size)
    if dtype.kind not in KINDS:
        raise Malformed(f"{name} has the dtype {dtype}, which is neither numbers nor text")
    if prod(shape) * dtype.itemsize != len(data):
        raise Malformed(
            f"{name} has {len(data)} bytes of data, but by its header it must have"
            f" {prod(shape) * dtype.itemsize}"
        )
    return np.frombuffer(data, dtype).reshape(shape, order="F" if by_columns else "C")


def _cast(arrays: dict[str, NDArray[Any]], name: str, kinds: str, dtype: Any) -> Any:
    """Convert an array of an npz recording to a dtype; None if the file lacks the array.

    Raises TraceError if the array's kind of dtype is not one of `kinds`.
    """
    if name not in arrays:
        return None
    if arrays[name].dtype.kind not in kinds:
        what = "integers" if "i" in kinds else "floats"
        raise TraceError(
            f"the array {name} has the dtype {arrays[name].dtype}, but must have {what}"
        )
    with np.errstate(over="ignore"):  # a gate weight beyond float16 is infinite there
        return arrays[name].astype(dtype)


def _strings(arrays: dict[str, NDArray[Any]], name: str) -> list[str]:
    array = arrays[name].reshape(-1)
    if array.dtype.kind == "U":
        codes = np.ascontiguousarray(array).view(f"{array.dtype.byteorder}u4")
        if np.any((codes > sys.maxunicode) | ((codes >= 0xD800) & (codes < 0xE000))):
            raise TraceError(f"the array {name} has characters that are not valid Unicode")
    return [str(each) for each in array.tolist()]


def _text(arrays: dict[str, NDArray[Any]], name: str) -> str:
    strings = _strings(arrays, name)
    if len(strings) != 1:
        raise TraceError(f"the array {name} must have one element, but has {len(strings)}")
    return strings[0]


def _sizes(value: Any) -> int | list[int]:
    """Check the number of experts of each layer: a list, or one number for all layers."""
    if isinstance(value, list):
        return [integer(each, "experts_per_layer", 1, MOST_EXPERTS) for each in value]
    return integer(value, "experts_per_layer", 1, MOST_EXPERTS)
